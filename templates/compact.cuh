// Segment compaction by one CTA: the step's non-empty experts in ascending order, and their slots.
// Positions are found by counting: a step has few slots, and counting needs no atomics, so the result never varies.

struct SegmentList {
  int* segment_count;   // one
  int* segment_expert;  // [segments]
  int* segment_begin;   // [segments + 1]
  int* rows;            // [slots]
};

template <class C>
struct CompactArena {
  int experts[C::kMaxSlots];
  int first[C::kMaxSlots];  // 1 where a slot is the first of its expert
};

// From raw ids. kKeepEmpty lists every expert, empty ones too: what a grouped GEMM without compaction walks over.
template <class C>
__device__ __forceinline__ void compact_ids(const Routing& routing, const SegmentList& list) {
  CompactArena<C>& arena = shared_arena<CompactArena<C>>();
  const int slots = routing.tokens * C::kTopK;
  routing.template stage<C>(arena.experts);
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const int expert = arena.experts[slot];
    int position = 0;
    int earlier = 0;
    for (int other = 0; other < slots; ++other) {
      const int e = arena.experts[other];
      const bool same = e == expert && other < slot;
      position += (e >= 0 && e < expert) || same;
      earlier += same;
    }
    arena.first[slot] = expert >= 0 && earlier == 0;
    if (expert >= 0) list.rows[position] = slot;
  }
  __syncthreads();
  if constexpr (C::kKeepEmpty) {
    for (int expert = threadIdx.x; expert <= C::kExperts; expert += blockDim.x) {
      int begin = 0;
      for (int slot = 0; slot < slots; ++slot) begin += arena.experts[slot] >= 0 && arena.experts[slot] < expert;
      list.segment_begin[expert] = begin;
      if (expert < C::kExperts) list.segment_expert[expert] = expert;
    }
    if (threadIdx.x == 0) *list.segment_count = C::kExperts;
  } else {
    // One thread past the slots closes the list: no expert is above it.
    for (int slot = threadIdx.x; slot <= slots; slot += blockDim.x) {
      const bool closing = slot == slots;
      if (!closing && !arena.first[slot]) continue;
      const int expert = closing ? C::kExperts : arena.experts[slot];
      int segment = 0;
      int begin = 0;
      for (int other = 0; other < slots; ++other) {
        const int e = arena.experts[other];
        const bool below = e >= 0 && e < expert;
        segment += below && arena.first[other];
        begin += below;
      }
      list.segment_begin[segment] = begin;
      if (closing) *list.segment_count = segment;
      else list.segment_expert[segment] = expert;
    }
  }
}

template <class C>
struct CompactSortedArena {
  unsigned occupied[(C::kExperts + 31) / 32];  // a bit an expert
};

// From an engine's own sort: offsets [experts + 1] into slots sorted by expert, which stay where they are.
template <class C>
__device__ __forceinline__ void compact_sorted(const int* offsets, const SegmentList& list) {
  CompactSortedArena<C>& arena = shared_arena<CompactSortedArena<C>>();
  constexpr int kWords = (C::kExperts + 31) / 32;
  for (int word = warp_id(); word < kWords; word += blockDim.x / 32) {
    const int expert = word * 32 + lane_id();
    const bool rows = expert < C::kExperts && offsets[expert + 1] > offsets[expert];
    const unsigned mask = __ballot_sync(0xffffffffu, rows);
    if (lane_id() == 0) arena.occupied[word] = mask;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert <= C::kExperts; expert += blockDim.x) {
    int segment = 0;
    for (int word = 0; word < expert / 32; ++word) segment += __popc(arena.occupied[word]);
    const unsigned mask = expert / 32 < kWords ? arena.occupied[expert / 32] : 0;
    segment += __popc(mask & ((1u << (expert % 32)) - 1u));
    if (expert == C::kExperts) {
      *list.segment_count = segment;
      list.segment_begin[segment] = offsets[expert];
    } else if (mask >> (expert % 32) & 1u) {
      list.segment_expert[segment] = expert;
      list.segment_begin[segment] = offsets[expert];
    }
  }
}
