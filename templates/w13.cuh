// Grouped W13 with fused SiLU(gate) * up: x f16 [tokens, H] -> hidden f32 [slots, I].
//
// A CTA takes one segment (grid y) and kTiles column tiles (grid x); its warps split K kSplitK ways. The partial sums
// meet in shared memory, where gate and up of an output lie in one tile, whichever way W13's columns are ordered.

template <class C>
struct W13 {
  static constexpr int kK = C::kHidden;
  static constexpr int kN = 2 * C::kIntermediate;
  using F = Family<C, kK, kN, unsigned short>;
  static constexpr int kTilePairs = F::kTileColumns / 2;
  static constexpr int kWarps = C::kTiles * C::kSplitK;

  struct alignas(16) Arena {
    int experts[C::kMaxSlots];
    int slots[kWarps][F::kPassRows];
    typename F::Shared warps[kWarps];
    float partial[C::kSplitK][F::kPassRows][C::kTiles * F::kTileColumns];
  };
  static_assert(sizeof(Arena) == C::kArenaBytes, "the launch plan and the kernel disagree on shared memory");

  const unsigned short* x;
  QuantizedTensors weights;
  float* hidden;

  // A lane's first column: a tile is half gate and half up columns.
  static __device__ __forceinline__ int column_of(int tile) {
    const int group = F::column_group();
    if constexpr (C::kInterleaved) return tile * F::kTileColumns + group * F::kLaneColumns;
    return (group < 4 ? 0 : C::kIntermediate) + tile * kTilePairs + (group & 3) * F::kLaneColumns;
  }

  static __device__ __forceinline__ float activate(float gate, float up) {
    if constexpr (C::kEngineNumerics) {
      return round_to_half(round_to_half(silu(round_to_half(gate))) * round_to_half(up));
    }
    return silu(gate) * up;
  }

  // Adds up the splits and writes the pass's outputs.
  __device__ __forceinline__ void finish(const Arena& arena, const int* slots, int count) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * C::kTiles * kTilePairs; i += blockDim.x) {
      const int r = i / (C::kTiles * kTilePairs);
      const int pair = i % (C::kTiles * kTilePairs);
      const int within = pair % kTilePairs;
      const int gate_at = pair / kTilePairs * F::kTileColumns + (C::kInterleaved ? 2 * within : within);
      const int up_at = gate_at + (C::kInterleaved ? 1 : kTilePairs);
      float gate = 0.0f;
      float up = 0.0f;
#pragma unroll 2
      for (int part = 0; part < C::kSplitK; ++part) {
        gate += arena.partial[part][r][gate_at];
        up += arena.partial[part][r][up_at];
      }
      hidden[(long long)slots[r] * C::kIntermediate + blockIdx.x * (C::kTiles * kTilePairs) + pair] = activate(gate, up);
    }
  }

  template <class Segments>
  __device__ __forceinline__ void run(Segments segments) const {
    Arena& arena = shared_arena<Arena>();
    segments.begin(arena.experts);
    if (!segments.open(blockIdx.y)) return;
    const int split = warp_id() % C::kSplitK;
    const int tile = warp_id() / C::kSplitK;
    const int step = split * F::kSteps;
    const int column = column_of(blockIdx.x * C::kTiles + tile);
    int* slots = arena.slots[warp_id()];
#pragma unroll 1
    while (true) {
      const int count = next_rows<F::kPassRows>(segments, slots);
      if (count == 0) return;
      F::multiply(
          weights, segments.expert, column, step, arena.warps[warp_id()], count,
          [&](int r) { return x + (long long)(slots[r] / C::kTopK) * kK + step * 32; },
          [&](int r, int c, float sum) { arena.partial[split][r][tile * F::kTileColumns + c] = sum; });
      __syncthreads();
      finish(arena, slots, count);
      __syncthreads();
    }
  }
};
