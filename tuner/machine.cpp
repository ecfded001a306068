// Executes the micro-operations of one sm_70 kernel: CTAs of warps of 32 lanes, registers as rows of 32 words. `machine.py`
// decodes, lays out memory, and tells faults; `machine_code.h`, which it writes, gives `Operation` and `Micro`.
//
// One thread does everything, in an order that the launch's `order` fixes: so every run gives the same bits, counts and
// trace. CTAs that are resident together take turns, as do warps; a warp that polls memory gives its turn away.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "machine_code.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define LANES for (unsigned i = 0; i < 32; ++i)
#define ACTIVE(mask) for (uint32_t rest = (mask), i; rest && (i = __builtin_ctz(rest), true); rest &= rest - 1)

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

namespace {

constexpr u32 kAll = ~0u, kNaN = 0x7fffffffu, kZero = 255, kTrue = 7;
constexpr unsigned kBarriers = 16;

// The same order as FAULTS in machine.py.
enum Fault : i32 {
  kNone, kMemory, kReadOnly, kMisaligned, kShared, kSharedRace, kGlobalRace, kLocal, kDeadlock, kMask, kDiverged, kTarget,
  kCarry, kSpecial, kConstant, kNotWhole
};

// Mirrored field by field by machine.py.
struct Range { u64 begin, end, told; u32 writable, unused; };  // told: where counts and traces say that it begins
struct Setup {
  const Micro* code;
  const u8* constants;
  const Range* ranges;
  const char* const* texts;  // of a trace: what stands before and after each instruction's mask; null without one
  u64 l2_bytes;
  u32 count, constant_bytes, range_count, grid_x, grid_y, block, shared, registers, local, order, resident, counted;
};
struct Report {
  i32 fault;
  u32 pc, block_x, block_y, warp, lane, other, write;
  u64 address, instructions;
};
// What one instruction did, over all warps.
struct Tally { u64 issued, lanes, requests, sectors, bytes, misses, wavefronts, least_wavefronts, addresses; };

inline float number(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 bits_of(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline u32 clean(float x) { return x != x ? kNaN : bits_of(x); }
inline u32 flushed(u32 bits) { return bits & 0x7f800000u ? bits : bits & 0x80000000u; }
inline float half(u32 bits) { const u16 low = bits; _Float16 h; memcpy(&h, &low, 2); return static_cast<float>(h); }
inline u32 half_bits(float x) {
  if (x != x) return 0x7fff;
  const _Float16 h = static_cast<_Float16>(x);
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline u32 half_flushed(u32 bits) { return bits & 0x7c00u ? bits : bits & 0x8000u; }

// a * b + c rounded once to f16: in float the product is exact, and a sum rounded to odd is as good as exact to f16.
inline u32 half_fma(float a, float b, float c) {
  const float p = a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
  u32 bits = bits_of(s);
  const bool inexact = error != 0.0f && error == error && !(bits & 1);
  if (inexact) bits += (error > 0.0f) == (s > 0.0f) ? 1u : ~0u;
  return half_bits(number(bits));
}

// One operation in another rounding mode; volatile keeps it between the changes of mode.
template <class F>
u32 in_mode(unsigned mode, F f) {
  static constexpr int modes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
  fesetround(modes[mode]);
  volatile float result = f();
  fesetround(FE_TONEAREST);
  return clean(result);
}

u64 random_bits(u64& state) {  // splitmix64 (Steele, Lea, Flood 2014)
  u64 z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// ---- the memory of a CTA ------------------------------------------------------------------------------------------
// Plain global stores that no fence has let out yet, word by word: only their CTA sees them.
class Held {
 public:
  struct Word { u64 key; u32 value; u8 bytes, warp; u32 epoch; };

  bool empty() const { return used_ == 0; }

  Word* find(u64 key) {
    if (words_.empty()) return nullptr;
    for (size_t at = place(key);; at = (at + 1) & (words_.size() - 1)) {
      if (words_[at].bytes == 0) return nullptr;
      if (words_[at].key == key) return &words_[at];
    }
  }

  void store(u64 address, const u8* data, unsigned count, unsigned warp, u32 epoch) {
    for (unsigned i = 0; i < count; ++i) {
      Word& word = at((address + i) >> 2);
      reinterpret_cast<u8*>(&word.value)[(address + i) & 3] = data[i];
      word.bytes |= 1u << ((address + i) & 3);
      word.warp = warp;
      word.epoch = epoch;
    }
  }

  // Lets out the words that `chosen` picks, in the order of their places; memory stays as it is for the others.
  template <class Chosen>
  void release(Chosen chosen) {
    if (empty()) return;
    std::vector<Word> old = std::move(words_);
    words_.clear();
    used_ = 0;
    for (const Word& word : old) {
      if (word.bytes == 0) continue;
      if (chosen(word)) write(word);
      else at(word.key) = word;
    }
  }
  void release_words(u64 address, unsigned count) {
    if (empty()) return;
    const u64 first = address >> 2, last = (address + count - 1) >> 2;
    bool any = false;
    for (u64 key = first; key <= last; ++key) any = any || find(key);
    if (any) release([&](const Word& word) { return first <= word.key && word.key <= last; });
  }

 private:
  static void write(const Word& word) {
    for (unsigned i = 0; i < 4; ++i) {
      if (word.bytes >> i & 1) reinterpret_cast<u8*>(word.key << 2)[i] = reinterpret_cast<const u8*>(&word.value)[i];
    }
  }
  size_t place(u64 key) const { return (key * 0x9E3779B97F4A7C15u >> 20) & (words_.size() - 1); }
  Word& at(u64 key) {
    if (Word* found = find(key)) return *found;
    if (2 * (used_ + 1) > words_.size()) {
      std::vector<Word> old = std::move(words_);
      words_.assign(std::max<size_t>(64, 2 * old.size()), Word{});
      used_ = 0;
      for (const Word& word : old) {
        if (word.bytes) insert(word);
      }
    }
    return insert({key, 0, 0, 0, 0});
  }
  Word& insert(const Word& word) {
    size_t at = place(word.key);
    while (words_[at].bytes) at = (at + 1) & (words_.size() - 1);
    ++used_;
    words_[at] = word;
    return words_[at];
  }

  std::vector<Word> words_;
  size_t used_ = 0;
};

// Which warps wrote a word of shared memory, plainly or by atomics, and read it since the barrier with number `epoch`.
// depth: see Machine::follow.
struct Access { u32 epoch, writers, adders, readers; u16 depth; };

// ---- warps --------------------------------------------------------------------------------------------------------
enum State : u8 { kReady, kAtSync, kAtWarpSync, kAtBarrier };
struct Split { u32 pc, mask; State state; u8 barrier; u32 wanted; };

struct Warp {
  std::vector<u32> registers;  // rows of 32, four more of zeros, four for what is thrown away
  std::vector<u8> local;
  std::vector<Split> splits;
  std::vector<u8> trace;
  std::vector<u16> depth;  // of each register and predicate: loads in the chain that its value came through
  u32 predicates[8] = {};
  u32 joined[kBarriers][32] = {};  // convergence barriers: the lanes that each lane waits for
  u32 live = 0;
  u32 index = 0;
  u64 traced = 0;
  bool polled = false;
};

struct Cta {
  std::vector<Warp> warps;
  std::vector<u32> order;
  std::vector<u8> shared;
  std::vector<Access> accesses;
  Held held;
  u32 x = 0, y = 0, epoch = 1, arrived = 0, live = 0;
};

// A simple L2: lines of four 32-byte sectors, 16 ways, the one unused longest makes room.
class L2 {
 public:
  explicit L2(u64 bytes) : sets_(bytes / 128 / kWays), lines_(sets_ * kWays) {}
  // Whether the sector was not there.
  bool miss(u64 address) {
    const u64 line = address >> 7;
    const u8 sector = 1u << (address >> 5 & 3);
    Line* set = &lines_[(line ^ line >> 13) % sets_ * kWays];
    Line* oldest = set;
    ++clock_;
    for (Line* each = set; each < set + kWays; ++each) {
      if (each->sectors && each->tag == line) {
        const bool missing = !(each->sectors & sector);
        each->sectors |= sector;
        each->used = clock_;
        return missing;
      }
      if (each->used < oldest->used) oldest = each;
    }
    *oldest = {line, clock_, sector};
    return true;
  }

 private:
  static constexpr u64 kWays = 16;
  struct Line { u64 tag = 0, used = 0; u8 sectors = 0; };
  u64 sets_, clock_ = 0;
  std::vector<Line> lines_;
};

class Machine {
 public:
  explicit Machine(const Setup& setup)
      : s(setup), tallies(setup.count), ranges_(setup.count), l2_(setup.counted ? setup.l2_bytes : 16 * 128) {
    state_ = static_cast<u64>(s.order) << 32;
    const u32 blocks = s.grid_x * s.grid_y;
    blocks_.resize(blocks);
    shuffle(blocks_, state_);
    if (s.texts) finished_.resize(blocks);
  }

  // Runs on for about `limit` instructions, or until CTAs have passed `last` barriers. 0: there is more to do; 1: done;
  // 2: a fault; 3: at that barrier.
  int run(u64 limit, u64 last) {
    const u64 end = report.instructions + limit;
    last_ = last;
    while (report.instructions < end) {
      while (live_.size() < s.resident && next_ < blocks_.size()) live_.push_back(start(blocks_[next_++]));
      if (live_.empty()) {
        for (auto& cta : done_) cta->held.release([](const Held::Word&) { return true; });
        done_.clear();
        return 1;
      }
      for (size_t i = 0; i < live_.size();) {
        Cta& cta = *live_[i];
        if (!turn(cta)) return 2;
        if (barriers >= last_) return 3;
        if (cta.live) {
          ++i;
          continue;
        }
        end_of(live_[i]);
        live_.erase(live_.begin() + i);
      }
    }
    return 0;
  }

  // The next part of the trace's text, CTA by CTA and warp by warp; empty at its end.
  const std::string& text() {
    text_.clear();
    while (text_.size() < (1u << 20) && emitted_ < finished_.size()) emit();
    return text_;
  }

  const Setup s;
  Report report{};
  std::vector<Tally> tallies;
  u32 chain = 0;
  u64 barriers = 0;

 private:
  // ---- order ----
  void shuffle(std::vector<u32>& out, u64& state) const {  // natural, reversed, then random
    const u32 count = out.size();
    for (u32 i = 0; i < count; ++i) out[i] = s.order == 1 ? count - 1 - i : i;
    for (u32 i = s.order < 2 ? 1 : count; i > 1; --i) std::swap(out[i - 1], out[random_bits(state) % i]);
  }

  std::unique_ptr<Cta> start(u32 block) {
    auto made = std::make_unique<Cta>();
    Cta& cta = *made;
    cta.x = block % s.grid_x;
    cta.y = block / s.grid_x;
    const u32 count = (s.block + 31) / 32;
    cta.warps.resize(count);
    cta.order.resize(count);
    u64 state = (static_cast<u64>(s.order) << 32) + block;
    shuffle(cta.order, state);
    cta.shared.assign(s.shared, 0xFF);
    cta.accesses.assign((s.shared + 3) / 4, Access{});
    cta.live = s.block;
    for (u32 w = 0; w < count; ++w) {
      Warp& warp = cta.warps[w];
      warp.index = w;
      warp.registers.assign((s.registers + 8) * 32, 0xFFFFFFFFu);  // poison: what nobody wrote
      std::fill_n(&warp.registers[s.registers * 32], 4 * 32, 0u);
      warp.local.assign(static_cast<size_t>(s.local) * 32, 0xFF);
      warp.live = s.block - w * 32 >= 32 ? kAll : (1u << (s.block - w * 32)) - 1;
      warp.splits.push_back({0, warp.live, kReady, 0, 0});
      warp.predicates[kTrue] = kAll;
      if (s.counted) warp.depth.assign(s.registers + 8, 0);
    }
    return made;
  }

  void end_of(std::unique_ptr<Cta>& cta) {
    if (s.texts) {
      auto& kept = finished_[cta->y * s.grid_x + cta->x];
      for (Warp& warp : cta->warps) {
        kept.push_back({std::move(warp.trace), warp.traced});
      }
    }
    // Its plain stores stay held: other CTAs see them for sure only when the launch is over.
    cta->warps.clear();
    cta->shared = {};
    cta->accesses = {};
    if (!cta->held.empty()) done_.push_back(std::move(cta));
  }

  // A turn of every warp of a CTA. Even orders let a warp run far, odd ones step by step.
  bool turn(Cta& cta) {
    bool ran = false;
    for (u32 w : cta.order) {
      Warp& warp = cta.warps[w];
      if (ready(warp) == warp.splits.size()) continue;
      ran = true;
      if (!slice(cta, warp, s.order & 1 ? 61 : 4096)) return false;
      if (barriers >= last_) return true;
    }
    if (ran || !cta.live) return true;
    return fault(cta, cta.warps[0], kDeadlock, waiting_pc(cta));
  }

  static u32 waiting_pc(const Cta& cta) {
    for (const Warp& warp : cta.warps) {
      if (!warp.splits.empty()) return warp.splits[0].pc;
    }
    return 0;
  }

  static size_t ready(const Warp& warp) {
    size_t at = 0;
    while (at < warp.splits.size() && warp.splits[at].state != kReady) ++at;
    return at;
  }

  bool fault(const Cta& cta, const Warp& warp, Fault kind, u32 pc, u32 lane = 0, u64 address = 0, u32 other = 0,
             u32 write = 0) {
    report.fault = kind;
    report.pc = pc * 16;
    report.block_x = cta.x;
    report.block_y = cta.y;
    report.warp = warp.index;
    report.lane = lane;
    report.address = address;
    report.other = other;
    report.write = write;
    return false;
  }

  // ---- convergence ----
  void merge(Warp& warp) {
    auto& splits = warp.splits;
    for (size_t i = 0; i < splits.size(); ++i) {
      for (size_t j = i + 1; splits[i].state == kReady && j < splits.size();) {
        if (splits[j].state == kReady && splits[j].pc == splits[i].pc) {
          splits[i].mask |= splits[j].mask;
          splits.erase(splits.begin() + j);
        } else {
          ++j;
        }
      }
    }
  }

  // Lets go the splits whose lanes need wait for no other; call when a split began to wait, exited or broke away.
  void settle(Warp& warp) {
    for (bool changed = true; changed;) {
      changed = false;
      for (Split& split : warp.splits) {
        if (split.state != kAtSync && split.state != kAtWarpSync) continue;
        u32 wanted = split.wanted;
        if (split.state == kAtSync) {
          wanted = 0;
          ACTIVE(split.mask) wanted |= warp.joined[split.barrier][i];
        }
        wanted = (wanted | split.mask) & warp.live;
        u32 there = 0;
        for (const Split& other : warp.splits) {
          const bool same = other.state == split.state && other.barrier == split.barrier &&
                            (split.state == kAtSync || other.wanted == split.wanted);
          if (same) there |= other.mask;
        }
        if (wanted & ~there) continue;
        const State state = split.state;
        const u8 barrier = split.barrier;
        for (Split& other : warp.splits) {
          if (other.state != state || other.barrier != barrier || !(other.mask & wanted)) continue;
          ACTIVE(other.mask) {
            if (state == kAtSync) warp.joined[barrier][i] = 0;
          }
          other.state = kReady;
          ++other.pc;
        }
        changed = true;
        break;
      }
    }
    merge(warp);
  }

  void pass_barrier(Cta& cta) {
    if (!cta.arrived || cta.arrived < cta.live) return;
    cta.arrived = 0;
    ++cta.epoch;
    ++barriers;
    for (Warp& warp : cta.warps) {
      for (Split& split : warp.splits) {
        if (split.state != kAtBarrier) continue;
        split.state = kReady;
        ++split.pc;
      }
      merge(warp);
    }
  }

  static void rotate(Warp& warp) {  // so that no split waits for ever for another that only polls
    if (warp.splits.size() > 1) std::rotate(warp.splits.begin(), warp.splits.begin() + 1, warp.splits.end());
  }

  void leave(Cta& cta, Warp& warp, u32 mask) {
    warp.live &= ~mask;
    cta.live -= __builtin_popcount(mask);
  }

  // ---- memory ----
  const Range* range_of(u32 op, u64 address, unsigned bytes) {
    const Range* known = &s.ranges[ranges_[op]];
    if (address >= known->begin && address + bytes <= known->end) return known;
    for (u32 r = 0; r < s.range_count; ++r) {
      if (address >= s.ranges[r].begin && address + bytes <= s.ranges[r].end) {
        ranges_[op] = r;
        return &s.ranges[r];
      }
    }
    return nullptr;
  }

  bool check_global(const Cta& cta, const Warp& warp, u32 pc, u32 mask, unsigned bytes, bool write) {
    ACTIVE(mask) {
      if (address_[i] % bytes) return fault(cta, warp, kMisaligned, pc, i, address_[i], bytes, write);
      const Range* range = range_of(pc, address_[i], bytes);
      if (!range) return fault(cta, warp, kMemory, pc, i, address_[i], bytes, write);
      if (write && !range->writable) return fault(cta, warp, kReadOnly, pc, i, address_[i], bytes, write);
      told_[i] = address_[i] - range->begin + range->told;
    }
    return true;
  }

  bool check_shared(Cta& cta, const Warp& warp, u32 pc, u32 mask, unsigned bytes, bool write, bool atomic) {
    ACTIVE(mask) {
      const u64 address = told_[i] = address_[i];
      if (address % bytes) return fault(cta, warp, kMisaligned, pc, i, address, bytes, write);
      if (address + bytes > cta.shared.size()) return fault(cta, warp, kShared, pc, i, address, bytes, write);
      for (u64 at = address / 4; at <= (address + bytes - 1) / 4; ++at) {
        Access& word = cta.accesses[at];
        if (word.epoch != cta.epoch) word = {cta.epoch, 0, 0, 0, word.depth};
        // Atomics of several warps may meet, and so may their reads; all else wants a barrier between.
        const u32 self = 1u << warp.index;
        const u32 others = (word.writers | (atomic ? 0 : word.adders) | (write ? word.readers : 0)) & ~self;
        if (others) return fault(cta, warp, kSharedRace, pc, i, address, __builtin_ctz(others), write);
        (atomic ? word.adders : write ? word.writers : word.readers) |= self;
      }
    }
    return true;
  }

  static void put_loaded(u32* rows, unsigned lane, const u8* data, const Micro& m) {
    switch (m.type) {
      case 0: rows[lane] = *data; break;
      case 1: rows[lane] = static_cast<i32>(static_cast<int8_t>(*data)); break;
      case 2: { u16 x; memcpy(&x, data, 2); rows[lane] = x; break; }
      case 3: { int16_t x; memcpy(&x, data, 2); rows[lane] = static_cast<i32>(x); break; }
      default:
        for (unsigned part = 0; part < m.bytes / 4u; ++part) memcpy(&rows[part * 32 + lane], data + 4 * part, 4);
    }
  }

  static void take_stored(u8* data, const u32* rows, unsigned lane, unsigned bytes) {
    if (bytes < 4) memcpy(data, &rows[lane], bytes);
    for (unsigned part = 0; part < bytes / 4; ++part) memcpy(data + 4 * part, &rows[part * 32 + lane], 4);
  }

  bool load_global(Cta& cta, Warp& warp, u32 pc, const Micro& m, u32 mask, u32* rows) {
    if (!check_global(cta, warp, pc, mask, m.bytes, false)) return false;
    const bool strong = m.order == 2;
    warp.polled = warp.polled || strong;
    if (cta.held.empty()) {
      ACTIVE(mask) put_loaded(rows, i, reinterpret_cast<const u8*>(address_[i]), m);
      return true;
    }
    ACTIVE(mask) {
      u8 data[16];
      if (strong) cta.held.release_words(address_[i], m.bytes);
      memcpy(data, reinterpret_cast<const u8*>(address_[i]), m.bytes);
      for (u64 key = address_[i] >> 2; key <= (address_[i] + m.bytes - 1) >> 2; ++key) {
        const Held::Word* word = cta.held.find(key);
        if (!word) continue;
        for (unsigned byte = 0; byte < 4; ++byte) {
          const u64 at = (key << 2) + byte - address_[i];
          if (!(word->bytes >> byte & 1) || at >= m.bytes) continue;
          if (word->warp != warp.index && word->epoch == cta.epoch) {
            return fault(cta, warp, kGlobalRace, pc, i, address_[i], word->warp);
          }
          data[at] = reinterpret_cast<const u8*>(&word->value)[byte];
        }
      }
      put_loaded(rows, i, data, m);
    }
    return true;
  }

  bool store_global(Cta& cta, Warp& warp, u32 pc, const Micro& m, u32 mask, const u32* rows) {
    if (!check_global(cta, warp, pc, mask, m.bytes, true)) return false;
    ACTIVE(mask) {
      u8 data[16];
      take_stored(data, rows, i, m.bytes);
      if (m.order == 2) {
        cta.held.release_words(address_[i], m.bytes);
        memcpy(reinterpret_cast<u8*>(address_[i]), data, m.bytes);
      } else {
        cta.held.store(address_[i], data, m.bytes, warp.index, cta.epoch);
      }
    }
    return true;
  }

  template <class T, class Signed>
  static T combined(unsigned kind, T old, T value) {
    switch (kind) {
      case 0: return old + value;
      case 1: return static_cast<Signed>(value) < static_cast<Signed>(old) ? value : old;
      case 2: return static_cast<Signed>(value) > static_cast<Signed>(old) ? value : old;
      case 3: return old >= value ? 0 : old + 1;
      case 4: return old == 0 || old > value ? value : old - 1;
      case 5: return old & value;
      case 6: return old | value;
      case 7: return old ^ value;
      default: return value;
    }
  }
  static u64 atomic_result(const Micro& m, bool compares, u64 old, u64 first, u64 second) {
    if (compares) return old == first ? second : old;
    switch (m.type) {
      case 0: return combined<u32, u32>(m.kind, old, first);
      case 1: return combined<u32, i32>(m.kind, old, first);
      default: return combined<u64, u64>(m.kind, old, first);
    }
  }

  // Lanes one after another, the last first in odd orders. `rows`: where the former values go, or null.
  void atomic(Cta& cta, const Micro& m, u32 mask, bool compares, bool shared, u32* rows, const u32* b, const u32* c) {
    for (unsigned n = 0; n < 32; ++n) {
      const unsigned i = s.order & 1 ? 31 - n : n;
      if (!(mask >> i & 1)) continue;
      u8* place = shared ? &cta.shared[address_[i]] : reinterpret_cast<u8*>(address_[i]);
      if (!shared) cta.held.release_words(address_[i], m.bytes);
      u64 old = 0, first = b[i], second = compares ? c[i] : 0;
      memcpy(&old, place, m.bytes);
      if (m.bytes == 8) {
        first |= static_cast<u64>(b[32 + i]) << 32;
        if (compares) second |= static_cast<u64>(c[32 + i]) << 32;
      }
      const u64 next = atomic_result(m, compares, old, first, second);
      memcpy(place, &next, m.bytes);
      if (!rows) continue;
      rows[i] = old;
      if (m.bytes == 8) rows[32 + i] = old >> 32;
    }
  }

  void fence(Cta& cta, const Warp& warp) {
    cta.held.release([&](const Held::Word& word) { return word.warp == warp.index || word.epoch < cta.epoch; });
  }

  // ---- counting and tracing ----
  // So that a trace can be held to what was executed.
  void tally_addresses(u32 pc, u32 mask) {
    ACTIVE(mask) tallies[pc].addresses += told_[i] * (2 * i + 1);
  }

  void tally_global(u32 pc, u32 mask, unsigned bytes) {
    Tally& t = tallies[pc];
    if (!mask) return;
    ++t.requests;
    t.bytes += static_cast<u64>(__builtin_popcount(mask)) * bytes;
    u64 seen[64];
    unsigned count = 0;
    ACTIVE(mask) {
      for (u64 sector = told_[i] >> 5; sector <= (told_[i] + bytes - 1) >> 5; ++sector) {
        unsigned k = count;
        while (k > 0 && seen[k - 1] != sector) --k;
        if (k) continue;
        seen[count++] = sector;
      }
    }
    t.sectors += count;
    for (unsigned k = 0; k < count; ++k) t.misses += l2_.miss(seen[k] << 5);
  }

  // 32 banks of 4 bytes; 8-byte accesses go half a warp at a time, 16-byte ones a quarter. Lanes that want the same word share.
  void tally_shared(u32 pc, u32 mask, unsigned bytes) {
    Tally& t = tallies[pc];
    if (!mask) return;
    ++t.requests;
    t.bytes += static_cast<u64>(__builtin_popcount(mask)) * bytes;
    const unsigned at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    for (unsigned from = 0; from < 32; from += at_once) {
      const u32 part = mask >> from & (at_once == 32 ? kAll : (1u << at_once) - 1);
      if (!part) continue;
      std::vector<u64>* banks = banks_;
      for (unsigned b = 0; b < 32; ++b) banks[b].clear();
      size_t most = 0;
      ACTIVE(part) {
        for (u64 word = told_[from + i] / 4; word <= (told_[from + i] + bytes - 1) / 4; ++word) {
          auto& bank = banks[word % 32];
          bool known = false;
          for (u64 each : bank) known = known || each == word;
          if (!known) bank.push_back(word);
          most = std::max(most, bank.size());
        }
      }
      t.wavefronts += most;
      ++t.least_wavefronts;
    }
  }

  // How long a chain of loads a value hangs on: through registers, predicates and shared memory, not through global
  // memory or the way that a branch took.
  void follow(Cta& cta, Warp& warp, const Micro& m, u32 mask, bool shared) {
    u16* depth = warp.depth.data();
    u16* truths = depth + s.registers;
    u16 deepest = std::max(truths[m.guard & 7], truths[m.ps & 7]);
    const auto look = [&](unsigned first, unsigned count) {
      for (unsigned r = first; r < first + count; ++r) deepest = std::max(deepest, depth[r]);
    };
    look(m.a, m.reads_a);
    look(m.b, m.reads_b);
    look(m.c, m.reads_c);
    if (shared) {
      ACTIVE(mask) {
        for (u64 at = address_[i] / 4; at <= (address_[i] + m.bytes - 1) / 4; ++at) {
          u16& held = cta.accesses[at].depth;
          if (m.op == OP_STS) held = deepest;
          else deepest = held = std::max(held, deepest);
        }
      }
    }
    const bool load = m.op == OP_LDG || m.op == OP_LD || m.op == OP_ATOMG || m.op == OP_ATOMG_CAS;
    if (load) chain = std::max<u32>(chain, ++deepest);
    for (unsigned r = m.d; r < m.d + unsigned{m.writes}; ++r) depth[r] = deepest;
    if (m.pd != kTrue) truths[m.pd] = deepest;
    if (m.pd2 != kTrue) truths[m.pd2] = deepest;
  }

  // A traced instruction: its number and mask, then, where it goes to memory, the first address and the steps to the next.
  void note(Warp& warp, u32 pc, u32 mask, bool addresses) {
    const auto put = [&](const void* data, size_t bytes) {
      const u8* from = static_cast<const u8*>(data);
      warp.trace.insert(warp.trace.end(), from, from + bytes);
    };
    ++warp.traced;
    const u16 tag = static_cast<u16>(pc << 1 | (mask != kAll));
    put(&tag, 2);
    if (mask != kAll) put(&mask, 4);
    if (!addresses || !mask) return;
    const unsigned first = __builtin_ctz(mask);
    const u64 base = told_[first];
    i32 steps[32];
    unsigned count = 0, before = first;
    bool near = true, even = true;
    ACTIVE(mask & (mask - 1)) {
      const i64 step = static_cast<i64>(told_[i] - told_[before]);
      steps[count] = static_cast<i32>(step);
      near = near && steps[count] == step;
      even = even && i == before + 1 && steps[count] == steps[0];
      before = i;
      ++count;
    }
    const u8 form = !near ? 0 : even ? 1 : 2;  // as in the text
    if (count == 0) steps[0] = 0;
    put(&base, 8);
    put(&form, 1);
    if (form == 0) ACTIVE(mask & (mask - 1)) put(&told_[i], 8);
    else put(steps, 4 * (form == 1 ? 1 : count));
  }

  void emit() {
    const auto& warps = finished_[emitted_];
    char line[64];
    if (warp_ == 0) {
      snprintf(line, sizeof line, "#BEGIN_TB\n\nthread block = %u,%u,0\n", static_cast<u32>(emitted_) % s.grid_x,
               static_cast<u32>(emitted_) / s.grid_x);
      text_ += line;
    }
    snprintf(line, sizeof line, "\nwarp = %zu\ninsts = %llu\n", warp_, static_cast<unsigned long long>(warps[warp_].lines));
    text_ += line;
    const u8* at = warps[warp_].bytes.data();
    const auto take = [&](auto& value) { memcpy(&value, at, sizeof value); at += sizeof value; };
    for (u64 n = 0; n < warps[warp_].lines; ++n) {
      u16 tag;
      u32 mask = kAll;
      take(tag);
      if (tag & 1) take(mask);
      const u32 pc = tag >> 1;
      text_ += s.texts[2 * pc];
      snprintf(line, sizeof line, "%08x", mask);
      text_ += line;
      text_ += s.texts[2 * pc + 1];
      if (is_memory(s.code[pc]) && mask) {
        u64 place;
        u8 form;
        take(place);
        take(form);
        snprintf(line, sizeof line, " %u %u 0x%llx", s.code[pc].bytes, form, static_cast<unsigned long long>(place));
        text_ += line;
        const int others = form == 1 ? 1 : __builtin_popcount(mask) - 1;
        for (int n = 0; n < others; ++n) {
          i32 step;
          if (form == 0) take(place);
          else take(step);
          if (form == 0) snprintf(line, sizeof line, " 0x%llx", static_cast<unsigned long long>(place));
          else snprintf(line, sizeof line, " %d", step);
          text_ += line;
        }
        text_ += " 0";
      } else {
        text_ += " 0 0";
      }
      text_ += '\n';
    }
    if (++warp_ == warps.size()) {
      text_ += "\n#END_TB\n\n";
      finished_[emitted_].clear();
      finished_[emitted_].shrink_to_fit();
      warp_ = 0;
      ++emitted_;
    }
  }

  static bool is_memory(const Micro& m) { return m.bytes && m.op != OP_LDC; }

  bool slice(Cta& cta, Warp& warp, u32 budget);

  struct Traced { std::vector<u8> bytes; u64 lines; };
  std::vector<u8> ranges_;
  L2 l2_;
  u64 state_ = 0, last_ = ~0ull;
  std::vector<u32> blocks_;
  size_t next_ = 0;
  std::vector<std::unique_ptr<Cta>> live_, done_;
  std::vector<std::vector<Traced>> finished_;
  size_t emitted_ = 0, warp_ = 0;
  std::string text_;
  u64 address_[32], told_[32];  // of the lanes of a memory access
  std::vector<u64> banks_[32];
};

#include "machine_step.h"

}  // namespace

EXPORT Machine* machine_new(const Setup* setup) { return new Machine(*setup); }
EXPORT int machine_run(Machine* machine, u64 limit, u64 last) { return machine->run(limit, last); }
EXPORT const Report* machine_report(const Machine* machine) { return &machine->report; }
EXPORT const Tally* machine_tallies(const Machine* machine) { return machine->tallies.data(); }
EXPORT u32 machine_chain(const Machine* machine) { return machine->chain; }
EXPORT u64 machine_barriers(const Machine* machine) { return machine->barriers; }
EXPORT const char* machine_text(Machine* machine, u64* bytes) {
  const std::string& text = machine->text();
  *bytes = text.size();
  return text.data();
}
EXPORT void machine_free(Machine* machine) { delete machine; }
