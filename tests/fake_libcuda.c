// A stand-in for the NVIDIA driver as tuner/cuda.py calls it: one GPU whose memory is the CPU's, shared with child processes. A
// kernel is a function of the test, which says how long it took, or does nothing in 10 us; time passes by that alone.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_CAPTURING = 901, BLOCKS = 1 << 14, NODES = 256, ARGUMENTS = 32 };

struct module { char image[64]; };
struct function { struct module *module; char name[64]; int arguments, allowed; };
struct record {
  char image[64], name[64];
  unsigned grid[3], block[3], shared;
  uint64_t arguments[ARGUMENTS];
};
struct graph { int count; struct record nodes[NODES]; };
struct event { double us; };

static struct { char *begin; size_t size; } blocks[BLOCKS];
static struct { char name[64]; int arguments; } entries[16];
static int entry_count, major = 7, minor;
static double now;
static struct graph *capturing;
static double idle(const struct record *record, int among) { return record && among ? 10 : 0; }
static double (*run)(const struct record *, int among) = idle;

void fake_entry(const char *name, int arguments) {
  strncpy(entries[entry_count].name, name, 63);
  entries[entry_count++].arguments = arguments;
}
void fake_run(double (*function)(const struct record *, int)) { run = function; }
void fake_capability(int high, int low) { major = high, minor = low; }
int fake_held(void) {
  int held = 0;
  for (int i = 0; i < BLOCKS; ++i) held += blocks[i].begin != NULL;
  return held;
}

int cuInit(unsigned flags) { return flags ? INVALID : 0; }
int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "invalid"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal ? INVALID : 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Tesla V100-PCIE-32GB", size); return device != 7; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 1, 16); return device != 7; }
int cuDeviceGetPCIBusId(char *text, int size, int device) { strncpy(text, "FFFF:FF:00.0", size); return device != 7; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? major : attribute == 76 ? minor : attribute == 16 ? 4 : attribute == 38 ? 60000 : 96 << 10;
  return device != 7;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &now; return device != 7; }
int cuCtxSetCurrent(void *context) { return context != &now; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = 1u << 30, *total = (size_t)1 << 35; return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t size) {
  for (int i = 0; i < BLOCKS; ++i) {
    if (blocks[i].begin) continue;
    char *begin = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return OUT_OF_MEMORY;
    blocks[i].begin = begin, blocks[i].size = size;
    *address = (uint64_t)begin;
    return 0;
  }
  return OUT_OF_MEMORY;
}
int cuMemFree_v2(uint64_t address) {
  for (int i = 0; i < BLOCKS; ++i) {
    if (!address || blocks[i].begin != (char *)address) continue;
    munmap(blocks[i].begin, blocks[i].size);
    blocks[i].begin = NULL;
    return 0;
  }
  return INVALID;
}
static int copy(uint64_t target, uint64_t source, size_t size) {
  if (!capturing) memcpy((void *)target, (void *)source, size);
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
  return !stream || copy(target, (uint64_t)source, size);
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
  return !stream || copy((uint64_t)target, source, size);
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) { return !stream || copy(target, source, size); }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t size, void *stream) {
  memset((void *)address, value, size);
  return !stream;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = &capturing; return flags != 1; }
int cuStreamSynchronize(void *stream) { return stream != &capturing; }
int cuStreamBeginCapture_v2(void *stream, int mode) {
  capturing = calloc(1, sizeof *capturing);
  return stream != &capturing || mode != 2;
}
int cuStreamEndCapture(void *stream, void **graph) {
  if (!capturing || stream != &capturing) return NOT_CAPTURING;
  *graph = capturing;
  capturing = NULL;
  return 0;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
  *executable = memcpy(malloc(sizeof(struct graph)), graph, sizeof(struct graph));
  return flags != 0;
}
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *executable) { free(executable); return 0; }
int cuGraphLaunch(const struct graph *executable, void *stream) {
  now += executable->count ? 0 : 10;  // a copy's
  for (int i = 0; i < executable->count; ++i) now += run(&executable->nodes[i], executable->count);
  return !stream;
}
int cuEventCreate(struct event **event, unsigned flags) { *event = calloc(1, sizeof **event); return flags != 0; }
int cuEventDestroy_v2(struct event *event) { free(event); return 0; }
int cuEventRecord(struct event *event, void *stream) { event->us = now; return !stream; }
int cuEventSynchronize(struct event *event) { return !event; }
int cuEventElapsedTime(float *ms, const struct event *start, const struct event *stop) {
  *ms = (float)((stop->us - start->us) / 1e3);
  return 0;
}
int cuModuleLoadData(struct module **module, const char *image) {
  *module = calloc(1, sizeof **module);
  strncpy((*module)->image, image, 63);
  return 0;
}
int cuModuleUnload(struct module *module) { return !module; }
int cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
  *function = calloc(1, sizeof **function);
  **function = (struct function){module, "", 0, 48 << 10};
  strncpy((*function)->name, name, 63);
  for (int i = 0; i < entry_count; ++i)
    if (!strcmp(entries[i].name, name)) (*function)->arguments = entries[i].arguments;
  return 0;
}
int cuFuncSetAttribute(struct function *function, int attribute, int value) {
  function->allowed = value;
  return attribute != 8 || value > 96 << 10;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, struct function *function, int threads, size_t shared) {
  *count = 2;
  return !function || threads > 1024 || shared > 96 << 10;
}
int cuLaunchKernel(struct function *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  if (!x || !y || !z || !block_x || block_x > 1024 || shared > (unsigned)function->allowed || extra || !stream) return INVALID;
  struct record record = {"", "", {x, y, z}, {block_x, block_y, block_z}, shared, {0}};
  strcpy(record.image, function->module->image);
  strcpy(record.name, function->name);
  for (int i = 0; i < function->arguments; ++i) memcpy(&record.arguments[i], arguments[i], 8);
  if (capturing) capturing->nodes[capturing->count++] = record;
  else now += run(&record, 1);
  return 0;
}
