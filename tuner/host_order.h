// Who used which word since when: so that a barrier or a fence that is missing shows, whoever happened to run first.
// -fsanitize=thread has a kernel call the functions below before each access; nothing of libtsan is linked. The rules are
// those of machine.cpp. Included once, by host_runtime.cpp.

namespace {

// `Strong` is what other CTAs see at once: volatile and atomic accesses, relaxed ones too.
enum Kind { kRead, kWrite, kStrongRead, kStrongWrite, kAtomic };
constexpr bool writes(Kind kind) { return kind != kRead && kind != kStrongRead; }

uint64_t called_from;  // where in the kernel, while this accesses memory in its stead; else 0

#define CALLER (reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1 - reinterpret_cast<uint64_t>(&__ehdr_start))

// ---- shared memory ------------------------------------------------------------------------------------------------
// The warps that wrote a word plainly, that changed it by atomics and that read it, since the barrier that began `epoch`.
struct Use { unsigned epoch, writers, adders, readers; };
Use* uses;  // [words of the arena]
unsigned epoch;

// Atomics of several warps may meet, and so may their reads; all else wants a barrier between.
template <Kind kind>
inline void use_shared(uint64_t at, uint64_t bytes, uint64_t pc) {
  const unsigned self = 1u << running_thread.x / 32;
  const uint64_t end = at + bytes < launch.shared ? at + bytes : launch.shared;
  for (Use* use = uses + at / 4; use <= uses + (end - 1) / 4; ++use) {
    if (use->epoch != epoch) *use = {epoch, 0, 0, 0};
    const unsigned used = use->writers | (kind == kAtomic ? 0 : use->adders) | (writes(kind) ? use->readers : 0);
    if (used & ~self) {
      const unsigned other = __builtin_ctz(used & ~self);
      fault(kSharedRace, {.address = reinterpret_cast<uint64_t>(arena) + at, .pc = pc, .write = writes(kind), .other = other});
    }
    (kind == kAtomic ? use->adders : writes(kind) ? use->writers : use->readers) |= self;
  }
}

// ---- global memory ------------------------------------------------------------------------------------------------
// The last plain store to a word of an operand, shared by all workers; without `bytes` there is none that matters. Its
// time is counted in its CTA: from one store to the next it moves on if a fence or a barrier lies between.
struct Store { uint64_t block : 24, warp : 5, bytes : 4, time : 31; };

// What a CTA's fences have let out: stores up to these times, of each warp and of all of them.
struct Released { unsigned of_warp[32], of_all; };

uint64_t* stores;    // a Store a word of all operands that kernels may write
Released* released;  // [CTAs]

struct Clock {
  unsigned block, now, barrier;
  bool ticked;
  unsigned seen[32];  // by each warp's fences, those of its CTA's scope too: what other warps may read
} cta;

bool is_released(const Store& store) {
  const auto past = [&](const unsigned& time) { return store.time <= __atomic_load_n(&time, __ATOMIC_ACQUIRE); };
  const Released& by = released[store.block];
  return past(by.of_warp[store.warp]) || past(by.of_all);
}

[[gnu::noinline]] void check_store(const Store& store, Kind kind, uint64_t address, uint64_t pc) {
  Where where{.address = address, .pc = pc, .write = writes(kind), .other = store.warp};
  if (store.block == cta.block) {
    const bool unseen = store.warp != running_thread.x / 32 && store.time > cta.barrier && store.time > cta.seen[store.warp];
    if (kind == kRead && unseen) fault(kGlobalRace, where);
  } else if (!is_released(store)) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // the store may have been seen before the fence that was ahead of it
    if (is_released(store)) return;
    where.other_x = store.block % launch.grid_x;
    where.other_y = store.block / launch.grid_x;
    fault(kUnfenced, where);
  }
}

template <Kind kind>
inline void use_global(uint64_t* words, uint64_t address, uint64_t at, uint64_t bytes, uint64_t pc) {
  const uint64_t first = at / 4, last = (at + bytes - 1) / 4;
  for (uint64_t word = first; word <= last; ++word) {
    unsigned mask = 15;
    if (word == first) mask &= 15u << at % 4;
    if (word == last) mask &= 15u >> (3 - (at + bytes - 1) % 4);
    Store store = __builtin_bit_cast(Store, __atomic_load_n(words + word, __ATOMIC_RELAXED));
    if (store.bytes & mask) check_store(store, kind, address, pc);
    if (kind == kWrite) {
      if (cta.ticked) ++cta.now;
      cta.ticked = false;
      const Store mine{cta.block, running_thread.x / 32, mask, cta.now};
      const bool same = store.block == mine.block && store.warp == mine.warp && store.time == mine.time;
      // Where several have stored parts of a word, only the last part is remembered.
      store = {mine.block, mine.warp, mask | (same ? store.bytes : 0), mine.time};
    } else if (writes(kind) && store.bytes & mask) {
      store.bytes &= ~mask;
    } else {
      continue;
    }
    __atomic_store_n(words + word, __builtin_bit_cast(uint64_t, store), __ATOMIC_RELAXED);
  }
}

template <Kind kind>
inline void use(const volatile void* pointer, uint64_t bytes, uint64_t pc) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer), in_arena = address - reinterpret_cast<uint64_t>(arena);
  if (in_arena < launch.shared) return use_shared<kind>(in_arena, bytes, pc);
  for (const Written* each = launch.written; each < launch.written + launch.written_count; ++each) {
    const uint64_t at = address - each->begin;
    if (at + bytes <= each->bytes && at < each->bytes) return use_global<kind>(stores + each->first, address, at, bytes, pc);
  }
}

// A fence lets out its own warp's stores, and others' from before the last barrier.
inline void fence(bool to_other_ctas) {
  const unsigned warp = running_thread.x / 32;
  cta.seen[warp] = cta.now;
  cta.ticked = true;
  if (to_other_ctas) {
    __atomic_store_n(&released[cta.block].of_warp[warp], cta.now, __ATOMIC_RELEASE);
    __atomic_store_n(&released[cta.block].of_all, cta.barrier, __ATOMIC_RELEASE);
  }
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void pass_barrier() {
  ++epoch;
  cta.barrier = cta.now;
  cta.ticked = true;
}

void begin_cta(unsigned block) {
  ++epoch;
  cta = {block, 0, 0, true, {}};
}

}  // namespace

// ---- what host_cuda.h calls ---------------------------------------------------------------------------------------
extern "C" void voltune_fence(bool to_other_ctas) { fence(to_other_ctas); }

// ---- what -fsanitize=thread calls (names and parameters of GCC's sanitizer.def) -----------------------------------
extern "C" void __tsan_init() {}

#define VOLTUNE_HOOK(name, kind, bytes) \
  extern "C" void __tsan_##name##bytes(void* address) { use<kind>(address, bytes, CALLER); }
#define VOLTUNE_HOOKS(bytes) \
  VOLTUNE_HOOK(read, kRead, bytes) \
  VOLTUNE_HOOK(write, kWrite, bytes) \
  VOLTUNE_HOOK(volatile_read, kStrongRead, bytes) \
  VOLTUNE_HOOK(volatile_write, kStrongWrite, bytes)
#define VOLTUNE_UNALIGNED_HOOKS(bytes) \
  VOLTUNE_HOOK(unaligned_read, kRead, bytes) \
  VOLTUNE_HOOK(unaligned_write, kWrite, bytes) \
  VOLTUNE_HOOK(unaligned_volatile_read, kStrongRead, bytes) \
  VOLTUNE_HOOK(unaligned_volatile_write, kStrongWrite, bytes)
VOLTUNE_HOOKS(1)
VOLTUNE_HOOKS(2)
VOLTUNE_HOOKS(4)
VOLTUNE_HOOKS(8)
VOLTUNE_HOOKS(16)
VOLTUNE_UNALIGNED_HOOKS(2)
VOLTUNE_UNALIGNED_HOOKS(4)
VOLTUNE_UNALIGNED_HOOKS(8)
VOLTUNE_UNALIGNED_HOOKS(16)
extern "C" void __tsan_read_range(void* address, uint64_t bytes) { use<kRead>(address, bytes, CALLER); }
extern "C" void __tsan_write_range(void* address, uint64_t bytes) { use<kWrite>(address, bytes, CALLER); }

extern "C" void __tsan_atomic_thread_fence(int order) {
  if (order >= __ATOMIC_RELEASE) fence(true);
}

namespace {

// An atomic access is made here, sequentially consistent; its own order says whether it is a fence as well.
template <Kind kind, class Access>
inline auto access(volatile void* address, uint64_t bytes, int order, uint64_t pc, Access made) {
  if (writes(kind) && order >= __ATOMIC_RELEASE) fence(true);
  use<kind>(address, bytes, pc);
  struct At {
    At(uint64_t pc) { called_from = pc; __atomic_signal_fence(__ATOMIC_SEQ_CST); }
    ~At() { __atomic_signal_fence(__ATOMIC_SEQ_CST); called_from = 0; }
  } at(pc);
  return made();
}

}  // namespace

#define VOLTUNE_STEP(bits, T, name) \
  extern "C" T __tsan_atomic##bits##_##name(volatile T* address, T value, int order) { \
    return access<kAtomic>(address, sizeof(T), order, CALLER, [&] { return __atomic_##name(address, value, __ATOMIC_SEQ_CST); }); \
  }
#define VOLTUNE_ATOMICS(bits, T) \
  extern "C" T __tsan_atomic##bits##_load(const volatile T* address, int order) { \
    return access<kStrongRead>(const_cast<T*>(address), sizeof(T), order, CALLER, \
                               [&] { return __atomic_load_n(address, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" void __tsan_atomic##bits##_store(volatile T* address, T value, int order) { \
    access<kStrongWrite>(address, sizeof(T), order, CALLER, [&] { __atomic_store_n(address, value, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" T __tsan_atomic##bits##_exchange(volatile T* address, T value, int order) { \
    return access<kAtomic>(address, sizeof(T), order, CALLER, \
                           [&] { return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* address, T* expected, T value, int order, int) { \
    return access<kAtomic>(address, sizeof(T), order, CALLER, [&] { \
      return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }); \
  } \
  VOLTUNE_STEP(bits, T, fetch_add) \
  VOLTUNE_STEP(bits, T, fetch_sub) \
  VOLTUNE_STEP(bits, T, fetch_and) \
  VOLTUNE_STEP(bits, T, fetch_or) \
  VOLTUNE_STEP(bits, T, fetch_xor)
VOLTUNE_ATOMICS(16, uint16_t)
VOLTUNE_ATOMICS(32, uint32_t)
VOLTUNE_ATOMICS(64, uint64_t)
