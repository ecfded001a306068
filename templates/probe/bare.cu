// Two kernels that show a GPU without the op: one that only reads, and one that does nothing.

// Reads count units of 16 bytes, four in flight a thread; the sink keeps the compiler from leaving the reads out.
extern "C" __global__ void __launch_bounds__(512) voltune_read(const uint4 *source, int count, unsigned *sink) {
  const int stride = gridDim.x * blockDim.x;
  unsigned mixed = 0;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (; i < count - 3 * stride; i += 4 * stride) {
    uint4 held[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) held[n] = source[i + n * stride];
#pragma unroll
    for (int n = 0; n < 4; ++n) mixed ^= held[n].x ^ held[n].y ^ held[n].z ^ held[n].w;
  }
  for (; i < count; i += stride) {
    const uint4 held = source[i];
    mixed ^= held.x ^ held.y ^ held.z ^ held.w;
  }
  if (mixed == 0x9E3779B9u) *sink = mixed;
}

extern "C" __global__ void __launch_bounds__(512) voltune_empty(const uint4 *, int, unsigned *) {}
