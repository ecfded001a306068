// Reads and dequantises int4 weights in place, in the layout an engine holds them.
//
// Every layout is read by one lane map: of a step of 32 k, a lane holds the 8 k of octet lane / 8 for kColumns adjacent
// columns of column group lane % 8. So the four octets of a warp share out K, and their sums meet by two shuffles.
//
// A 32-bit word holds eight nibbles; logical index i sits at nibble 4 * (i & 1) + i / 2, in both layouts. A nibble is
// not shifted down: put under the exponent of 2^23 where it stands, it reads as 2^23 + q * 16^place, and subtracting
// 2^23 + z * 16^place is exact. The factor 16^place is taken back by scaling activations (sm70-u4, where a word runs
// along K) or scales (awq, where it runs along columns) by 16^-place, which is exact as well.

__device__ __forceinline__ constexpr int place_of(int index) { return index / 2; }

__device__ __forceinline__ constexpr float inverse_place(int index) {
  return place_of(index) == 0 ? 1.0f : place_of(index) == 1 ? 0x1p-4f : place_of(index) == 2 ? 0x1p-8f : 0x1p-12f;
}

__device__ __forceinline__ unsigned field_of(unsigned word, int index) {
  return (index & 1 ? word >> 16 : word) & (0xfu << (4 * place_of(index)));
}

__device__ __forceinline__ float above_2_23(unsigned field) { return __uint_as_float(0x4b000000u | field); }

__device__ __forceinline__ unsigned short bias_of(unsigned zero, unsigned short scale) {
  return float_to_half(-((float)(int)zero * half_to_float(scale)));
}

// The statistics of one column in one group, ready for either numerics.
template <class C, int kPlaces>
struct Column {
  float scale;
  float zeros[kPlaces];  // 2^23 + z * 16^place
  unsigned short engine_scale;
  unsigned short engine_bias;
};

// Eight adjacent lanes share an octet.
struct OctetLanes {
  static __device__ __forceinline__ int octet() { return lane_id() >> 3; }
  static __device__ __forceinline__ int index() { return lane_id() & 7; }  // of the lane's columns in the tile
};

struct QuantizedTensors {
  const unsigned* q;
  const void* scales;     // awq: f16 scales; sm70-u4: its statistics
  const unsigned* zeros;  // awq only
};

template <class C>
constexpr int kGroupSteps = C::kGroup / 32;  // steps that share statistics

// Where a column tile stands in a matrix: half of its columns from `first` on, the other half `apart` further than next to
// them.
struct TileColumns {
  int first;
  int apart;

  // Of a lane's kColumns columns, the `index`-th of the tile's eight such groups.
  template <int kColumns>
  __device__ __forceinline__ int of(int index) const {
    return first + index * kColumns + (index < 4 ? 0 : apart);
  }
};

// Weights are read once: past L1, which rows and statistics need.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
#else
  return *address;
#endif
}

// One column's statistics in one group.
struct Statistics {
  unsigned short scale;
  unsigned short bias;  // f16(-z * s)
  unsigned zero;
};

// Column c's three bytes {s low, s high, z} of the twelve s0 s0 z0 s1 | s1 z1 s2 s2 | z2 s3 s3 z3; the fourth is anything.
__device__ __forceinline__ unsigned packed_statistics(const unsigned* s, int c) {
  return c == 0   ? s[0]
         : c == 1 ? __byte_perm(s[0], s[1], 0x0543u)
         : c == 2 ? __byte_perm(s[1], s[2], 0x0432u)
                  : s[2] >> 8;
}

// Column c of the four whose statistics, 3 or 4 bytes each, stand in `s`.
template <class C>
__device__ __forceinline__ Statistics sm70_u4_statistics(const unsigned* s, int c) {
  Statistics found;
  if constexpr (C::kStatsBytes == 3) {
    const unsigned triple = packed_statistics(s, c);
    found.scale = (unsigned short)triple;
    found.zero = triple >> 16 & 0xfu;
    found.bias = C::kEngineNumerics ? bias_of(found.zero, found.scale) : (unsigned short)0;
  } else {
    // half2 {s, f16(-z * s)}: -b / s lies within 2^-11 of z in relative terms, so the nearest integer is z.
    found.scale = (unsigned short)s[c];
    found.bias = (unsigned short)(s[c] >> 16);
    const float scale = half_to_float(found.scale);
    const float inverse = scale == 0.0f ? 0.0f : reciprocal(scale);
    found.zero = __float_as_uint(fmaf(-half_to_float(found.bias), inverse, 0x1.8p23f)) & 0xfu;
  }
  return found;
}

// sm70-u4: word(e, k, n) = e*K*N/8 + ((n/32)*(K/8) + k/8)*32 + n%32. A step of a 32-column tile is 512 contiguous bytes.
// Lanes says which octet a lane holds.
template <class C, int K, int N, class Lanes>
struct Sm70U4 {
  static constexpr int kColumns = 4;
  static constexpr int kStatsWords = C::kStatsBytes;  // 4 columns of 3 or 4 bytes

  struct Fragment {
    uint4 words;  // one column's octet each
    unsigned stats[kStatsWords];
  };
  using Stats = Column<C, 4>;

  const uint4* words;
  const unsigned* stats;
  int step;

  __device__ __forceinline__ Sm70U4(const QuantizedTensors& t, int expert, int column, int first) : step(first) {
    const int octet = first * 4 + Lanes::octet();
    words = reinterpret_cast<const uint4*>(t.q + (long long)expert * (K * (N / 8)) +
                                           ((column / 32) * (K / 8) + octet) * 32 + column % 32);
    const long long group = (long long)expert * (K / C::kGroup) + first / kGroupSteps<C>;
    stats = static_cast<const unsigned*>(t.scales) + (group * N + column) / 4 * C::kStatsBytes;
  }

  // The fragment of the next step.
  __device__ __forceinline__ void next(Fragment& fragment) {
    fragment.words = load_once(words);
    if constexpr (C::kStatsBytes == 4) {
      const uint4 s = *reinterpret_cast<const uint4*>(stats);
      fragment.stats[0] = s.x, fragment.stats[1] = s.y, fragment.stats[2] = s.z, fragment.stats[3] = s.w;
    } else {
#pragma unroll
      for (int i = 0; i < kStatsWords; ++i) fragment.stats[i] = stats[i];
    }
    words += 32;
    if (++step % kGroupSteps<C> == 0) stats += N / 4 * C::kStatsBytes;
  }

  static __device__ __forceinline__ Stats column(const Fragment& fragment, int c) {
    const Statistics read = sm70_u4_statistics<C>(fragment.stats, c);
    Stats stats;
    stats.engine_scale = read.scale;
    if constexpr (C::kEngineNumerics) stats.engine_bias = read.bias;
    stats.scale = half_to_float(stats.engine_scale);
#pragma unroll
    for (int place = 0; place < 4; ++place) stats.zeros[place] = above_2_23(read.zero << (4 * place));
    return stats;
  }

  // Something of all that was loaded: what a kernel that only loads keeps.
  static __device__ __forceinline__ float mixed(const Fragment& f) {
    unsigned all = f.words.x ^ f.words.y ^ f.words.z ^ f.words.w;
#pragma unroll
    for (int i = 0; i < kStatsWords; ++i) all ^= f.stats[i];
    return __uint_as_float(all & 0x007fffffu);
  }
  static __device__ __forceinline__ unsigned word(const Fragment& f, int c, int) {
    return c == 0 ? f.words.x : c == 1 ? f.words.y : c == 2 ? f.words.z : f.words.w;
  }
  static __device__ __forceinline__ constexpr int index(int, int k) { return k; }
  static __device__ __forceinline__ constexpr int zero_index(int, int k) { return place_of(k); }
  static __device__ __forceinline__ constexpr float activation_factor(int k) {
    return C::kEngineNumerics ? 1.0f : inverse_place(k % 8);
  }
};

// awq: q [E, K, N/8] along columns, scales f16 [E, K/g, N], zeros [E, K/g, N/8]. A lane reads 8 k of one word column.
template <class C, int K, int N>
struct Awq {
  static constexpr int kColumns = 8;

  struct Fragment {
    unsigned words[8];  // one k each
    uint4 scales;
    unsigned zeros;
  };
  using Stats = Column<C, 1>;

  const unsigned* words;
  const uint4* scales;
  const unsigned* zeros;
  int step;

  __device__ __forceinline__ Awq(const QuantizedTensors& t, int expert, int column, int first) : step(first) {
    const int k = first * 32 + OctetLanes::octet() * 8;
    const long long group = ((long long)expert * (K / C::kGroup) + first / kGroupSteps<C>) * (N / 8) + column / 8;
    words = t.q + ((long long)expert * K + k) * (N / 8) + column / 8;
    scales = static_cast<const uint4*>(t.scales) + group;
    zeros = t.zeros + group;
  }

  // The fragment of the next step.
  __device__ __forceinline__ void next(Fragment& fragment) {
#pragma unroll
    for (int k = 0; k < 8; ++k) fragment.words[k] = words[k * (N / 8)];
    fragment.scales = *scales;
    fragment.zeros = *zeros;
    words += 32 * (N / 8);
    if (++step % kGroupSteps<C> == 0) {
      scales += N / 8;
      zeros += N / 8;
    }
  }

  static __device__ __forceinline__ Stats column(const Fragment& f, int c) {
    const unsigned pair = c < 2 ? f.scales.x : c < 4 ? f.scales.y : c < 6 ? f.scales.z : f.scales.w;
    Stats stats;
    stats.engine_scale = (unsigned short)(c & 1 ? pair >> 16 : pair);
    stats.scale = half_to_float(stats.engine_scale) * inverse_place(c);
    const unsigned field = field_of(f.zeros, c);
    stats.zeros[0] = above_2_23(field);
    if constexpr (C::kEngineNumerics) stats.engine_bias = bias_of(field >> (4 * place_of(c)), stats.engine_scale);
    return stats;
  }

  static __device__ __forceinline__ float mixed(const Fragment& f) {
    unsigned all = f.scales.x ^ f.scales.y ^ f.scales.z ^ f.scales.w ^ f.zeros;
#pragma unroll
    for (int k = 0; k < 8; ++k) all ^= f.words[k];
    return __uint_as_float(all & 0x007fffffu);
  }
  static __device__ __forceinline__ unsigned word(const Fragment& f, int, int k) { return f.words[k]; }
  static __device__ __forceinline__ constexpr int index(int c, int) { return c; }
  static __device__ __forceinline__ constexpr int zero_index(int, int) { return 0; }
  static __device__ __forceinline__ constexpr float activation_factor(int) { return 1.0f; }
};

template <class C, int K, int N, bool kSm70U4>
struct ReaderOf {
  using type = Sm70U4<C, K, N, OctetLanes>;
};
template <class C, int K, int N>
struct ReaderOf<C, K, N, false> {
  using type = Awq<C, K, N>;
};
template <class C, int K, int N>
using Reader = typename ReaderOf<C, K, N, C::kSm70U4>::type;

// What one nibble contributes: exact numerics leave the scale to the group's sum, the engine's round each weight to f16.
template <class C, class R>
__device__ __forceinline__ float weight_of(const typename R::Fragment& f, const typename R::Stats& stats, int c, int k) {
  const unsigned field = field_of(R::word(f, c, k), R::index(c, k));
  if constexpr (C::kEngineNumerics) {
    return half_dequantise((int)(field >> (4 * place_of(R::index(c, k)))), stats.engine_scale, stats.engine_bias);
  } else {
    return above_2_23(field) - stats.zeros[R::zero_index(c, k)];
  }
}
