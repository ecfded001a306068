// What each operation does: included by machine.cpp. Operands are rows of 32 lanes; a result is made for all lanes and
// kept for those that the instruction's guard lets through.

struct alignas(64) Row { u32 lane[32]; };

inline u32 mask_of(const u32 (&truth)[32]) {
  u32 mask = 0;
  LANES mask |= (truth[i] & 1u) << i;
  return mask;
}

inline bool compares(unsigned how, float a, float b) {  // FSETP's sixteen: less, equal, greater, unordered
  return a < b ? how & 1 : a == b ? how & 2 : a > b ? how & 4 : how & 8;
}
inline bool whole_compares(unsigned how, bool less, bool equal) { return less ? how & 1 : equal ? how & 2 : how & 4; }
inline u32 combined_predicate(unsigned how, u32 a, u32 b) { return how == 0 ? a & b : how == 1 ? a | b : a ^ b; }

// A half of an operand: as it stands, or one of its halves for both.
inline u32 chosen_half(u32 pair, unsigned swizzle, unsigned which) {
  const unsigned upper = swizzle == 0 ? which : swizzle == 3;
  return upper ? pair >> 16 : pair & 0xFFFF;
}

inline u32 half_bits_of_whole(double x) {
  const _Float16 h = static_cast<_Float16>(x);
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}

// Estimates of MUFU: the function in double, rounded once; subnormals are zero to it.
inline u32 estimate(unsigned kind, u32 bits) {
  const double x = number(flushed(bits));
  constexpr double turn = 6.283185307179586476925286766559;
  double result = 0;
  switch (kind) {
    case 0: result = cos(turn * x); break;
    case 1: result = sin(turn * x); break;
    case 2: result = exp2(x); break;
    case 3: result = log2(x); break;
    case 4: result = 1.0 / x; break;
    case 5: result = 1.0 / sqrt(x); break;
    default: result = sqrt(x);
  }
  return flushed(clean(static_cast<float>(result)));
}

// Whether a / b may not be had by the short way: an operand or the quotient is near the ends of what an f32 holds.
inline bool hard_division(u32 a, u32 b) {
  const int ea = a >> 23 & 255, eb = b >> 23 & 255;
  return ea < 32 || ea > 252 || eb < 3 || eb > 250 || ea - eb > 120 || ea - eb < -95;
}

inline u32 whole_of(float x, const Micro& m) {
  static constexpr double (*rounds[])(double) = {nearbyint, floor, ceil, trunc};
  if (x != x) return 0;
  const double r = rounds[m.round](static_cast<double>(x));
  if (m.sign) return r <= -2147483648.0 ? 0x80000000u : r >= 2147483647.0 ? 0x7fffffffu : static_cast<u32>(static_cast<i32>(r));
  return r <= 0.0 ? 0u : r >= 4294967295.0 ? ~0u : static_cast<u32>(r);
}

inline u32 special_register(unsigned kind, const Cta& cta, const Warp& warp, unsigned lane, bool& known) {
  switch (kind) {
    case 0x00: return lane;
    case 0x21: return warp.index * 32 + lane;
    case 0x22: case 0x23: case 0x27: return 0;
    case 0x25: return cta.x;
    case 0x26: return cta.y;
    case 0x38: return 1u << lane;
    case 0x39: return (1u << lane) - 1;
    case 0x3a: return (2u << lane) - 1;
    case 0x3b: return ~((2u << lane) - 1);
    case 0x3c: return ~((1u << lane) - 1);
    default: known = false; return 0;
  }
}

// One HMMA.884 step of the whole warp: two of a lane's eight accumulators, i = 2 * step and the next. A lane's place p in its
// quadpair is the row of A and the column of B that it holds; its accumulators are rows (p&1) + (i&2) + (p&4) and columns
// (i&4) + (p&2) + (i&1). Products and their sum are exact here, and rounded once; a tensor core may round otherwise.
inline void multiply_step(unsigned step, const u32* a, const u32* b, const u32* c, u32* out) {
  double x[32][4], y[32][4];
  LANES {
    for (unsigned k = 0; k < 4; ++k) {
      x[i][k] = half(a[k / 2 * 32 + i] >> (k % 2 * 16));
      y[i][k] = half(b[k / 2 * 32 + i] >> (k % 2 * 16));
    }
  }
  LANES {
    const unsigned p = (i & 3) | (i >> 2 & 4), first = i & 12;
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned n = 2 * step + e;
      const unsigned row = (p & 1) + (n & 2) + (p & 4), column = (n & 4) + (p & 2) + (n & 1);
      const double* r = x[first | (row & 3) | (row & 4) << 2];
      const double* q = y[first | (column & 3) | (column & 4) << 2];
      const double sum = r[0] * q[0] + r[1] * q[1] + r[2] * q[2] + r[3] * q[3];
      out[e * 32 + i] = clean(static_cast<float>(sum + number(c[e * 32 + i])));
    }
  }
}

bool Machine::slice(Cta& cta, Warp& warp, u32 budget) {
  const size_t chosen = ready(warp);
  std::rotate(warp.splits.begin(), warp.splits.begin() + chosen, warp.splits.end());
  merge(warp);
  u32 pc = warp.splits[0].pc, active = warp.splits[0].mask;
  u32* const rows = warp.registers.data();
  const u32 thrown = s.registers + 4;  // after four rows of zeros
  Row left[3], out[2];
  warp.polled = false;

  const auto row = [&](unsigned r) -> u32* { return rows + 32 * (r == kZero ? s.registers : r); };
  const auto target = [&](unsigned r) -> u32* { return rows + 32 * (r == kZero ? thrown : r); };
  const auto predicate = [&](unsigned p) { return warp.predicates[p & 7] ^ (p & 8 ? kAll : 0); };

  for (; budget > 0; --budget, ++report.instructions) {
    if (pc >= s.count) return fault(cta, warp, kTarget, pc);
    const Micro& m = s.code[pc];
    u32 mask = active & predicate(m.guard);
    bool go_on = true, addresses = false;
    u32 next = pc + 1;

    const auto operand = [&](unsigned which) -> const u32* {
      const bool value = which == 1 ? m.values & 1 : which == 2 && (m.values & 2);
      const u32* from = row(which == 0 ? m.a : which == 1 ? m.b : m.c);
      if (!value) return from;
      LANES left[which].lane[i] = m.value;
      return left[which].lane;
    };
    const auto real = [&](unsigned which) -> const u32* {  // with magnitude, sign and flushing of subnormals
      const u32* from = operand(which);
      const u32 keep = m.magnitudes >> which & 1 ? 0x7fffffffu : kAll, flip = m.signs >> which & 1 ? 0x80000000u : 0;
      if (keep == kAll && !flip && !m.ftz) return from;
      LANES left[which].lane[i] = (from[i] & keep) ^ flip;
      if (m.ftz) LANES left[which].lane[i] = flushed(left[which].lane[i]);
      return left[which].lane;
    };
    const auto keep = [&](unsigned r, const u32* from) {
      u32* to = target(r);
      if (mask == kAll) {
        memcpy(to, from, 128);
      } else {
        LANES to[i] = mask >> i & 1 ? from[i] : to[i];
      }
    };
    const auto keep_real = [&](u32* result) {
      if (m.ftz) LANES result[i] = flushed(result[i]);
      if (m.sat) LANES {
        const float x = number(result[i]);
        result[i] = bits_of(x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f);
      }
      keep(m.d, result);
    };
    const auto keep_predicate = [&](unsigned p, u32 truth) {
      if (p != kTrue) warp.predicates[p] = (warp.predicates[p] & ~mask) | (truth & mask);
    };
    const auto effective = [&](bool wide) {  // addresses of the lanes that take part
      const u32 *low = row(m.a), *high = low + 32;
      ACTIVE(mask) {
        address_[i] = wide ? (static_cast<u64>(high[i]) << 32 | low[i]) + static_cast<i64>(m.offset)
                           : static_cast<u32>(low[i] + static_cast<u32>(m.offset));
      }
      addresses = true;
    };

    switch (m.op) {
      // ---- f32 ----
      case OP_FADD: {
        const u32 *a = real(0), *b = real(1);
        if (m.round) LANES out[0].lane[i] = in_mode(m.round, [&] { volatile float x = number(a[i]), y = number(b[i]); return x + y; });
        else LANES out[0].lane[i] = clean(number(a[i]) + number(b[i]));
        keep_real(out[0].lane);
        break;
      }
      case OP_FMUL: {
        const u32 *a = real(0), *b = real(1);
        if (m.round) LANES out[0].lane[i] = in_mode(m.round, [&] { volatile float x = number(a[i]), y = number(b[i]); return x * y; });
        else LANES out[0].lane[i] = clean(number(a[i]) * number(b[i]));
        keep_real(out[0].lane);
        break;
      }
      case OP_FFMA: {
        const u32 *a = real(0), *b = real(1), *c = real(2);
        if (m.round) {
          LANES out[0].lane[i] = in_mode(m.round, [&] {
            volatile float x = number(a[i]), y = number(b[i]), z = number(c[i]);
            return fmaf(x, y, z);
          });
        } else {
          LANES out[0].lane[i] = clean(__builtin_fmaf(number(a[i]), number(b[i]), number(c[i])));
        }
        keep_real(out[0].lane);
        break;
      }
      case OP_FMNMX: {  // the operand that is a number; -0 below +0; the predicate asks for the lesser
        const u32 *a = real(0), *b = real(1);
        const u32 lesser = predicate(m.ps);
        LANES {
          const float x = number(a[i]), y = number(b[i]);
          const bool least = lesser >> i & 1;
          u32 r = x < y == least ? a[i] : b[i];
          if (x == y) r = least ? a[i] | b[i] : a[i] & b[i];
          if (x != x) r = y != y ? kNaN : b[i];
          else if (y != y) r = a[i];
          out[0].lane[i] = r;
        }
        keep_real(out[0].lane);
        break;
      }
      case OP_FSEL: {
        const u32 *a = real(0), *b = real(1);
        const u32 first = predicate(m.ps);
        LANES out[0].lane[i] = first >> i & 1 ? a[i] : b[i];
        keep(m.d, out[0].lane);
        break;
      }
      case OP_FSETP: {
        const u32 *a = real(0), *b = real(1);
        LANES out[0].lane[i] = compares(m.compare, number(a[i]), number(b[i]));
        const u32 truth = mask_of(out[0].lane), other = predicate(m.ps);
        keep_predicate(m.pd, combined_predicate(m.combine, truth, other));
        keep_predicate(m.pd2, combined_predicate(m.combine, ~truth, other));
        break;
      }
      case OP_FCHK: {
        const u32 *a = real(0), *b = real(1);
        LANES out[0].lane[i] = hard_division(a[i], b[i]);
        keep_predicate(m.pd, mask_of(out[0].lane));
        break;
      }
      case OP_MUFU: {
        const u32* b = real(1);
        ACTIVE(mask) out[0].lane[i] = estimate(m.kind, b[i]);
        keep(m.d, out[0].lane);
        break;
      }
      // ---- f16 ----
      case OP_HADD2: case OP_HMUL2: case OP_HFMA2: {
        const u32 *a = operand(0), *b = operand(1), *c = m.op == OP_HFMA2 ? operand(2) : a;
        if (m.high) {  // HADD2.F32: one half of each, added as f32
          LANES {
            u32 x = chosen_half(a[i], m.swizzle_a, 0), y = chosen_half(b[i], m.swizzle_b, 0);
            x = (x & (m.magnitudes & 1 ? 0x7fff : 0xffff)) ^ (m.signs & 1 ? 0x8000 : 0);
            y = (y & (m.magnitudes & 2 ? 0x7fff : 0xffff)) ^ (m.signs & 2 ? 0x8000 : 0);
            out[0].lane[i] = clean(half(x) + half(y));
          }
          keep_real(out[0].lane);
          break;
        }
        const auto part = [&](const u32* from, unsigned which, unsigned lane, unsigned swizzle, unsigned upper) {
          u32 bits = chosen_half(from[lane], swizzle, upper);
          bits = (bits & (m.magnitudes >> which & 1 ? 0x7fff : 0xffff)) ^ (m.signs >> which & 1 ? 0x8000 : 0);
          return half(m.ftz ? half_flushed(bits) : bits);
        };
        LANES {
          u32 halves[2];
          for (unsigned upper = 0; upper < 2; ++upper) {
            const float x = part(a, 0, i, m.swizzle_a, upper), y = part(b, 1, i, m.swizzle_b, upper);
            u32 r = m.op == OP_HADD2 ? half_fma(x, 1.0f, y) : m.op == OP_HMUL2 ? half_bits(x * y)
                    : half_fma(x, y, part(c, 2, i, m.swizzle_c, upper));
            if (m.ftz) r = half_flushed(r);
            if (m.sat) r = half(r) > 0.0f ? half(r) < 1.0f ? r : 0x3c00 : 0;
            halves[upper] = r;
          }
          out[0].lane[i] = halves[0] | halves[1] << 16;
        }
        keep(m.d, out[0].lane);
        break;
      }
      case OP_HMMA: {
        if (mask != kAll) return fault(cta, warp, kNotWhole, pc, 0, 0, mask);
        multiply_step(m.kind, row(m.a), row(m.b), row(m.c), out[0].lane);
        memcpy(target(m.d), out[0].lane, 256);
        break;
      }
      // ---- integers ----
      case OP_IADD3: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        const u32 carry = predicate(m.ps), second = predicate(m.ps2);
        u32 one = 0, two = 0;
        LANES {
          u64 sum = 0;
          const u32 terms[] = {a[i], b[i], c[i]};
          for (unsigned t = 0; t < 3; ++t) {
            const bool minus = m.signs >> t & 1;
            sum += minus ? static_cast<u64>(~terms[t]) + !m.extended : terms[t];
          }
          if (m.extended) sum += (carry >> i & 1) + (second >> i & 1);
          out[0].lane[i] = sum;
          one |= (sum >> 32 > 0) << i;
          two |= (sum >> 32 > 1) << i;
        }
        if (m.pd != kTrue && m.pd2 == kTrue && (two & mask)) return fault(cta, warp, kCarry, pc, __builtin_ctz(two & mask));
        keep(m.d, out[0].lane);
        keep_predicate(m.pd, one);
        keep_predicate(m.pd2, two);
        break;
      }
      case OP_IMAD: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        const u32 carry = m.extended ? predicate(m.ps) : 0, minus = m.signs >> 2 & 1;
        LANES {
          const u32 addend = minus ? ~c[i] + !m.extended : c[i];
          out[0].lane[i] = a[i] * b[i] + addend + (carry >> i & 1);
        }
        keep(m.d, out[0].lane);
        break;
      }
      case OP_IMAD_WIDE: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        const u32 carry = m.extended ? predicate(m.ps) : 0, minus = m.signs >> 2 & 1;
        u32 carried = 0;
        LANES {
          const u64 product = m.sign ? static_cast<u64>(static_cast<i64>(static_cast<i32>(a[i])) * static_cast<i32>(b[i]))
                                     : static_cast<u64>(a[i]) * b[i];
          u64 addend = c[i] | static_cast<u64>(m.values & 2 ? m.value_high : c[32 + i]) << 32;
          if (minus) addend = ~addend + !m.extended;
          const u64 sum = product + addend, whole = sum + (carry >> i & 1);
          carried |= static_cast<u32>(sum < product || whole < sum) << i;
          out[0].lane[i] = whole;
          out[1].lane[i] = whole >> 32;
        }
        keep(m.d, out[0].lane);
        if (m.d != kZero) keep(m.d + 1u, out[1].lane);
        keep_predicate(m.pd, carried);
        break;
      }
      case OP_IABS: {
        const u32* b = operand(1);
        LANES out[0].lane[i] = static_cast<i32>(b[i]) < 0 ? 0u - b[i] : b[i];
        keep(m.d, out[0].lane);
        break;
      }
      case OP_ISETP: {  // .EX: the high words of a comparison whose low words gave ps3
        const u32 *a = operand(0), *b = operand(1);
        const u32 low = m.extended ? predicate(m.ps3) : 0;
        LANES {
          const bool less = m.sign ? static_cast<i32>(a[i]) < static_cast<i32>(b[i]) : a[i] < b[i], equal = a[i] == b[i];
          out[0].lane[i] = m.extended && equal && m.compare != 0 && m.compare != 7 ? low >> i & 1
                                                                                  : whole_compares(m.compare, less, equal);
        }
        const u32 truth = mask_of(out[0].lane), other = predicate(m.ps);
        keep_predicate(m.pd, combined_predicate(m.combine, truth, other));
        keep_predicate(m.pd2, combined_predicate(m.combine, ~truth, other));
        break;
      }
      case OP_LOP3: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        u32* r = out[0].lane;
        switch (m.lut) {  // the usual ones by themselves, for speed
          case 0xc0: LANES r[i] = a[i] & b[i]; break;
          case 0xfc: LANES r[i] = a[i] | b[i]; break;
          case 0x3c: LANES r[i] = a[i] ^ b[i]; break;
          case 0xea: LANES r[i] = (a[i] & b[i]) | c[i]; break;
          default: {
            u32 term[8];
            for (unsigned t = 0; t < 8; ++t) term[t] = m.lut >> t & 1 ? kAll : 0;
            LANES {
              const u32 x = a[i], y = b[i], z = c[i];
              r[i] = (~x & ~y & ~z & term[0]) | (~x & ~y & z & term[1]) | (~x & y & ~z & term[2]) | (~x & y & z & term[3]) |
                     (x & ~y & ~z & term[4]) | (x & ~y & z & term[5]) | (x & y & ~z & term[6]) | (x & y & z & term[7]);
            }
          }
        }
        keep(m.d, r);
        if (m.pd != kTrue) {
          u32 any = 0;
          LANES any |= static_cast<u32>(r[i] != 0) << i;
          keep_predicate(m.pd, any);
        }
        break;
      }
      case OP_PLOP3: {
        const u32 a = predicate(m.ps), b = predicate(m.ps2), c = predicate(m.ps3);
        u32 one = 0, two = 0;
        for (unsigned t = 0; t < 8; ++t) {
          const u32 here = (t & 4 ? a : ~a) & (t & 2 ? b : ~b) & (t & 1 ? c : ~c);
          one |= m.lut >> t & 1 ? here : 0;
          two |= m.lut2 >> t & 1 ? here : 0;
        }
        keep_predicate(m.pd, one);
        keep_predicate(m.pd2, two);
        break;
      }
      case OP_SEL: {
        const u32 *a = operand(0), *b = operand(1);
        const u32 first = predicate(m.ps);
        LANES out[0].lane[i] = first >> i & 1 ? a[i] : b[i];
        keep(m.d, out[0].lane);
        break;
      }
      case OP_MOV: keep(m.d, operand(1)); break;
      case OP_SHF: {  // of c:a by b; the amount held to the type's width, or wrapped
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        const u32 width = m.type < 2 ? 64 : 32;
        const bool arithmetic = !(m.type & 1);
        LANES {
          const u64 value = static_cast<u64>(c[i]) << 32 | a[i];
          const u32 by = m.wrap ? b[i] & (width - 1) : std::min(b[i], width);
          u64 r = 0;
          if (!m.right) r = by < 64 ? value << by : 0;
          else if (arithmetic) r = static_cast<u64>(static_cast<i64>(value) >> std::min(by, 63u));
          else r = by < 64 ? value >> by : 0;
          out[0].lane[i] = m.high ? r >> 32 : r;
        }
        keep(m.d, out[0].lane);
        break;
      }
      case OP_LEA: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        const u32 carry = m.extended ? predicate(m.ps) : 0;
        u32 carried = 0;
        LANES {
          u64 part;
          if (m.high) {
            const u64 upper = m.sign ? static_cast<u64>(static_cast<i64>(static_cast<i32>(a[i]))) : static_cast<u64>(c[i]) << 32 | a[i];
            part = static_cast<u32>(m.shift ? upper << m.shift >> 32 : upper >> 32);
          } else {
            const u32 shifted = a[i] << m.shift;
            part = m.signs & 1 ? static_cast<u64>(~shifted) + !m.extended : shifted;
          }
          const u64 sum = part + (m.signs & 2 ? static_cast<u64>(~b[i]) + !m.extended : b[i]) + (carry >> i & 1);
          out[0].lane[i] = sum;
          carried |= static_cast<u32>(sum >> 32 != 0) << i;
        }
        keep(m.d, out[0].lane);
        keep_predicate(m.pd, carried);
        break;
      }
      case OP_PRMT: {
        const u32 *a = operand(0), *b = operand(1), *c = operand(2);
        LANES {
          const u64 pool = static_cast<u64>(c[i]) << 32 | a[i];
          u32 r = 0;
          for (unsigned n = 0; n < 4; ++n) {
            const u32 pick = b[i] >> (4 * n) & 15, byte = pool >> (8 * (pick & 7)) & 255;
            r |= (pick & 8 ? byte & 128 ? 255u : 0u : byte) << (8 * n);
          }
          out[0].lane[i] = r;
        }
        keep(m.d, out[0].lane);
        break;
      }
      case OP_POPC: case OP_BREV: case OP_FLO: {
        const u32* b = operand(1);
        const u32 flip = m.signs & 2 ? kAll : 0;
        LANES {
          u32 x = b[i] ^ flip;
          if (m.op == OP_POPC) {
            x = __builtin_popcount(x);
          } else if (m.op == OP_BREV) {
            x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
            x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
            x = __builtin_bswap32((x >> 4 & 0x0F0F0F0Fu) | (x & 0x0F0F0F0Fu) << 4);
          } else {
            if (m.sign && static_cast<i32>(x) < 0) x = ~x;
            const u32 zeros = x ? __builtin_clz(x) : 0;
            x = x ? m.kind ? zeros : 31 - zeros : kAll;
          }
          out[0].lane[i] = x;
        }
        keep(m.d, out[0].lane);
        break;
      }
      // ---- conversions ----
      case OP_I2F: {
        const u32* b = operand(1);
        LANES {
          const double x = m.sign ? static_cast<double>(static_cast<i32>(b[i])) : static_cast<double>(b[i]);
          if (m.kind == 1) out[0].lane[i] = half_bits_of_whole(x);
          else if (m.round) out[0].lane[i] = in_mode(m.round, [&] { volatile double y = x; return static_cast<float>(y); });
          else out[0].lane[i] = bits_of(static_cast<float>(x));
        }
        keep(m.d, out[0].lane);
        break;
      }
      case OP_F2I: {
        const u32* b = real(1);
        ACTIVE(mask) out[0].lane[i] = whole_of(number(b[i]), m);
        keep(m.d, out[0].lane);
        break;
      }
      case OP_F2F: {
        const u32* b = real(1);
        LANES out[0].lane[i] = half_bits(number(b[i]));
        keep(m.d, out[0].lane);
        break;
      }
      case OP_FRND: {
        static constexpr float (*rounds[])(float) = {nearbyintf, floorf, ceilf, truncf};
        const u32* b = real(1);
        ACTIVE(mask) out[0].lane[i] = clean(rounds[m.round](number(b[i])));
        keep(m.d, out[0].lane);
        break;
      }
      // ---- special registers and predicates ----
      case OP_S2R: {
        bool known = true;
        LANES out[0].lane[i] = special_register(m.kind, cta, warp, i, known);
        if (!known) return fault(cta, warp, kSpecial, pc, 0, m.kind);
        keep(m.d, out[0].lane);
        break;
      }
      case OP_CS2R:
        keep(m.d, row(kZero));
        if (m.high && m.d != kZero) keep(m.d + 1u, row(kZero));
        break;
      case OP_P2R: case OP_R2P: {
        const u32 *a = operand(0), *b = operand(1);
        if (m.op == OP_R2P) {
          for (unsigned p = 0; p < 7; ++p) {
            u32 chosen = 0, truth = 0;
            LANES chosen |= (b[i] >> p & 1) << i;
            LANES truth |= (a[i] >> p & 1) << i;
            warp.predicates[p] = (warp.predicates[p] & ~(mask & chosen)) | (truth & mask & chosen);
          }
          break;
        }
        LANES {
          u32 bits = 0;
          for (unsigned p = 0; p < 7; ++p) bits |= (warp.predicates[p] >> i & 1) << p;
          out[0].lane[i] = (a[i] & ~b[i]) | (bits & b[i]);
        }
        keep(m.d, out[0].lane);
        break;
      }
      // ---- between lanes ----
      case OP_VOTE: {
        const u32 votes = predicate(m.ps) & mask;
        const bool all = votes == mask, any = votes != 0;
        LANES out[0].lane[i] = votes;
        keep(m.d, out[0].lane);
        keep_predicate(m.pd, (m.kind == 0 ? all : m.kind == 1 ? any : all || !any) ? kAll : 0);
        break;
      }
      case OP_SHFL: {  // PTX ISA, shfl.sync; a lane outside those that take part gives poison
        const u32* a = row(m.a);
        const u32 *b = row(m.b), *c = row(m.c);
        u32 within = 0;
        ACTIVE(mask) {
          const u32 by = (m.values & 1 ? m.value : b[i]) & 31, held = m.values & 2 ? static_cast<u32>(m.offset) : c[i];
          const u32 segment = held >> 8 & 31, clamp = held & 31;
          const u32 last = (i & segment) | (clamp & ~segment), first = i & segment;
          u32 from = 0;
          bool inside = false;
          switch (m.kind) {
            case 0: from = first | (by & ~segment); inside = from <= last; break;
            case 1: from = i - by; inside = static_cast<i32>(from) >= static_cast<i32>(last); break;
            case 2: from = i + by; inside = from <= last; break;
            default: from = i ^ by; inside = from <= last;
          }
          if (!inside) from = i;
          out[0].lane[i] = mask >> from & 1 ? a[from] : kAll;
          within |= static_cast<u32>(inside) << i;
        }
        keep(m.d, out[0].lane);
        keep_predicate(m.pd, within);
        break;
      }
      case OP_MATCH: {
        const u32* a = operand(0);
        ACTIVE(mask) {
          u32 same = 0;
          for (unsigned j = 0; j < 32; ++j) same |= static_cast<u32>((mask >> j & 1) && a[j] == a[i]) << j;
          out[0].lane[i] = same;
        }
        keep(m.d, out[0].lane);
        break;
      }
      // ---- memory ----
      case OP_LDG: case OP_LD:
        effective(true);
        if (!load_global(cta, warp, pc, m, mask, target(m.d))) return false;
        break;
      case OP_STG: case OP_ST:
        effective(true);
        if (!store_global(cta, warp, pc, m, mask, row(m.b))) return false;
        break;
      case OP_LDS:
        effective(false);
        if (!check_shared(cta, warp, pc, mask, m.bytes, false, false)) return false;
        { u32* to = target(m.d); ACTIVE(mask) put_loaded(to, i, &cta.shared[address_[i]], m); }
        break;
      case OP_STS:
        effective(false);
        if (!check_shared(cta, warp, pc, mask, m.bytes, true, false)) return false;
        { const u32* from = row(m.b); ACTIVE(mask) take_stored(&cta.shared[address_[i]], from, i, m.bytes); }
        break;
      case OP_LDL: case OP_STL: {
        effective(false);
        ACTIVE(mask) {
          const u64 at = told_[i] = address_[i];
          if (at % m.bytes || at + m.bytes > s.local) return fault(cta, warp, kLocal, pc, i, at, m.bytes, m.op == OP_STL);
          u8* place = &warp.local[static_cast<size_t>(i) * s.local + at];
          if (m.op == OP_LDL) put_loaded(target(m.d), i, place, m);
          else take_stored(place, row(m.b), i, m.bytes);
        }
        break;
      }
      case OP_LDC: {
        const u32* a = row(m.a);
        ACTIVE(mask) {
          const u64 at = static_cast<u64>(a[i]) + static_cast<u32>(m.offset);
          if (at % m.bytes || at + m.bytes > s.constant_bytes) return fault(cta, warp, kConstant, pc, i, at, m.bytes);
          put_loaded(target(m.d), i, s.constants + at, m);
        }
        break;
      }
      case OP_ATOMG: case OP_ATOM: case OP_RED: case OP_ATOMG_CAS:
        effective(true);
        if (!check_global(cta, warp, pc, mask, m.bytes, true)) return false;
        atomic(cta, m, mask, m.op == OP_ATOMG_CAS, false, m.op == OP_RED ? nullptr : target(m.d), row(m.b), row(m.c));
        warp.polled = warp.polled || m.op == OP_ATOMG_CAS;
        break;
      case OP_ATOMS: case OP_ATOMS_CAS:
        effective(false);
        if (!check_shared(cta, warp, pc, mask, m.bytes, true, true)) return false;
        atomic(cta, m, mask, m.op == OP_ATOMS_CAS, true, target(m.d), row(m.b), row(m.c));
        break;
      case OP_MEMBAR:
        if (m.scope != 0 && mask) fence(cta, warp);
        break;
      case OP_ERRBAR: case OP_CCTL: case OP_NOP: case OP_NANOSLEEP: case OP_YIELD: break;
      // ---- control ----
      case OP_BRA: case OP_CALL: {
        u32 taken = mask & predicate(m.op == OP_BRA ? m.ps : kTrue);
        if (m.op == OP_BRA && m.kind == 2) taken = active == warp.live ? 0 : taken;  // .DIV: if the warp's lanes are apart
        if (m.op == OP_BRA && m.kind == 3) taken = active == warp.live ? taken : 0;  // .CONV: if they are together
        if (m.op == OP_BRA && m.kind == 1 && taken && taken != active) return fault(cta, warp, kDiverged, pc, 0, 0, taken);
        const u32 there = static_cast<u32>(m.target);
        if (taken == active) {
          next = there;
        } else if (taken) {
          const bool jump = s.order & 1;
          warp.splits[0].mask = jump ? taken : active & ~taken;
          warp.splits.push_back({jump ? pc + 1 : there, active & ~warp.splits[0].mask, kReady, 0, 0});
          active = warp.splits[0].mask;
          next = jump ? there : pc + 1;
        }
        if (taken && there <= pc && warp.polled) go_on = false;
        break;
      }
      case OP_RET: {  // to the address in a register, counted from the target
        if (!mask) break;
        const u32* a = row(m.a);
        const u32 at = a[__builtin_ctz(mask)];
        ACTIVE(mask) {
          if (a[i] != at) return fault(cta, warp, kDiverged, pc, i, a[i], at);
        }
        const u32 there = static_cast<u32>(m.target) + at / 16;
        if (mask != active) {
          warp.splits.push_back({there, mask, kReady, 0, 0});
          active = warp.splits[0].mask = active & ~mask;
        } else {
          next = there;
        }
        break;
      }
      case OP_BSSY: ACTIVE(mask) warp.joined[m.lut][i] = mask; break;
      case OP_BREAK: {
        const u32 gone = mask & predicate(m.ps);
        ACTIVE(gone) {
          const u32 group = warp.joined[m.lut][i];
          for (unsigned j = 0; j < 32; ++j) {
            if (group >> j & 1) warp.joined[m.lut][j] &= ~gone;
          }
        }
        ACTIVE(gone) warp.joined[m.lut][i] = 0;
        go_on = !gone;  // others may wait for those that went
        break;
      }
      case OP_BMOV:
        LANES out[0].lane[i] = warp.joined[m.lut][i];
        keep(m.d, out[0].lane);
        if (m.kind) ACTIVE(mask) warp.joined[m.lut][i] = 0;
        break;
      case OP_BMOV_SET: {
        const u32* b = operand(1);
        ACTIVE(mask) warp.joined[m.lut][i] = b[i];
        break;
      }
      case OP_BSYNC: case OP_WARPSYNC: case OP_BAR: {
        if (!mask) break;
        const State state = m.op == OP_BSYNC ? kAtSync : m.op == OP_WARPSYNC ? kAtWarpSync : kAtBarrier;
        u32 wanted = 0;
        if (state == kAtWarpSync) {
          wanted = m.values & 1 ? m.value : row(m.b)[__builtin_ctz(mask)];
          u32 others = 0;  // whose mask is another: they come here by themselves
          ACTIVE(mask) {
            const u32 own = m.values & 1 ? m.value : row(m.b)[i];
            if (!(own >> i & 1)) return fault(cta, warp, kMask, pc, i, own);
            if (own != wanted) others |= 1u << i;
          }
          if (others) {
            warp.splits.push_back({pc, others, kReady, 0, 0});
            mask &= ~others;
            active &= ~others;
            warp.splits[0].mask = active;
          }
          wanted &= warp.live;
        }
        if (state == kAtSync && mask == active) {  // the usual case: all whom it waits for are here
          u32 needed = 0;
          ACTIVE(mask) needed |= warp.joined[m.lut][i];
          if (!(needed & warp.live & ~mask)) {
            ACTIVE(mask) warp.joined[m.lut][i] = 0;
            break;
          }
        }
        if (state == kAtWarpSync && mask == active && !(wanted & ~mask)) break;
        if (mask != active) {
          warp.splits.push_back({pc + 1, active & ~mask, kReady, 0, 0});
          warp.splits[0].mask = mask;
        }
        warp.splits[0] = {pc, mask, state, m.op == OP_BSYNC ? m.lut : u8{0}, wanted};
        if (state == kAtBarrier) cta.arrived += __builtin_popcount(mask);
        go_on = false;
        break;
      }
      case OP_EXIT:
        if (!mask) break;
        leave(cta, warp, mask);
        active &= ~mask;
        warp.splits[0].mask = active;
        if (!active) warp.splits.erase(warp.splits.begin());
        go_on = false;
        break;
      default: return fault(cta, warp, kTarget, pc);
    }

    if (s.counted) {
      Tally& t = tallies[pc];
      ++t.issued;
      t.lanes += __builtin_popcount(mask);
      const bool shared = m.op == OP_LDS || m.op == OP_STS || m.op == OP_ATOMS || m.op == OP_ATOMS_CAS;
      follow(cta, warp, m, mask, shared);
      if (addresses) {
        tally_addresses(pc, mask);
        if (shared) tally_shared(pc, mask, m.bytes);
        else if (m.op != OP_LDL && m.op != OP_STL) tally_global(pc, mask, m.bytes);
      }
      if (s.texts) note(warp, pc, mask, addresses);
    }

    if (!go_on) {
      ++report.instructions;
      if (active && warp.splits[0].state == kReady) warp.splits[0].pc = next;
      settle(warp);
      pass_barrier(cta);
      rotate(warp);
      return true;
    }
    pc = next;
  }
  warp.splits[0].pc = pc;
  rotate(warp);
  return true;
}
