// Grouped W2 with fused weighted combine: hidden f32 [slots, I] -> out f16 [tokens, H].
//
// A CTA takes one column tile and every segment of the step: groups of kSplitK warps take segments in turn and leave
// each slot's output in shared memory. Then a token's slots are weighted and added in route order, so the result
// does not depend on which warp took what, and needs no atomics, zeroing or unpermute.

template <class C>
struct W2 {
  static constexpr int kK = C::kIntermediate;
  static constexpr int kN = C::kHidden;
  using F = Family<C, kK, kN, float>;
  static constexpr int kWarps = C::kWarps * C::kSplitK;

  struct alignas(16) Arena {
    int experts[C::kMaxSlots];
    float route_weights[C::kMaxSlots];
    int slots[kWarps][F::kPassRows];
    typename F::Shared warps[kWarps];
    // after it: float routes[kSplitK][slots][kTileColumns], as long as the step
  };
  static_assert(sizeof(Arena) == C::kArenaBytes, "the launch plan and the kernel disagree on shared memory");

  const float* hidden;
  const float* topk_weights;
  QuantizedTensors weights;
  unsigned short* out;

  // Weighs and adds each token's routed slots in route order, and writes the CTA's columns.
  __device__ __forceinline__ void combine(const Arena& arena, const float* routes, int tokens) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * F::kTileColumns; i += blockDim.x) {
      const int token = i / F::kTileColumns;
      const int column = i % F::kTileColumns;
      float sum = 0.0f;
#pragma unroll 2
      for (int slot = token * C::kTopK; slot < (token + 1) * C::kTopK; ++slot) {
        if (arena.experts[slot] < 0) continue;
        float route = 0.0f;
#pragma unroll
        for (int part = 0; part < C::kSplitK; ++part) {
          route += routes[(part * tokens * C::kTopK + slot) * F::kTileColumns + column];
        }
        if constexpr (C::kEngineNumerics) route = round_to_half(route);
        sum = fmaf(arena.route_weights[slot], route, sum);
      }
      out[(long long)token * kN + blockIdx.x * F::kTileColumns + column] = float_to_half(sum);
    }
  }

  template <class Segments>
  __device__ __forceinline__ void run(Segments segments) const {
    Arena& arena = shared_arena<Arena>();
    float* routes = reinterpret_cast<float*>(&arena + 1);
    const int tokens = segments.tokens();
    // Asked for now, needed last: its latency is hidden behind the weights'.
#pragma unroll 1
    for (int slot = threadIdx.x; slot < tokens * C::kTopK; slot += blockDim.x) {
      arena.route_weights[slot] = topk_weights[slot];
    }
    segments.begin(arena.experts);
    segments.routed(arena.experts);
    const int split = warp_id() % C::kSplitK;
    const int step = split * F::kSteps;
    const int column = blockIdx.x * F::kTileColumns + F::column_group() * F::kLaneColumns;
    float* outputs = routes + split * tokens * C::kTopK * F::kTileColumns;
    int* slots = arena.slots[warp_id()];
#pragma unroll 1
    for (int i = warp_id() / C::kSplitK; i < segments.count(); i += C::kWarps) {
      if (!segments.open(i)) continue;
#pragma unroll 1
      while (true) {
        const int count = next_rows<F::kPassRows>(segments, slots);
        if (count == 0) break;
        F::multiply(
            weights, segments.expert, column, step, arena.warps[warp_id()], count,
            [&](int r) { return hidden + (long long)slots[r] * kK + step * 32; },
            [&](int r, int c, float sum) { outputs[slots[r] * F::kTileColumns + c] = sum; });
      }
    }
    __syncthreads();
    combine(arena, routes, tokens);
  }
};
