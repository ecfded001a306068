// SiLU with an exponential made of fmaf alone, so that every executor gives the same bits.

// e^-x. x is clamped to where e^-x is a normal float: beyond, 1 + e^-x has long reached 1, or x / (1 + e^-x) long reached 0.
// y * log2(e) = n + f with the product carried to twice a float's precision; 2^f for f in [-1/2, 1/2] is its Taylor series
// to f^7 (remainder 5e-9), and n goes into the exponent.
__device__ __forceinline__ float exp_negative(float x) {
  const float y = fminf(fmaxf(-x, -87.3365402f), 87.3365402f);
  const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const float shifted = fmaf(y, 1.44269504f, round);
  const float f = fmaf(y, 1.92596303e-8f, fmaf(y, 1.44269504f, -(shifted - round)));
  float p = 1.52527338e-5f;
  p = fmaf(p, f, 1.54035304e-4f);
  p = fmaf(p, f, 1.33335581e-3f);
  p = fmaf(p, f, 9.61812911e-3f);
  p = fmaf(p, f, 5.55041087e-2f);
  p = fmaf(p, f, 2.40226507e-1f);
  p = fmaf(p, f, 6.93147181e-1f);
  p = fmaf(p, f, 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp_negative(x)); }
