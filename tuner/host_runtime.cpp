// Runs the grid of one CUDA kernel on the CPU. Threads of a CTA are fibers of one worker process; CTAs are handed out
// to several worker processes, which share the operands' memory with the caller. A worker that faults describes the
// fault in a shared Report and exits: the caller never does. A worker is forked from a Python process that may have
// threads, so it allocates with mmap only and calls no libc function that takes a lock.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "host_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
uint3 running_thread asm("threadIdx"), running_block asm("blockIdx");
uint3 block_size asm("blockDim"), grid_size asm("gridDim");
void voltune_thread(const unsigned long long* slots);  // the kernel, in the rendered source's object
extern const char __ehdr_start __attribute__((visibility("hidden")));  // where this library is mapped
}

namespace {

constexpr unsigned kThreads = 1024, kWorkers = 256;
constexpr size_t kStack = 64 << 10, kGuard = 256 << 20;
const size_t kPage = sysconf(_SC_PAGESIZE);

// The same order as _FAULTS in host.py.
enum Fault : int {
  kNone, kMemory, kStackOverflow, kSignal, kMisaligned, kIndex, kShift, kDivergentBarrier, kExitedBarrier,
  kMaskWithoutSelf, kMismatch, kAbsentLane, kDeadlock, kSharedOverrun, kTimeout, kResource, kSharedRace, kGlobalRace,
  kUnfenced
};

struct Wait { int op, line; unsigned mask; };

// Written by the first worker that faults, read by the caller. Mirrored field by field by host.py.
struct Report {
  int claimed, fault;
  unsigned block_x, block_y, thread, other, other_x, other_y;
  int line, write;
  uint64_t address, pc, caller, arena, arena_bytes;
  char detail[96];
  uint64_t next, finished;
  Wait waits[kThreads];
};

// An operand that kernels may write, and the first of its words among those of all of them.
struct Written { uint64_t begin, bytes, first; };

struct Launch {
  unsigned grid_x, grid_y, block, shared, order, workers;
  const unsigned long long* slots;
  const Written* written;
  unsigned written_count;
};

struct Run {
  Report* report;
  size_t mapped;
  unsigned workers;
  int ended, status;  // `status`: of the first worker that did not exit on its own
  pid_t pids[kWorkers];
};

struct Warp { unsigned exited, waiting; unsigned source[32]; unsigned long long value[32], result[32]; };

// ---- the worker's state -------------------------------------------------------------------------------------------
Report* report;
Launch launch;
char *arena, *arena_pages, *stacks;
size_t arena_page_bytes;
Wait waits[kThreads];
Warp warps[kThreads / 32];
unsigned warp_order[kThreads / 32], lane_order[32];
unsigned exited, arrived;
int barrier_line;

uint64_t random_bits(uint64_t& state) {  // splitmix64 (Steele, Lea, Flood 2014)
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Order 0 is natural and 1 its reverse, so that those two let either of any two threads (or CTAs) run first; others are
// random.
void fill_order(unsigned* out, unsigned count, unsigned order, uint64_t& state) {
  for (unsigned i = 0; i < count; ++i) out[i] = order == 1 ? count - 1 - i : i;
  if (order < 2) return;
  for (unsigned i = count; i > 1; --i) {
    const unsigned j = random_bits(state) % i, kept = out[i - 1];
    out[i - 1] = out[j];
    out[j] = kept;
  }
}

// ---- faults -------------------------------------------------------------------------------------------------------
struct Where {
  unsigned thread = running_thread.x;
  int line = 0;
  uint64_t address = 0, pc = 0, caller = 0;  // `caller`: of this library, where the kernel itself was not running
  int write = -1;
  const char* detail = "";
  unsigned other = 0, other_x = 0, other_y = 0;
};

[[noreturn]] void fault(Fault kind, const Where& where) {
  if (__atomic_exchange_n(&report->claimed, 1, __ATOMIC_SEQ_CST)) _exit(1);
  report->block_x = running_block.x;
  report->block_y = running_block.y;
  report->thread = where.thread;
  report->other = where.other;
  report->other_x = where.other_x;
  report->other_y = where.other_y;
  report->line = where.line;
  report->write = where.write;
  report->address = where.address;
  report->pc = where.pc;
  report->caller = where.caller;
  report->arena = reinterpret_cast<uint64_t>(arena);
  report->arena_bytes = launch.shared;
  strncpy(report->detail, where.detail, sizeof report->detail - 1);
  memcpy(report->waits, waits, sizeof waits);
  __atomic_store_n(&report->fault, kind, __ATOMIC_RELEASE);  // last: the caller stops the other workers once it sees it
  _exit(1);
}

}  // namespace

#include "host_order.h"

namespace {

void on_signal(int number, siginfo_t* info, void* context) {
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  uint64_t pc = 0;
  int write = -1;
#if defined(__x86_64__)
  const greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  pc = static_cast<uint64_t>(registers[REG_RIP]) - reinterpret_cast<uint64_t>(&__ehdr_start);
  write = registers[REG_ERR] >> 1 & 1;  // the page fault's error code
#endif
  const auto told = [&](Fault kind, uint64_t about) {
    fault(kind, {.address = about, .pc = pc, .caller = caller(), .write = write});
  };
  if (number == SIGTERM) told(kTimeout, 0);
  if (number != SIGSEGV && number != SIGBUS) told(kSignal, static_cast<uint64_t>(number));
  const bool on_stacks = address - reinterpret_cast<uint64_t>(stacks) < launch.block * (kPage + kStack);
  told(on_stacks ? kStackOverflow : kMemory, address);
}

// ---- fibers -------------------------------------------------------------------------------------------------------
void fiber_main();

#if defined(__x86_64__) && !defined(VOLTUNE_UCONTEXT)
using Context = void*;
extern "C" void voltune_switch(Context* from, Context to);
// Only what the System V ABI preserves over a call; an indirect jump, since `ret` would always be mispredicted.
asm(R"(
.text
.hidden voltune_switch
.type voltune_switch, @function
voltune_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size voltune_switch, .-voltune_switch
)");
void prepare(Context& context, char* stack, unsigned thread) {
  // Tops at different page offsets, or every fiber's hottest lines would share a few sets of the L1.
  auto** top = reinterpret_cast<void**>(stack + kStack - 64 * (thread * 5 % 48) - 64);
  *--top = nullptr;  // fiber_main's return address: it has none
  *--top = reinterpret_cast<void*>(fiber_main);
  context = top - 6;
}
inline void switch_to(Context& from, Context& to) { voltune_switch(&from, to); }
#else
using Context = ucontext_t;
void prepare(Context& context, char* stack, unsigned) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
}
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

Context main_context;
Context fibers[kThreads];

// The threads that can run: a ring that is used as a stack (one warp runs as far as it can) in even orders and as a
// queue (all warps advance side by side) in odd ones.
unsigned short ring[kThreads];
unsigned head, ready;

inline void make_ready(unsigned thread) { ring[(head + ready++) % kThreads] = thread; }

// Puts the threads of `mask` in a warp before those already there (even orders) or behind them (odd), in this CTA's
// lane order.
void release(unsigned warp, unsigned mask) {
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned lane = launch.order & 1 ? lane_order[i] : lane_order[31 - i];
    if (!(mask >> lane & 1)) continue;
    const unsigned thread = warp * 32 + lane;
    waits[thread].op = VOLTUNE_RUNNING;
    if (launch.order & 1) {
      make_ready(thread);
    } else {
      head = (head - 1) % kThreads;
      ring[head] = thread;
      ++ready;
    }
  }
}

void release_all() {
  const unsigned count = (launch.block + 31) / 32;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned warp = launch.order & 1 ? warp_order[i] : warp_order[count - 1 - i];
    release(warp, ~warps[warp].exited);
  }
}

// Runs the next thread. Returns when the calling one is run again; a call from the last thread to exit goes back to
// run_block.
void run_next(Context& from, unsigned self) {
  if (ready == 0) {
    if (exited == launch.block) switch_to(from, main_context);
    unsigned waiting = 0;
    while (waits[waiting].op == VOLTUNE_EXITED) ++waiting;
    fault(kDeadlock, {.thread = waiting, .line = waits[waiting].line});
  }
  const unsigned next = ring[head];
  head = (head + 1) % kThreads;
  --ready;
  if (next == self) return;
  running_thread.x = next;
  switch_to(from, fibers[next]);
}

void fiber_main() {
  voltune_thread(launch.slots);
  const unsigned thread = running_thread.x;
  waits[thread].op = VOLTUNE_EXITED;
  warps[thread / 32].exited |= 1u << thread % 32;
  ++exited;
  if (arrived) fault(kExitedBarrier, {.line = barrier_line});
  run_next(fibers[thread], kThreads);
}

// The parts of the arena's pages that are not the CTA's still hold the poison.
void check_untouched(const char* begin, const char* end) {
  for (; begin < end; ++begin) {
    if (*begin != '\xFF') fault(kSharedOverrun, {.address = reinterpret_cast<uint64_t>(begin)});
  }
}

void run_block(unsigned block) {
  running_block = {block % launch.grid_x, block / launch.grid_x, 0};
  begin_cta(block);
  uint64_t state = (static_cast<uint64_t>(launch.order) << 32) + block;
  const unsigned count = (launch.block + 31) / 32;
  fill_order(warp_order, count, launch.order, state);
  fill_order(lane_order, 32, launch.order, state);
  memset(arena_pages, 0xFF, arena_page_bytes);
  for (unsigned warp = 0; warp < count; ++warp) warps[warp].exited = warps[warp].waiting = 0;
  // Lanes past the block's end are as good as exited: a mask that names one is reported.
  if (launch.block % 32) warps[count - 1].exited = ~0u << launch.block % 32;
  exited = arrived = head = ready = 0;
  for (unsigned thread = 0; thread < launch.block; ++thread) {
    prepare(fibers[thread], stacks + thread * (kPage + kStack) + kPage, thread);
  }
  release_all();
  run_next(main_context, kThreads);
  if (!arena) return;
  check_untouched(arena_pages, arena);
  check_untouched(arena + launch.shared, arena_pages + arena_page_bytes);
}

// ---- workers ------------------------------------------------------------------------------------------------------
char* map(size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) fault(kResource, {.address = static_cast<uint64_t>(errno), .detail = "mapping memory"});
  return static_cast<char*>(address);
}

void open_pages(char* address, size_t bytes) {
  if (bytes && mprotect(address, bytes, PROT_READ | PROT_WRITE)) {
    fault(kResource, {.address = static_cast<uint64_t>(errno), .detail = "opening memory"});
  }
}

[[noreturn]] void work(const unsigned* order, unsigned blocks) {
  static char handler_stack[32 << 10];
  stack_t alternate = {};
  alternate.ss_sp = handler_stack;
  alternate.ss_size = sizeof handler_stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  constexpr int reported[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGTERM};
  for (int number : reported) sigaction(number, &action, nullptr);
  signal(SIGINT, SIG_IGN);  // the caller decides what Ctrl-C means, and stops the workers itself
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);

  block_size = {launch.block, 1, 1};
  grid_size = {launch.grid_x, launch.grid_y, 1};
  arena_page_bytes = (launch.shared + kPage - 1) / kPage * kPage;
  arena_pages = map(kGuard + arena_page_bytes + kGuard, PROT_NONE) + kGuard;
  open_pages(arena_pages, arena_page_bytes);
  if (launch.shared) {
    arena = launch.order & 1 ? arena_pages : arena_pages + arena_page_bytes - (launch.shared + 15) / 16 * 16;
  }
  find_operands();
  uses = reinterpret_cast<Use*>(map(launch.shared / 4 * sizeof(Use) + sizeof(Use), PROT_READ | PROT_WRITE));
  stacks = map(launch.block * (kPage + kStack), PROT_NONE);
  for (unsigned thread = 0; thread < launch.block; ++thread) {
    open_pages(stacks + thread * (kPage + kStack) + kPage, kStack);
  }

  for (;;) {
    const uint64_t i = __atomic_fetch_add(&report->next, 1, __ATOMIC_RELAXED);
    if (i >= blocks || __atomic_load_n(&report->claimed, __ATOMIC_RELAXED)) _exit(0);
    run_block(order[i]);
    __atomic_fetch_add(&report->finished, 1, __ATOMIC_RELAXED);
  }
}

}  // namespace

// ---- what the source calls ----------------------------------------------------------------------------------------
extern "C" void* voltune_shared_arena() { return arena; }

extern "C" void voltune_syncthreads(int line) {
  const unsigned thread = running_thread.x;
  waits[thread] = {VOLTUNE_SYNCTHREADS, line, 0};
  if (exited) fault(kExitedBarrier, {.line = line});
  if (arrived && line != barrier_line) {
    fault(kDivergentBarrier, {.line = line, .other = static_cast<unsigned>(barrier_line)});
  }
  barrier_line = line;
  if (++arrived == launch.block) {
    arrived = 0;
    pass_barrier();
    release_all();
  }
  run_next(fibers[thread], thread);
}

static float half_to_float(unsigned bits) {
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(bits)));
}

// A warp's mma.m8n8k4 at once. A lane's place in its quadpair, of lanes 4q..4q+3 and 16+4q..16+4q+3, is the row of A and the
// column of B it holds; its accumulators are rows p&1 + (i&2) + (p&4) and columns (i&4) + (p&2) + (i&1).
static void multiply_add(const unsigned long long* values) {
  constexpr unsigned K = 8;
  for (unsigned quadpair = 0; quadpair < 4; ++quadpair) {
    const voltune_mma_operands* lanes[8];
    float b[K][8];  // floats, which a CPU converts to where it has no way from f16 to double
    for (unsigned p = 0; p < 8; ++p) {
      lanes[p] = reinterpret_cast<const voltune_mma_operands*>(values[quadpair * 4 + p % 4 + p / 4 * 16]);
      for (unsigned k = 0; k < K; ++k) b[k][p] = half_to_float(lanes[p]->b[k / 2] >> (k % 2 * 16));
    }
    for (unsigned c = 0; c < 4; ++c) {
      for (unsigned row = 0; row < 8; ++row) {
        float a[K];
        double sums[8] = {};
        for (unsigned k = 0; k < K; ++k) a[k] = half_to_float(lanes[row]->a[c][k / 2] >> (k % 2 * 16));
        for (unsigned k = 0; k < K; ++k) {
          for (unsigned column = 0; column < 8; ++column) sums[column] += static_cast<double>(a[k]) * b[k][column];
        }
        for (unsigned column = 0; column < 8; ++column) {
          float& d = lanes[(row & 5) | (column & 2)]->d[8 * c + ((row & 2) | (column & 5))];
          d = static_cast<float>(d + sums[column]);
        }
      }
    }
  }
}

extern "C" unsigned long long voltune_warp(voltune_op op, unsigned mask, unsigned long long value, unsigned source,
                                           int line) {
  const unsigned thread = running_thread.x, lane = thread % 32, first = thread - lane;
  Warp& warp = warps[thread / 32];
  waits[thread] = {op, line, mask};
  if (!(mask >> lane & 1)) fault(kMaskWithoutSelf, {.line = line});
  if (mask & warp.exited) fault(kAbsentLane, {.line = line, .other = first + __builtin_ctz(mask & warp.exited)});
  warp.value[lane] = value;
  warp.source[lane] = source;
  warp.waiting |= 1u << lane;
  if ((warp.waiting & mask) == mask) {
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      const Wait& wait = waits[first + i];
      if (wait.op != op || wait.line != line || wait.mask != mask) {
        fault(kMismatch, {.line = line, .other = first + i});
      }
      ballot |= (warp.value[i] != 0) << i;
    }
    if (op == VOLTUNE_MMA) multiply_add(warp.value);
    // The results of all lanes now: a lane that runs on may bring its next value before another has read this one.
    for (unsigned i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      switch (op) {
        case VOLTUNE_BALLOT: warp.result[i] = ballot; break;
        case VOLTUNE_ANY: warp.result[i] = ballot != 0; break;
        case VOLTUNE_ALL: warp.result[i] = ballot == mask; break;
        case VOLTUNE_MATCH_ANY:
          warp.result[i] = 0;
          for (unsigned j = 0; j < 32; ++j) {
            if ((mask >> j & 1) && warp.value[j] == warp.value[i]) warp.result[i] |= 1u << j;
          }
          break;
        default:  // a shuffle from a lane outside the mask is undefined on a GPU: poison
          warp.result[i] = mask >> warp.source[i] & 1 ? warp.value[warp.source[i]] : ~0ull;
      }
    }
    warp.waiting &= ~mask;
    release(thread / 32, mask);
  }
  run_next(fibers[thread], thread);
  return warp.result[lane];
}

// ---- what -fsanitize calls (layouts of GCC's ubsan.cc) ------------------------------------------------------------
struct UbsanPlace { const char* file; uint32_t line, column; };
struct UbsanType { uint16_t kind, info; char name[1]; };
struct UbsanMismatch { UbsanPlace place; const UbsanType* type; unsigned char log_alignment, check; };
struct UbsanTyped { UbsanPlace place; const UbsanType* type; };

extern "C" void __ubsan_handle_type_mismatch_v1_abort(UbsanMismatch* data, uintptr_t address) {
  fault(kMisaligned, {.line = static_cast<int>(data->place.line), .address = address, .write = data->check == 1,
                      .detail = data->type->name, .other = 1u << data->log_alignment});
}
extern "C" void __ubsan_handle_out_of_bounds_abort(UbsanTyped* data, uintptr_t index) {
  fault(kIndex, {.line = static_cast<int>(data->place.line), .address = index, .detail = data->type->name});
}
extern "C" void __ubsan_handle_shift_out_of_bounds_abort(UbsanTyped* data, uintptr_t, uintptr_t amount) {
  fault(kShift, {.line = static_cast<int>(data->place.line), .address = amount, .detail = data->type->name});
}

// ---- what host.py calls -------------------------------------------------------------------------------------------
// Starts the workers; null, with errno set, when the machine has no memory or processes left.
EXPORT Run* voltune_start(const Launch* wanted) {
  const unsigned blocks = wanted->grid_x * wanted->grid_y;
  auto* run = static_cast<Run*>(calloc(1, sizeof(Run)));
  if (!run) return nullptr;
  uint64_t words = 0;
  for (unsigned i = 0; i < wanted->written_count; ++i) words += (wanted->written[i].bytes + 3) / 4;
  run->mapped = sizeof(Report) + sizeof(uint64_t) * words + (sizeof(Released) + sizeof(unsigned)) * blocks;
  void* shared = mmap(nullptr, run->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (shared == MAP_FAILED) {
    free(run);
    return nullptr;
  }
  run->report = static_cast<Report*>(shared);
  auto* kept = reinterpret_cast<uint64_t*>(run->report + 1);
  auto* let_out = reinterpret_cast<Released*>(kept + words);
  auto* order = reinterpret_cast<unsigned*>(let_out + blocks);
  uint64_t state = wanted->order;
  fill_order(order, blocks, wanted->order, state);
  // No handler of the caller's may run in a worker: signals wait until the worker has set its own.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = 0;
  while (run->workers < wanted->workers && run->workers < blocks && run->workers < kWorkers) {
    const pid_t pid = fork();
    if (pid == 0) {
      report = run->report;
      launch = *wanted;
      stores = kept;
      released = let_out;
      work(order, blocks);
    }
    if (pid < 0) {
      failed = errno;
      break;
    }
    run->pids[run->workers++] = pid;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (run->workers == 0) {
    munmap(shared, run->mapped);
    free(run);
    errno = failed;
    return nullptr;
  }
  return run;  // fewer workers than wanted are slower, not wrong
}

EXPORT const Report* voltune_report(const Run* run) { return run->report; }

// The wait status of a worker that died instead of exiting; 0 when none did.
EXPORT int voltune_status(const Run* run) { return run->status; }

// Waits up to `milliseconds` for every worker to end; 1 when all have.
EXPORT int voltune_wait(Run* run, int milliseconds) {
  for (int slept = 0;; ++slept) {
    for (unsigned i = 0; i < run->workers; ++i) {
      int status = 0;
      if (run->pids[i] == 0) continue;
      const pid_t pid = waitpid(run->pids[i], &status, WNOHANG);
      if (pid == 0 || (pid < 0 && errno == EINTR)) continue;
      run->pids[i] = 0;
      ++run->ended;
      if (pid > 0 && WIFSIGNALED(status) && !run->status) run->status = status;
    }
    if (run->ended == static_cast<int>(run->workers)) return 1;
    if (slept >= milliseconds * 4) return 0;
    const timespec quarter = {0, 250000};
    nanosleep(&quarter, nullptr);
  }
}

// Asks the workers where they are (the first to answer fills the report), then kills them.
EXPORT void voltune_stop(Run* run) {
  constexpr int firmer[] = {SIGTERM, SIGKILL};
  for (int number : firmer) {
    for (unsigned i = 0; i < run->workers; ++i) {
      if (run->pids[i]) kill(run->pids[i], number);
    }
    if (voltune_wait(run, 500)) return;
  }
}

EXPORT void voltune_free(Run* run) {
  munmap(run->report, run->mapped);
  free(run);
}
