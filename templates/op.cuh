// W13, W2 and combine in one launch, as one stream of work.
//
// CTAs take items by ticket: first every item of W13, then those of W2, segment by segment. An item waits only for items of
// lower tickets, and a CTA works in the order of its tickets: so the lowest unfinished ticket waits for nothing, and nothing
// deadlocks, however few CTAs the GPU holds at once and in whatever order it starts them. A W2 item asks for its weights
// before it waits for its rows, so that the memory does not fall silent between the two. A CTA asks for its next ticket when
// an item is nearly done: sooner, and the next item would wait for a CTA that itself waits. The first ticket that a CTA gets
// past W2's says which of the tokens' outputs are its own.

// Counters of a step, zero before a launch and after it: the next ticket, then for each slot how many CTAs have read its
// hidden row.
struct Tickets {
  unsigned* counters;

  // By one lane, which need not wait for the answer: of an addition, or an increment without a bound, the compiler makes
  // one for the whole warp, and hands its answer around at once.
  __device__ __forceinline__ int take() const { return (int)atomicInc(counters, 0x7fffffffu); }
  // Each CTA ends on one ticket past the last of all items; the holder of the last such leaves the counter as it was.
  __device__ __forceinline__ void close(int past) const {
    if (threadIdx.x == 0 && past == (int)gridDim.x - 1) *counters = 0u;
  }
  __device__ __forceinline__ unsigned* readers() const { return counters + 1; }
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
    int turn = 1;
    const auto ask = [&] {
      if (threadIdx.x == 0) next = tickets.take();
    };
    const auto take = [&] {
      turn ^= 1;
      if (threadIdx.x == 0) arena.tickets[turn] = next;
      __syncthreads();
      return arena.tickets[turn];
    };
    int ticket = take();
    // A loop a stage, so that no stage's registers are held through another; nor are the stages' ends.
    const auto second_begin = [&] { return segments.count() * First::kItems; };
    const auto end = [&] { return segments.count() * (First::kItems + Second::kItems); };
    if constexpr (First::kItems > 0) {
#pragma unroll 1
      for (; ticket < second_begin(); ticket = take()) {
        segments.open(ticket / First::kItems);
        first.run(arena.parts.first, segments, ticket % First::kItems, ask);
      }
    }
#pragma unroll 1
    for (; ticket < end(); ticket = take()) {
      const int item = ticket - second_begin();
      segments.open(item / Second::kItems);
      second.run(arena.parts.second, segments, item % Second::kItems, ask);
    }
    ticket -= end();
    tickets.close(ticket);
#pragma unroll 1
    for (int item = ticket; item < segments.tokens() * Combine<C>::kItems; item += gridDim.x) {
      combine.run(segments, item / Combine<C>::kItems, item % Combine<C>::kItems);
    }
  }
};
