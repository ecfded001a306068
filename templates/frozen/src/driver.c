// The backend of the built op: kernels embedded as sm_70 code, launched through the NVIDIA driver, which is looked for when it is
// first wanted.
#include "backend.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "kernels.h"

extern const unsigned char *const code[KERNELS];  // code.c: sm_70 machine code

// The names these functions had before glibc 2.34 moved them, so that an older one loads this.
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");

#ifndef VOLTUNE_DRIVER
#define VOLTUNE_DRIVER "libcuda.so.1"
#endif

// Of the CUDA driver's interface, which keeps these numbers.
enum {
  SM_COUNT = 16,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  SHARED_LIMIT = 8,  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  SHARED_WITHOUT_ASKING = 48 << 10
};
typedef struct context *Context;
typedef struct module *Module;
typedef struct function *Function;
typedef int Result;

#define DRIVER_FUNCTIONS(F) \
  F(init, "cuInit", (unsigned flags)) \
  F(error_text, "cuGetErrorString", (Result error, const char **text)) \
  F(device_get, "cuDeviceGet", (int *device, int ordinal)) \
  F(device_name, "cuDeviceGetName", (char *name, int size, int device)) \
  F(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device)) \
  F(context_retain, "cuDevicePrimaryCtxRetain", (Context *context, int device)) \
  F(context_release, "cuDevicePrimaryCtxRelease_v2", (int device)) \
  F(context_push, "cuCtxPushCurrent_v2", (Context context)) \
  F(context_pop, "cuCtxPopCurrent_v2", (Context *context)) \
  F(module_load, "cuModuleLoadData", (Module *module, const void *code)) \
  F(module_unload, "cuModuleUnload", (Module module)) \
  F(module_function, "cuModuleGetFunction", (Function *function, Module module, const char *name)) \
  F(function_set, "cuFuncSetAttribute", (Function function, int attribute, int value)) \
  F(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int *blocks, Function function, int threads, size_t shared)) \
  F(stream_capturing, "cuStreamIsCapturing", (void *stream, int *status)) \
  F(launch, "cuLaunchKernel", \
    (Function function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, unsigned block_z, \
     unsigned shared, void *stream, void **arguments, void **extra))

static struct {
#define MEMBER(member, name, parameters) Result(*member) parameters;
  DRIVER_FUNCTIONS(MEMBER)
} driver;

struct gpu {
  int ready;  // written last, with release
  int ordinal;
  Context context;
  Module modules[KERNELS];
  Function functions[KERNELS];
  unsigned resident[KERNELS];
};
static struct gpu gpus[DEVICES];
static pthread_mutex_t preparing = PTHREAD_MUTEX_INITIALIZER;

static bool ready(int device) { return __atomic_load_n(&gpus[device].ready, __ATOMIC_ACQUIRE); }

static bool failed(Result result, const char *doing, int device, char *text) {
  const char *said = NULL;
  if (result == 0) return false;
  driver.error_text(result, &said);
  snprintf(text, TEXT, "device %d: %s failed: %s (CUDA error %d)", device, doing, said ? said : "unknown", result);
  return true;
}

static bool open_driver(char *text) {
  static void *library = NULL;
  if (library) return true;
  void *opened = dlopen(VOLTUNE_DRIVER, RTLD_NOW | RTLD_LOCAL);
  if (!opened) {
    snprintf(text, TEXT, "no NVIDIA driver: %s", dlerror());
    return false;
  }
#define LOOK_UP(member, name, parameters) \
  *(void **)&driver.member = dlsym(opened, name); \
  if (!driver.member) { \
    snprintf(text, TEXT, "the NVIDIA driver has no %s: it is too old", name); \
    return false; \
  }
  DRIVER_FUNCTIONS(LOOK_UP)
  library = opened;
  return true;
}

static bool load_kernel(struct gpu *gpu, int device, int i, const void *code, int sms, char *text) {
  char doing[96];
  const char *name = kernels[i].name;
  int blocks = 0;
  snprintf(doing, sizeof doing, "loading %s", name);
  if (failed(driver.module_load(&gpu->modules[i], code), doing, device, text)) return false;
  if (failed(driver.module_function(&gpu->functions[i], gpu->modules[i], name), doing, device, text)) return false;
  if (kernels[i].shared > SHARED_WITHOUT_ASKING) {
    snprintf(doing, sizeof doing, "allowing %u bytes of shared memory to %s", kernels[i].shared, name);
    const Result allowed = driver.function_set(gpu->functions[i], SHARED_LIMIT, (int)kernels[i].shared);
    if (failed(allowed, doing, device, text)) return false;
  }
  snprintf(doing, sizeof doing, "asking how many CTAs of %s there is room for", name);
  const Result asked = driver.occupancy(&blocks, gpu->functions[i], (int)kernels[i].block, kernels[i].shared);
  if (failed(asked, doing, device, text)) return false;
  if (blocks < 1) {
    snprintf(text, TEXT, "device %d has no room for a CTA of %s", device, name);
    return false;
  }
  gpu->resident[i] = (unsigned)(blocks * sms);
  return true;
}

// In the GPU's context. What it loaded before it fails is unloaded again.
static bool load_kernels(struct gpu *gpu, int device, const char *const *ptx, int sms, char *text) {
  for (int i = 0; i < KERNELS; ++i) {
    gpu->modules[i] = NULL;
    if (load_kernel(gpu, device, i, ptx ? (const void *)ptx[i] : code[i], sms, text)) continue;
    for (; i >= 0; --i)
      if (gpu->modules[i]) driver.module_unload(gpu->modules[i]);
    return false;
  }
  return true;
}

static bool prepare(struct gpu *gpu, int device, const char *const *ptx, char *text) {
  int major = 0, minor = 0, sms = 0;
  char name[96] = "";
  Context popped;
  if (!open_driver(text)) return false;
  if (failed(driver.init(0), "starting CUDA", device, text)) return false;
  if (failed(driver.device_get(&gpu->ordinal, device), "finding it", device, text)) return false;
  if (failed(driver.device_name(name, sizeof name, gpu->ordinal), "naming it", device, text) ||
      failed(driver.device_attribute(&major, CAPABILITY_MAJOR, gpu->ordinal), "describing it", device, text) ||
      failed(driver.device_attribute(&minor, CAPABILITY_MINOR, gpu->ordinal), "describing it", device, text) ||
      failed(driver.device_attribute(&sms, SM_COUNT, gpu->ordinal), "describing it", device, text))
    return false;
  const bool own = major == 7 && minor == 0;
  if (!own && !ptx) {
    snprintf(text, TEXT,
             "device %d, %s, has compute capability %d.%d, and these kernels are machine code of 7.0, a V100's; to check them "
             "on another GPU, ask for their PTX: allow_ptx=True",
             device, name, major, minor);
    return false;
  }
  if (failed(driver.context_retain(&gpu->context, gpu->ordinal), "opening its context", device, text)) return false;
  bool good = !failed(driver.context_push(gpu->context), "entering its context", device, text);
  if (good) {
    good = load_kernels(gpu, device, own ? NULL : ptx, sms, text);
    driver.context_pop(&popped);
  }
  if (!good) driver.context_release(gpu->ordinal);
  return good;
}

bool backend_prepare(int device, const char *const *ptx, char *text) {
  struct gpu *gpu = &gpus[device];
  if (ready(device)) return true;
  pthread_mutex_lock(&preparing);
  bool good = ready(device);
  if (!good) {
    good = prepare(gpu, device, ptx, text);
    __atomic_store_n(&gpu->ready, good, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&preparing);
  return good;
}

unsigned backend_resident(int device, int kernel) { return ready(device) ? gpus[device].resident[kernel] : 0; }

bool backend_launch(int device, int kernel, unsigned x, unsigned y, void *stream, void **arguments, char *text) {
  const struct gpu *gpu = &gpus[device];
  Context popped;
  if (failed(driver.context_push(gpu->context), "entering its context", device, text)) return false;
  const Result launched = driver.launch(gpu->functions[kernel], x, y, 1, kernels[kernel].block, 1, 1, kernels[kernel].shared,
                                        stream, arguments, NULL);
  driver.context_pop(&popped);
  return !failed(launched, kernels[kernel].name, device, text);
}

bool backend_capturing(int device, void *stream) {
  int status = 0;
  Context popped;
  if (!ready(device) || driver.context_push(gpus[device].context)) return false;
  const bool told = driver.stream_capturing(stream, &status) == 0;
  driver.context_pop(&popped);
  return told && status != 0;
}
