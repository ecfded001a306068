// The ops of this folder: registers them with torch, checks a call's tensors, and launches the kernel of its token count.
//
// What the ops are (schemas, operands, arguments, kernels, grids) is data, in tables.h. This file is the same for every
// contract. A call allocates nothing, waits for nothing and reads no environment; it raises before it has launched anything, or
// not at all.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "tables.h"
#include "torch_shim.h"

#define EXPORT __attribute__((visibility("default")))

// The tests build this file for CPU tensors, against a driver of their own.
#ifndef VOLTUNE_DEVICE_TYPE
#define VOLTUNE_DEVICE_TYPE aoti_torch_device_type_cuda
#define VOLTUNE_DEVICE_NAME "a CUDA tensor"
#endif

static const char *const type_names[] = {"float16", "float32", "int32", "int64", "uint8"};
static const int type_sizes[] = {2, 4, 4, 8, 1};
enum { TYPES = sizeof type_sizes / sizeof *type_sizes };

// A tensor as a call gives it.
struct view {
  bool present;
  char *data;
  int64_t dims;
  const int64_t *sizes, *strides;
  int64_t bytes;
  int32_t dtype, place, index;
  int type;  // of type_names, -1: none of them
};

static int type_of(int32_t dtype) {
  const int32_t known[TYPES] = {aoti_torch_dtype_float16(), aoti_torch_dtype_float32(), aoti_torch_dtype_int32(),
                                aoti_torch_dtype_int64(), aoti_torch_dtype_uint8()};
  for (int i = 0; i < TYPES; ++i)
    if (known[i] == dtype) return i;
  return -1;
}

static bool look(AtenTensorHandle tensor, struct view *view) {
  void *data = NULL;
  int64_t *sizes = NULL, *strides = NULL;
  const bool failed = aoti_torch_get_data_ptr(tensor, &data) || aoti_torch_get_dim(tensor, &view->dims) ||
                      aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides) ||
                      aoti_torch_get_dtype(tensor, &view->dtype) || aoti_torch_get_device_type(tensor, &view->place) ||
                      aoti_torch_get_device_index(tensor, &view->index);
  if (failed) return false;
  view->present = true;
  view->data = data;
  view->sizes = sizes;
  view->strides = strides;
  view->type = type_of(view->dtype);
  view->bytes = view->type < 0 ? 0 : type_sizes[view->type];
  for (int64_t i = 0; i < view->dims; ++i) view->bytes *= sizes[i];
  if (view->index < 0) view->index = 0;
  return true;
}

// ---- texts ---------------------------------------------------------------------------------------------------------
// Appends to `text`, at most to its end.
__attribute__((format(printf, 2, 3))) static void say(char *text, const char *format, ...) {
  const size_t length = strlen(text);
  va_list values;
  va_start(values, format);
  vsnprintf(text + length, TEXT - length, format, values);
  va_end(values);
}

static void say_view(char *text, const struct view *view) {
  say(text, "%s [", view->type < 0 ? "of another dtype" : type_names[view->type]);
  for (int64_t i = 0; i < view->dims; ++i) say(text, "%s%lld", i ? ", " : "", (long long)view->sizes[i]);
  say(text, "]");
}

static void say_expected(char *text, const struct operand *operand, int64_t tokens) {
  bool first = true;
  say(text, ": expected ");
  for (int i = 0; i < TYPES; ++i) {
    if (!(operand->types >> i & 1)) continue;
    say(text, "%s%s", first ? "" : " or ", type_names[i]);
    first = false;
  }
  say(text, " [");
  for (int i = 0; i < operand->dims; ++i) {
    const struct size *size = &operand->shape[i];
    if (size->constant == ANY) say(text, "1 or more");
    else say(text, "%s%lld", i ? ", " : "", (long long)(size->constant + size->per_token * tokens));
  }
  say(text, "]");
}

// ---- checks --------------------------------------------------------------------------------------------------------
// The step's tokens, from the first operand whose size grows with them; 0 where it has no such number of rows.
static int64_t tokens_of(const struct op *op, const struct view *views) {
  for (int i = 0; i < op->operand_count; ++i) {
    const struct size *size = &op->operands[i].shape[0];
    if (size->per_token == 0) continue;
    if (views[i].dims != op->operands[i].dims) return 0;
    const int64_t rows = views[i].sizes[0] - size->constant;
    return rows > 0 && rows % size->per_token == 0 ? rows / size->per_token : 0;
  }
  return 0;
}

static bool fits(const struct operand *operand, const struct view *view, int64_t tokens) {
  if (view->type < 0 || !(operand->types >> view->type & 1) || view->dims != operand->dims) return false;
  for (int i = 0; i < operand->dims; ++i) {
    const struct size *size = &operand->shape[i];
    const bool good = size->constant == ANY ? view->sizes[i] > 0
                                            : view->sizes[i] == size->constant + size->per_token * tokens;
    if (!good) return false;
  }
  return true;
}

static bool contiguous(const struct view *view) {
  int64_t stride = 1;
  for (int64_t i = view->dims - 1; i >= 0; --i) {
    if (view->sizes[i] != 1 && view->strides[i] != stride) return false;
    stride *= view->sizes[i];
  }
  return true;
}

static bool overlap(const struct view *a, const struct view *b) {
  return a->data < b->data + b->bytes && b->data < a->data + a->bytes;
}

// Whether every operand of a call is what the op takes; if not, `text` says what is wrong.
static bool check(const struct op *op, const struct view *views, int64_t tokens, char *text) {
  const int32_t place = VOLTUNE_DEVICE_TYPE();
  for (int i = 0; i < op->operand_count; ++i) {
    const struct operand *operand = &op->operands[i];
    const struct view *view = &views[i];
    if (!view->present) continue;
    if (view->place != place) {
      say(text, "%s is on the wrong kind of device: expected " VOLTUNE_DEVICE_NAME, operand->name);
      return false;
    }
    if (view->index != views[0].index) {
      say(text, "%s is on device %d, and %s on device %d: expected one device", operand->name, view->index,
          op->operands[0].name, views[0].index);
      return false;
    }
    if (tokens < 1 || tokens > MAX_TOKENS) {
      say(text, "%s is ", op->operands[0].name);
      say_view(text, &views[0]);
      say(text, ": expected the rows of 1 to %d tokens; admits() tells beforehand", MAX_TOKENS);
      return false;
    }
    if (!fits(operand, view, tokens)) {
      say(text, "%s is ", operand->name);
      say_view(text, view);
      say_expected(text, operand, tokens);
      return false;
    }
    if (!contiguous(view)) {
      say(text, "%s is not contiguous: pass %s.contiguous()", operand->name, operand->name);
      return false;
    }
    const int item = type_sizes[view->type], alignment = item > operand->alignment ? item : operand->alignment;
    if ((uintptr_t)view->data % alignment) {
      say(text, "%s begins at %p: expected an address that %d divides", operand->name, (void *)view->data, alignment);
      return false;
    }
  }
  for (int i = 0; i < op->operand_count; ++i) {
    if (!op->operands[i].written) continue;
    for (int j = 0; j < op->operand_count; ++j) {
      if (i == j || !overlap(&views[i], &views[j])) continue;
      say(text, "%s shares memory with %s: it is written, and needs its own", op->operands[i].name, op->operands[j].name);
      return false;
    }
  }
  return true;
}

// ---- a call --------------------------------------------------------------------------------------------------------
static bool call(const struct op *op, const struct view *views, char *text) {
  const int64_t tokens = tokens_of(op, views);
  if (!check(op, views, tokens, text)) return false;
  const int device = views[0].index;
  const struct level *level = &op->levels[level_of[tokens]];
  const unsigned resident = device < DEVICES ? backend_resident(device, level->kernel) : 0;
  if (!resident) {
    say(text, "device %d is not prepared: call bind() or prepare() once at load, outside any capture", device);
    return false;
  }
  void *stream = NULL;
  if (!aoti_torch_get_current_cuda_stream) {
    say(text, "this torch gives no CUDA stream: install one that is built with CUDA");
    return false;
  }
  if (aoti_torch_get_current_cuda_stream(device, &stream)) {
    say(text, "torch has no current stream of device %d, and has said why on stderr", device);
    return false;
  }
  uint64_t values[ARGUMENTS];  // as wide as a pointer each: the driver reads as much of one as its kernel takes
  void *arguments[ARGUMENTS];
  for (int i = 0; i < op->argument_count; ++i) {
    const struct argument *argument = &op->arguments[i];
    const struct view *view = &views[argument->operand];
    switch (argument->source) {
      case POINTER: values[i] = view->present ? (uint64_t)(uintptr_t)(view->data + argument->offset) : 0; break;
      case ABSENT: values[i] = 0; break;
      case TOKENS: values[i] = (uint64_t)tokens; break;
      case ITEM_BYTES: values[i] = (uint64_t)type_sizes[view->type]; break;
      case LENGTH: values[i] = view->present ? (uint64_t)view->sizes[0] : 0; break;
    }
    arguments[i] = &values[i];
  }
  const uint64_t x = (uint64_t)(level->grid[0].constant + level->grid[0].per_token * tokens);
  const uint64_t y = (uint64_t)(level->grid[1].constant + level->grid[1].per_token * tokens);
  const unsigned columns = kernels[level->kernel].by_ticket && x > resident ? resident : (unsigned)x;
  return backend_launch(device, level->kernel, columns, (unsigned)y, stream, arguments, text);
}

// Takes over the stack's handles, and frees every one before it raises.
static void run(const struct op *op, StableIValue *stack) {
  AtenTensorHandle handles[OPERANDS] = {NULL};
  struct view views[OPERANDS];
  char text[TEXT] = "";
  memset(views, 0, sizeof views);
  for (int i = 0; i < op->operand_count; ++i) {
    if (!op->operands[i].optional) {
      handles[i] = (AtenTensorHandle)(uintptr_t)stack[i];
      continue;
    }
    StableIValue *held = (StableIValue *)(uintptr_t)stack[i];
    if (!held) continue;
    handles[i] = (AtenTensorHandle)(uintptr_t)*held;
    cxx_delete(held);
  }
  bool good = true;
  for (int i = 0; i < op->operand_count && good; ++i) {
    good = !handles[i] || look(handles[i], &views[i]);
    if (!good) say(text, "%s cannot be looked at", op->operands[i].name);
  }
  good = good && call(op, views, text);
  for (int i = 0; i < op->operand_count; ++i)
    if (handles[i]) aoti_torch_delete_tensor_object(handles[i]);
  if (!good) {
    char whole[TEXT + 64];
    snprintf(whole, sizeof whole, NAMESPACE "::%s: %s", op->name, text);
    aoti_torch_check(false, op->name, "voltune", 0, whole);
  }
}

#define BOXED(index, name) \
  static void run_##name(StableIValue *stack, uint64_t arguments, uint64_t outputs) { \
    (void)arguments, (void)outputs; \
    run(&ops[index], stack); \
  }
EACH_OP(BOXED)

#define ENTRY(index, name) run_##name,
static const BoxedKernel boxed[] = {EACH_OP(ENTRY)};

// ---- for Python, by ctypes -----------------------------------------------------------------------------------------
// Defines the ops; once a process. 0: defined now, 1: by this library before, 2: not, and torch has said why on stderr, as where
// another file has defined the same namespace.
EXPORT int voltune_register(void) {
  static int done = 0;
  static const char *const keys[] = {"CPU", "CUDA"};  // that a CPU tensor is refused in words
  if (done) return 1;
  TorchLibraryHandle made = NULL;  // never deleted: that would take the ops away
  if (aoti_torch_library_init_def(NAMESPACE, "voltune", 0, &made)) return 2;
  for (int i = 0; i < OPS; ++i)
    if (aoti_torch_library_def(made, ops[i].schema)) return 2;
  for (int k = 0; k < 2; ++k) {
    if (aoti_torch_library_init_impl(NAMESPACE, keys[k], "voltune", 0, &made)) return 2;
    for (int i = 0; i < OPS; ++i)
      if (aoti_torch_library_impl(made, ops[i].name, boxed[i])) return 2;
  }
  done = 1;
  return 0;
}

// Makes a GPU ready, as backend_prepare. 0: it is; else text, of at least TEXT bytes, has the reason.
EXPORT int voltune_prepare(int device, const char *const *ptx, char *text) {
  text[0] = '\0';
  if (device >= 0 && device < DEVICES) return !backend_prepare(device, ptx, text);
  say(text, "device %d: expected 0 to %d", device, DEVICES - 1);
  return 1;
}

// The current stream of a GPU; -1: this torch has no CUDA.
EXPORT intptr_t voltune_stream(int device) {
  void *stream = NULL;
  if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream)) return -1;
  return (intptr_t)stream;
}

// Whether a stream of a GPU that is ready is being captured.
EXPORT bool voltune_capturing(int device, intptr_t stream) { return backend_capturing(device, (void *)stream); }
