// The backend of a build of one's own: kernels compiled beside it, launched through the CUDA runtime.
#include "backend.h"

#include <cuda_runtime.h>
#include <stdio.h>

#include <mutex>

#include "kernels.h"

extern "C" const void* const entries[KERNELS];  // kernels.cu

namespace {

struct Gpu {
  bool ready;  // written last
  unsigned resident[KERNELS];
};
Gpu gpus[DEVICES];
std::mutex preparing;

bool ready(int device) { return __atomic_load_n(&gpus[device].ready, __ATOMIC_ACQUIRE); }

bool failed(cudaError_t result, const char* doing, int device, char* text) {
  if (result == cudaSuccess) return false;
  cudaGetLastError();  // so that nobody else takes it for theirs
  snprintf(text, TEXT, "device %d: %s failed: %s (CUDA error %d)", device, doing, cudaGetErrorString(result), result);
  return true;
}

// Makes `device` current, and at its end the one that was.
class Current {
 public:
  Current(int device, char* text) {
    good_ = !failed(cudaGetDevice(&before_), "asking for the current device", device, text) &&
            (before_ == device || !failed(cudaSetDevice(device), "choosing it", device, text));
    changed_ = good_ && before_ != device;
  }
  ~Current() {
    if (changed_) cudaSetDevice(before_);
  }
  explicit operator bool() const { return good_; }

 private:
  int before_ = 0;
  bool good_, changed_;
};

bool prepare(Gpu& gpu, int device, char* text) {
  const Current current(device, text);
  int sms = 0;
  if (!current || failed(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "describing it", device, text))
    return false;
  for (int i = 0; i < KERNELS; ++i) {
    const struct kernel& kernel = kernels[i];
    int blocks = 0;
    // Which also loads the kernel, as a launch in a capture could not.
    if (failed(cudaFuncSetAttribute(entries[i], cudaFuncAttributeMaxDynamicSharedMemorySize, (int)kernel.shared), kernel.name,
               device, text) ||
        failed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, entries[i], (int)kernel.block, kernel.shared),
               kernel.name, device, text))
      return false;
    if (blocks < 1) {
      snprintf(text, TEXT, "device %d has no room for a CTA of %s", device, kernel.name);
      return false;
    }
    gpu.resident[i] = (unsigned)(blocks * sms);
  }
  return true;
}

}  // namespace

extern "C" bool backend_prepare(int device, const char* const*, char* text) {
  const std::lock_guard<std::mutex> lock(preparing);
  if (ready(device)) return true;
  const bool good = prepare(gpus[device], device, text);
  __atomic_store_n(&gpus[device].ready, good, __ATOMIC_RELEASE);
  return good;
}

extern "C" unsigned backend_resident(int device, int kernel) { return ready(device) ? gpus[device].resident[kernel] : 0; }

extern "C" bool backend_launch(int device, int kernel, unsigned x, unsigned y, void* stream, void** arguments, char* text) {
  const Current current(device, text);
  return current && !failed(cudaLaunchKernel(entries[kernel], dim3(x, y), dim3(kernels[kernel].block), arguments,
                                             kernels[kernel].shared, (cudaStream_t)stream),
                            kernels[kernel].name, device, text);
}

extern "C" bool backend_capturing(int, void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing((cudaStream_t)stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}
