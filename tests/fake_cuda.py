"""CUDA's driver and runtime as CuPy binds them, on host memory, with kernels that are Python functions.

Knows what a launch of a plan takes, so that a test's kernel gets its arguments by name. What it cannot show is whether
the real driver behaves so.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tuner.build import Image
from tuner.plan import SCALARS, Plan

L2_BYTES = 600_000

Kernel = Callable[[dict[str, int]], None]


class CudaError(RuntimeError):
    pass


class FakeCuda:
    """Driver and runtime in one object. Time passes by `us` a launch in a replayed graph."""

    CUDADriverError = CUDARuntimeError = CudaError
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    streamNonBlocking, streamCaptureModeRelaxed, eventDefault = 1, 2, 0
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self, plan: Plan, kernels: Mapping[str, Kernel], capability: tuple[int, int] = (7, 0)) -> None:
        self.plan, self.kernels = plan, kernels
        # cudaDeviceAttr: compute capability, multiprocessors, L2, shared memory that a block may ask for
        self.attributes = {75: capability[0], 76: capability[1], 16: 80, 38: L2_BYTES, 97: 96 << 10}
        self.free_memory = 1 << 40
        self.memory: dict[int, Any] = {}
        self.modules: dict[int, bytes] = {}
        self.functions: dict[int, tuple[int, str]] = {}
        self.dynamic_shared: dict[str, int] = {}
        self.blocks_per_sm: Callable[[str, int, int], int] = lambda kernel, threads, shared: 8
        self.launches: list[dict[str, Any]] = []
        self.graphs: dict[int, list[dict[str, Any]]] = {}
        self._instantiated: dict[int, list[dict[str, Any]]] = {}
        self.captured: list[list[dict[str, Any]]] = []  # every graph there ever was
        self.replayed: list[int] = []
        self.fails_at_synchronize = ""
        self.us: Callable[[dict[str, Any]], float] = lambda launch: 10.0
        self._capturing: list[dict[str, Any]] | None = None
        self._now_us = 0.0
        self._events: dict[int, float] = {}
        self._handles = 100

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    # Runtime

    def getDeviceCount(self) -> int:
        return 1

    def setDevice(self, ordinal: int) -> None:
        pass

    def deviceGetPCIBusId(self, ordinal: int) -> str:
        return "0000:00:00.0"

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        return {"name": b"Fake V100", "uuid": bytes(range(16))}

    def deviceGetAttribute(self, attribute: int, ordinal: int) -> int:
        return self.attributes[attribute]

    def memGetInfo(self) -> tuple[int, int]:
        return self.free_memory, 1 << 40

    def malloc(self, size: int) -> int:
        block = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return address

    def free(self, address: int) -> None:
        if address:
            del self.memory[address]

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        if self._capturing is not None:
            self._capturing.append({"kernel": "memcpy", "arguments": {}, "sizes": (size,), "image": b""})
            return
        ctypes.memmove(target, source, size)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        ctypes.memset(address, value, size)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self.handle()

    def streamSynchronize(self, stream: int) -> None:
        if self.fails_at_synchronize:
            raise CudaError(self.fails_at_synchronize)

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self._capturing = []

    def streamEndCapture(self, stream: int) -> int:
        graph = self.handle()
        assert self._capturing is not None
        self.captured.append(self._capturing)
        self.graphs[graph], self._capturing = self._capturing, None
        return graph

    def graphInstantiate(self, graph: int) -> int:
        executable = self.handle()
        self.graphs[executable] = self._instantiated[executable] = self.graphs[graph]
        return executable

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    graphExecDestroy = graphDestroy

    def graph_of(self, executable: int) -> list[dict[str, Any]]:
        """The launches of a graph that may be gone by now."""
        return self._instantiated[executable]

    def graphLaunch(self, executable: int, stream: int) -> None:
        self.replayed.append(executable)
        self._now_us += sum(self.us(launch) for launch in self.graphs[executable])

    def eventCreateWithFlags(self, flags: int) -> int:
        return self.handle()

    def eventDestroy(self, event: int) -> None:
        self._events.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        self._events[event] = self._now_us

    def eventSynchronize(self, event: int) -> None:
        pass

    def eventElapsedTime(self, start: int, stop: int) -> float:
        return (self._events[stop] - self._events[start]) / 1e3

    # Driver

    def moduleLoadData(self, image: bytes) -> int:
        module = self.handle()
        self.modules[module] = image
        return module

    def moduleUnload(self, module: int) -> None:
        del self.modules[module]

    def moduleGetFunction(self, module: int, name: str) -> int:
        function = self.handle()
        self.functions[function] = module, name
        return function

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.dynamic_shared[self.functions[function][1]] = value

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        return self.blocks_per_sm(self.functions[function][1], threads, shared)

    def launchKernel(self, function: int, *given: int) -> None:
        module, name = self.functions[function]
        *sizes, _, pointers, extra = given
        assert extra == 0
        taken = next(launch for launch in self.plan.launches if launch.kernel == name).arguments
        addresses = (ctypes.c_void_p * len(taken)).from_address(pointers)
        arguments = {
            operand: (ctypes.c_int32 if operand in SCALARS else ctypes.c_uint64).from_address(address).value
            for operand, address in zip(taken, addresses, strict=True)
        }
        image = self.modules[module]
        launch = {"kernel": name, "arguments": arguments, "sizes": tuple(sizes), "image": image}
        if self._capturing is not None:
            self._capturing.append(launch)
            return
        self.launches.append(launch)
        if name in self.kernels:
            self.kernels[name](arguments)


def image(kernel: str, arch: str = "sm_70", cubin: bytes = b"cubin", digest: str = "0") -> Image:
    return Image(kernel, arch, cubin, b"ptx", 32, 0, 0, 0, (), "NVRTC 12.9.86", digest)


def images(plan: Plan, **fields: Any) -> dict[str, Image]:
    return {launch.stage: image(launch.kernel, **fields) for launch in plan.launches}


def at(address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array in fake GPU memory, in place."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)
