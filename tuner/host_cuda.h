// The part of CUDA C++ that a rendered source may use when g++ compiles it for the CPU executor. Force-included before
// the source, which itself includes nothing, as NVRTC demands. Semantics follow the CUDA C++ Programming Guide; where
// that says "undefined", this either reports the use or returns poison (all bits set). Threads are fibers of one
// process: see host_runtime.cpp.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

// ---- types --------------------------------------------------------------------------------------------------------
// Aligned as on the GPU, so that -fsanitize=alignment reports the vector access that would fault there.
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- the running thread -------------------------------------------------------------------------------------------
// `const` is true for a fiber, and lets the compiler keep them in registers over a barrier; the runtime writes them
// under the same symbols when it switches fibers.
#pragma GCC visibility push(hidden)  // the runtime is linked into the same library
extern "C" const uint3 threadIdx, blockIdx, blockDim, gridDim;

// The running CTA's dynamic shared memory, 16-byte aligned, poisoned with 0xFF at its start. Null in a launch without
// any.
extern "C" void* voltune_shared_arena();

// ---- barriers and warp collectives --------------------------------------------------------------------------------
// The line of the call in the source tells one barrier or collective from another, and goes into every report.
enum voltune_op : unsigned char {
  VOLTUNE_RUNNING, VOLTUNE_EXITED, VOLTUNE_SYNCTHREADS, VOLTUNE_SYNCWARP, VOLTUNE_SHFL, VOLTUNE_SHFL_UP,
  VOLTUNE_SHFL_DOWN, VOLTUNE_SHFL_XOR, VOLTUNE_BALLOT, VOLTUNE_ANY, VOLTUNE_ALL, VOLTUNE_MATCH_ANY, VOLTUNE_MMA
};
extern "C" void voltune_syncthreads(int line);
// Returns when every lane of `mask` has called it with the same op, mask and line. `source`: the lane whose value a
// shuffle returns.
extern "C" unsigned long long voltune_warp(voltune_op op, unsigned mask, unsigned long long value, unsigned source,
                                           int line);
extern "C" void voltune_fence(bool to_other_ctas);
#pragma GCC visibility pop

#define VOLTUNE_LINE int line = __builtin_LINE()
inline void __syncthreads(VOLTUNE_LINE) { voltune_syncthreads(line); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, VOLTUNE_LINE) { voltune_warp(VOLTUNE_SYNCWARP, mask, 0, 0, line); }
inline unsigned __ballot_sync(unsigned mask, int predicate, VOLTUNE_LINE) {
  return static_cast<unsigned>(voltune_warp(VOLTUNE_BALLOT, mask, predicate != 0, 0, line));
}
inline int __any_sync(unsigned mask, int predicate, VOLTUNE_LINE) {
  return static_cast<int>(voltune_warp(VOLTUNE_ANY, mask, predicate != 0, 0, line));
}
inline int __all_sync(unsigned mask, int predicate, VOLTUNE_LINE) {
  return static_cast<int>(voltune_warp(VOLTUNE_ALL, mask, predicate != 0, 0, line));
}

template <class T>
inline T voltune_exchange(voltune_op op, unsigned mask, T value, unsigned source, int line) {
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = voltune_warp(op, mask, bits, source, line);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned voltune_lane() { return threadIdx.x & 31u; }  // blocks are one-dimensional: the host refuses others

// A source outside the segment of `width` lanes means the caller's own value (guide, "Warp Shuffle Functions").
#define VOLTUNE_COLLECTIVES_OF(T) \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, VOLTUNE_LINE) { \
    const unsigned own = voltune_lane(), first = own & ~(width - 1u); \
    return voltune_exchange(VOLTUNE_SHFL, mask, value, first | (lane & (width - 1u)), line); \
  } \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, VOLTUNE_LINE) { \
    const unsigned own = voltune_lane(), in = own & (width - 1u); \
    return voltune_exchange(VOLTUNE_SHFL_UP, mask, value, delta > in ? own : own - delta, line); \
  } \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, VOLTUNE_LINE) { \
    const unsigned own = voltune_lane(), in = own & (width - 1u); \
    return voltune_exchange(VOLTUNE_SHFL_DOWN, mask, value, delta >= width - in ? own : own + delta, line); \
  } \
  inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, VOLTUNE_LINE) { \
    const unsigned own = voltune_lane(), end = (own & ~(width - 1u)) + width; \
    const unsigned other = own ^ static_cast<unsigned>(bits); \
    return voltune_exchange(VOLTUNE_SHFL_XOR, mask, value, other >= end ? own : other, line); \
  }
VOLTUNE_COLLECTIVES_OF(int)
VOLTUNE_COLLECTIVES_OF(unsigned)
VOLTUNE_COLLECTIVES_OF(float)
#undef VOLTUNE_COLLECTIVES_OF

inline unsigned __match_any_sync(unsigned mask, unsigned value, VOLTUNE_LINE) {
  return static_cast<unsigned>(voltune_warp(VOLTUNE_MATCH_ANY, mask, value, 0, line));
}
inline unsigned __match_any_sync(unsigned mask, int value, VOLTUNE_LINE) {
  return __match_any_sync(mask, static_cast<unsigned>(value), line);
}

// The plain twin of eight PTX mma.sync.m8n8k4.row.col.f32.f16.f16.f32, two for each of four A operands: in each quadpair of the
// warp d[c] += A[c] B over eight k, fragments as the PTX ISA gives them, f16 operands in pairs of k. Products and their sum are
// exact here, then rounded once; a tensor core rounds its sums in its own way.
struct voltune_mma_operands {
  float* d;  // [4][8]
  const unsigned (*a)[4];
  const unsigned* b;
};
inline void voltune_mma_m8n8k4(float* d, const unsigned (*a)[4], const unsigned* b, VOLTUNE_LINE) {
  const voltune_mma_operands mine{d, a, b};
  voltune_warp(VOLTUNE_MMA, 0xFFFFFFFFu, reinterpret_cast<unsigned long long>(&mine), 0, line);
}

// Four bytes chosen by the low three bits of each nibble of `selector` out of the eight of low, then high; a nibble's top
// bit would spread a sign, which nothing here asks for.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return chosen;
}

inline void __threadfence_block() { voltune_fence(false); }
inline void __threadfence() { voltune_fence(true); }
inline void __threadfence_system() { voltune_fence(true); }

// ---- atomics: real ones, since CTAs of one launch run in several processes ----------------------------------------
// Relaxed, as CUDA's are: none of them is a fence.
template <class T, class Step>
inline T voltune_atomic(T* address, Step step) {
  T old{}, next;  // a guess: where it is wrong, the exchange tells what is there
  do {
    next = step(old);
  } while (!__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline float atomicAdd(float* address, float value) {
  return voltune_atomic(address, [=](float old) { return old + value; });
}
inline int atomicMax(int* address, int value) {
  return voltune_atomic(address, [=](int old) { return old > value ? old : value; });
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
  return voltune_atomic(address, [=](unsigned old) { return old > value ? old : value; });
}
inline int atomicMin(int* address, int value) {
  return voltune_atomic(address, [=](int old) { return old < value ? old : value; });
}
inline int atomicOr(int* address, int bits) { return __atomic_fetch_or(address, bits, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* address, unsigned bits) {
  return __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return voltune_atomic(address, [=](unsigned old) { return old >= last ? 0u : old + 1u; });
}
inline int atomicExch(int* address, int value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }
inline unsigned atomicExch(unsigned* address, unsigned value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline float atomicExch(float* address, float value) {
  return voltune_atomic(address, [=](float) { return value; });
}
inline int atomicCAS(int* address, int expected, int value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------
extern "C" {
float fmaf(float, float, float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fabsf(float) noexcept;
float rintf(float) noexcept;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline unsigned __brev(unsigned bits) {
  bits = ((bits >> 1) & 0x55555555u) | ((bits & 0x55555555u) << 1);
  bits = ((bits >> 2) & 0x33333333u) | ((bits & 0x33333333u) << 2);
  bits = ((bits >> 4) & 0x0F0F0F0Fu) | ((bits & 0x0F0F0F0Fu) << 4);
  return __builtin_bswap32(bits);
}

#define VOLTUNE_MIN_MAX_OF(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
VOLTUNE_MIN_MAX_OF(int)
VOLTUNE_MIN_MAX_OF(unsigned)
VOLTUNE_MIN_MAX_OF(long long)
VOLTUNE_MIN_MAX_OF(unsigned long long)
#undef VOLTUNE_MIN_MAX_OF
inline float min(float a, float b) { return fminf(a, b); }  // as on the GPU, the operand that is not a NaN
inline float max(float a, float b) { return fmaxf(a, b); }

template <class T>
inline T __ldg(const T* address) { return *address; }

// ---- entry --------------------------------------------------------------------------------------------------------
// Each argument is a 64-bit slot whose low bytes are the value; the kernel's own type says how to read it, so nothing
// is generated per kernel but its name.
template <class T>
inline T voltune_argument(const unsigned long long& slot) {
  static_assert(sizeof(T) <= sizeof slot, "kernel arguments are pointers and scalars");
  T value;
  __builtin_memcpy(&value, &slot, sizeof value);
  return value;
}
template <class T> struct voltune_letter { static constexpr char value = sizeof(T) == 4 ? 'i' : '?'; };
template <> struct voltune_letter<float> { static constexpr char value = '?'; };
template <class T> struct voltune_letter<T*> { static constexpr char value = 'p'; };
template <int... I> struct voltune_indices {};
template <class... A, int... I>
inline __attribute__((always_inline)) void voltune_apply(void (*kernel)(A...), const unsigned long long* slots,
                                                         voltune_indices<I...>) {
  kernel(voltune_argument<A>(slots[I])...);
}
template <class... A>
inline __attribute__((always_inline)) void voltune_call(void (*kernel)(A...), const unsigned long long* slots) {
  voltune_apply(kernel, slots, voltune_indices<__integer_pack(sizeof...(A))...>{});
}
template <class... A>
inline const char* voltune_letters(void (*)(A...)) {
  static const char letters[] = {voltune_letter<A>::value..., 0};
  return letters;
}

#define VOLTUNE_ENTRY(kernel) \
  extern "C" void voltune_thread(const unsigned long long* slots) { voltune_call(kernel, slots); } \
  extern "C" __attribute__((visibility("default"))) const char* voltune_signature() { return voltune_letters(kernel); }
