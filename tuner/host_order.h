// Who used which word since when: so that a barrier or a fence that is missing shows, whoever happened to run first.
// -fsanitize=thread has a kernel call this before each access; nothing of libtsan is linked. docs/verification.md has
// the rules, which are nearly those of machine.cpp. Included once, by host_runtime.cpp.

namespace {

// `Strong` are volatile and atomic accesses, relaxed ones too: other CTAs see what they write at once.
enum Kind { kRead, kWrite, kStrongRead, kStrongWrite, kAtomic };
constexpr bool writes(Kind kind) { return kind != kRead && kind != kStrongRead; }

// Where in the kernel an access or a fence was last told from. Inlined into what the kernel calls; a signal may ask.
uint64_t returns_to;
[[gnu::always_inline]] inline void called() {
  __atomic_store_n(&returns_to, reinterpret_cast<uint64_t>(__builtin_return_address(0)), __ATOMIC_RELAXED);
}

uint64_t caller() { return returns_to ? returns_to - 1 - reinterpret_cast<uint64_t>(&__ehdr_start) : 0; }

// ---- shared memory ------------------------------------------------------------------------------------------------
// The warps that wrote a word plainly, changed it by atomics and read it, since the barrier that began `epoch`.
struct Use { unsigned epoch, writers, adders, readers; };
Use* uses;  // [words of the arena]
unsigned epoch;

[[noreturn, gnu::noinline, gnu::cold]] void fault_shared(uint64_t at, Kind kind, unsigned others) {
  fault(kSharedRace, {.address = reinterpret_cast<uint64_t>(arena) + at, .pc = caller(), .write = writes(kind),
                      .other = static_cast<unsigned>(__builtin_ctz(others))});
}

// Atomics of several warps may meet, and so may their reads; all else wants a barrier between.
template <Kind kind>
[[gnu::always_inline]] inline void use_shared(uint64_t at, uint64_t bytes) {
  const unsigned self = 1u << running_thread.x / 32;
  const uint64_t end = at + bytes < launch.shared ? at + bytes : launch.shared;
  for (Use* use = uses + at / 4; use <= uses + (end - 1) / 4; ++use) {
    if (use->epoch != epoch) *use = {epoch, 0, 0, 0};
    const unsigned used = use->writers | (kind == kAtomic ? 0 : use->adders) | (writes(kind) ? use->readers : 0);
    if (used & ~self) fault_shared(at, kind, used & ~self);
    (kind == kAtomic ? use->adders : writes(kind) ? use->writers : use->readers) |= self;
  }
}

// ---- global memory ------------------------------------------------------------------------------------------------
// The last plain store to a word of an operand, as all workers see it: to which bytes (none: there was no store), and
// when by its CTA's clock, which moves on from one store to the next where a fence or a barrier lies between. So no
// clock gets past its bits in a launch's time.
struct Store { uint64_t block : 24, warp : 5, bytes : 4, time : 31; };

// What a CTA's fences have let out: stores up to these times, of each warp and of all of them.
struct Released { unsigned of_warp[32], of_all; };

uint64_t* stores;       // a Store a word of the operands that kernels may write, one operand after another
Released* released;     // [CTAs]
uint64_t lowest, span;  // where those operands lie, and much else perhaps

struct Clock {
  unsigned block, now, barrier;
  bool ticked;
  unsigned seen[32];  // let out to the other warps of the CTA at least, by each warp's fences
} cta;

void find_operands() {
  uint64_t end = lowest = launch.written_count ? launch.written->begin : 0;
  for (const Written* each = launch.written; each < launch.written + launch.written_count; ++each) {
    if (each->begin < lowest) lowest = each->begin;
    if (each->begin + each->bytes > end) end = each->begin + each->bytes;
  }
  span = end - lowest;
}

bool is_released(const Store& store) {
  const auto past = [&](const unsigned& time) { return store.time <= __atomic_load_n(&time, __ATOMIC_ACQUIRE); };
  const Released& by = released[store.block];
  return past(by.of_warp[store.warp]) || past(by.of_all);
}

void check_store(const Store& store, Kind kind, uint64_t address) {
  Where where{.address = address, .pc = caller(), .write = writes(kind), .other = store.warp};
  if (store.block == cta.block) {
    const bool own = store.warp == running_thread.x / 32;
    const bool seen = own || store.time <= cta.barrier || store.time <= cta.seen[store.warp];
    if (kind == kRead && !seen) fault(kGlobalRace, where);
  } else if (!is_released(store)) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // a CPU may see a store before the fence that was ahead of it
    if (is_released(store)) return;
    where.other_x = store.block % launch.grid_x;
    where.other_y = store.block / launch.grid_x;
    fault(kUnfenced, where);
  }
}

void use_word(uint64_t& word, unsigned bytes, Kind kind, uint64_t address) {
  const Store before = __builtin_bit_cast(Store, __atomic_load_n(&word, __ATOMIC_RELAXED));
  if (before.bytes & bytes) check_store(before, kind, address);
  Store after = before;
  if (kind == kWrite) {
    if (cta.ticked) ++cta.now;
    cta.ticked = false;
    after = {cta.block, running_thread.x / 32, bytes, cta.now};
    const bool same = before.block == after.block && before.warp == after.warp && before.time == after.time;
    if (same) after.bytes |= before.bytes;
  } else if (writes(kind)) {
    after.bytes &= ~bytes;
  }
  const uint64_t kept = __builtin_bit_cast(uint64_t, after);
  if (kept != __builtin_bit_cast(uint64_t, before)) __atomic_store_n(&word, kept, __ATOMIC_RELAXED);
}

template <Kind kind>
[[gnu::noinline]] void use_global(uint64_t address, uint64_t bytes) {
  for (const Written* each = launch.written; each < launch.written + launch.written_count; ++each) {
    const uint64_t at = address - each->begin, end = at + bytes;
    if (at >= each->bytes || end > each->bytes) continue;
    for (uint64_t word = at / 4; word <= (end - 1) / 4; ++word) {
      const unsigned from = word == at / 4 ? at % 4 : 0, past = word == (end - 1) / 4 ? (end - 1) % 4 + 1 : 4;
      use_word(stores[each->first + word], (1u << past) - (1u << from), kind, address);
    }
  }
}

template <Kind kind>
[[gnu::always_inline]] inline void use(const volatile void* pointer, uint64_t bytes) {
  called();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer), in_arena = address - reinterpret_cast<uint64_t>(arena);
  if (in_arena < launch.shared) return use_shared<kind>(in_arena, bytes);
  if (address - lowest < span) use_global<kind>(address, bytes);  // and not inputs and a thread's own variables
}

// A fence lets out its own warp's stores, and others' from before the last barrier.
void fence(bool to_other_ctas) {
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
extern "C" void voltune_fence(bool to_other_ctas) { called(), fence(to_other_ctas); }

// ---- what -fsanitize=thread calls (names and parameters of GCC's sanitizer.def) -----------------------------------
extern "C" void __tsan_init() {}

#define VOLTUNE_HOOK(name, kind, bytes) \
  extern "C" void __tsan_##name##bytes(void* address) { use<kind>(address, bytes); }
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
extern "C" void __tsan_read_range(void* address, uint64_t bytes) { use<kRead>(address, bytes); }
extern "C" void __tsan_write_range(void* address, uint64_t bytes) { use<kWrite>(address, bytes); }

extern "C" void __tsan_atomic_thread_fence(int order) {
  if (order >= __ATOMIC_RELEASE) called(), fence(true);
}

namespace {

// An atomic access, made here in sequence with all others; the order asked for says whether it is a fence as well.
template <Kind kind, class Access>
[[gnu::always_inline]] inline auto atomically(volatile void* address, uint64_t bytes, int order, Access access) {
  if (writes(kind) && order >= __ATOMIC_RELEASE) fence(true);
  use<kind>(address, bytes);
  return access();
}

}  // namespace

#define VOLTUNE_STEP(bits, T, name) \
  extern "C" T __tsan_atomic##bits##_##name(volatile T* address, T value, int order) { \
    return atomically<kAtomic>(address, sizeof(T), order, \
                               [&] { return __atomic_##name(address, value, __ATOMIC_SEQ_CST); }); \
  }
#define VOLTUNE_ATOMICS(bits, T) \
  extern "C" T __tsan_atomic##bits##_load(const volatile T* address, int order) { \
    return atomically<kStrongRead>(const_cast<T*>(address), sizeof(T), order, \
                                   [&] { return __atomic_load_n(address, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" void __tsan_atomic##bits##_store(volatile T* address, T value, int order) { \
    atomically<kStrongWrite>(address, sizeof(T), order, \
                             [&] { __atomic_store_n(address, value, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" T __tsan_atomic##bits##_exchange(volatile T* address, T value, int order) { \
    return atomically<kAtomic>(address, sizeof(T), order, \
                               [&] { return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST); }); \
  } \
  extern "C" bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* address, T* expected, T value, int order, \
                                                                int) { \
    return atomically<kAtomic>(address, sizeof(T), order, [&] { \
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
