// Segment compaction by one CTA: the step's non-empty experts in ascending order, and their slots.
//
// Slots are counted by expert, and the counts added up by warps: every position follows from the ids alone, so the result
// never varies.

struct SegmentList {
  int* segment_count;   // one
  int* segment_expert;  // [segments]
  int* segment_begin;   // [segments + 1]
  int* rows;            // [slots]
};

template <class C>
constexpr int kExpertWords = (C::kExperts + 31) / 32;

template <class C>
struct CompactArena {
  int experts[C::kMaxSlots];
  int ranks[C::kMaxSlots];    // of each slot among its expert's
  int before[C::kExperts];    // slots of an expert; then of those below it, as Below
  int words[kExpertWords<C>];  // of 32 experts together, as Below
};

// How many slots, and how many experts that have any, lie below: both in one number, so that one sum adds up both.
struct Below {
  static __device__ __forceinline__ int of(int slots) { return slots << 16 | (slots > 0); }
  static __device__ __forceinline__ int slots(int below) { return below >> 16; }
  static __device__ __forceinline__ int segments(int below) { return below & 0xffff; }
};

// The sum over this lane and those below it.
__device__ __forceinline__ int inclusive_sum(int value) {
#pragma unroll 1
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, value, lanes);
    if (lane_id() >= lanes) value += lower;
  }
  return value;
}

// Each slot's rank, and each expert's slots into arena.before: by one warp, as the ranks go in the slots' order.
template <class C>
__device__ __forceinline__ void rank_slots(CompactArena<C>& arena, int slots) {
#pragma unroll 1
  for (int base = 0; base < slots; base += 32) {
    const int slot = base + lane_id();
    const int expert = slot < slots ? arena.experts[slot] : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int earlier = __popc(same & ((1u << lane_id()) - 1u));
    if (expert >= 0) {
      const int before = arena.before[expert];
      arena.ranks[slot] = before + earlier;
      __syncwarp(same);
      if (earlier == 0) arena.before[expert] = before + __popc(same);
    }
    __syncwarp();
  }
}

// From raw ids. kKeepEmpty lists every expert, empty ones too: what a grouped GEMM without compaction walks over.
template <class C>
__device__ __forceinline__ void compact_ids(const Routing& routing, const SegmentList& list) {
  static_assert(C::kMaxSlots < 1 << 15, "a count of slots fills the upper half of a Below");
  CompactArena<C>& arena = shared_arena<CompactArena<C>>();
  const int slots = routing.tokens * C::kTopK;
#pragma unroll 1
  for (int expert = threadIdx.x; expert < C::kExperts; expert += blockDim.x) arena.before[expert] = 0;
  routing.template stage<C>(arena.experts);
  __syncthreads();
  if (warp_id() == 0) rank_slots(arena, slots);
  __syncthreads();
#pragma unroll 1
  for (int word = warp_id(); word < kExpertWords<C>; word += blockDim.x / 32) {
    const int expert = word * 32 + lane_id();
    const int own = expert < C::kExperts ? Below::of(arena.before[expert]) : 0;
    const int sum = inclusive_sum(own);
    if (expert < C::kExperts) arena.before[expert] = sum - own;
    if (lane_id() == 31) arena.words[word] = sum;
  }
  __syncthreads();
  if (warp_id() == 0) {
    int carried = 0;
#pragma unroll 1
    for (int base = 0; base < kExpertWords<C>; base += 32) {
      const int word = base + lane_id();
      const int own = word < kExpertWords<C> ? arena.words[word] : 0;
      const int sum = carried + inclusive_sum(own);
      if (word < kExpertWords<C>) arena.words[word] = sum - own;
      carried = __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane_id() == 0) {
      const int segments = C::kKeepEmpty ? C::kExperts : Below::segments(carried);
      *list.segment_count = segments;
      list.segment_begin[segments] = Below::slots(carried);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const int expert = arena.experts[slot];
    if (expert < 0) continue;
    const int below = arena.before[expert] + arena.words[expert / 32];
    const int rank = arena.ranks[slot];
    list.rows[Below::slots(below) + rank] = slot;
    if (C::kKeepEmpty || rank > 0) continue;
    list.segment_expert[Below::segments(below)] = expert;
    list.segment_begin[Below::segments(below)] = Below::slots(below);
  }
  if constexpr (C::kKeepEmpty) {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < C::kExperts; expert += blockDim.x) {
      list.segment_expert[expert] = expert;
      list.segment_begin[expert] = Below::slots(arena.before[expert] + arena.words[expert / 32]);
    }
  }
}

template <class C>
struct CompactSortedArena {
  unsigned occupied[kExpertWords<C>];  // a bit an expert
};

// From an engine's own sort: offsets [experts + 1] into slots sorted by expert, which stay where they are.
template <class C>
__device__ __forceinline__ void compact_sorted(const int* offsets, const SegmentList& list) {
  CompactSortedArena<C>& arena = shared_arena<CompactSortedArena<C>>();
  for (int word = warp_id(); word < kExpertWords<C>; word += blockDim.x / 32) {
    const int expert = word * 32 + lane_id();
    const bool rows = expert < C::kExperts && offsets[expert + 1] > offsets[expert];
    const unsigned mask = __ballot_sync(0xffffffffu, rows);
    if (lane_id() == 0) arena.occupied[word] = mask;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert <= C::kExperts; expert += blockDim.x) {
    int segment = 0;
    for (int word = 0; word < expert / 32; ++word) segment += __popc(arena.occupied[word]);
    const unsigned mask = expert / 32 < kExpertWords<C> ? arena.occupied[expert / 32] : 0;
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
