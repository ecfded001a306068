"""Executes the rendered CUDA sources of a plan on the CPU: grid, block, warp and barrier semantics, compiled by g++.

`host_cuda.h` is the CUDA that a source sees, `host_runtime.cpp` the scheduler: threads are fibers, CTAs run in any
order and are spread over worker processes, each of which begins a CTA when its last one has ended: a CTA may wait only
for what others that began before it will do without it. A fault ends a worker, never the caller, and is raised as
LaunchFailed with kernel, block, thread and source line.

The kernels tell `host_order.h` of each access: two warps that meet in a word of shared memory with no barrier between,
and a plain store that another CTA meets before a fence has let it out, are faults too, whoever happened to run first.

Every operand lies between pages that may not be touched (`memory`), and what is left of its own pages is checked after
each launch. Inputs are read-only while kernels run; workspace and outputs start as 0xFF bytes, counters as zeros.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tuner import cache
from tuner.errors import BuildFailed, LaunchFailed, MissingTool, TrialTimeout
from tuner.memory import GUARD, Memory, Operands
from tuner.plan import SCALARS, Launch, Outputs, Plan
from tuner.render import Source

_HERE = Path(__file__).parent
_SHIM = _HERE / "host_cuda.h"
_RUNTIME = _HERE / "host_runtime.cpp"
_ORDER = _HERE / "host_order.h"
_CTAS = (1 << 24) - 1  # as host_order.h numbers them
# No contraction, integers that wrap as the GPU's do, and neither aliasing nor the end of a loop taken for granted.
_FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-fwrapv", "-fno-strict-aliasing", "-fno-finite-loops"),
)
_OBJECT = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-w")
# What C++ leaves open and a GPU traps or defines otherwise. They call into host_runtime.cpp, not into libubsan.
_CHECKS = ("-fsanitize=alignment,bounds,shift-exponent", "-fno-sanitize-recover=all", "-fstack-clash-protection", "-g1")
# Before each access of memory a call into host_order.h, not into libtsan: which says from where, as it is never a tail
# call, and of accesses that the source has, as none is brought forward out of a condition.
_WATCHED = (
    *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1"),
    *("-fno-optimize-sibling-calls", "-fno-hoist-adjacent-loads"),
)
_ALONE = ("-nostdinc", "-nostdinc++")  # a source includes nothing, as for NVRTC


# ---- compiling -----------------------------------------------------------------------------------------------------
def compiler() -> tuple[str, str]:
    """(g++'s path, what -march=native and the code depend on: its version and this CPU). Raises MissingTool."""
    return _examined(shutil.which("g++"))


@functools.lru_cache(maxsize=8)
def _examined(path: str | None) -> tuple[str, str]:
    if path is None:
        raise MissingTool("g++ was not found: the CPU executor compiles with it; install it with: apt-get install g++")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    cpu = [line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU part"))]
    return path, "\n".join([version, platform.machine(), *cpu])


def require_compiler() -> None:
    """Raises MissingTool where there is no C++ compiler to run kernels with."""
    compiler()


def digest(*parts: str) -> str:
    """A name in the cache for what is made of `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def run_compiler(what: str, command: list[str], folder: str) -> None:
    """Raises BuildFailed with g++'s log when it refuses `what`."""
    plain = {**os.environ, "LC_ALL": "C"}  # a log in ASCII and in one language
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"g++ refused {what} for the CPU executor:\n{done.stderr.strip()}")


def _texts() -> list[str]:
    """What a kernel is compiled and linked with."""
    return [path.read_text() for path in (_SHIM, _RUNTIME, _ORDER)]


def _runtime() -> Path:
    """The scheduler's object file, from the cache."""
    gxx, machine = compiler()
    flags = [*_FLAGS, *_OBJECT]

    def make(path: Path) -> None:
        run_compiler("the runtime", [gxx, "-c", *flags, str(_RUNTIME), "-o", str(path)], str(_HERE))

    key = digest(*_texts(), *flags, machine)
    return cache.get_or_make("host", key, ".o", make)


def compile(source: Source) -> Path:
    """The shared library that runs `source`'s kernel on this CPU, from the cache or by g++.

    Raises MissingTool without g++, BuildFailed with g++'s log when it refuses the source.
    """
    gxx, machine = compiler()
    if not re.fullmatch(r"[A-Za-z_]\w*", source.kernel):
        raise BuildFailed(f"kernel name {source.kernel!r}: expected a C identifier")
    flags = [*_FLAGS, *_OBJECT, *_CHECKS, *_WATCHED, *_ALONE]
    text = source.text + f"\nVOLTUNE_ENTRY({source.kernel})\n"

    def make(path: Path) -> None:
        runtime = _runtime()
        with tempfile.TemporaryDirectory(prefix="voltune-") as folder:
            (Path(folder) / f"{source.kernel}.cpp").write_text(text)
            place = f"-ffile-prefix-map={folder}=."
            command = [gxx, "-c", *flags, place, "-include", str(_SHIM), f"{source.kernel}.cpp", "-o", "kernel.o"]
            run_compiler(source.kernel, command, folder)
            command = [gxx, "-shared", "-Wl,-z,defs", "kernel.o", str(runtime), "-lm", "-o", str(path)]
            run_compiler(source.kernel, command, folder)

    key = digest(text, *_texts(), *flags, machine)
    return cache.get_or_make("host", key, ".so", make)


# ---- running -------------------------------------------------------------------------------------------------------
class _Wait(ctypes.Structure):
    _fields_ = (("op", ctypes.c_int), ("line", ctypes.c_int), ("mask", ctypes.c_uint))


class _Report(ctypes.Structure):
    """host_runtime.cpp's Report."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("claimed", "fault")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "thread", "other", "other_x", "other_y")),
        *((name, ctypes.c_int) for name in ("line", "write")),
        *((name, ctypes.c_uint64) for name in ("address", "pc", "caller", "arena", "arena_bytes")),
        ("detail", ctypes.c_char * 96),
        *((name, ctypes.c_uint64) for name in ("next", "finished")),
        ("waits", _Wait * 1024),
    )


class _Written(ctypes.Structure):
    """host_runtime.cpp's Written."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("begin", "bytes", "first"))


class _Launch(ctypes.Structure):
    """host_runtime.cpp's Launch."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "block", "shared", "order", "workers")),
        *(("slots", ctypes.c_void_p), ("written", ctypes.c_void_p), ("written_count", ctypes.c_uint)),
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
    reach, accesses that no barrier or fence parts (docs/verification.md says which), an element of an output left
    unwritten, or a counter not left zero, TrialTimeout when the launches together take longer than `timeout_s` seconds.
    """
    memory = Memory(plan, operands, tokens, flush_right=order % 2 == 0)
    libraries = [compile(sources[launch.stage]) for launch in plan.launches]
    deadline = time.monotonic() + timeout_s
    for launch, library in zip(plan.launches, libraries, strict=True):
        _launch(launch, library, memory, order, deadline, timeout_s)
    return memory.outputs(plan)


def _launch(launch: Launch, path: Path, memory: Memory, order: int, deadline: float, timeout_s: float) -> None:
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
    if min(grid) < 1 or grid[0] * grid[1] > _CTAS or not 1 <= launch.block <= 1024:
        expected = f"expected 1 up, {_CTAS} CTAs at most, and 1 to 1024"
        raise LaunchFailed(f"kernel {launch.kernel}: grid {grid}, {launch.block} threads; {expected}")
    slots = (ctypes.c_uint64 * max(len(wanted), 1))(*(memory.slot(name) for name in launch.arguments))
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    written = _written(memory)
    chosen = _Launch(
        *(*grid, launch.block, launch.shared.at(memory.tokens), order, workers),
        *(ctypes.addressof(slots), ctypes.addressof(written), len(written)),
    )
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
    memory.check_untouched(launch.kernel)


def _written(memory: Memory) -> "ctypes.Array[_Written]":
    """The operands that kernels may write, and where in host_order.h's shadow of them each begins."""
    ranges, first = [], 0
    for name in memory.results:
        mapping = memory.mappings[name]
        ranges.append(_Written(mapping.address, mapping.nbytes, first))
        first += -(-mapping.nbytes // 4)
    return (_Written * len(ranges))(*ranges)


# ---- telling a fault -----------------------------------------------------------------------------------------------
_OPS = (
    *("running", "exited", "__syncthreads", "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync"),
    *("__shfl_xor_sync", "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync", "mma.m8n8k4"),
)  # host_cuda.h's voltune_op
_FAULTS = (
    *("", "memory", "stack", "signal", "misaligned", "index", "shift", "divergent barrier", "exited barrier"),
    *("not in mask", "mismatch", "absent lane", "deadlock", "shared overrun", "timeout", "resource"),
    *("shared race", "global race", "unfenced"),
)  # host_runtime.cpp's Fault


def _told(launch: Launch, path: Path, memory: Memory, report: _Report) -> str:
    """The report as one line: kernel, block, thread, source line, and what happened."""
    fault = _FAULTS[report.fault]
    # An overrun of shared memory is found when its CTA ends, whoever did it.
    thread = "some thread" if fault == "shared overrun" else f"thread {report.thread}"
    line = report.line or _line(launch, path, report.pc) or _line(launch, path, report.caller)
    at = f", line {line}" if line else ""
    what = _happened(fault, report, memory, launch.block)
    return f"kernel {launch.kernel}, block ({report.block_x},{report.block_y}), {thread}{at}: {what}"


def _happened(fault: str, report: _Report, memory: Memory, block: int) -> str:
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
        case "shared race":
            return f"{access} of {_place(report, memory)}, used by warp {report.other} since the last barrier"
        case "global race":
            return f"read at {_place(report, memory)}, stored by warp {report.other} since the last barrier"
        case "unfenced":
            by = f"warp {report.other} of block ({report.other_x},{report.other_y})"
            return f"{access} at {_place(report, memory)}, stored by {by}, which let no fence follow"
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


def _place(report: _Report, memory: Memory) -> str:
    if report.arena and report.arena - GUARD <= report.address < report.arena + report.arena_bytes + GUARD:
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
