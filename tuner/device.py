"""Runs a plan on an NVIDIA GPU: loads Images, places guarded operands, launches, captures CUDA graphs and times them.

Reaches CUDA through CuPy's thin bindings of the driver and runtime interfaces, in which handles and addresses are plain
integers; or, with VOLTUNE_CUDA=driver, through the driver alone (tuner/cuda.py). A CUDA error may leave the process's
context unusable: run this in a `worker.Worker` and replace that after a LaunchFailed.
"""

import contextlib
import ctypes
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from tuner import cuda
from tuner.build import INSTALL, Image
from tuner.errors import InvalidConfig, LaunchFailed, MissingTool, RequestError
from tuner.nvml import Board, Clocks, Nvml
from tuner.plan import Buffer, Launch, Outputs, Plan, check_counters, resolve

Array = np.ndarray[Any, np.dtype[Any]]
Code = Literal["cubin", "ptx"]
Work = TypeVar("Work")

GUARD = 4096  # bytes either side of a buffer that kernels write
CANARY, POISON = 0xA5, 0xFF
_ALIGN = 256
# Of CUDA's cudaDeviceAttr: CuPy names only some of them. The last is the most a block may ask for.
_MAJOR, _MINOR, _SMS, _L2_BYTES, _SHARED_PER_BLOCK = 75, 76, 16, 38, 97
_DEFAULT_SHARED = 48 << 10  # dynamic shared memory a kernel may use without asking


@dataclass(frozen=True)
class GpuInfo:
    """Which GPU. capability: (major, minor); sizes in bytes; uuid and driver are empty where NVML does not tell."""

    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    shared_per_block: int
    memory_bytes: int
    uuid: str
    driver: str

    @property
    def arch(self) -> str:
        """What its own machine code is built for, e.g. "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "capability": list(self.capability)}


@dataclass(frozen=True, eq=False)
class Resident:
    """An array in GPU memory, freed with the last reference to it. It can stand for its array among operands."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Operands = Mapping[str, Array | Resident | int | None]


@dataclass(frozen=True, eq=False)
class Step:
    """A plan's operands at one token count, in place on the GPU: any config's kernels of that plan can run on it."""

    tokens: int
    addresses: Mapping[str, int]  # of present buffers; an absent one is a null pointer
    scalars: Mapping[str, int]
    arena: Resident  # everything kernels write, canaries between
    spans: Mapping[str, tuple[int, Buffer]]  # offset in the arena
    keeps: tuple[Resident, ...]

    def over(self, weights: Mapping[str, Resident]) -> "Step":
        """The same step with other weights."""
        addresses = {**self.addresses, **{name: held.address for name, held in weights.items()}}
        return replace(self, addresses=addresses, keeps=(*self.keeps, *weights.values()))


@dataclass(frozen=True, eq=False)
class Kernels:
    """A plan's loaded kernels by stage, unloaded with the last reference: the driver's function handles, and how many
    CTAs of each the GPU holds at once."""

    functions: Mapping[str, int]
    resident: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Call:
    """Some stages of a plan (all by default) on a step."""

    plan: Plan
    kernels: Kernels
    step: Step
    stages: tuple[str, ...] = ()

    @property
    def launches(self) -> Iterator[Launch]:
        return (launch for launch in self.plan.launches if not self.stages or launch.stage in self.stages)


def available() -> tuple[bool, str]:
    """Whether a GPU can be used here, and if not, why."""
    try:
        _, runtime = _bindings()
        count = runtime.getDeviceCount()
    except MissingTool as error:
        return False, str(error)
    except RuntimeError as error:  # CUDARuntimeError is one; without a driver its text speaks of an old driver
        return False, f"no GPU: the NVIDIA driver is missing or older than CuPy's CUDA ({error})"
    return (True, "") if count else (False, "no GPU: the NVIDIA driver is there and sees none")


class Gpu:
    """One GPU, used by this process alone and through one stream. Raises MissingTool where there is none.

    Any method may raise LaunchFailed with CUDA's own text.
    """

    def __init__(self, ordinal: int = 0) -> None:
        works, reason = available()
        if not works:
            raise MissingTool(reason)
        self._driver, self._runtime = _bindings()
        self._errors = (self._driver.CUDADriverError, self._runtime.CUDARuntimeError)
        with self._faults("opening the GPU"):
            count = self._runtime.getDeviceCount()
            if not 0 <= ordinal < count:
                raise RequestError(f"GPU {ordinal}: expected 0 to {count - 1}")
            self._runtime.setDevice(ordinal)
            self._runtime.free(0)  # makes the device's primary context, which the driver's calls need
            self._stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
            self._nvml = Nvml(self._runtime.deviceGetPCIBusId(ordinal))
            self.info = self._describe(ordinal)

    def _describe(self, ordinal: int) -> GpuInfo:
        properties = self._runtime.getDeviceProperties(ordinal)

        def attribute(number: int) -> int:
            return int(self._runtime.deviceGetAttribute(number, ordinal))

        identity = properties.get("uuid", b"")
        return GpuInfo(
            name=properties["name"].decode(),
            capability=(attribute(_MAJOR), attribute(_MINOR)),
            sms=attribute(_SMS),
            l2_bytes=attribute(_L2_BYTES),
            shared_per_block=attribute(_SHARED_PER_BLOCK),
            memory_bytes=int(self._runtime.memGetInfo()[1]),
            uuid=self._nvml.uuid or (f"GPU-{uuid.UUID(bytes=bytes(identity))}" if len(identity) == 16 else ""),
            driver=self._nvml.driver,
        )

    def clocks(self) -> Clocks:
        """The clocks right now; read it while or just after the GPU worked, since it slows down when idle."""
        return self._nvml.clocks()

    def board(self) -> Board:
        """Power, temperature and settings right now."""
        return self._nvml.board()

    def free_bytes(self) -> int:
        """GPU memory that is not taken."""
        with self._faults("asking for free memory"):
            return int(self._runtime.memGetInfo()[0])

    # Memory

    def allocate(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Resident:
        """Uninitialised GPU memory, aligned to 256 bytes."""
        size = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        with self._faults(f"allocating {size} bytes"):
            address = self._runtime.malloc(size)
        held = Resident(address, dtype, shape)
        weakref.finalize(held, self._release, self._runtime.free, address).atexit = False  # the process's end frees all
        return held

    def _release(self, release: Callable[[int], None], *handles: int) -> None:
        with contextlib.suppress(*self._errors):  # after a fault nothing can be freed, and the process ends
            for handle in handles:
                release(handle)

    def upload(self, array: Array) -> Resident:
        """A copy of array in GPU memory."""
        held = self.allocate(array.dtype, array.shape)
        self._write(held.address, array)
        return held

    def copy(self, source: Resident) -> Resident:
        """Another copy on the GPU, at another address."""
        held = self.allocate(source.dtype, source.shape)
        with self._faults("copying on the GPU"):
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(held.address, source.address, source.nbytes, kind, self._stream)
        self.synchronize()
        return held

    def _write(self, address: int, array: Array) -> None:
        if not array.nbytes:
            return
        array = np.ascontiguousarray(array)
        with self._faults("copying to the GPU"):
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, kind, self._stream)
        self.synchronize()

    def download(self, source: Resident) -> Array:
        """The array's present content, after all work before it."""
        array = np.empty(source.shape, source.dtype)
        with self._faults("copying from the GPU"):
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(array.ctypes.data, source.address, source.nbytes, kind, self._stream)
        self.synchronize()
        return array

    def synchronize(self) -> None:
        """Waits for all work; a fault in a kernel shows here at the latest."""
        with self._faults("running"):
            self._runtime.streamSynchronize(self._stream)

    # Kernels

    def load(self, plan: Plan, images: Mapping[str, Image], code: Code) -> Kernels:
        """The kernels of a plan, ready for every token count of its contract.

        code: "cubin", for exactly the GPU an Image was built for; "ptx", which the driver compiles for this GPU (about
        a second a kernel the first time). Raises RequestError for a cubin of another GPU, and InvalidConfig when a
        kernel needs more shared memory than there is.
        """
        functions: dict[str, int] = {}
        resident: dict[str, int] = {}
        modules = []
        for launch in plan.launches:
            image, shared = images[launch.stage], launch.shared.at(plan.contract.max_tokens)
            if code == "cubin" and image.arch != self.info.arch:
                raise RequestError(
                    f"{image.kernel} is {image.arch} code, {self.info.name} runs {self.info.arch}: use ptx"
                )
            if shared > self.info.shared_per_block:
                raise InvalidConfig(
                    f"{launch.kernel} needs {shared} bytes of shared memory; {self.info.name} has "
                    f"{self.info.shared_per_block} a block"
                )
            with self._faults(f"loading {launch.kernel} as {code}"):
                # PTX is a C string to the driver.
                module = self._driver.moduleLoadData(image.cubin if code == "cubin" else image.ptx + b"\0")
                modules.append(module)
                function = functions[launch.stage] = self._driver.moduleGetFunction(module, launch.kernel)
                if shared > _DEFAULT_SHARED:
                    limit = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    self._driver.funcSetAttribute(function, limit, shared)
                held = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(function, launch.block, shared)
                resident[launch.stage] = self.info.sms * int(held)
        kernels = Kernels(functions, resident)
        weakref.finalize(kernels, self._release, self._driver.moduleUnload, *modules).atexit = False
        return kernels

    def step(self, plan: Plan, operands: Operands, tokens: int) -> Step:
        """Places operands, poisoned workspace and outputs, and zeroed counters. Raises RequestError like `resolve`."""
        inputs: dict[str, Array | Resident]
        inputs, scalars = resolve(plan, operands, tokens)
        held = {name: given if isinstance(given, Resident) else self.upload(given) for name, given in inputs.items()}
        spans: dict[str, tuple[int, Buffer]] = {}
        end = 0
        for buffer in plan.buffers:
            if buffer.role != "input":
                start = -(-(end + GUARD) // _ALIGN) * _ALIGN
                spans[buffer.name] = start, buffer
                end = start + buffer.nbytes(tokens)
        arena = self.allocate(np.dtype(np.uint8), (end + GUARD,))
        addresses = {name: resident.address for name, resident in held.items()}
        addresses |= {name: arena.address + start for name, (start, _) in spans.items()}
        step = Step(tokens, addresses, scalars, arena, spans, (*held.values(), arena))
        self.poison(step)
        return step

    def poison(self, step: Step) -> None:
        """Fills what kernels write with 0xFF, counters with zeros, and what lies between with canaries."""
        with self._faults("poisoning"):
            self._runtime.memsetAsync(step.arena.address, CANARY, step.arena.nbytes, self._stream)
            for start, buffer in step.spans.values():
                size, value = buffer.nbytes(step.tokens), 0 if buffer.role == "counters" else POISON
                if size:
                    self._runtime.memsetAsync(step.arena.address + start, value, size, self._stream)

    def launch(self, call: Call) -> None:
        """Queues the launches of a call."""
        for launch in call.launches:
            values = [
                ctypes.c_int32(call.step.scalars[name])
                if name in call.step.scalars
                else ctypes.c_uint64(call.step.addresses.get(name, 0))
                for name in launch.arguments
            ]  # which must live until launchKernel has read them
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            x, y = (size.at(call.step.tokens) for size in launch.grid)
            if launch.by_ticket:  # more would wait for a place and find no work left
                x = min(x, call.kernels.resident[launch.stage])
            shared = launch.shared.at(call.step.tokens)
            with self._faults(
                f"launching {launch.kernel} with {launch.block} threads and {shared} bytes of shared memory"
            ):
                self._driver.launchKernel(
                    call.kernels.functions[launch.stage],
                    *(x, y, 1),
                    *(launch.block, 1, 1),
                    *(shared, self._stream, ctypes.addressof(pointers), 0),
                )

    def outputs(self, step: Step) -> Outputs:
        """What the step's kernels left, after any number of launches.

        Raises LaunchFailed for a write into a guard, an output never written, or a counter not left zero.
        """
        arena = self.download(step.arena)
        buffers = {}
        end = 0
        for name, (start, buffer) in step.spans.items():
            self._check_guard(arena, end, start, f"before {name}")
            end = start + buffer.nbytes(step.tokens)
            buffers[name] = arena[start:end].view(buffer.dtype).reshape(buffer.dimensions(step.tokens)).copy()
        self._check_guard(arena, end, arena.size, "after the last buffer")
        check_counters((buffer for _, buffer in step.spans.values()), buffers)
        for name, (_, buffer) in step.spans.items():
            if buffer.role == "output":
                bits = buffers[name].view(f"u{buffers[name].itemsize}")
                unwritten = np.argwhere(bits == np.iinfo(bits.dtype).max)
                if len(unwritten):
                    first = [int(index) for index in unwritten[0]]
                    raise LaunchFailed(f"{len(unwritten)} elements of {name} were never written, first {first}")
        return Outputs(buffers)

    @staticmethod
    def _check_guard(arena: Array, begin: int, end: int, where: str) -> None:
        hit = np.flatnonzero(arena[begin:end] != CANARY)
        if len(hit):
            raise LaunchFailed(f"{len(hit)} bytes of the guard {where} were overwritten, first at byte {hit[0]} of it")

    def execute(self, plan: Plan, images: Mapping[str, Image], operands: Operands, tokens: int, code: Code) -> Outputs:
        """One run of the plan; operands as in tuner.plan, arrays here or Resident. Raises what its parts do."""
        step = self.step(plan, operands, tokens)
        self.launch(Call(plan, self.load(plan, images, code), step))
        return self.outputs(step)

    def capture(self, calls: Sequence[Call]) -> "Replay":
        """The calls, in order, as one CUDA graph.

        Each kernel must have run once: the driver loads its code at the first launch, which fails in a capture.
        """
        return self._captured(calls, self.launch)

    def capture_copy(self, target: Resident, source: Resident) -> "Replay":
        """A copy on the GPU as a CUDA graph."""

        def queue(pair: tuple[Resident, Resident]) -> None:
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(pair[0].address, pair[1].address, pair[1].nbytes, kind, self._stream)

        return self._captured([(target, source)], queue)

    def _captured(self, work: Sequence[Work], queue: Callable[[Work], None]) -> "Replay":
        with self._faults("capturing a graph"):
            self._runtime.streamBeginCapture(self._stream, self._runtime.streamCaptureModeRelaxed)
            for one in work:
                queue(one)
            graph = self._runtime.streamEndCapture(self._stream)
            executable = self._runtime.graphInstantiate(graph)
            self._runtime.graphDestroy(graph)
        return Replay(self, executable, work)

    @contextlib.contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LaunchFailed(f"{doing}: {error}") from error


class Replay:
    """A captured graph and the memory it uses."""

    def __init__(self, gpu: Gpu, executable: int, work: Sequence[Any]) -> None:
        self._gpu, self._executable, self._work = gpu, executable, tuple(work)
        runtime = gpu._runtime
        self._events = [runtime.eventCreateWithFlags(runtime.eventDefault) for _ in range(2)]
        weakref.finalize(self, gpu._release, runtime.graphExecDestroy, executable).atexit = False
        weakref.finalize(self, gpu._release, runtime.eventDestroy, *self._events).atexit = False

    def run(self) -> None:
        """Queues one pass."""
        with self._gpu._faults("replaying a graph"):
            self._gpu._runtime.graphLaunch(self._executable, self._gpu._stream)

    def time_us(self) -> float:
        """Microseconds of one pass through the graph, over the calls in it.

        A pass that is not timed goes before, so that the GPU is busy while the timed one is queued and the gap between
        the host's calls is not counted.
        """
        gpu, runtime, (start, stop) = self._gpu, self._gpu._runtime, self._events
        with gpu._faults("replaying a graph"):
            runtime.graphLaunch(self._executable, gpu._stream)
            runtime.eventRecord(start, gpu._stream)
            runtime.graphLaunch(self._executable, gpu._stream)
            runtime.eventRecord(stop, gpu._stream)
            runtime.eventSynchronize(stop)
            return float(runtime.eventElapsedTime(start, stop)) * 1e3 / len(self._work)


def _bindings() -> tuple[Any, Any]:
    """CuPy's driver and runtime modules. Imported late: it takes a tenth of a second."""
    if os.environ.get("VOLTUNE_CUDA") == "driver":
        return cuda.bindings(), cuda.bindings()
    try:
        from cupy_backends.cuda.api import driver, runtime
    except ImportError as error:
        raise MissingTool(f"CuPy cannot be imported ({error}). Install it with: {INSTALL}") from error
    return driver, runtime
