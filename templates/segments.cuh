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
//   tokens(), count(): of the step; segments;
//   open(i): goes to segment i;  expert: its expert;
//   rows<n>(from, slots): the open segment's rows from the from-th on, at most n into the warp's own shared memory;
//     returns how many there are from there on;
//   routed(slot): whether the slot has an expert.

// Segments found in the ids by each CTA for itself: one per expert's first slot, in the order of those.
template <class C>
struct RoutedSegments {
  static constexpr int kWords = (C::kMaxSlots + 31) / 32;
  struct Arena {
    int experts[C::kMaxSlots];  // of each slot, or -1
    int first[C::kExperts];     // slot of each expert, if any
    unsigned firsts[kWords];    // a bit a slot
  };

  Routing routing;
  const Arena* arena;
  int segments;
  int expert;
  int base;  // of the word where the open segment begins

  __device__ __forceinline__ void begin(Arena& shared) {
    arena = &shared;
    const int slots = routing.tokens * C::kTopK;
    if (slots <= 32) return match(shared, slots);
#pragma unroll 1
    for (int e = threadIdx.x; e < C::kExperts; e += blockDim.x) shared.first[e] = C::kMaxSlots;
    routing.template stage<C>(shared.experts);
    __syncthreads();
#pragma unroll 1
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      if (shared.experts[slot] >= 0) atomicMin(&shared.first[shared.experts[slot]], slot);
    }
    __syncthreads();
#pragma unroll 1
    for (int word = warp_id(); word * 32 < slots; word += blockDim.x / 32) {
      const int slot = word * 32 + lane_id();
      const unsigned mask = __ballot_sync(0xffffffffu, slot < slots && routed(slot) && shared.first[shared.experts[slot]] == slot);
      if (lane_id() == 0) shared.firsts[word] = mask;
    }
    __syncthreads();
    segments = 0;
#pragma unroll 1
    for (int word = 0; word * 32 < slots; ++word) segments += __popc(shared.firsts[word]);
  }

  __device__ __forceinline__ int tokens() const { return routing.tokens; }
  __device__ __forceinline__ int count() const { return segments; }
  __device__ __forceinline__ bool routed(int slot) const { return arena->experts[slot] >= 0; }

  __device__ __forceinline__ void open(int i) {
    base = 0;
    unsigned firsts = arena->firsts[0];
#pragma unroll 1
    for (; i >= __popc(firsts); firsts = arena->firsts[base / 32]) {
      i -= __popc(firsts);
      base += 32;
    }
    const bool found = (firsts >> lane_id() & 1u) && __popc(firsts & ((1u << lane_id()) - 1u)) == i;
    expert = arena->experts[base + __ffs(__ballot_sync(0xffffffffu, found)) - 1];
  }

  template <int kRows>
  __device__ __forceinline__ int rows(int from, int* slots) const {
    __syncwarp();  // the rows before these are done with
    int found = -from;
#pragma unroll 1
    for (int word = base; word < tokens() * C::kTopK; word += 32) {
      const int slot = word + lane_id();
      const bool mine = slot < tokens() * C::kTopK && arena->experts[slot] == expert;
      const unsigned mask = __ballot_sync(0xffffffffu, mine);
      const int at = found + __popc(mask & ((1u << lane_id()) - 1u));
      if (mine && at >= 0 && at < kRows) slots[at] = slot;
      found += __popc(mask);
    }
    __syncwarp();
    return found;
  }

 private:
  // begin of a step that has a lane for each slot: every warp finds the segments for itself, and none waits.
  __device__ __forceinline__ void match(Arena& shared, int slots) {
    const int routed_to = routing.template expert_of<C>(min(lane_id(), slots - 1));
    const int expert = lane_id() < routing.live() * C::kTopK ? routed_to : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const unsigned firsts = __ballot_sync(0xffffffffu, expert >= 0 && __ffs(same) - 1 == lane_id());
    segments = __popc(firsts);
    if (warp_id() > 0) return;
    if (lane_id() < slots) shared.experts[lane_id()] = expert;
    if (lane_id() == 0) shared.firsts[0] = firsts;
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
