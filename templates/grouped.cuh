// What W13 and W2 share: a warp multiplies up to kRows rows by its share of K of one column tile.

// The rows of one pass, alike in every lane; those past `count` repeat the last, so that arithmetic needs no masks.
template <int kRows>
struct Pass {
  int slots[kRows];
  int count;

  template <class Segments>
  __device__ __forceinline__ Pass(Segments& segments) : count(0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int slot = count == r ? segments.next() : -1;
      slots[r] = slot >= 0 ? slot : r == 0 ? -1 : slots[r - 1];
      count += slot >= 0;
    }
  }
};

// The weights in flight: kUnroll steps ahead of the arithmetic, in registers.
template <class C, class R>
struct Ring {
  typename R::Fragment fragments[C::kUnroll];

  __device__ __forceinline__ Ring(const R& reader) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) reader.load(fragments[u], u);
  }
};

// Puts a warp's share of one row into its own shared memory as floats, with the layout's factors.
template <class R>
__device__ __forceinline__ void stage_row(float* shared, const unsigned short* row, int share) {
  for (int i = lane_id(); i < share / 8; i += 32) {
    const uint4 v = reinterpret_cast<const uint4*>(row)[i];
    const unsigned halves[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      shared[i * 8 + k] = half_to_float((unsigned short)halves[k / 2]) * R::activation_factor(k);
      shared[i * 8 + k + 1] = half_to_float((unsigned short)(halves[k / 2] >> 16)) * R::activation_factor(k + 1);
    }
  }
}

template <class R>
__device__ __forceinline__ void stage_row(float* shared, const float* row, int share) {
  for (int i = lane_id(); i < share; i += 32) shared[i] = row[i] * R::activation_factor(i % 8);
}

// sums[r][c] over this warp's kSteps steps of K, complete in every lane. x is the warp's [rows][kSteps * 32].
template <class C, class R, int kSteps, int kRows>
__device__ __forceinline__ void multiply(const R& reader, Ring<C, R>& ring, const float* x,
                                         float (&sums)[kRows][R::kColumns]) {
  static_assert(kSteps % C::kUnroll == 0, "unroll must divide a warp's steps");
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < R::kColumns; ++c) sums[r][c] = 0.0f;
  }
  const float* octet = x + (lane_id() >> 3) * 8;
#pragma unroll 1
  for (int base = 0; base < kSteps; base += C::kUnroll) {
#pragma unroll
    for (int u = 0; u < C::kUnroll; ++u) {
      const typename R::Fragment fragment = ring.fragments[u];
      if (base + u + C::kUnroll < kSteps) reader.load(ring.fragments[u], base + u + C::kUnroll);
      float activation[kRows][8];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4* v = reinterpret_cast<const float4*>(octet + r * (kSteps * 32) + (base + u) * 32);
        const float4 low = v[0];
        const float4 high = v[1];
        activation[r][0] = low.x, activation[r][1] = low.y, activation[r][2] = low.z, activation[r][3] = low.w;
        activation[r][4] = high.x, activation[r][5] = high.y, activation[r][6] = high.z, activation[r][7] = high.w;
      }
#pragma unroll
      for (int c = 0; c < R::kColumns; ++c) {
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
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < R::kColumns; ++c) {
      sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 8);
      sums[r][c] += __shfl_xor_sync(0xffffffffu, sums[r][c], 16);
    }
  }
}
