// Grouped W2 with fused weighted combine: hidden f32 [slots, I] -> out f16 [tokens, H].
//
// A CTA takes one column tile and every segment of the step: groups of kSplitK warps take segments in turn and leave
// each slot's output in shared memory. Then a token's slots are weighted and added in route order, so the result
// does not depend on which warp took what, and needs no atomics, zeroing or unpermute.

template <class C>
struct W2 {
  static constexpr int kK = C::kIntermediate;
  static constexpr int kN = C::kHidden;
  using R = Reader<C, kK, kN>;
  static constexpr int kSteps = kK / 32 / C::kSplitK;  // of a warp
  static constexpr int kShare = kSteps * 32;
  static constexpr int kTileColumns = 8 * R::kColumns;

  struct Arena {
    int experts[C::kMaxSlots];
    alignas(16) float hidden[C::kWarps * C::kSplitK][C::kRows][kShare];
    // after it: float routes[kSplitK][slots][kTileColumns], as long as the step
  };
  static_assert(sizeof(Arena) == C::kArenaBytes, "the launch plan and the kernel disagree on shared memory");
  static_assert(kK % (32 * C::kSplitK) == 0, "split-K must divide K / 32");

  const float* hidden;
  const float* topk_weights;
  QuantizedTensors weights;
  unsigned short* out;

  template <int kRows>
  __device__ __forceinline__ void pass(Arena& arena, float* routes, int slots, const int* rows, int count,
                                       int expert) const {
    const int split = warp_id() % C::kSplitK;
    const int column = blockIdx.x * kTileColumns + (lane_id() & 7) * R::kColumns;
    const R reader(weights, expert, column, split * kSteps);
    Ring<C, R> ring(reader);
    float* staged = arena.hidden[warp_id()][0];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      stage_row<R>(staged + r * kShare, hidden + (long long)rows[r] * kK + split * kShare, kShare);
    }
    __syncwarp();
    float sums[kRows][R::kColumns];
    multiply<C, R, kSteps, kRows>(reader, ring, staged, sums);
    if (lane_id() < 8) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= count) break;
#pragma unroll
        for (int c = 0; c < R::kColumns; ++c) {
          routes[(split * slots + rows[r]) * kTileColumns + lane_id() * R::kColumns + c] = sums[r][c];
        }
      }
    }
  }

  template <class Segments>
  __device__ __forceinline__ void run(Segments segments) const {
    Arena& arena = shared_arena<Arena>();
    float* routes = reinterpret_cast<float*>(&arena + 1);
    segments.stage(arena.experts);
    const int tokens = segments.tokens();
    const int slots = tokens * C::kTopK;
    for (int i = warp_id() / C::kSplitK; i < segments.count(); i += C::kWarps) {
      if (!segments.open(i)) continue;
      for (Pass<C::kRows> rows(segments); rows.count > 0; rows = Pass<C::kRows>(segments)) {
        if (C::kRows == 1 || rows.count == 1) {
          pass<1>(arena, routes, slots, rows.slots, 1, segments.expert);
        } else {
          pass<C::kRows>(arena, routes, slots, rows.slots, rows.count, segments.expert);
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * kTileColumns; i += blockDim.x) {
      const int token = i / kTileColumns;
      const int column = i % kTileColumns;
      float sum = 0.0f;
      for (int slot = token * C::kTopK; slot < (token + 1) * C::kTopK; ++slot) {
        if (arena.experts[slot] < 0) continue;
        float route = 0.0f;
#pragma unroll
        for (int part = 0; part < C::kSplitK; ++part) route += routes[(part * slots + slot) * kTileColumns + column];
        if constexpr (C::kEngineNumerics) route = round_to_half(route);
        sum = fmaf(topk_weights[slot], route, sum);
      }
      out[(long long)token * kN + blockIdx.x * kTileColumns + column] = float_to_half(sum);
    }
  }
};
