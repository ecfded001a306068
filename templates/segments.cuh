// Routed rows and their segments. Loops here and in the kernels' ends are kept rolled: every launch finds the instruction
// caches cold, and fetching unrolled code costs more than running rolled code.
//
// A slot is token * top-k + choice; a segment is one expert with all slots routed to it.

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// A step's routing as the engine holds it. Nothing here is trusted: what is out of range is not routed.
struct Routing {
  const void* ids;         // [tokens, top-k], int32 or int64
  int id_bytes;            // 4 or 8
  const int* expert_map;   // [map_size] global id -> local expert or -1; null: ids are local
  int map_size;
  const int* live_tokens;  // one count on the device; null: every token is live
  int tokens;

  __device__ __forceinline__ int live() const {
    // Clamped before it is multiplied by top-k, which could wrap.
    return live_tokens == nullptr ? tokens : min(max(*live_tokens, 0), tokens);
  }

  // The local expert of a slot, or -1.
  template <class C>
  __device__ __forceinline__ int expert_of(int slot) const {
    long long id = id_bytes == 8 ? static_cast<const long long*>(ids)[slot] : static_cast<const int*>(ids)[slot];
    if (expert_map != nullptr) id = id >= 0 && id < map_size ? expert_map[id] : -1;
    return id >= 0 && id < C::kExperts ? (int)id : -1;
  }

  // Every slot's expert into shared memory; the caller's barrier ends it. The ids of padding tokens are read and mean
  // nothing: so their load does not wait for the count's.
  template <class C>
  __device__ __forceinline__ void stage(int* experts) const {
    const int live_slots = live() * C::kTopK;
#pragma unroll 1
    for (int slot = threadIdx.x; slot < tokens * C::kTopK; slot += blockDim.x) {
      const int expert = expert_of<C>(slot);
      experts[slot] = slot < live_slots ? expert : -1;
    }
  }
};

// Both sources below are used by whole CTAs at first, by whole warps afterwards, and answer every lane alike:
//   begin(arena): makes ready to be asked, after one more barrier of the caller's; may hold barriers;
//   tokens(), count(): of the step; segments, from memory;
//   open(i): goes to segment i;  expert: its expert;
//   rows<n>(from, slots): the open segment's rows from the from-th on, at most n into the warp's own shared memory;
//     returns how many there are from there on;
//   routed(slot): whether the slot has an expert.

// Segments found in the ids by each CTA for itself, in an order that all CTAs agree on. That of a segment's rows may differ
// from CTA to CTA, and nothing depends on it.
template <class C>
struct RoutedSegments {
  static constexpr int kWords = (C::kExperts + 31) / 32;
  static constexpr int kMost = C::kMaxSlots < C::kExperts ? C::kMaxSlots : C::kExperts;
  static constexpr int kEnd = -1;
  struct alignas(8) Segment {
    int expert;
    int first;  // of its slots
  };
  struct Arena {
    Segment segments[kMost];
    int experts[C::kMaxSlots];  // of each slot, or -1
    int next[C::kMaxSlots];     // slot of the same expert, or kEnd
    int first[C::kExperts];     // slot of each expert, or kEnd
    unsigned present[kWords];   // a bit an expert
    int count;                  // of segments
  };

  Routing routing;
  const Arena* arena;
  int expert;
  int first;

  __device__ __forceinline__ void begin(Arena& shared) {
    arena = &shared;
    const int slots = routing.tokens * C::kTopK;
    if (slots <= 32) {
      if (warp_id() == 0) match(shared, slots);
      return;
    }
#pragma unroll 1
    for (int e = threadIdx.x; e < C::kExperts; e += blockDim.x) shared.first[e] = kEnd;
#pragma unroll 1
    for (int word = threadIdx.x; word < kWords; word += blockDim.x) shared.present[word] = 0u;
    routing.template stage<C>(shared.experts);
    __syncthreads();
#pragma unroll 1
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      const int e = shared.experts[slot];
      if (e < 0) continue;
      shared.next[slot] = atomicExch(&shared.first[e], slot);
      atomicOr(&shared.present[e / 32], 1u << e % 32);
    }
    __syncthreads();
    // Counting bits is slow on every GPU: only warps that need a count take part.
    if (threadIdx.x == blockDim.x - 1) shared.count = below(shared, kWords);
#pragma unroll 1
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      const int e = shared.experts[slot];
      if (e < 0 || shared.first[e] != slot) continue;
      const int lower = __popc(shared.present[e / 32] & ((1u << e % 32) - 1u));
      shared.segments[below(shared, e / 32) + lower] = {e, slot};
    }
  }

  __device__ __forceinline__ int tokens() const { return routing.tokens; }
  __device__ __forceinline__ int count() const { return arena->count; }
  __device__ __forceinline__ bool routed(int slot) const { return arena->experts[slot] >= 0; }

  __device__ __forceinline__ void open(int i) {
    const Segment found = arena->segments[i];
    expert = found.expert;
    first = found.first;
  }

  template <int kRows>
  __device__ __forceinline__ int rows(int from, int* slots) const {
    __syncwarp();  // the rows before these are done with
    int found = -from;
#pragma unroll 1
    for (int slot = first; slot != kEnd; slot = arena->next[slot]) {
      if (lane_id() == 0 && found >= 0 && found < kRows) slots[found] = slot;
      ++found;
    }
    __syncwarp();
    return found;
  }

 private:
  // Experts present in the first `words` words.
  static __device__ __forceinline__ int below(const Arena& shared, int words) {
    int found = 0;
#pragma unroll 8
    for (int word = 0; word < kWords; ++word) found += word < words ? __popc(shared.present[word]) : 0;
    return found;
  }

  // begin of a step that has a lane of one warp for each slot.
  __device__ __forceinline__ void match(Arena& shared, int slots) {
    const int routed_to = routing.template expert_of<C>(min(lane_id(), slots - 1));
    const int expert = lane_id() < routing.live() * C::kTopK ? routed_to : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const unsigned above = same & ~(1u << lane_id() | ((1u << lane_id()) - 1u));
    const bool leads = expert >= 0 && __ffs(same) - 1 == lane_id();
    const unsigned leaders = __ballot_sync(0xffffffffu, leads);
    if (lane_id() == 0) shared.count = __popc(leaders);
    if (lane_id() >= slots) return;
    shared.experts[lane_id()] = expert;
    shared.next[lane_id()] = above == 0u ? kEnd : __ffs(above) - 1;
    if (leads) shared.segments[__popc(leaders & ((1u << lane_id()) - 1u))] = {expert, lane_id()};
  }
};

// Segments listed in memory by a compaction kernel.
template <class C>
struct ListedSegments {
  struct Arena {
    int routed[C::kMaxSlots];
  };

  const int* segment_count;   // one
  const int* segment_expert;  // [segments]
  const int* segment_begin;   // [segments + 1], into listed
  const int* listed;          // slots, segment after segment
  int step_tokens;
  const Arena* arena;
  int expert;
  int first;
  int end;

  __device__ __forceinline__ void begin(Arena& shared) {
    arena = &shared;
#pragma unroll 1
    for (int slot = threadIdx.x; slot < step_tokens * C::kTopK; slot += blockDim.x) shared.routed[slot] = 0;
    __syncthreads();
    const int listed_end = segment_begin[count()];
#pragma unroll 1
    for (int at = segment_begin[0] + threadIdx.x; at < listed_end; at += blockDim.x) shared.routed[listed[at]] = 1;
  }
  __device__ __forceinline__ int tokens() const { return step_tokens; }
  __device__ __forceinline__ int count() const { return *segment_count; }
  __device__ __forceinline__ bool routed(int slot) const { return arena->routed[slot] != 0; }

  __device__ __forceinline__ void open(int i) {
    expert = segment_expert[i];
    first = segment_begin[i];
    end = segment_begin[i + 1];
  }

  template <int kRows>
  __device__ __forceinline__ int rows(int from, int* slots) const {
    __syncwarp();  // the rows before these are done with
    const int left = end - first - from;
    if (lane_id() < min(left, kRows)) slots[lane_id()] = listed[first + from + lane_id()];
    __syncwarp();
    return left;
  }
};

// A CTA's dynamic shared memory as one struct, whose size the launch plan knows.
template <class Arena>
__device__ __forceinline__ Arena& shared_arena() {
#ifdef __CUDA_ARCH__
  extern __shared__ uint4 voltune_arena[];
  return *reinterpret_cast<Arena*>(voltune_arena);
#else
  return *reinterpret_cast<Arena*>(voltune_shared_arena());
#endif
}
