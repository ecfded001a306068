// W13, W2 and combine in one launch, as one stream of work.
//
// CTAs take items by ticket: first every item of W13, then those of W2, segment by segment, then each token's. An item
// waits only for items of lower tickets, and a CTA works in the order of its tickets, of which it takes one ahead: so the
// lowest unfinished ticket waits for nothing, and nothing deadlocks, however few CTAs the GPU holds at once and in whatever
// order it starts them. A W2 item asks for its weights before it waits for its rows, so that the memory does not fall
// silent between the two.

// Counters of a step, zero before a launch and after it: the next ticket, then for each segment how many CTAs have read
// its hidden rows.
struct Tickets {
  int* counters;

  __device__ __forceinline__ int take() const { return atomicAdd(counters, 1); }
  // Each CTA ends on one ticket past the last; the holder of the last of those leaves the counter as it was.
  __device__ __forceinline__ void close(int ticket, int end) const {
    if (threadIdx.x == 0 && ticket == end + (int)gridDim.x - 1) *counters = 0;
  }
  __device__ __forceinline__ int* readers(int segment) const { return counters + 1 + segment; }
};

// In First's place where W13 was a launch of its own.
struct NoStage {
  static constexpr int kItems = 0;
  struct Arena {};
};

template <class C, class First, class Second, class Segments>
struct Op {
  First first;
  Second second;
  Combine<C> combine;
  Tickets tickets;

  struct alignas(16) Arena {
    typename Segments::Arena segments;
    int tickets[2];  // in turn, so that one barrier an item is enough
    union Parts {
      typename First::Arena first;
      typename Second::Arena second;
    } parts;
  };
  static_assert(sizeof(Arena) == C::kArenaBytes, "the launch plan and the kernel disagree on shared memory");

  __device__ __forceinline__ void run(Segments segments) const {
    Arena& arena = shared_arena<Arena>();
    int next = 0;  // of thread 0
    if (threadIdx.x == 0) next = tickets.take();
    segments.begin(arena.segments);
    const int second_begin = segments.count() * First::kItems;
    const int combine_begin = second_begin + segments.count() * Second::kItems;
    const int end = combine_begin + segments.tokens() * Combine<C>::kItems;
    int turn = 1;
    const auto take = [&] {
      turn ^= 1;
      if (threadIdx.x == 0) arena.tickets[turn] = next;
      __syncthreads();
      const int ticket = arena.tickets[turn];
      if (threadIdx.x == 0 && ticket < end) next = tickets.take();  // back by the time it is wanted
      return ticket;
    };
    int ticket = take();
    // A loop a stage, so that no stage's registers are held through another.
    if constexpr (First::kItems > 0) {
#pragma unroll 1
      for (; ticket < second_begin; ticket = take()) {
        segments.open(ticket / First::kItems);
        first.run(arena.parts.first, segments, ticket % First::kItems);
      }
    }
#pragma unroll 1
    for (; ticket < combine_begin; ticket = take()) {
      const int segment = (ticket - second_begin) / Second::kItems;
      segments.open(segment);
      second.run(arena.parts.second, segments, (ticket - second_begin) % Second::kItems);
      if constexpr (First::kItems > 0 && !C::kLoadOnly) {
        if (warp_id() == 0) clear(segments, arena.parts.second.slots[0], tickets.readers(segment));
      }
    }
#pragma unroll 1
    for (; ticket < end; ticket = take()) {
      const int item = ticket - combine_begin;
      combine.run(segments, item / Combine<C>::kItems, item % Combine<C>::kItems);
    }
    tickets.close(ticket, end);
  }

 private:
  // The last to read a segment's hidden rows clears them. One warp, after its CTA has read them.
  __device__ __forceinline__ void clear(const Segments& segments, int* slots, int* readers) const {
    constexpr int kRows = Second::F::kPassRows;
    int before = 0;
    if (lane_id() == 0) before = atomicAdd(readers, 1);
    if (__shfl_sync(0xffffffffu, before, 0) < Second::kItems - 1) return;
    if (lane_id() == 0) *readers = 0;
    int left = kRows + 1;
#pragma unroll 1
    for (int from = 0; left > kRows; from += kRows) {
      left = segments.template rows<kRows>(from, slots);
#pragma unroll 1
      for (int r = 0; r < min(left, kRows); ++r) {
#pragma unroll 1
        for (int k = lane_id(); k < Second::kK; k += 32) second.hidden.clear((long long)slots[r] * Second::kK + k);
      }
    }
  }
};
