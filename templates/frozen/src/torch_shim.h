// The part of libtorch's stable C interface that the op uses, as torch has it since 2.8. Written out here so that no torch
// need be there to build. A StableIValue is 64 bits: an integer, or an owning handle of a tensor; of an optional tensor, null
// or a pointer to one, which its receiver deletes as C++ does.
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef uint64_t StableIValue;
typedef int32_t AOTITorchError;  // 0: good
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef void (*BoxedKernel)(StableIValue *stack, uint64_t arguments, uint64_t outputs);

AOTITorchError aoti_torch_library_init_def(const char *space, const char *file, uint32_t line, TorchLibraryHandle *made);
AOTITorchError aoti_torch_library_init_impl(const char *space, const char *key, const char *file, uint32_t line,
                                            TorchLibraryHandle *made);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char *schema);
AOTITorchError aoti_torch_library_impl(TorchLibraryHandle library, const char *name, BoxedKernel kernel);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library);

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void **data);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t *dims);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t **sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t **strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t *index);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_device_type_cuda(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_uint8(void);

// Throws c10::Error, a RuntimeError in Python, with `message`.
void aoti_torch_check(bool good, const char *function, const char *file, uint32_t line, const char *message);

// Not in a torch without CUDA.
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream) __attribute__((weak));

void cxx_delete(void *held) __asm__("_ZdlPv");
