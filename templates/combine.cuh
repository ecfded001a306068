// Weighted combine: routes f32 [slots, H] -> out f16 [tokens, H].
//
// A CTA takes kThreads columns of one token, awaits the token's routed slots, and adds them in route order: so the result
// does not depend on who computed what, and needs no float atomics, zeroing or unpermute. Nobody comes after it: so it also
// clears the token's hidden rows for the next launch, once all their readers have counted themselves.

template <class C>
struct Combine {
  static constexpr int kN = C::kHidden;
  static constexpr int kItems = (kN + C::kThreads - 1) / C::kThreads;  // CTAs of a token
  static constexpr int kLoads = C::kTopK < 16 ? C::kTopK : 16;

  const float* topk_weights;
  Exchange<true> routes;
  unsigned short* out;
  Exchange<C::kPublished> hidden;
  unsigned* readers;  // as W2's

  template <class Segments>
  __device__ __forceinline__ void run(const Segments& segments, int token, int item) const {
    const int column = item * C::kThreads + threadIdx.x;
    const int end = (token + 1) * C::kTopK;
    float sum = 0.0f;
#pragma unroll 1
    for (int base = token * C::kTopK; base < end; base += kLoads) {
      const int slot = min(base + lane_id(), end - 1);
      const bool routed = lane_id() < kLoads && base + lane_id() < end && segments.routed(slot);
      // A slot without an expert has no weight to speak of either.
      const unsigned present = __ballot_sync(0xffffffffu, routed);
      const float weight = topk_weights[slot];
      float values[kLoads];
      routes.get(values, (long long)base * kN + column, kN,
                 [&](int c) { return (present >> c & 1u) != 0 && column < kN && !C::kLoadOnly; });
#pragma unroll
      for (int c = 0; c < kLoads; ++c) {
        const float factor = __shfl_sync(0xffffffffu, weight, c);
        if (!(present >> c & 1u) || column >= kN) continue;
        routes.clear((long long)(base + c) * kN + column);
        sum = fmaf(factor, C::kEngineNumerics ? round_to_half(values[c]) : values[c], sum);
      }
    }
    if (column < kN) out[(long long)token * kN + column] = float_to_half(sum);
    if constexpr (C::kPublished && !C::kLoadOnly) clear(segments, token, item);
  }

 private:
  // The item's share of the token's hidden rows, a warp a row.
  template <class Segments>
  __device__ __forceinline__ void clear(const Segments& segments, int token, int item) const {
    constexpr int kWarps = C::kThreads / 32;
#pragma unroll 1
    for (int choice = item * kWarps + warp_id(); choice < C::kTopK; choice += kItems * kWarps) {
      const int slot = token * C::kTopK + choice;
      if (!segments.routed(slot)) continue;
      if (lane_id() == 0) {
        while (load_relaxed(readers + slot) < W2<C>::kItems) {
        }
        readers[slot] = 0;
      }
      __syncwarp();
#pragma unroll 1
      for (int k = lane_id(); k < W2<C>::kK; k += 32) hidden.clear((long long)slot * W2<C>::kK + k);
    }
  }
};
