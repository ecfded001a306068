"""Executes the rendered CUDA sources of a plan on the CPU: grid, block, warp and barrier semantics, compiled by g++.

`host_cuda.h` is the CUDA that a source sees, `host_runtime.cpp` the scheduler: threads are fibers, CTAs run in any
order and are spread over worker processes, each of which begins a CTA when its last one has ended: a CTA may wait only
for what others that began before it will do without it. A fault ends a worker, never the caller, and is raised as
LaunchFailed with kernel, block, thread and source line.

Memory: every operand lies between pages that may not be touched. In even orders its end, rounded up to 16 bytes, meets
the upper ones, in odd orders its start the lower ones; what is left of its pages holds 0xFF and is checked after each
launch. Inputs are read-only while kernels run; workspace and outputs start as 0xFF bytes, counters as zeros.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tuner import cache
from tuner.errors import BuildFailed, LaunchFailed, MissingTool, TrialTimeout
from tuner.plan import SCALARS, Launch, Outputs, Plan, check_counters, resolve
from tuner.render import Source

Operands = Mapping[str, np.ndarray | int | None]

_HERE = Path(__file__).parent
_SHIM = _HERE / "host_cuda.h"
_RUNTIME = _HERE / "host_runtime.cpp"
# No contraction, integers that wrap as the GPU's do, and neither aliasing nor the end of a loop taken for granted.
_FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-fwrapv", "-fno-strict-aliasing", "-fno-finite-loops"),
)
_OBJECT = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-w")
# What C++ leaves open and a GPU traps or defines otherwise. They call into host_runtime.cpp, not into libubsan.
_CHECKS = ("-fsanitize=alignment,bounds,shift-exponent", "-fno-sanitize-recover=all", "-fstack-clash-protection", "-g1")
_ALONE = ("-nostdinc", "-nostdinc++")  # a source includes nothing, as for NVRTC

_PAGE = mmap.PAGESIZE
_GUARD = 256 << 20  # address space only: an index that is wrong by a few expert strides still meets it
_POISON = 0xFF


# ---- guarded memory ------------------------------------------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


class _Mapping:
    """`nbytes` of memory that worker processes share, between guard pages; freed when the last array over it is."""

    def __init__(self, nbytes: int, flush_right: bool) -> None:
        self.nbytes = nbytes
        self.pages = -(-max(nbytes, 1) // _PAGE) * _PAGE
        private, shared = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self._base = self._map(None, self.pages + 2 * _GUARD, _PROT_NONE, private)
        weakref.finalize(self, _libc.munmap, self._base, self.pages + 2 * _GUARD).atexit = False
        self.first = self._map(self._base + _GUARD, self.pages, mmap.PROT_READ | mmap.PROT_WRITE, shared | _MAP_FIXED)
        self.address = self.first + (self.pages - -(-nbytes // 16) * 16 if flush_right else 0)
        self.__array_interface__ = {"data": (self.first, False), "shape": (self.pages,), "typestr": "|u1", "version": 3}

    @staticmethod
    def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
        found = _libc.mmap(address, nbytes, protection, flags, -1, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise MissingTool(f"no memory for a buffer of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        return int(found)

    @property
    def bytes(self) -> np.ndarray:
        """u8 [pages]: the data and what is left of its pages."""
        return np.asarray(self)

    def array(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        start = self.address - self.first
        return self.bytes[start : start + self.nbytes].view(dtype).reshape(shape)

    def freeze(self) -> None:
        if _libc.mprotect(self.first, self.pages, mmap.PROT_READ):
            raise MissingTool(f"an input cannot be made read-only: {os.strerror(ctypes.get_errno())}")
        self.__array_interface__["data"] = (self.first, True)

    def touched(self) -> int | None:
        """Where, counted from the data's start, something was written outside the data; None when nothing was."""
        start = self.address - self.first
        for lowest, part in ((0, self.bytes[:start]), (start + self.nbytes, self.bytes[start + self.nbytes :])):
            if (part != _POISON).any():
                return lowest + int(np.argmax(part != _POISON)) - start
        return None

    def offset(self, address: int) -> int | None:
        """`address` counted from the data's start; None when it is neither in the pages nor in their guards."""
        within = self._base <= address < self._base + self.pages + 2 * _GUARD
        return address - self.address if within else None


_guarded: "weakref.WeakValueDictionary[int, _Mapping]" = weakref.WeakValueDictionary()


def guard(array: np.ndarray) -> np.ndarray:
    """A read-only copy of `array` between guard pages, which `execute` uses in place instead of copying it again.

    For weights: made once, used by any number of runs, freed with the last array over it. It meets the guard pages at
    its end, and at its start as well if its size is a multiple of the page size, in every order. Raises MissingTool
    when there is no memory for it.
    """
    mapping = _fill(array, flush_right=True)
    _guarded[mapping.address] = mapping
    return mapping.array(array.dtype, array.shape)


def _fill(array: np.ndarray, flush_right: bool) -> _Mapping:
    mapping = _Mapping(array.nbytes, flush_right)
    start = mapping.address - mapping.first
    mapping.bytes[:start] = _POISON
    mapping.bytes[start + array.nbytes :] = _POISON
    mapping.array(array.dtype, array.shape)[...] = array
    mapping.freeze()
    return mapping


# ---- operands ------------------------------------------------------------------------------------------------------
class _Memory:
    """The operands of one run: a mapping by buffer, and the 64-bit slot that a kernel's argument is read from."""

    def __init__(self, plan: Plan, operands: Operands, tokens: int, flush_right: bool) -> None:
        self.tokens = tokens
        self.flush_right = flush_right
        self.mappings: dict[str, _Mapping] = {}
        self.results: dict[str, np.ndarray] = {}
        inputs, self._scalars = resolve(plan, operands, tokens)
        for name, given in inputs.items():
            self._put(name, given)
        for buffer in plan.buffers:
            if buffer.role != "input":
                mapping = self.mappings[buffer.name] = _Mapping(buffer.nbytes(tokens), flush_right)
                mapping.bytes[:] = _POISON
                result = mapping.array(np.dtype(buffer.dtype), buffer.dimensions(tokens))
                if buffer.role == "counters":
                    result[...] = 0
                self.results[buffer.name] = result

    def slot(self, name: str) -> int:
        if name in self._scalars:
            return self._scalars[name]
        mapping = self.mappings.get(name)
        return mapping.address if mapping else 0

    def _put(self, name: str, array: np.ndarray) -> None:
        mapping = _guarded.get(array.ctypes.data)
        in_place = mapping is not None and mapping.nbytes == array.nbytes and array.flags.c_contiguous
        self.mappings[name] = mapping if mapping and in_place else _fill(array, self.flush_right)

    def place(self, address: int) -> str:
        """What lies at an address, in words."""
        for name, mapping in self.mappings.items():
            offset = mapping.offset(address)
            if offset is not None:
                role = "" if name in self.results else " (an input)"
                return f"{name}{role}, byte {offset} of {mapping.nbytes}"
        if address < 1 << 20:
            return f"address {address:#x}, a null pointer: an absent operand, or shared memory in a launch without any"
        return f"address {address:#x}, which belongs to no operand"


# ---- compiling -----------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=8)
def _compiler(path: str | None) -> tuple[str, str]:
    """(g++'s path, what -march=native and the code depend on: its version and this CPU)."""
    if path is None:
        raise MissingTool("g++ was not found: the CPU executor compiles with it; install it with: apt-get install g++")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    cpu = [line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU part"))]
    return path, "\n".join([version, platform.machine(), *cpu])


def require_compiler() -> None:
    """Raises MissingTool where there is no C++ compiler to run kernels with."""
    _compiler(shutil.which("g++"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run_compiler(what: str, command: list[str], folder: str) -> None:
    plain = {**os.environ, "LC_ALL": "C"}  # a log in ASCII and in one language
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"g++ refused {what} for the CPU executor:\n{done.stderr.strip()}")


def _runtime() -> Path:
    """The scheduler's object file, from the cache."""
    compiler, machine = _compiler(shutil.which("g++"))
    flags = [*_FLAGS, *_OBJECT]

    def make(path: Path) -> None:
        _run_compiler("the runtime", [compiler, "-c", *flags, str(_RUNTIME), "-o", str(path)], str(_HERE))

    key = _digest(_RUNTIME.read_text(), _SHIM.read_text(), *flags, machine)
    return cache.get_or_make("host", key, ".o", make)


def compile(source: Source) -> Path:
    """The shared library that runs `source`'s kernel on this CPU, from the cache or by g++.

    Raises MissingTool without g++, BuildFailed with g++'s log when it refuses the source.
    """
    compiler, machine = _compiler(shutil.which("g++"))
    if not re.fullmatch(r"[A-Za-z_]\w*", source.kernel):
        raise BuildFailed(f"kernel name {source.kernel!r}: expected a C identifier")
    flags = [*_FLAGS, *_OBJECT, *_CHECKS, *_ALONE]
    text = source.text + f"\nVOLTUNE_ENTRY({source.kernel})\n"

    def make(path: Path) -> None:
        runtime = _runtime()
        with tempfile.TemporaryDirectory(prefix="voltune-") as folder:
            (Path(folder) / f"{source.kernel}.cpp").write_text(text)
            place = f"-ffile-prefix-map={folder}=."
            command = [compiler, "-c", *flags, place, "-include", str(_SHIM), f"{source.kernel}.cpp", "-o", "kernel.o"]
            _run_compiler(source.kernel, command, folder)
            command = [compiler, "-shared", "kernel.o", str(runtime), "-lm", "-o", str(path)]
            _run_compiler(source.kernel, command, folder)

    key = _digest(text, _SHIM.read_text(), _RUNTIME.read_text(), *flags, machine)
    return cache.get_or_make("host", key, ".so", make)


# ---- running -------------------------------------------------------------------------------------------------------
class _Wait(ctypes.Structure):
    _fields_ = (("op", ctypes.c_int), ("line", ctypes.c_int), ("mask", ctypes.c_uint))


class _Report(ctypes.Structure):
    """host_runtime.cpp's Report."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("claimed", "fault")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "thread", "other")),
        *((name, ctypes.c_int) for name in ("line", "write")),
        *((name, ctypes.c_uint64) for name in ("address", "pc", "arena", "arena_bytes")),
        ("detail", ctypes.c_char * 96),
        *((name, ctypes.c_uint64) for name in ("next", "finished")),
        ("waits", _Wait * 1024),
    )


class _Launch(ctypes.Structure):
    """host_runtime.cpp's Launch."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "block", "shared", "order", "workers")),
        ("slots", ctypes.c_void_p),
    )


def execute(
    plan: Plan,
    sources: Mapping[str, Source],
    operands: Operands,
    tokens: int,
    *,
    order: int = 0,
    timeout_s: float = 120.0,
) -> Outputs:
    """Runs the plan's launches on this CPU and returns its outputs and workspace, as the kernels left them.

    `sources` by stage; `operands` by name, with the dtypes and shapes of the plan's buffers at `tokens` (see
    tuner.plan), optional ones None or absent. TOKENS, ID_BYTES and MAP_SIZE follow from the others; if given, they must
    agree. `order` chooses which CTA, warp and lane runs when (0 natural, 1 reversed, others random but repeatable) and
    at which end a buffer meets its guard pages (even: its end). A right kernel gives the same bits in every order.

    Raises RequestError for operands that do not fit, MissingTool and BuildFailed from compiling, LaunchFailed for a
    fault, an access outside a buffer, a write to an input, a barrier or warp collective that not all of its threads
    reach, an element of an output left unwritten, or a counter not left zero, TrialTimeout when the launches together
    take longer than `timeout_s` seconds.
    """
    memory = _Memory(plan, operands, tokens, flush_right=order % 2 == 0)
    libraries = [compile(sources[launch.stage]) for launch in plan.launches]
    deadline = time.monotonic() + timeout_s
    for launch, library in zip(plan.launches, libraries, strict=True):
        _launch(launch, library, memory, order, deadline, timeout_s)
    check_counters(plan.buffers, memory.results)
    for buffer in plan.buffers:
        if buffer.role == "output":
            _check_written(buffer.name, memory.results[buffer.name])
    return Outputs({name: array.copy() for name, array in memory.results.items()})


def _launch(launch: Launch, path: Path, memory: _Memory, order: int, deadline: float, timeout_s: float) -> None:
    library = ctypes.CDLL(str(path), use_errno=True)
    for function, restype in (("voltune_signature", ctypes.c_char_p), ("voltune_start", ctypes.c_void_p)):
        getattr(library, function).restype = restype
    library.voltune_report.restype = ctypes.POINTER(_Report)
    wanted = "".join("i" if name in SCALARS else "p" for name in launch.arguments)
    takes = library.voltune_signature().decode()
    if takes != wanted:
        raise LaunchFailed(
            f"kernel {launch.kernel} takes {takes!r} (p: a pointer, i: an int32) where the plan passes {wanted!r}: "
            f"{', '.join(launch.arguments)}"
        )
    grid = tuple(size.at(memory.tokens) for size in launch.grid)
    if min(grid) < 1 or not 1 <= launch.block <= 1024:
        raise LaunchFailed(f"kernel {launch.kernel}: grid {grid}, {launch.block} threads; expected 1 up, and 1 to 1024")
    slots = (ctypes.c_uint64 * max(len(wanted), 1))(*(memory.slot(name) for name in launch.arguments))
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = _Launch(*grid, launch.block, launch.shared.at(memory.tokens), order, workers, ctypes.addressof(slots))
    run = library.voltune_start(ctypes.byref(chosen))
    if not run:
        raise MissingTool(f"no worker process for kernel {launch.kernel}: {os.strerror(ctypes.get_errno())}")
    run = ctypes.c_void_p(run)
    try:
        report = library.voltune_report(run).contents
        late = False
        while not library.voltune_wait(run, 50):
            late = time.monotonic() > deadline
            if late or report.fault:
                library.voltune_stop(run)
                break
        told = _told(launch, path, memory, report) if report.fault else f"kernel {launch.kernel}: had not ended"
        if report.fault and _FAULTS[report.fault] != "timeout":
            raise LaunchFailed(told)
        if late:
            ended = f"{report.finished} of {grid[0] * grid[1]} CTAs had"
            raise TrialTimeout(
                f"{told} after {timeout_s:g} s, {ended}: an endless loop, or CTAs that wait for what none will bring"
            )
        if report.finished != grid[0] * grid[1]:
            ended = signal.Signals(library.voltune_status(run) & 0x7F or signal.SIGKILL).name
            raise LaunchFailed(f"kernel {launch.kernel}: a worker was ended by {ended}; is this machine out of memory?")
    finally:
        library.voltune_stop(run)
        library.voltune_free(run)
    for name in memory.results:  # the other operands are read-only
        mapping = memory.mappings[name]
        touched = mapping.touched()
        if touched is not None:
            where = f"{name}, byte {touched} of {mapping.nbytes}"
            raise LaunchFailed(f"kernel {launch.kernel} wrote outside a buffer: {where}")


def _check_written(name: str, array: np.ndarray) -> None:
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize)
    unwritten = (raw == _POISON).all(axis=1)
    if unwritten.any():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(unwritten)), array.shape))
        more = f"{int(unwritten.sum()) - 1} more of {array.size} elements"
        raise LaunchFailed(f"unwritten output, still 0xFF bytes: {name}{list(index)} and {more}")


# ---- telling a fault -----------------------------------------------------------------------------------------------
_OPS = (
    *("running", "exited", "__syncthreads", "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync"),
    *("__shfl_xor_sync", "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync", "mma.m8n8k4"),
)  # host_cuda.h's voltune_op
_FAULTS = (
    *("", "memory", "stack", "signal", "misaligned", "index", "shift", "divergent barrier", "exited barrier"),
    *("not in mask", "mismatch", "absent lane", "deadlock", "shared overrun", "timeout", "resource"),
)  # host_runtime.cpp's Fault


def _told(launch: Launch, path: Path, memory: _Memory, report: _Report) -> str:
    """The report as one line: kernel, block, thread, source line, and what happened."""
    fault = _FAULTS[report.fault]
    # An overrun of shared memory is found when its CTA ends, whoever did it.
    thread = "some thread" if fault == "shared overrun" else f"thread {report.thread}"
    line = report.line or _line(launch, path, report.pc)
    at = f", line {line}" if line else ""
    what = _happened(fault, report, memory, launch.block)
    return f"kernel {launch.kernel}, block ({report.block_x},{report.block_y}), {thread}{at}: {what}"


def _happened(fault: str, report: _Report, memory: _Memory, block: int) -> str:
    value = ctypes.c_int64(report.address).value
    detail = report.detail.decode(errors="replace")
    access = "write" if report.write == 1 else "read"
    op = _OPS[report.waits[report.thread].op]
    match fault:
        case "memory":
            return f"illegal {access} at {_place(report, memory)}"
        case "stack":
            return "stack overflow: a thread has 64 KB for its local variables and calls"
        case "signal":
            return f"ended by signal {value} ({signal.strsignal(value)})"
        case "misaligned":
            return f"misaligned {access} of {detail} ({report.other} bytes aligned) at {_place(report, memory)}"
        case "index":
            return f"index {value} is outside {detail}"
        case "shift":
            return f"{detail} shifted by {value} bits"
        case "shared overrun":
            return f"wrote outside {_place(report, memory)}"
        case "timeout":
            return "had not ended"
        case "resource":
            return f"the worker process failed at {detail}: {os.strerror(value)}"
        case "divergent barrier":
            what = f"divergent __syncthreads: others wait at line {report.other}"
        case "exited barrier":
            what = "divergent __syncthreads: not every thread of the block reaches it"
        case "not in mask":
            what = f"{op} with a mask that lacks the caller's own lane"
        case "mismatch":
            what = f"{op} meets another collective, mask or line in thread {report.other}"
        case "absent lane":
            what = f"{op} names thread {report.other}, which has exited or does not exist"
        case _:
            what = fault
    return f"{what}; {_groups(report, block)}"


def _groups(report: _Report, block: int) -> str:
    """What each thread of the block does, neighbours that do the same told once."""
    told: list[tuple[int, int, str]] = []
    for thread in range(block):
        wait = report.waits[thread]
        mask = f", mask {wait.mask:#010x}" if wait.mask else ""
        does = f"in {_OPS[wait.op]} (line {wait.line}{mask})" if wait.op > 1 else _OPS[wait.op]
        first = told.pop()[0] if told and told[-1][2] == does else thread
        told.append((first, thread, does))
    lines = [f"thread{'' if first == last else f's {first} to'} {last} {does}" for first, last, does in told[:12]]
    return ", ".join(lines + ["..."] * (len(told) > 12))


def _place(report: _Report, memory: _Memory) -> str:
    if report.arena and report.arena - _GUARD <= report.address < report.arena + report.arena_bytes + _GUARD:
        return f"shared memory, byte {report.address - report.arena} of {report.arena_bytes}"
    return memory.place(report.address)


def _line(launch: Launch, path: Path, pc: int) -> int:
    """The source line of an address in the kernel's library; 0 when it is not known, or addr2line is not there."""
    tool = shutil.which("addr2line")
    if not pc or tool is None:
        return 0
    command = [tool, "-i", "-e", str(path), f"{pc:#x}"]  # -i: out of the shim's inlined functions, to the source's line
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(rf"{re.escape(launch.kernel)}\.cpp:(\d+)", said)
    return int(found[1]) if found else 0
