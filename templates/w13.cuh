// Grouped W13 with fused SiLU(gate) * up: x f16 [tokens, H] -> hidden f32 [slots, I].
//
// A CTA takes one segment (grid y) and kTiles column tiles (grid x); its warps split K kSplitK ways. The partial sums
// meet in shared memory, where gate and up of an output lie side by side, whichever way W13's columns are ordered.

template <class C>
struct W13 {
  static constexpr int kK = C::kHidden;
  static constexpr int kN = 2 * C::kIntermediate;
  using R = Reader<C, kK, kN>;
  static constexpr int kSteps = kK / 32 / C::kSplitK;  // of a warp
  static constexpr int kShare = kSteps * 32;
  static constexpr int kTileColumns = 8 * R::kColumns;
  static constexpr int kTilePairs = kTileColumns / 2;
  static constexpr int kWarps = C::kTiles * C::kSplitK;

  struct Arena {
    int experts[C::kMaxSlots];
    alignas(16) float x[kWarps][C::kRows][kShare];
    float partial[C::kSplitK][C::kRows][C::kTiles * kTileColumns];
  };
  static_assert(sizeof(Arena) == C::kArenaBytes, "the launch plan and the kernel disagree on shared memory");
  static_assert(kK % (32 * C::kSplitK) == 0, "split-K must divide K / 32");

  const unsigned short* x;
  QuantizedTensors weights;
  float* hidden;

  // A lane's first column: a tile is half gate and half up columns.
  static __device__ __forceinline__ int column_of(int tile) {
    const int group = lane_id() & 7;
    if constexpr (C::kInterleaved) return tile * kTileColumns + group * R::kColumns;
    return (group < 4 ? 0 : C::kIntermediate) + tile * kTilePairs + (group & 3) * R::kColumns;
  }

  template <int kRows>
  __device__ __forceinline__ void pass(Arena& arena, const int* slots, int count, int expert) const {
    const int split = warp_id() % C::kSplitK;
    const int tile = warp_id() / C::kSplitK;
    const R reader(weights, expert, column_of(blockIdx.x * C::kTiles + tile), split * kSteps);
    Ring<C, R> ring(reader);
    float* staged = arena.x[warp_id()][0];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      stage_row<R>(staged + r * kShare, x + (long long)(slots[r] / C::kTopK) * kK + split * kShare, kShare);
    }
    __syncwarp();
    float sums[kRows][R::kColumns];
    multiply<C, R, kSteps, kRows>(reader, ring, staged, sums);
    if (lane_id() < 8) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < R::kColumns; ++c) {
          arena.partial[split][r][tile * kTileColumns + lane_id() * R::kColumns + c] = sums[r][c];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * C::kTiles * kTilePairs; i += blockDim.x) {
      const int r = i / (C::kTiles * kTilePairs);
      const int pair = i % (C::kTiles * kTilePairs);
      const int first = pair / kTilePairs * kTileColumns;
      const int within = pair % kTilePairs;
      const int gate_at = first + (C::kInterleaved ? 2 * within : within);
      const int up_at = C::kInterleaved ? gate_at + 1 : gate_at + kTilePairs;
      float gate = 0.0f;
      float up = 0.0f;
#pragma unroll
      for (int part = 0; part < C::kSplitK; ++part) {
        gate += arena.partial[part][r][gate_at];
        up += arena.partial[part][r][up_at];
      }
      float value;
      if constexpr (C::kEngineNumerics) {
        value = round_to_half(round_to_half(silu(round_to_half(gate))) * round_to_half(up));
      } else {
        value = silu(gate) * up;
      }
      int slot = slots[0];  // a register array takes no run-time index
#pragma unroll
      for (int s = 1; s < kRows; ++s) slot = r == s ? slots[s] : slot;
      hidden[(long long)slot * C::kIntermediate + blockIdx.x * (C::kTiles * kTilePairs) + pair] = value;
    }
    __syncthreads();
  }

  template <class Segments>
  __device__ __forceinline__ void run(Segments segments) const {
    Arena& arena = shared_arena<Arena>();
    segments.stage(arena.experts);
    if (!segments.open(blockIdx.y)) return;
    for (Pass<C::kRows> rows(segments); rows.count > 0; rows = Pass<C::kRows>(segments)) {
      // A lone row, the common case under uniform routing, does not pay for the others.
      if (C::kRows == 1 || rows.count == 1) {
        pass<1>(arena, rows.slots, 1, segments.expert);
      } else {
        pass<C::kRows>(arena, rows.slots, rows.count, segments.expert);
      }
    }
  }
};
