// A stand-in for the NVIDIA driver, for tests without a GPU: GPUs whose memory is the CPU's, and which record launches instead of
// doing them, or hand them to a function of the test. It refuses what a driver refuses: a launch without a context, more shared
// memory than was allowed, loading code during a capture. The library under test is built with the two functions of torch at the
// end in place of torch's own, so that a CPU tensor can be on any of these GPUs and in any stream.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS = 64, RECORDS = 4096, ARGUMENTS = 32, STREAMS = 16, ENTRIES = 16, RANGES = 64 };
enum { GOOD = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_IMAGE = 200, NOT_FOUND = 500, CAPTURING = 900 };

struct record {
  int gpu, kernel;  // which of the modules of its GPU, in the order they were loaded
  unsigned grid[3], block[3], shared;
  void *stream;
  int count;
  uint64_t arguments[ARGUMENTS];
  char entry[64];
};
struct module { int gpu, kernel; };
struct function { struct module *module; const struct entry *entry; int allowed; };
struct entry { char name[64]; int arguments; };
struct graph { void *stream; int capturing, count; struct record nodes[64]; };
struct range { const char *begin, *end; int gpu; };

static struct {
  int major, minor, sms, blocks;
  char failing[64];
  int code, after;
  int modules, contexts, loaded[GPUS];
  int records;
  struct record record[RECORDS];
  int entries;
  struct entry entry[ENTRIES];
  struct graph graphs[STREAMS];
  struct range ranges[RANGES];
  void (*run)(const struct record *);
} fake = {.major = 7, .sms = 80, .blocks = 4};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int stack[16], depth;
static _Thread_local void *current;

// ---- what tests say and ask ----------------------------------------------------------------------------------------
void fake_reset(int major, int minor, int sms, int blocks) {
  fake.major = major, fake.minor = minor, fake.sms = sms, fake.blocks = blocks;
  fake.failing[0] = '\0', fake.records = 0, fake.run = NULL, current = NULL;
  memset(fake.ranges, 0, sizeof fake.ranges);
  memset(fake.graphs, 0, sizeof fake.graphs);
}
// The call of `function` that comes after `after` others of it fails with `code`.
void fake_fail(const char *function, int code, int after) {
  strncpy(fake.failing, function, sizeof fake.failing - 1);
  fake.code = code, fake.after = after;
}
void fake_entry(const char *name, int arguments) {
  struct entry *entry = &fake.entry[fake.entries++];
  strncpy(entry->name, name, sizeof entry->name - 1);
  entry->arguments = arguments;
}
void fake_run(void (*run)(const struct record *)) { fake.run = run; }
int fake_records(void) { return fake.records; }
const struct record *fake_record(int i) { return &fake.record[i]; }
int fake_modules(void) { return fake.modules; }
int fake_contexts(void) { return fake.contexts; }
int fake_depth(void) { return depth; }
void fake_stream(void *stream) { current = stream; }  // of this thread
void fake_place(const void *begin, size_t bytes, int gpu) {
  for (int i = 0; i < RANGES; ++i) {
    if (fake.ranges[i].begin) continue;
    fake.ranges[i] = (struct range){begin, (const char *)begin + bytes, gpu};
    return;
  }
  abort();
}

static struct graph *graph_of(void *stream, int make) {
  for (int i = 0; i < STREAMS; ++i)
    if (fake.graphs[i].stream == stream && (fake.graphs[i].capturing || fake.graphs[i].count)) return &fake.graphs[i];
  for (int i = 0; make && i < STREAMS; ++i)
    if (!fake.graphs[i].capturing && !fake.graphs[i].count) return &fake.graphs[i];
  return NULL;
}
void fake_capture(void *stream) {
  struct graph *graph = graph_of(stream, 1);
  *graph = (struct graph){.stream = stream, .capturing = 1};
}
int fake_end_capture(void *stream) {
  struct graph *graph = graph_of(stream, 0);
  graph->capturing = 0;
  return graph->count;
}

void fake_clear(void *stream) {
  struct graph *graph = graph_of(stream, 0);
  memset(graph, 0, sizeof *graph);
}

static void perform(const struct record *launch) {
  pthread_mutex_lock(&lock);
  if (fake.records < RECORDS) fake.record[fake.records] = *launch;
  ++fake.records;
  pthread_mutex_unlock(&lock);
  if (fake.run) fake.run(launch);
}
void fake_replay(void *stream) {
  const struct graph *graph = graph_of(stream, 0);
  for (int i = 0; i < graph->count; ++i) perform(&graph->nodes[i]);
}

// ---- the driver ----------------------------------------------------------------------------------------------------
static int failing(const char *function) {
  return strcmp(fake.failing, function) == 0 && fake.after-- == 0 ? fake.code : GOOD;
}
#define MAY_FAIL \
  const int fails = failing(__func__); \
  if (fails) return fails

int cuInit(unsigned flags) { MAY_FAIL; return flags ? INVALID_VALUE : GOOD; }
int cuGetErrorString(int error, const char **text) {
  *text = error == CAPTURING ? "operation not permitted when stream is capturing" : "a failure the test asked for";
  return GOOD;
}
int cuDeviceGet(int *device, int ordinal) { MAY_FAIL; *device = ordinal; return ordinal < GPUS ? GOOD : 101; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "fake GPU", (size_t)size); return GOOD; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  MAY_FAIL;
  (void)device;
  *value = attribute == 75 ? fake.major : attribute == 76 ? fake.minor : attribute == 16 ? fake.sms : -1;
  return *value < 0 ? INVALID_VALUE : GOOD;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  MAY_FAIL;
  *context = (void *)(uintptr_t)(device + 1);
  ++fake.contexts;
  return GOOD;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; --fake.contexts; return GOOD; }
int cuCtxPushCurrent_v2(void *context) { MAY_FAIL; stack[depth++] = (int)(uintptr_t)context - 1; return GOOD; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)(uintptr_t)(stack[--depth] + 1); return GOOD; }

static int refused(void) {  // anything but a launch, in a capture
  for (int i = 0; i < STREAMS; ++i)
    if (fake.graphs[i].capturing) return CAPTURING;
  return depth ? GOOD : INVALID_CONTEXT;
}
int cuModuleLoadData(struct module **module, const void *code) {
  MAY_FAIL;
  if (refused()) return refused();
  const int is_code = memcmp(code, "\177ELF", 4) == 0 && fake.major == 7 && fake.minor == 0;
  if (!is_code && !strstr(code, ".target sm_70")) return INVALID_IMAGE;
  const int gpu = stack[depth - 1];
  *module = malloc(sizeof **module);
  **module = (struct module){gpu, fake.loaded[gpu]++};
  ++fake.modules;
  return GOOD;
}
int cuModuleUnload(struct module *module) {
  --fake.modules, --fake.loaded[module->gpu];
  free(module);
  return GOOD;
}
int cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
  MAY_FAIL;
  for (int i = 0; i < fake.entries; ++i) {
    if (strcmp(fake.entry[i].name, name)) continue;
    *function = malloc(sizeof **function);  // as the driver's, it lives with its module: for the rest of the process
    **function = (struct function){module, &fake.entry[i], 48 << 10};
    return GOOD;
  }
  return NOT_FOUND;
}
int cuFuncSetAttribute(struct function *function, int attribute, int value) {
  MAY_FAIL;
  if (refused()) return refused();
  if (attribute != 8 || value > 96 << 10) return INVALID_VALUE;
  function->allowed = value;
  return GOOD;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, struct function *function, int threads, size_t shared) {
  MAY_FAIL;
  (void)function, (void)threads, (void)shared;
  *blocks = fake.blocks;
  return GOOD;
}
int cuStreamIsCapturing(void *stream, int *status) {
  const struct graph *graph = graph_of(stream, 0);
  *status = graph && graph->capturing;
  return depth ? GOOD : INVALID_CONTEXT;
}
int cuLaunchKernel(struct function *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
  MAY_FAIL;
  if (!depth || stack[depth - 1] != function->module->gpu) return INVALID_CONTEXT;
  if (!x || !y || !z || !block_x || block_x > 1024 || shared > (unsigned)function->allowed || extra) return INVALID_VALUE;
  struct record launch = {function->module->gpu, function->module->kernel, {x, y, z}, {block_x, block_y, block_z}, shared, stream,
                          function->entry->arguments, {0}, ""};
  for (int i = 0; i < launch.count; ++i) memcpy(&launch.arguments[i], arguments[i], sizeof launch.arguments[i]);
  strcpy(launch.entry, function->entry->name);
  struct graph *graph = graph_of(stream, 0);
  if (graph && graph->capturing) graph->nodes[graph->count++] = launch;
  else perform(&launch);
  return GOOD;
}

// ---- torch ---------------------------------------------------------------------------------------------------------
int32_t aoti_torch_get_data_ptr(void *tensor, void **data);

int32_t fake_current_stream(int32_t gpu, void **stream) { (void)gpu; *stream = current; return GOOD; }
int32_t fake_device_index(void *tensor, int32_t *index) {
  void *data = NULL;
  aoti_torch_get_data_ptr(tensor, &data);
  *index = 0;
  for (int i = 0; i < RANGES; ++i)
    if ((char *)data >= fake.ranges[i].begin && (char *)data < fake.ranges[i].end) *index = fake.ranges[i].gpu;
  return GOOD;
}
