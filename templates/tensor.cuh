// The tensor-core family: a warp multiplies 32 columns of sm70-u4 weights by up to eight rows, a step of 32 k at a time.
//
// Weights are the A operand and rows the B operand, so one row and eight cost the same. A lane holds one k-octet of four
// adjacent columns (16 bytes) and the same octet of one row. Which octet and columns a lane holds is all that differs
// between Volta's m8n8k4, where each quadpair owns an octet and the quadpairs' sums meet at the end, and m16n8k16 (from
// compute capability 8.0). The order of k inside a product is free, so neither needs a shuffle on the way in.
//
// (q - z) and f16 activations are exact as operands; products are exact, and sums fp32 as the tensor cores add them, so
// they may differ from one architecture to another. fp32 activations go in as two columns of B: a row scaled by a power
// of two to the middle of f16's range, rounded, and what that rounding left.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define VOLTUNE_M16N8K16 1
#else
#define VOLTUNE_M16N8K16 0
#endif

// d[i] += A B of one mma, fragments as the PTX ISA gives them for f16 operands and f32 accumulators.
#if VOLTUNE_M16N8K16
__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#elif defined(__CUDA_ARCH__)
__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
#endif

// {1024 + q} - {1024 + z} as half2, for q and z of 0..15: exact.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ unsigned small_difference(unsigned q, unsigned z) {
  unsigned difference;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(q), "r"(z));
  return difference;
}
#else
inline unsigned small_difference(unsigned q, unsigned z) {
  constexpr unsigned short kHalves[16] = {0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
                                          0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};
  const int low = (int)(q & 15u) - (int)(z & 15u);
  const int high = (int)(q >> 16 & 15u) - (int)(z >> 16 & 15u);
  return (low < 0 ? 0x8000u | kHalves[-low] : kHalves[low]) |
         (high < 0 ? 0x8000u | kHalves[-high] : (unsigned)kHalves[high]) << 16;
}
#endif

// How a warp's lanes share out a step, and where the sums of 4 columns a lane come out.
struct TensorLanes {
#if VOLTUNE_M16N8K16
  static constexpr int kSums = 8;  // [column of four][row of two]
  static constexpr int kRows = 2;  // rows a lane's sums belong to

  static __device__ __forceinline__ int octet() { return lane_id() & 3; }
  static __device__ __forceinline__ int index() { return lane_id() >> 2; }
  static __device__ __forceinline__ int row(int i) { return octet() * 2 + i; }

  // pairs[column][pair of k] times the row's octet.
  static __device__ __forceinline__ void step(float (&d)[kSums], const unsigned (&pairs)[4][4], const uint4& row) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      mma(d + 2 * c, pairs[c][0], pairs[c + 1][0], pairs[c][1], pairs[c + 1][1], row.x, row.y);
      mma(d + 2 * c, pairs[c][2], pairs[c + 1][2], pairs[c][3], pairs[c + 1][3], row.z, row.w);
    }
  }

  static __device__ __forceinline__ void scale(float (&sums)[kSums], const float (&d)[kSums], const float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = fmaf(d[i], s[i / 2], sums[i]);
  }

  // take(which of the lane's rows, column of the tile, sum)
  template <class Take>
  static __device__ __forceinline__ void finish(float (&sums)[kSums], Take take) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) take(i & 1, index() * 4 + i / 2, sums[i]);
  }
#else
  static constexpr int kSums = 32;  // [column of four][accumulator of an m8n8k4]
  static constexpr int kRows = 4;

  static __device__ __forceinline__ int quadpair() { return (lane_id() >> 2) & 3; }
  static __device__ __forceinline__ int octet() { return quadpair(); }
  static __device__ __forceinline__ int index() { return (lane_id() & 3) | (lane_id() >> 4) << 2; }
  static __device__ __forceinline__ int row(int i) { return (i >> 1) * 4 + (lane_id() & 2) + (i & 1); }

  static __device__ __forceinline__ void step(float (&d)[kSums], const unsigned (&pairs)[4][4], const uint4& row) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      mma(d + 8 * c, pairs[c][0], pairs[c][1], row.x, row.y);
      mma(d + 8 * c, pairs[c][2], pairs[c][3], row.z, row.w);
    }
#else
    voltune_mma_m8n8k4(d, pairs, &row.x);
#endif
  }

  // A lane's accumulators belong to columns of two indexes: its own, and that of the lane two away.
  static __device__ __forceinline__ void scale(float (&sums)[kSums], const float (&d)[kSums], const float (&s)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float other = __shfl_xor_sync(0xffffffffu, s[c], 2);
      const float first = lane_id() & 2 ? other : s[c];
      const float second = lane_id() & 2 ? s[c] : other;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[8 * c + i] = fmaf(d[8 * c + i], i & 2 ? second : first, sums[8 * c + i]);
    }
  }

  // Each exchange adds up two quadpairs and halves what a lane holds: in the end, column c of four is quadpair c's.
  template <class Take>
  static __device__ __forceinline__ void finish(float (&sums)[kSums], Take take) {
    const bool upper = quadpair() & 2;
    const bool odd = quadpair() & 1;
    float half[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      half[i] = (upper ? sums[16 + i] : sums[i]) + __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[16 + i], 8);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float sum = (odd ? half[8 + i] : half[i]) + __shfl_xor_sync(0xffffffffu, odd ? half[i] : half[8 + i], 4);
      const int group = (lane_id() & 1) + (i & 2) + (lane_id() >> 4) * 4;
      take((i >> 1 & 2) + (i & 1), group * 4 + quadpair(), sum);
    }
  }
#endif
};

template <class C, int K, int N, class Element>
struct Tensor {
  static constexpr bool kSplitRows = sizeof(Element) == 4;  // fp32 rows, as two columns of B each
  static constexpr int kPassRows = kSplitRows ? 4 : 8;
  static constexpr int kLaneColumns = 4;
  static constexpr int kTileColumns = 32;
  static constexpr int kSteps = K / 32 / C::kSplitK;  // of a warp
  static constexpr int kShare = kSteps * 32;
  static constexpr int kStatsWords = C::kStatsBytes;
  static_assert(C::kSm70U4 && !C::kEngineNumerics, "the tensor-core family reads sm70-u4 with exact numerics");
  static_assert(K % (32 * C::kSplitK) == 0, "split-K must divide K / 32");
  static_assert(kSteps % C::kUnroll == 0, "unroll must divide a warp's steps");

  struct Planes {
    alignas(16) unsigned short halves[2 * kPassRows][kShare + 8];  // a row's two columns of B; 8 keep banks apart
    float unscale[kPassRows];
  };
  struct Nothing {};
  template <bool kPlanes, class = void>
  struct SharedOf {
    using type = Planes;
  };
  template <class Unused>
  struct SharedOf<false, Unused> {
    using type = Nothing;
  };
  using Shared = typename SharedOf<kSplitRows>::type;

  struct Fragment {
    uint4 words;
    unsigned stats[kStatsWords];
    uint4 row;
  };

  // The warp's stream of weights and statistics, and of f16 rows.
  struct Reader {
    const uint4* words;
    const unsigned* stats;
    const uint4* row;
    int step;

    __device__ __forceinline__ Reader(const QuantizedTensors& t, int expert, int column, int first)
        : row(nullptr), step(first) {
      const int octet = first * 4 + TensorLanes::octet();
      words = reinterpret_cast<const uint4*>(t.q + (long long)expert * (K * (N / 8)) +
                                             ((column / 32) * (K / 8) + octet) * 32 + column % 32);
      const long long group = (long long)expert * (K / C::kGroup) + first / kGroupSteps<C>;
      stats = static_cast<const unsigned*>(t.scales) + (group * N + column) / 4 * C::kStatsBytes;
    }

    __device__ __forceinline__ void next(Fragment& fragment) {
      fragment.words = *words;
#pragma unroll
      for (int i = 0; i < kStatsWords; ++i) fragment.stats[i] = stats[i];
      words += 32;
      if (++step % kGroupSteps<C> == 0) stats += N / 4 * C::kStatsBytes;
      if constexpr (!kSplitRows) {
        fragment.row = *row;
        row += 4;
      }
    }
  };

  static __device__ __forceinline__ int column_group() { return TensorLanes::index(); }

  // As Simt::multiply.
  template <class RowOf, class Put>
  static __device__ __forceinline__ void multiply(const QuantizedTensors& tensors, int expert, int column, int step,
                                                  Shared& shared, int count, RowOf row_of, Put put) {
    Reader reader(tensors, expert, column, step);
    const uint4* planes = nullptr;
    // Columns of B past the last row repeat it: what comes of them is not used.
    if constexpr (!kSplitRows) {
      reader.row = reinterpret_cast<const uint4*>(row_of(min(TensorLanes::index(), count - 1))) + TensorLanes::octet();
    } else {
      const int plane = min(TensorLanes::index(), 2 * count - 1);
      planes = reinterpret_cast<const uint4*>(shared.halves[plane]) + TensorLanes::octet();
    }
    Fragment ring[C::kUnroll];  // what is in flight
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) reader.next(ring[u]);
    if constexpr (kSplitRows) {
      split(shared, count, row_of);
      __syncwarp();
    }
    float sums[TensorLanes::kSums];
#pragma unroll
    for (int i = 0; i < TensorLanes::kSums; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int base = 0; base < kSteps; base += C::kUnroll) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        if constexpr (kSplitRows) {
          ring[u].row = *planes;
          planes += 4;
        }
        accumulate(ring[u], sums);
        // Into the registers just used: a load before the arithmetic would cost copies of them.
        if (base + u + C::kUnroll < kSteps) reader.next(ring[u]);
      }
    }
    float rounded = 0.0f;
    TensorLanes::finish(sums, [&](int i, int c, float sum) {
      const int row = TensorLanes::row(i);
      if constexpr (!kSplitRows) {
        if (row < count) put(row, c, sum);
      } else if (i % 2 == 0) {
        rounded = sum;  // and the next is what rounding left
      } else if (row / 2 < count) {
        put(row / 2, c, (rounded + sum) * shared.unscale[row / 2]);
      }
    });
  }

 private:
  // sums += a step's products, scaled.
  static __device__ __forceinline__ void accumulate(const Fragment& f, float (&sums)[TensorLanes::kSums]) {
    const unsigned words[4] = {f.words.x, f.words.y, f.words.z, f.words.w};
    unsigned pairs[4][4];
    float scales[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Statistics statistics = sm70_u4_statistics<C>(f.stats, c);
      scales[c] = half_to_float(statistics.scale);
      const unsigned zero = statistics.zero * 0x00010001u + 0x64006400u;
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[c][i] = small_difference((words[c] >> (4 * i) & 0x000f000fu) | 0x64006400u, zero);
    }
    float d[TensorLanes::kSums];
#pragma unroll
    for (int i = 0; i < TensorLanes::kSums; ++i) d[i] = 0.0f;
    TensorLanes::step(d, pairs, f.row);
    TensorLanes::scale(sums, d, scales);
  }

  // fp32 rows as two f16 columns each. A row's largest magnitude is brought to [2^13, 2^14), so that the two together
  // hold each element to 2^-24 of it. A row's loads are all asked for before one is used, the next row's before that.
  template <class RowOf>
  static __device__ __forceinline__ void split(Shared& shared, int count, RowOf row_of) {
    constexpr int kLoads = kShare / 32;
    float next[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) next[i] = row_of(0)[lane_id() + i * 32];
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      float values[kLoads];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) values[i] = next[i];
      if (r + 1 < count) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) next[i] = row_of(r + 1)[lane_id() + i * 32];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      }
      const unsigned exponent = min(max(__float_as_uint(largest) >> 23, 14u), 254u);
      const float scale = __uint_as_float((267u - exponent) << 23);
      if (lane_id() == 0) shared.unscale[r] = __uint_as_float((exponent - 13u) << 23);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float value = values[i] * scale;
        const unsigned short rounded = float_to_half(value);
        shared.halves[2 * r][lane_id() + i * 32] = rounded;
        shared.halves[2 * r + 1][lane_id() + i * 32] = float_to_half(value - half_to_float(rounded));
      }
    }
  }
};
