// Grouped W13 with fused SiLU(gate) * up: x f16 [tokens, H] -> hidden f32 [slots, I].
//
// A CTA takes one segment and kTiles column tiles; its warps split K kSplitK ways. The partial sums meet in shared
// memory, where gate and up of an output lie in one tile, whichever way W13's columns are ordered.

template <class C>
struct W13 {
  static constexpr int kK = C::kHidden;
  static constexpr int kN = 2 * C::kIntermediate;
  using F = W13Family<C, kK, kN, unsigned short>;
  static_assert(C::kThreads == 32 * C::kTiles * C::kSplitK, "a warp a column tile and split");
  static constexpr int kTilePairs = F::kTileColumns / 2;
  static constexpr int kItems = kN / F::kTileColumns / C::kTiles;  // CTAs of a segment

  struct alignas(16) Arena {
    typename F::Stage warps[C::kThreads / 32];
    typename F::Rows rows;
    int slots[C::kThreads / 32][F::kPassRows];
  };

  const unsigned short* x;
  QuantizedTensors weights;
  Exchange<C::kPublished> hidden;

  // A tile is half gate and half up columns.
  static __device__ __forceinline__ TileColumns columns_of(int tile) {
    if constexpr (C::kInterleaved) return {tile * F::kTileColumns, 0};
    return {tile * kTilePairs, C::kIntermediate - kTilePairs};
  }

  // The open segment's columns of `item`, for all its rows. Calls `ask` once, when little
  // is left to do.
  template <class Segments, class Ask>
  __device__ __forceinline__ void run(Arena& arena, Segments& segments, int item, Ask ask) const {
    const int split = warp_id() % C::kSplitK;
    const int tile = warp_id() / C::kSplitK;
    const TileColumns columns = columns_of(item * C::kTiles + tile);
    typename F::Stage& stage = arena.warps[warp_id()];
    int* slots = arena.slots[warp_id()];
    const auto row_of = [&](int r) { return x + (long long)(slots[r] / C::kTopK) * kK; };
    int left = F::kPassRows + 1;
#pragma unroll 1
    for (int from = 0; left > F::kPassRows; from += F::kPassRows) {
      left = segments.template rows<F::kPassRows>(from, slots);
      if (left <= 0) return ask();
      const int count = min(left, F::kPassRows);
      typename F::Stream stream(weights, segments.expert, columns, split);
      if constexpr (F::kStages) {
        if constexpr (!C::kLoadOnly) F::stage(arena.rows, count, row_of);
        __syncthreads();
      } else {
        stream.follow(split, count, row_of);
      }
      F::multiply(
          stream, arena.rows, split, count, [&] { if (left <= F::kPassRows) ask(); },
          [&](int r, int c, float sum) { stage.sums[r][c] = sum; });
      __syncthreads();
      finish(arena, slots, count, item);
      // Where rows are staged, the barrier after that keeps the sums until they are added up.
      if (!F::kStages && left > F::kPassRows) __syncthreads();
    }
  }

 private:
  static __device__ __forceinline__ float activate(float gate, float up) {
    if constexpr (C::kEngineNumerics) {
      return round_to_half(round_to_half(silu(round_to_half(gate))) * round_to_half(up));
    }
    return silu(gate) * up;
  }

  // Adds up the splits and writes the pass's outputs.
  __device__ __forceinline__ void finish(const Arena& arena, const int* slots, int count, int item) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * C::kTiles * kTilePairs; i += blockDim.x) {
      const int r = i / (C::kTiles * kTilePairs);
      const int pair = i % (C::kTiles * kTilePairs);
      const int within = pair % kTilePairs;
      const int gate_at = C::kInterleaved ? 2 * within : within;
      const int up_at = gate_at + (C::kInterleaved ? 1 : kTilePairs);
      const typename F::Stage* warps = arena.warps + pair / kTilePairs * C::kSplitK;
      float gate = 0.0f;
      float up = 0.0f;
#pragma unroll
      for (int part = 0; part < C::kSplitK; ++part) {
        gate += warps[part].sums[r][gate_at];
        up += warps[part].sums[r][up_at];
      }
      hidden.put((long long)slots[r] * C::kIntermediate + item * (C::kTiles * kTilePairs) + pair, activate(gate, up));
    }
  }
};
