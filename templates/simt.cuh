// The SIMT family: a warp multiplies up to kRows rows by its share of K of one column tile, in fp32.
//
// Every product and sum is written out, in one order, so every executor and every configuration with the same split-K
// gives the same bits.

template <class C, int K, int N, class Element>
struct Simt {
  using R = Reader<C, K, N>;
  static constexpr int kPassRows = C::kRows;
  static constexpr int kLaneColumns = R::kColumns;
  static constexpr int kTileColumns = 8 * R::kColumns;
  static constexpr int kSteps = K / 32 / C::kSplitK;  // of a warp
  static constexpr int kShare = kSteps * 32;
  static_assert(K % (32 * C::kSplitK) == 0, "split-K must divide K / 32");
  static_assert(kSteps % C::kUnroll == 0, "unroll must divide a warp's steps");

  // A warp's own shared memory: its share of each row, with the layout's factors.
  struct Shared {
    alignas(16) float rows[C::kRows][kShare];
  };

  // Which of a tile's eight column groups is this lane's.
  static __device__ __forceinline__ int column_group() { return lane_id() & 7; }

  // Multiplies `count` rows by the tile; put(row, column in the tile, sum) takes what comes out. row_of(r) is where the
  // share of row r begins; `column` is the lane's first, `step` the warp's.
  template <class RowOf, class Put>
  static __device__ __forceinline__ void multiply(const QuantizedTensors& tensors, int expert, int column, int step,
                                                  Shared& shared, int count, RowOf row_of, Put put) {
    // A lone row, the common case under uniform routing, does not pay for the others.
    if (C::kRows == 1 || count == 1) {
      pass<1>(tensors, expert, column, step, shared, count, row_of, put);
    } else {
      pass<C::kRows>(tensors, expert, column, step, shared, count, row_of, put);
    }
  }

 private:
  // How many of a row's 32-lane loads, and how many rows, are asked for before the first is used.
  static constexpr int kElements = 16 / sizeof(Element);  // of a load
  static constexpr int kLoads = (kShare + 32 * kElements - 1) / (32 * kElements);
  static constexpr int kBatch = kLoads < 8 ? kLoads : 8;

  static __device__ __forceinline__ void store(float* shared, const uint4& v) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 2) {
        shared[2 * i] = half_to_float((unsigned short)words[i]) * R::activation_factor(2 * i);
        shared[2 * i + 1] = half_to_float((unsigned short)(words[i] >> 16)) * R::activation_factor(2 * i + 1);
      } else {
        // Of an octet this lane has the first or the second half.
        const bool second = lane_id() & 1;
        shared[i] = __uint_as_float(words[i]) * (second ? R::activation_factor(4 + i) : R::activation_factor(i));
      }
    }
  }

  // Rows into the warp's shared memory, their loads in flight together as far as registers go.
  template <int kRows, class RowOf>
  static __device__ __forceinline__ void stage(Shared& shared, int count, RowOf row_of) {
    constexpr int kTogether = kRows * kBatch <= 16 ? kRows : 1;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
#pragma unroll 1
      for (int batch = lane_id() * kElements; batch < kShare; batch += kBatch * 32 * kElements) {
        uint4 loads[kTogether][kBatch];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          const Element* row = row_of(min(first + r, count - 1)) + batch;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (batch + i * 32 * kElements < kShare) loads[r][i] = *reinterpret_cast<const uint4*>(row + i * 32 * kElements);
          }
        }
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int at = batch + i * 32 * kElements;
            if (first + r < count && at < kShare) store(&shared.rows[first + r][at], loads[r][i]);
          }
        }
      }
    }
  }

  template <int kRows, class RowOf, class Put>
  static __device__ __forceinline__ void pass(const QuantizedTensors& tensors, int expert, int column, int step,
                                              Shared& shared, int count, RowOf row_of, Put put) {
    R reader(tensors, expert, column, step);
    typename R::Fragment ring[C::kUnroll];  // the weights in flight
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) reader.next(ring[u]);
    stage<kRows>(shared, count, row_of);
    __syncwarp();
    float sums[kRows][kLaneColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums[r][c] = 0.0f;
    }
    const float* octet = &shared.rows[0][(lane_id() >> 3) * 8];
#pragma unroll 1
    for (int base = 0; base < kSteps; base += C::kUnroll, octet += C::kUnroll * 32) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        accumulate<kRows>(ring[u], octet + u * 32, count, sums);
        // Into the registers just used: a load before the arithmetic would cost copies of them.
        if (base + u + C::kUnroll < kSteps) reader.next(ring[u]);
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
    float activation[kRows][8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4* v = reinterpret_cast<const float4*>(octet + min(r, count - 1) * kShare);
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
