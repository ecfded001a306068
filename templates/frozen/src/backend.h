// What the op asks of whatever launches its kernels: driver.c, or an engine's own build of the kernels (launch.cu).
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TEXT = 640, DEVICES = 64 };  // bytes of a reason; ordinals of GPUs, from 0

// One kernel: its entry, threads a block, bytes of dynamic shared memory, and whether its CTAs take work by ticket, so that no
// more are started than the GPU holds at once.
struct kernel {
  const char *name;
  unsigned block, shared;
  bool by_ticket;
};

#ifdef __cplusplus
extern "C" {
#endif

// Makes a GPU ready: loads every kernel, allows its shared memory, asks how many CTAs the GPU holds. Not within a capture.
// ptx: each kernel's PTX, for a GPU that is not of compute capability 7.0; or null. False, with the reason in `text`, leaves
// nothing behind. A GPU that is ready stays so.
bool backend_prepare(int device, const char *const *ptx, char *text);

// CTAs of a kernel that a ready GPU holds at once; 0 where the GPU is not ready.
unsigned backend_resident(int device, int kernel);

// Queues one launch on a ready GPU. False, with the reason in `text`, queued nothing.
bool backend_launch(int device, int kernel, unsigned x, unsigned y, void *stream, void **arguments, char *text);

// Whether a stream of a ready GPU is being captured.
bool backend_capturing(int device, void *stream);

#ifdef __cplusplus
}
#endif
