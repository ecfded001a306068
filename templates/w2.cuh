// Grouped W2: hidden f32 [slots, I] -> routes f32 [slots, H].
//
// A CTA takes one segment and kTiles column tiles, as in W13.

template <class C>
struct W2 {
  static constexpr int kK = C::kIntermediate;
  static constexpr int kN = C::kHidden;
  using F = W2Family<C, kK, kN, float>;
  static_assert(C::kThreads == 32 * C::kTiles * C::kSplitK, "a warp a column tile and split");
  static constexpr int kColumns = C::kTiles * F::kTileColumns;
  static constexpr int kItems = kN / kColumns;  // CTAs of a segment

  struct alignas(16) Arena {
    typename F::Stage warps[C::kThreads / 32];
    typename F::Rows rows;
    int slots[C::kThreads / 32][F::kPassRows];
  };

  Exchange<C::kPublished> hidden;
  QuantizedTensors weights;
  Exchange<true> routes;
  unsigned* readers;  // of each slot's hidden row, where that is published: how many items have read it

  // As in W13. Counts itself among the readers of the rows where they await those.
  template <class Segments, class Ask>
  __device__ __forceinline__ void run(Arena& arena, Segments& segments, int item, Ask ask) const {
    const int split = warp_id() % C::kSplitK;
    const int tile = warp_id() / C::kSplitK;
    const int first = item * kColumns + tile * F::kTileColumns;
    typename F::Stage& stage = arena.warps[warp_id()];
    int* slots = arena.slots[warp_id()];
    const auto load = [&](int r, float (&values)[F::kBatch], int k) {
      hidden.get(values, (long long)slots[r] * kK + k, 32, [&](int i) { return k + i * 32 < kK; });
    };
    int left = F::kPassRows + 1;
#pragma unroll 1
    for (int from = 0; left > F::kPassRows; from += F::kPassRows) {
      left = segments.template rows<F::kPassRows>(from, slots);
      if (left <= 0) return ask();
      const int count = min(left, F::kPassRows);
      // The weights are on their way before the rows are awaited.
      typename F::Stream stream(weights, segments.expert, {first, 0}, split);
      if constexpr (!C::kLoadOnly) F::stage_fp32(arena.rows, count, load);
      __syncthreads();
      if constexpr (C::kPublished && !C::kLoadOnly) {
        if (threadIdx.x < count) atomicAdd(readers + slots[threadIdx.x], 1u);
      }
      F::multiply(
          stream, arena.rows, split, count, [&] { if (left <= F::kPassRows) ask(); },
          [&](int r, int c, float sum) {
            if constexpr (C::kSplitK > 1) stage.sums[r][c] = sum;
            else routes.put((long long)slots[r] * kN + first + c, sum);
          });
      if constexpr (C::kSplitK > 1) {
        __syncthreads();
        finish(arena, slots, count, item);
      } else if (left > F::kPassRows) {
        __syncthreads();  // the next pass stages rows in the place of these
      }
    }
  }

 private:
  // Adds up the splits and writes the pass's slots.
  __device__ __forceinline__ void finish(const Arena& arena, const int* slots, int count, int item) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kColumns; i += blockDim.x) {
      const int r = i / kColumns;
      const int column = i % kColumns;
      const typename F::Stage* warps = arena.warps + column / F::kTileColumns * C::kSplitK;
      float route = 0.0f;
#pragma unroll
      for (int part = 0; part < C::kSplitK; ++part) route += warps[part].sums[r][column % F::kTileColumns];
      routes.put((long long)slots[r] * kN + item * kColumns + column, route);
    }
  }
};
