// The SIMT family: a warp multiplies up to kRows rows by its share of K of one column tile, in fp32.
//
// Every product and sum is written out, in one order, so every executor and every configuration with the same split-K
// gives the same bits.

template <class C, int K, int N, class Element>
struct Simt {
  using R = Reader<C, K, N>;
  using Lanes = OctetLanes;
  static constexpr int kPassRows = C::kRows;
  static constexpr bool kStages = true;
  static constexpr int kBatch = K / 32 < 8 ? K / 32 : 8;  // elements a lane asks for together when staging a row
  static constexpr int kLaneColumns = R::kColumns;
  static constexpr int kTileColumns = 8 * R::kColumns;
  static constexpr int kSteps = K / 32 / C::kSplitK;  // of a warp
  static_assert(K % (32 * C::kSplitK) == 0, "split-K must divide K / 32");
  static_assert(kSteps % C::kUnroll == 0, "unroll must divide a warp's steps");

  // The CTA's rows, with the layout's factors.
  struct Rows {
    alignas(16) float values[C::kRows][K];
  };

  // A warp's own shared memory: what it multiplied.
  struct Stage {
    float sums[C::kRows][kTileColumns];
  };

  // A warp's stream of weights, in registers. Rows come from shared memory.
  struct Stream {
    R reader;
    typename R::Fragment ring[C::kUnroll];  // in flight

    __device__ __forceinline__ Stream(const QuantizedTensors& tensors, int expert, const TileColumns& tile, int split)
        : reader(tensors, expert, tile.template of<kLaneColumns>(Lanes::index()), split * kSteps) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) reader.next(ring[u]);
    }
  };

  // The CTA brings `count` f16 rows into shared memory, four octets a thread in flight; row_of(r) is where a row begins.
  // The caller's barrier ends it.
  template <class RowOf>
  static __device__ __forceinline__ void stage(Rows& rows, int count, RowOf row_of) {
    constexpr int kOctets = K / 8;
    const int octets = count * kOctets;
#pragma unroll 1
    for (int base = threadIdx.x; base < octets; base += 4 * blockDim.x) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = base + i * blockDim.x;
        if (at < octets) v[i] = reinterpret_cast<const uint4*>(row_of(at / kOctets))[at % kOctets];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = base + i * blockDim.x;
        if (at < octets) store(&rows.values[at / kOctets][at % kOctets * 8], v[i]);
      }
    }
  }

  // The same of fp32 rows, a warp a row; load(r, values, k) gives kBatch elements of row r, 32 apart from k on.
  template <class Load>
  static __device__ __forceinline__ void stage_fp32(Rows& rows, int count, Load load) {
#pragma unroll 1
    for (int r = warp_id(); r < count; r += blockDim.x / 32) {
#pragma unroll 1
      for (int base = 0; base < K; base += 32 * kBatch) {
        float values[kBatch];
        load(r, values, base + lane_id());
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int k = base + i * 32 + lane_id();
          if (base + i * 32 < K) rows.values[r][k] = values[i] * factor(k);
        }
      }
    }
  }

  // Multiplies `count` rows by the stream's tile; put(row, column in the tile, sum) takes what comes out. ask() is called
  // once, to ask for what is wanted afterwards.
  template <class Ask, class Put>
  static __device__ __forceinline__ void multiply(Stream& stream, const Rows& rows, int split, int count, Ask ask,
                                                  Put put) {
    ask();
    // A lone row, the common case under uniform routing, does not pay for the others.
    if (C::kRows == 1 || count == 1) {
      pass<1>(stream, rows, split, count, put);
    } else {
      pass<C::kRows>(stream, rows, split, count, put);
    }
  }

 private:
  static __device__ __forceinline__ void store(float* shared, const uint4& v) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared[2 * i] = half_to_float((unsigned short)words[i]) * R::activation_factor(2 * i);
      shared[2 * i + 1] = half_to_float((unsigned short)(words[i] >> 16)) * R::activation_factor(2 * i + 1);
    }
  }

  // R::activation_factor of a k that is not known when compiling: 16^-place.
  static __device__ __forceinline__ float factor(int k) {
    if (R::activation_factor(2) == 1.0f) return 1.0f;
    return __uint_as_float((127u - 4u * (k % 8 / 2)) << 23);
  }

  template <int kRows, class Put>
  static __device__ __forceinline__ void pass(Stream& stream, const Rows& rows, int split, int count, Put put) {
    float sums[kRows][kLaneColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums[r][c] = 0.0f;
    }
    const float* octet = &rows.values[0][split * kSteps * 32 + Lanes::octet() * 8];
#pragma unroll 1
    for (int base = 0; base < kSteps; base += C::kUnroll, octet += C::kUnroll * 32) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        accumulate<kRows>(stream.ring[u], octet + u * 32, count, sums);
        // Into the registers just used: a load before the arithmetic would cost copies of them.
        if (base + u + C::kUnroll < kSteps) stream.reader.next(stream.ring[u]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 8);
        sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 16);
      }
    }
    if (lane_id() < 8) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= count) break;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) put(r, lane_id() * kLaneColumns + c, sums[r][c]);
      }
    }
  }

  // sums[r][c] += a step's products. Rows past the last read the last again: their sums are not used.
  template <int kRows>
  static __device__ __forceinline__ void accumulate(const typename R::Fragment& fragment, const float* octet, int count,
                                                    float (&sums)[kRows][kLaneColumns]) {
    if constexpr (C::kLoadOnly) {
      sums[0][0] += R::mixed(fragment);
    } else {
      multiply_add<kRows>(fragment, octet, count, sums);
    }
  }

  template <int kRows>
  static __device__ __forceinline__ void multiply_add(const typename R::Fragment& fragment, const float* octet, int count,
                                                      float (&sums)[kRows][kLaneColumns]) {
    float activation[kRows][8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4* v = reinterpret_cast<const float4*>(octet + min(r, count - 1) * K);
      const float4 low = v[0];
      const float4 high = v[1];
      activation[r][0] = low.x, activation[r][1] = low.y, activation[r][2] = low.z, activation[r][3] = low.w;
      activation[r][4] = high.x, activation[r][5] = high.y, activation[r][6] = high.z, activation[r][7] = high.w;
    }
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const typename R::Stats stats = R::column(fragment, c);
      float products[kRows];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float weight = weight_of<C, R>(fragment, stats, c, k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          products[r] = k == 0 ? weight * activation[r][0] : fmaf(weight, activation[r][k], products[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r][c] = C::kEngineNumerics ? sums[r][c] + products[r] : fmaf(products[r], stats.scale, sums[r][c]);
      }
    }
  }
};
