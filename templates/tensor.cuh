// The tensor-core family: a warp multiplies 32 columns of sm70-u4 weights by up to eight rows, a step of 32 k at a time.
//
// Weights are the A operand and rows the B operand, so one row and eight cost the same. A lane holds one k-octet of four
// adjacent columns (16 bytes) and the same octet of one row. Which octet and columns a lane holds is all that differs
// between Volta's m8n8k4, where each quadpair owns an octet and the quadpairs' sums meet at the end, and m16n8k16 (from
// compute capability 8.0). The order of k inside a product is free, so neither needs a shuffle on the way in.
//
// (q - z) and f16 activations are exact as operands; products are exact, and sums fp32 as the tensor cores add them, so
// they may differ from one architecture to another. fp32 activations go in as two columns of B: a row scaled by a power
// of two to the middle of f16's range, rounded, and what that rounding left. With an engine's numerics weights are rounded
// to f16 and so are the activations of both stages, so that nothing is left to scale.

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

// The eight q - z of a word of sm70-u4 as four half2 along k, from low = -(1024 + z) as half2: exact. A nibble is not
// shifted all the way down: under the exponent of 1024 it reads as 1024 + q, or four bits further up as 1024 + 16 q, which
// a fused step brings to q - z.
#if defined(__CUDA_ARCH__) && !defined(VOLTUNE_PLAIN)
__device__ __forceinline__ void differences(unsigned (&pairs)[4], unsigned word, unsigned low) {
  unsigned high;  // -(64 + z)
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(low), "r"(0x63806380u));
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned nibbles = word >> (4 * i);
    unsigned first;  // nibbles & mask | 1024 in one instruction, which the compiler makes two of
    unsigned second;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x64006400, 0xea;" : "=r"(first) : "r"(nibbles));
    asm("lop3.b32 %0, %1, 0x00f000f0, 0x64006400, 0xea;" : "=r"(second) : "r"(nibbles));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(first), "r"(low));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pairs[i + 1]) : "r"(second), "r"(0x2c002c00u), "r"(high));
  }
}
#else
__device__ __forceinline__ void differences(unsigned (&pairs)[4], unsigned word, unsigned low) {
  constexpr unsigned short kHalves[16] = {0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
                                          0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};
  const auto half = [&](int place) -> unsigned {
    const int difference = (int)(word >> (4 * place) & 15u) - (int)(low & 15u);
    return difference < 0 ? 0x8000u | kHalves[-difference] : kHalves[difference];
  };
  for (int i = 0; i < 4; ++i) pairs[i] = half(i) | half(i + 4) << 16;
}
#endif

// The same word's weights as an engine rounds them: round_f16(q * scale + bias), both as half2.
#if defined(__CUDA_ARCH__) && !defined(VOLTUNE_PLAIN)
__device__ __forceinline__ void dequantised(unsigned (&pairs)[4], unsigned word, unsigned scale, unsigned bias) {
  differences(pairs, word, 0xe400e400u);  // z = 0
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pairs[i]) : "r"(scale), "r"(bias));
}
#else
__device__ __forceinline__ void dequantised(unsigned (&pairs)[4], unsigned word, unsigned scale, unsigned bias) {
  const auto half = [&](int place) -> unsigned {
    const int nibble = (int)(word >> (4 * place) & 15u);
    return float_to_half_plain(half_dequantise_plain(nibble, (unsigned short)scale, (unsigned short)bias));
  };
  for (int i = 0; i < 4; ++i) pairs[i] = half(i) | half(i + 4) << 16;
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

  static constexpr int kAtOnce = 2;  // columns a step takes together

  // d += pairs[column][pair of k] times the row's octet.
  static __device__ __forceinline__ void step(float* d, const unsigned (&pairs)[kAtOnce][4], const uint4& row) {
    mma(d, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], row.x, row.y);
    mma(d, pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], row.z, row.w);
  }
  // A column's first sum.
  static __device__ __forceinline__ constexpr int sum_of(int c) { return 2 * c; }

  // sums += scale * (pairs times the row's octet), for the columns from c on.
  static __device__ __forceinline__ void step(float (&sums)[kSums], int c, const unsigned (&pairs)[kAtOnce][4],
                                              const float (&scales)[kAtOnce], const uint4& row) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    step(d, pairs, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[2 * c + i] = fmaf(d[i], scales[i / 2], sums[2 * c + i]);
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

#ifdef __CUDA_ARCH__
  static constexpr int kAtOnce = 1;
#else
  static constexpr int kAtOnce = 4;
#endif

  static __device__ __forceinline__ void step(float* d, const unsigned (&pairs)[kAtOnce][4], const uint4& row) {
#ifdef __CUDA_ARCH__
    mma(d, pairs[0][0], pairs[0][1], row.x, row.y);
    mma(d, pairs[0][2], pairs[0][3], row.z, row.w);
#else
    voltune_mma_m8n8k4(d, pairs, &row.x);
#endif
  }
  static __device__ __forceinline__ constexpr int sum_of(int c) { return 8 * c; }

  static __device__ __forceinline__ void step(float (&sums)[kSums], int c, const unsigned (&pairs)[kAtOnce][4],
                                              const float (&scales)[kAtOnce], const uint4& row) {
    float d[8 * kAtOnce];
#pragma unroll
    for (int i = 0; i < 8 * kAtOnce; ++i) d[i] = 0.0f;
    step(d, pairs, row);
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      // A lane's accumulators belong to columns of two indexes: its own, and that of the lane two away.
      const float other = __shfl_xor_sync(0xffffffffu, scales[at], 2);
      const float first = lane_id() & 2 ? other : scales[at];
      const float second = lane_id() & 2 ? scales[at] : other;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = sums[8 * (c + at) + i];
        sum = fmaf(d[8 * at + i], i & 2 ? second : first, sum);
      }
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
  using R = Sm70U4<C, K, N, TensorLanes>;
  using Lanes = TensorLanes;
  static constexpr bool kStages = sizeof(Element) == 4;  // fp32 rows; f16 rows are read in place
  static constexpr int kPlanes = kStages && !C::kEngineNumerics ? 2 : 1;  // columns of B a row; an engine's rows are f16
  static constexpr int kPassRows = 8 / kPlanes;
  static constexpr int kBatch = K / 32 < 8 ? K / 32 : 8;  // elements a lane asks for together when staging a row
  static constexpr int kLaneColumns = 4;
  static constexpr int kTileColumns = 32;
  static constexpr int kSteps = K / 32 / C::kSplitK;  // of a warp
  static_assert(C::kSm70U4, "the tensor-core family reads sm70-u4");
  static_assert(K % (32 * C::kSplitK) == 0, "split-K must divide K / 32");
  static_assert(kSteps % C::kUnroll == 0, "unroll must divide a warp's steps");

  struct Planes {
    alignas(16) unsigned short halves[kPlanes * kPassRows][K + 16];  // 16 keep Volta's banks apart
    float unscale[kPassRows];
  };
  struct Nothing {};
  template <bool kStaged, class = void>
  struct RowsOf {
    using type = Planes;
  };
  template <class Unused>
  struct RowsOf<false, Unused> {
    using type = Nothing;
  };
  using Rows = typename RowsOf<kStages>::type;

  // Steps of f16 rows in flight. They come from L2, weights from further: a long ring of weights needs but two.
  static constexpr int kRowSteps = C::kUnroll > 5 && C::kUnroll % 2 == 0 ? 2 : C::kUnroll;

  // A warp's own shared memory: what it multiplied.
  struct Stage {
    float sums[kPassRows][kTileColumns];
  };

  // A warp's stream of weights, and of f16 rows.
  struct Stream {
    R reader;
    typename R::Fragment ring[C::kUnroll];  // in flight
    const uint4* row;
    uint4 rows[kRowSteps];

    __device__ __forceinline__ Stream(const QuantizedTensors& tensors, int expert, const TileColumns& tile, int split)
        : reader(tensors, expert, tile.template of<kLaneColumns>(Lanes::index()), split * kSteps), row(nullptr) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) reader.next(ring[u]);
    }

    // f16 rows, read where they are. Columns of B past the last row repeat it: what comes of them is not used.
    template <class RowOf>
    __device__ __forceinline__ void follow(int split, int count, RowOf row_of) {
      row = reinterpret_cast<const uint4*>(row_of(min(Lanes::index(), count - 1)) + split * kSteps * 32) + Lanes::octet();
#pragma unroll
      for (int u = 0; u < kRowSteps; ++u) rows[u] = row[4 * u];
    }
  };

  // Two steps before the end, which with what follows them take about as long as an atomic's answer.
  static constexpr int kAskAt = C::kUnroll > 2 ? C::kUnroll - 2 : 0;

  // As Simt::multiply.
  template <class Ask, class Put>
  static __device__ __forceinline__ void multiply(Stream& stream, const Rows& rows, int split, int count, Ask ask,
                                                  Put put) {
    const uint4* planes = nullptr;
    if constexpr (kStages) {
      const int plane = min(Lanes::index(), kPlanes * count - 1);
      planes = reinterpret_cast<const uint4*>(rows.halves[plane] + split * kSteps * 32) + Lanes::octet();
    }
    float sums[Lanes::kSums];
#pragma unroll
    for (int i = 0; i < Lanes::kSums; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int base = 0; base < kSteps; base += C::kUnroll) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        const int next_row = base + u + kRowSteps;
        if (u == kAskAt && base + C::kUnroll >= kSteps) ask();
        if constexpr (kStages) stream.rows[u % kRowSteps] = planes[4 * (base + u)];
        accumulate(stream.ring[u], stream.rows[u % kRowSteps], sums);
        // Into the registers just used: a load before the arithmetic would cost copies of them.
        if (base + u + C::kUnroll < kSteps) stream.reader.next(stream.ring[u]);
        if constexpr (!kStages) {
          if (next_row < kSteps) stream.rows[u % kRowSteps] = stream.row[4 * next_row];
        }
      }
    }
    float rounded = 0.0f;
    Lanes::finish(sums, [&](int i, int c, float sum) {
      const int row = Lanes::row(i);
      if constexpr (kPlanes == 1) {
        if (row < count) put(row, c, sum);
      } else if (i % 2 == 0) {
        rounded = sum;  // and the next is what rounding left
      } else if (row / 2 < count) {
        put(row / 2, c, (rounded + sum) * rows.unscale[row / 2]);
      }
    });
  }

  // fp32 rows, a warp a row; load as in Simt::stage_fp32, and the caller's barrier ends it. With exact numerics a row
  // becomes two f16 columns: its largest magnitude is brought to [2^13, 2^14), rounded, and what that rounding left, so
  // that the two together hold each element to 2^-24 of that magnitude. An engine's rows are f16 values already.
  template <class Load>
  static __device__ __forceinline__ void stage_fp32(Rows& rows, int count, Load load) {
#pragma unroll 1
    for (int r = warp_id(); r < count; r += blockDim.x / 32) {
      float values[kBatch];
      float scale = 1.0f;
      if constexpr (kPlanes == 2) {
        float largest = 0.0f;
#pragma unroll 1
        for (int base = 0; base < K; base += 32 * kBatch) {
          load(r, values, base + lane_id());
#pragma unroll
          for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, fabsf(values[i]));
        }
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        }
        const unsigned exponent = min(max(__float_as_uint(largest) >> 23, 14u), 254u);
        scale = __uint_as_float((267u - exponent) << 23);
        if (lane_id() == 0) rows.unscale[r] = __uint_as_float((exponent - 13u) << 23);
      }
#pragma unroll 1
      for (int base = 0; base < K; base += 32 * kBatch) {
        if constexpr (kPlanes == 1 || K > 32 * kBatch) load(r, values, base + lane_id());
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int k = base + i * 32 + lane_id();
          if (base + i * 32 >= K) break;
          const float value = values[i] * scale;
          const unsigned short rounded = float_to_half(value);
          rows.halves[kPlanes * r][k] = rounded;
          if constexpr (kPlanes == 2) rows.halves[2 * r + 1][k] = float_to_half(value - half_to_float(rounded));
        }
      }
    }
  }

 private:
  // sums += a step's products, scaled.
  static __device__ __forceinline__ void accumulate(const typename R::Fragment& weights, const uint4& row,
                                                    float (&sums)[Lanes::kSums]) {
    if constexpr (C::kLoadOnly) {
      sums[0] += R::mixed(weights) + (kStages ? 0.0f : __uint_as_float((row.x ^ row.y ^ row.z ^ row.w) & 0x007fffffu));
    } else {
      multiply_add(weights, row, sums);
    }
  }

  static __device__ __forceinline__ void multiply_add(const typename R::Fragment& weights, const uint4& row,
                                                      float (&sums)[Lanes::kSums]) {
#pragma unroll
    for (int c = 0; c < 4; c += Lanes::kAtOnce) {
      unsigned pairs[Lanes::kAtOnce][4];
      float scales[Lanes::kAtOnce];
#pragma unroll
      for (int i = 0; i < Lanes::kAtOnce; ++i) {
        const unsigned word = R::word(weights, c + i, 0);
        if constexpr (C::kEngineNumerics) {
          const Statistics statistics = sm70_u4_statistics<C>(weights.stats, c + i);
          dequantised(pairs[i], word, statistics.scale * 0x00010001u, statistics.bias * 0x00010001u);
        } else if constexpr (C::kStatsBytes == 3) {
          const unsigned triple = packed_statistics(weights.stats, c + i);
          scales[i] = half_to_float((unsigned short)triple);
          differences(pairs[i], word, __byte_perm(triple, 0xe4e4e4e4u, 0x4242u));
        } else {
          const Statistics statistics = sm70_u4_statistics<C>(weights.stats, c + i);
          scales[i] = half_to_float(statistics.scale);
          differences(pairs[i], word, statistics.zero * 0x00010001u | 0xe400e400u);
        }
      }
      if constexpr (C::kEngineNumerics) Lanes::step(sums + Lanes::sum_of(c), pairs, row);
      else Lanes::step(sums, c, pairs, scales, row);
    }
  }
};
