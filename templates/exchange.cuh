// fp32 values that pass from stage to stage in the workspace.
//
// Within one launch, a value that one CTA writes and another awaits is its own flag: its place in the workspace is zero
// until it is there, and it is stored as its complement, which is zero for no value that occurs. So no fence stands
// between writing and reading, and whoever reads last clears the place for the next launch.

__device__ __forceinline__ unsigned published_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits == 0xffffffffu ? 0x80000000u : ~bits;  // the NaN whose complement is zero becomes another
}
__device__ __forceinline__ float published_value(unsigned bits) { return __uint_as_float(~bits); }

// Single words, past L1, which is not coherent between SMs.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ void store_relaxed(unsigned* address, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_relaxed(const unsigned* address) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
#else
inline void store_relaxed(unsigned* address, unsigned value) { __atomic_store_n(address, value, __ATOMIC_RELAXED); }
inline unsigned load_relaxed(const unsigned* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
#endif

// fp32 values in the workspace: as they are where an earlier launch wrote them, published within one launch.
template <bool kPublished>
struct Exchange {
  unsigned* words;

  __device__ __forceinline__ void put(long long at, float value) const {
    if constexpr (kPublished) store_relaxed(words + at, published_bits(value));
    else words[at] = __float_as_uint(value);
  }

  // kCount values, `stride` apart, zero where present(i) is false; waits for all the others. All loads are on their way
  // before the first is looked at.
  template <int kCount, class Present>
  __device__ __forceinline__ void get(float (&values)[kCount], long long at, int stride, Present present) const {
    unsigned bits[kCount];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        bits[i] = kPublished ? published_bits(0.0f) : 0u;
        if (!present(i)) continue;
        if constexpr (kPublished) bits[i] = load_relaxed(words + at + (long long)i * stride);
        else bits[i] = words[at + (long long)i * stride];
      }
      if constexpr (kPublished) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) missing = missing || bits[i] == 0u;
      }
    } while (missing);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = kPublished ? published_value(bits[i]) : __uint_as_float(bits[i]);
  }

  __device__ __forceinline__ void clear(long long at) const { words[at] = 0u; }
};
