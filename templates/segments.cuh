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

  // Every slot's expert into shared memory; the caller's barrier ends it. Padding tokens' ids are not even read.
  template <class C>
  __device__ __forceinline__ void stage(int* experts) const {
    const int live_slots = live() * C::kTopK;
#pragma unroll 1
    for (int slot = threadIdx.x; slot < tokens * C::kTopK; slot += blockDim.x) {
      experts[slot] = slot < live_slots ? expert_of<C>(slot) : -1;
    }
  }
};

// Both sources below are used by whole warps, and answer every lane alike:
//   begin(experts): makes ready to be asked; experts is the CTA's own shared memory, one a slot;
//   routed(experts): experts[slot] >= 0 marks the routed slots, after the next barrier;
//   count(): candidates to open;  open(i): false when candidate i is no segment;  next(): its next slot, -1 at the end.

// Segments found by ballots: candidate i is slot i, and it is a segment when no earlier slot has the same expert.
template <class C>
struct BallotSegments {
  Routing routing;
  const int* experts;
  int expert;
  int base;
  unsigned rest;

  __device__ __forceinline__ void begin(int* shared) {
    routing.template stage<C>(shared);
    experts = shared;
    __syncthreads();
  }
  __device__ __forceinline__ void routed(int*) const {}  // as begin() left them
  __device__ __forceinline__ int tokens() const { return routing.tokens; }
  __device__ __forceinline__ int count() const { return routing.tokens * C::kTopK; }

  __device__ __forceinline__ unsigned peers(int first) const {
    const int slot = first + lane_id();
    return __ballot_sync(0xffffffffu, slot < count() && experts[slot] == expert);
  }

  __device__ __forceinline__ bool open(int slot) {
    expert = experts[slot];
    if (expert < 0) return false;
#pragma unroll 1
    for (base = 0; base + 32 <= slot; base += 32) {
      if (peers(base) != 0) return false;
    }
    rest = peers(base);
    return (rest & ((1u << (slot - base)) - 1u)) == 0;
  }

  __device__ __forceinline__ int next() {
#pragma unroll 1
    while (rest == 0) {
      base += 32;
      if (base >= count()) return -1;
      rest = peers(base);
    }
    const int slot = base + __ffs(rest) - 1;
    rest &= rest - 1;
    return slot;
  }
};

// Segments listed in memory by a compaction kernel.
template <class C>
struct ListedSegments {
  const int* segment_count;   // one
  const int* segment_expert;  // [segments]
  const int* segment_begin;   // [segments + 1], into rows
  const int* rows;            // slots, segment after segment
  int step_tokens;
  int expert;
  int cursor;
  int end;

  __device__ __forceinline__ void begin(int*) const {}
  __device__ __forceinline__ void routed(int* experts) const {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < step_tokens * C::kTopK; slot += blockDim.x) experts[slot] = -1;
    __syncthreads();
    const int routed = segment_begin[count()];
#pragma unroll 1
    for (int i = threadIdx.x; i < routed; i += blockDim.x) experts[rows[i]] = 0;
  }
  __device__ __forceinline__ int tokens() const { return step_tokens; }
  __device__ __forceinline__ int count() const { return *segment_count; }

  __device__ __forceinline__ bool open(int i) {
    if (i >= count()) return false;
    expert = segment_expert[i];
    cursor = segment_begin[i];
    end = segment_begin[i + 1];
    return cursor < end;
  }

  __device__ __forceinline__ int next() { return cursor < end ? rows[cursor++] : -1; }
};

// The next rows of the open segment, at most kRows, into the warp's own shared memory; how many.
template <int kRows, class Segments>
__device__ __forceinline__ int next_rows(Segments& segments, int* slots) {
  __syncwarp();  // the rows before these are done with
  int count = 0;
#pragma unroll 1
  for (; count < kRows; ++count) {
    const int slot = segments.next();
    if (slot < 0) break;
    if (lane_id() == 0) slots[count] = slot;
  }
  __syncwarp();
  return count;
}

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
