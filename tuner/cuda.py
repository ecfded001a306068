"""NVIDIA's driver by ctypes, under the names and with the plain integers of CuPy's bindings.

For a machine that has the driver and no CuPy: it is both of the modules that tuner/device.py wants, and holds what that
calls. Names, constants and signatures: CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api.
"""

import ctypes
import functools
from typing import Any

from tuner.errors import MissingTool

_LIBRARY = "libcuda.so.1"


class CudaError(RuntimeError):
    """The driver's own text."""


class Cuda:
    """The driver with one GPU's primary context. Handles and addresses are integers. Any method may raise CudaError."""

    CUDADriverError = CUDARuntimeError = CudaError
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    streamNonBlocking, streamCaptureModeRelaxed, eventDefault = 1, 2, 0
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises MissingTool without a driver or where it cannot start."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise MissingTool(f"no GPU: {library} cannot be loaded ({error}); install the NVIDIA driver") from error
        try:
            self._call("cuInit", ctypes.c_uint(0))
        except CudaError as error:
            raise MissingTool(f"no GPU: the NVIDIA driver does not start ({error})") from error

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"the NVIDIA driver has no {name}: it is too old")
        error = function(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise CudaError(f"{(text.value or b'unknown error').decode()} ({name}, CUDA error {error})")

    def _handle(self, name: str, *arguments: Any) -> int:
        """What the function puts where its first argument points: a handle or an address."""
        found = ctypes.c_uint64()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _number(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    # What CuPy has in `runtime`

    def getDeviceCount(self) -> int:
        return self._number("cuDeviceGetCount")

    def _device(self, ordinal: int) -> ctypes.c_int:
        return ctypes.c_int(self._number("cuDeviceGet", ctypes.c_int(ordinal)))

    def setDevice(self, ordinal: int) -> None:
        context = self._handle("cuDevicePrimaryCtxRetain", self._device(ordinal))
        self._call("cuCtxSetCurrent", _pointer(context))

    def deviceGetPCIBusId(self, ordinal: int) -> str:
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), self._device(ordinal))
        return text.value.decode()

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        name, identity = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), self._device(ordinal))
        self._call("cuDeviceGetUuid", identity, self._device(ordinal))
        return {"name": name.value, "uuid": identity.raw}

    def deviceGetAttribute(self, attribute: int, ordinal: int) -> int:
        """cudaDeviceAttr has the numbers of CUdevice_attribute, as far as they go."""
        return self._number("cuDeviceGetAttribute", ctypes.c_int(attribute), self._device(ordinal))

    def memGetInfo(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def malloc(self, size: int) -> int:
        return self._handle("cuMemAlloc_v2", ctypes.c_size_t(size))

    def free(self, address: int) -> None:
        if address:  # CUDA's runtime takes 0 to make the context, which setDevice has done
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        name = {1: "cuMemcpyHtoDAsync_v2", 2: "cuMemcpyDtoHAsync_v2", 3: "cuMemcpyDtoDAsync_v2"}[kind]
        self._call(name, ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), _pointer(stream))

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        arguments = ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size), _pointer(stream)
        self._call("cuMemsetD8Async", *arguments)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._handle("cuStreamCreate", ctypes.c_uint(flags))

    def streamSynchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", _pointer(stream))

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self._call("cuStreamBeginCapture_v2", _pointer(stream), ctypes.c_int(mode))

    def streamEndCapture(self, stream: int) -> int:
        graph = ctypes.c_uint64()
        self._call("cuStreamEndCapture", _pointer(stream), ctypes.byref(graph))
        return graph.value

    def graphInstantiate(self, graph: int) -> int:
        return self._handle("cuGraphInstantiateWithFlags", _pointer(graph), ctypes.c_ulonglong(0))

    def graphDestroy(self, graph: int) -> None:
        self._call("cuGraphDestroy", _pointer(graph))

    def graphExecDestroy(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", _pointer(executable))

    def graphLaunch(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", _pointer(executable), _pointer(stream))

    def eventCreateWithFlags(self, flags: int) -> int:
        return self._handle("cuEventCreate", ctypes.c_uint(flags))

    def eventDestroy(self, event: int) -> None:
        self._call("cuEventDestroy_v2", _pointer(event))

    def eventRecord(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", _pointer(event), _pointer(stream))

    def eventSynchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", _pointer(event))

    def eventElapsedTime(self, start: int, stop: int) -> float:
        """Milliseconds."""
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(found), _pointer(start), _pointer(stop))
        return found.value

    # What CuPy has in `driver`

    def moduleLoadData(self, image: bytes) -> int:
        return self._handle("cuModuleLoadData", ctypes.c_char_p(image))

    def moduleUnload(self, module: int) -> None:
        self._call("cuModuleUnload", _pointer(module))

    def moduleGetFunction(self, module: int, name: str) -> int:
        return self._handle("cuModuleGetFunction", _pointer(module), ctypes.c_char_p(name.encode()))

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self._call("cuFuncSetAttribute", _pointer(function), ctypes.c_int(attribute), ctypes.c_int(value))

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return self._number(name, _pointer(function), ctypes.c_int(threads), ctypes.c_size_t(shared))

    def launchKernel(self, function: int, *sizes_stream_parameters: int) -> None:
        """Grid and block in x, y, z, bytes of shared memory, stream, addresses of the parameters, extra."""
        *sizes, stream, parameters, extra = sizes_stream_parameters
        rest = _pointer(stream), _pointer(parameters), _pointer(extra)
        self._call("cuLaunchKernel", _pointer(function), *map(ctypes.c_uint, sizes), *rest)


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


@functools.lru_cache(maxsize=1)
def bindings() -> Cuda:
    """The driver of this machine. Raises MissingTool."""
    return Cuda()
