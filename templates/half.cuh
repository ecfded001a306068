// f16 values travel as their 16 bits. Each PTX conversion has a plain C++ twin, so that a source runs without a GPU
// and gives the same bits there.

__device__ __forceinline__ float half_to_float_plain(unsigned short half) {
  const unsigned magnitude = half & 0x7fffu;
  const unsigned sign = (half & 0x8000u) << 16;
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
  const unsigned bits = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u
                                             : __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f);
  return __uint_as_float(sign | bits);
}

// Rounds to nearest, ties to even; overflow gives infinity, any NaN the canonical one.
__device__ __forceinline__ unsigned short float_to_half_plain(float value) {
  const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
  const unsigned sign = (__float_as_uint(value) >> 16) & 0x8000u;
  if (bits > 0x7f800000u) return 0x7fff;
  if (bits >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and above round past 65504
  if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the f16 subnormal in the low bits, rounded
    return (unsigned short)(sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u));
  }
  return (unsigned short)(sign | ((bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13));
}

// round_f16(nibble * scale + bias), rounded once: an engine's dequantised weight. Its plain twin is exact in double,
// since a nibble times an f16 plus an f16 spans at most 45 bits, and rounds to odd on the way to float.
__device__ __forceinline__ float half_dequantise_plain(int nibble, unsigned short scale, unsigned short bias) {
  const double exact = (double)nibble * (double)half_to_float_plain(scale) + (double)half_to_float_plain(bias);
  float nearest = (float)exact;
  const double error = exact - (double)nearest;
  unsigned bits = __float_as_uint(nearest);
  // An infinite result has no error to speak of: infinity minus itself is NaN, and compares false.
  if ((error < 0.0 || error > 0.0) && (bits & 1u) == 0u) bits += ((error > 0.0) == (nearest > 0.0f)) ? 1u : -1u;
  return half_to_float_plain(float_to_half_plain(__uint_as_float(bits)));
}

// Approximate reciprocal for values whose use tolerates a few ulp.
__device__ __forceinline__ float reciprocal_plain(float value) { return 1.0f / value; }

#if defined(__CUDA_ARCH__) && !defined(VOLTUNE_PLAIN)
__device__ __forceinline__ float half_to_float(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ __forceinline__ float half_dequantise(int nibble, unsigned short scale, unsigned short bias) {
  unsigned short weight;
  asm("{ .reg .f16 n; cvt.rn.f16.s32 n, %1; fma.rn.f16 %0, n, %2, %3; }"
      : "=h"(weight) : "r"(nibble), "h"(scale), "h"(bias));
  return half_to_float(weight);
}

__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
#else
__device__ __forceinline__ float half_to_float(unsigned short half) { return half_to_float_plain(half); }
__device__ __forceinline__ unsigned short float_to_half(float value) { return float_to_half_plain(value); }
__device__ __forceinline__ float half_dequantise(int nibble, unsigned short scale, unsigned short bias) {
  return half_dequantise_plain(nibble, scale, bias);
}
__device__ __forceinline__ float reciprocal(float value) { return reciprocal_plain(value); }
#endif

__device__ __forceinline__ float round_to_half(float value) { return half_to_float(float_to_half(value)); }
