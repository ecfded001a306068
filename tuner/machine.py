"""Executes the sm_70 machine code of a plan's kernels on the CPU: the cubin's own instructions, not its source.

`microcode` decodes, `machine.cpp` executes: one compiled program for every kernel, in one thread and in an order that
`order` fixes, so that a run always gives the same bits, counts and trace. Operands lie in the same guarded, poisoned
memory as the host executor's; every access must lie whole in one operand, aligned to its width.

What memory may do is done to a kernel on purpose. A plain global store is seen by its own CTA alone until that CTA's
fence (MEMBAR of GPU or system scope) or the end of the launch lets it out; relaxed stores and atomics are seen at once.
Shared memory remembers who touched a word since which barrier: two warps that touch one between the same two barriers,
one of them writing and not both by atomics, are a fault. What the lanes of one warp do to each other without a
WARPSYNC is not looked at. A lane outside a shuffle's mask gives 0xFF bytes.

HMMA's products are exact and a step's sum is rounded once; a tensor core may round otherwise, so its bits are not
claimed: they agree within 2^-20 of the sum of |products|. MUFU's estimates are the function's nearest f32.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from tuner import cache as builds
from tuner import gpu, host, microcode, sass
from tuner.build import Image
from tuner.errors import LaunchFailed, TrialTimeout, UnknownInstruction
from tuner.gpu import Device, Resources
from tuner.memory import Memory, Operands
from tuner.microcode import Micro
from tuner.plan import SCALARS, Launch, Linear, Outputs, Plan, items

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "machine.cpp", _HERE / "machine_step.h")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fwrapv", "-fno-strict-aliasing", "-fno-exceptions", "-fvisibility=hidden", "-fPIC", "-shared", "-w"),
)
_AT_ONCE = 1 << 20  # instructions between two looks at the clock
_NO_BARRIER = 2**64 - 1
_PAST_ALL = 1 << 30  # a ticket that no step has an item for
_ENDED, _FAULT = 1, 2  # of machine_run: 0 for more to do, 3 for the barrier that was asked for
_MOST_CODE = 1 << 15  # instructions of a kernel: a trace keeps their number in 15 bits
_PARAMETERS = sass.PARAMETERS
_STACK = 0x28  # in constant bank 0: where a thread's stack begins, at the end of its local memory
_TOLD, _APART = 0x00007F4000000000, 2 << 20  # where counts and traces place operands, a GPU's large page apart
DEVICE = "V100-PCIE-32GB"


# ---- the compiled machine ------------------------------------------------------------------------------------------
_TYPES = {"H": "uint16_t", "B": "uint8_t", "I": "uint32_t", "i": "int32_t"}


def _header() -> str:
    """`machine_code.h`: what microcode says of operations and of a micro-operation, in C++."""
    names = ", ".join(f"OP_{name}" for name in microcode.OPERATIONS)
    fields = "".join(f"  {_TYPES[letter]} {name};\n" for name, letter in microcode.LAYOUT)
    return (
        f"#include <cstdint>\nenum Operation : uint16_t {{ {names} }};\n"
        f"#pragma pack(push, 1)\nstruct Micro {{\n{fields}}};\n#pragma pack(pop)\n"
    )


@cache
def _library() -> ctypes.CDLL:
    """The machine, from the cache or by g++. Raises MissingTool without it."""
    gxx, machine = host.compiler()
    texts = [path.read_text(encoding="utf-8") for path in _SOURCES]

    def make(path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="voltune-") as folder:
            (Path(folder) / "machine_code.h").write_text(_header(), encoding="utf-8")
            for source in _SOURCES:
                shutil.copy(source, folder)
            host.run_compiler("the machine", [gxx, *_FLAGS, _SOURCES[0].name, "-o", str(path)], folder)

    library = ctypes.CDLL(
        str(builds.get_or_make("machine", host.digest(_header(), *texts, *_FLAGS, machine), ".so", make))
    )
    library.machine_new.restype = ctypes.c_void_p
    library.machine_new.argtypes = (ctypes.POINTER(_Setup),)
    library.machine_run.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
    library.machine_report.restype = ctypes.POINTER(_Report)
    library.machine_tallies.restype = ctypes.c_void_p
    library.machine_barriers.restype = ctypes.c_uint64
    library.machine_text.restype = ctypes.c_void_p
    library.machine_text.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
    for name in ("report", "tallies", "chain", "barriers", "free"):
        getattr(library, f"machine_{name}").argtypes = (ctypes.c_void_p,)
    return library


class _Range(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("begin", "end", "told")),
        *((name, ctypes.c_uint32) for name in ("writable", "unused")),
    )


class _Setup(ctypes.Structure):
    """machine.cpp's Setup."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("code", "constants", "ranges", "texts")),
        ("l2_bytes", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("count", "constant_bytes", "range_count", "grid_x", "grid_y", "block")),
        *((name, ctypes.c_uint32) for name in ("shared", "registers", "local", "order", "resident", "counted")),
    )


class _Report(ctypes.Structure):
    """machine.cpp's Report."""

    _fields_ = (
        ("fault", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("pc", "block_x", "block_y", "warp", "lane", "other", "write")),
        *((name, ctypes.c_uint64) for name in ("address", "instructions")),
    )


_TALLIED = "issued lanes requests sectors bytes misses wavefronts least_wavefronts addresses"
#: machine.cpp's Tally: what one instruction did, over all warps of a launch. issued: warp instructions; lanes: those
#: that took part. Of memory: requests of a warp, 32-byte sectors they touch, bytes asked for, sectors missed by the L2;
#: passes through shared memory, and how few the width allows; the sum of address * (2 * lane + 1), modulo 2^64.
TALLY = np.dtype([(name, np.uint64) for name in _TALLIED.split()])


# ---- running -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Executed:
    """One launch, executed. tallies: TALLY [instructions], by place in `code`.

    chain: the most global loads and returning atomics of which each one's address hangs on the one before, through
    registers. barriers: passed, over all CTAs. grid, resident: CTAs launched, and at work together.
    """

    launch: Launch
    image: Image
    code: tuple[Micro, ...]
    grid: tuple[int, int]
    resident: int
    instructions: int
    tallies: np.ndarray
    chain: int
    barriers: int


Text = Callable[[Launch, Image, tuple[Micro, ...], tuple[int, int], int], "Sink"]


@dataclass(frozen=True)
class Sink:
    """Where a launch's trace goes: what stands before and after each instruction's mask, and who takes the text."""

    pieces: tuple[tuple[str, str], ...]
    write: Callable[[bytes], object]


def execute(
    plan: Plan,
    images: Mapping[str, Image],
    operands: Operands,
    tokens: int,
    *,
    order: int = 0,
    timeout_s: float = 120.0,
    device: Device | None = None,
    counted: list[Executed] | None = None,
    trace: Text | None = None,
) -> Outputs:
    """Runs the plan's launches and returns its outputs and workspace, as the kernels left them.

    `images` by stage, built for sm_70; `operands` as for host.execute. A launch by ticket gets the CTAs that `device`
    (a V100) holds at once, at most the plan's grid. `order`: in 0 those CTAs take turns; in 1 they run one after
    another, the last first, step by step; in others a few together, CTAs and warps in a random but repeatable order.
    With `counted`, each launch is counted, and appended to it. With `trace`, which makes each launch's Sink, it is
    traced too.

    Raises RequestError for operands that do not fit, UnknownInstruction, MissingTool without g++, LaunchFailed for a
    fault, an element of an output left unwritten, or a counter not left zero, TrialTimeout when the launches together
    take longer than `timeout_s` seconds.
    """
    memory = Memory(plan, operands, tokens, flush_right=order % 2 == 0)
    decoded = [microcode.decode(images[launch.stage]) for launch in plan.launches]
    deadline = time.monotonic() + timeout_s
    for launch, code in zip(plan.launches, decoded, strict=True):
        run = _Run(launch, images[launch.stage], code, memory, order, device or gpu.device(DEVICE))
        done = run.execute(deadline, timeout_s, counted is not None or trace is not None, trace)
        if counted is not None:
            counted.append(done)
        memory.check_untouched(launch.kernel)
    return memory.outputs(plan)


@dataclass(frozen=True, eq=False)
class Item:
    """What one CTA does over all its warps: TALLY [instructions]."""

    code: tuple[Micro, ...]
    tallies: np.ndarray


def start(plan: Plan, image: Image, operands: Operands, tokens: int, timeout_s: float = 60.0) -> Item:
    """What a CTA of the fused plan's launch does until it knows its first ticket. Raises as `execute` does."""
    *_, (_, last), _ = _barriers(plan, image, operands, tokens, _PAST_ALL, timeout_s)
    return Item(_decoded(image), last)


def item(plan: Plan, image: Image, operands: Operands, tokens: int, ticket: int, timeout_s: float = 60.0) -> Item:
    """What the fused plan's launch does for the item with `ticket`: from somewhere in it to the same place in the next.

    `ticket` counts the items of W13, then of W2, and the next is of the same stage; the one past those means all
    outputs together. Raises as `execute` does.
    """
    asked: list[np.ndarray] = []  # at the barrier before the CTA asks for a second ticket, and before a third
    known, last = ticket + 1, np.zeros(0, TALLY)
    for next_ticket, tallies in _barriers(plan, image, operands, tokens, ticket, timeout_s):
        if next_ticket > known:
            asked.append(last)
        if len(asked) == 2:
            return Item(_decoded(image), _difference(asked[1], asked[0]))
        known, last = next_ticket, tallies
    before = start(plan, image, operands, tokens, timeout_s).tallies
    return Item(_decoded(image), _difference(last, before))


def _barriers(
    plan: Plan, image: Image, operands: Operands, tokens: int, ticket: int, timeout_s: float
) -> Iterator[tuple[int, np.ndarray]]:
    """The next ticket and the tallies at each barrier, and at the end, of a launch of one CTA that finds `ticket` next.

    The step is as if other CTAs had done all before it: what is handed on is there, as zeros, so that nothing waits.
    """
    memory = Memory(plan, operands, tokens, flush_right=True)
    for buffer in plan.buffers:
        if buffer.role == "counters" and buffer.name != "COUNTERS":
            memory.results[buffer.name].view(np.uint32)[...] = 0xFFFFFFFF  # zero, as it is published
    counters = memory.results["COUNTERS"]
    counters[0], counters[1:] = ticket, items(plan.contract, "w2", plan.config.w2)  # readers of every slot's row
    launch = replace(plan.launches[0], grid=(Linear(1), Linear(1)))
    run = _Run(launch, image, _decoded(image), memory, 1, gpu.device(DEVICE))
    deadline = time.monotonic() + timeout_s
    with run.started(counted=True) as machine:
        for barriers in itertools.count(1):
            ended = run.go_on(machine, deadline, timeout_s, barriers)
            yield int(counters[0]), run.tallies(machine)
            if ended:
                return


_decoded = lru_cache(maxsize=2)(microcode.decode)  # items of one image are asked for one after another


def _difference(later: np.ndarray, before: np.ndarray) -> np.ndarray:
    found = np.empty_like(later)
    for name in _TALLIED.split():
        found[name] = later[name] - before[name]
    return found


class _Run:
    """One launch of one kernel."""

    def __init__(
        self, launch: Launch, image: Image, code: tuple[Micro, ...], memory: Memory, order: int, device: Device
    ) -> None:
        self._launch, self._image, self._code, self._memory, self._order = launch, image, code, memory, order
        self._l2 = device.l2_bytes
        if len(code) >= _MOST_CODE:
            raise UnknownInstruction(f"{image.kernel} has {len(code)} instructions: the machine takes {_MOST_CODE - 1}")
        held = gpu.occupancy(device, launch.block, Resources.of(image, launch, memory.tokens)).blocks * device.sms
        x, y = (size.at(memory.tokens) for size in launch.grid)
        self._grid = (min(x, held), y) if launch.by_ticket else (x, y)
        self._resident = {0: held, 1: 1}.get(order, 2 + order % 7)
        self._constants = self._bank_0()

    def execute(self, deadline: float, timeout_s: float, counted: bool, trace: Text | None) -> Executed:
        sink = trace(self._launch, self._image, self._code, self._grid, self._shared) if trace else None
        with self.started(counted, sink) as machine:
            self.go_on(machine, deadline, timeout_s)
            if sink:
                for part in _parts(machine):
                    sink.write(part)
            ran = _library().machine_report(machine).contents.instructions
            return Executed(
                *(self._launch, self._image, self._code, self._grid, self._resident, ran, self.tallies(machine)),
                *(_library().machine_chain(machine), _library().machine_barriers(machine)),
            )

    @contextlib.contextmanager
    def started(self, counted: bool, sink: Sink | None = None) -> Iterator[int]:
        """A machine before its first instruction."""
        table = b"".join(each.packed(self._constant(each)) for each in self._code)
        ranges = list(self._ranges())
        pieces = [text.encode() for pair in sink.pieces for text in pair] if sink else []
        texts = (ctypes.c_char_p * len(pieces))(*pieces)
        held = ctypes.create_string_buffer(table, len(table)), ctypes.create_string_buffer(self._constants)
        places = (_Range * len(ranges))(*ranges)
        setup = _Setup(
            *(ctypes.addressof(held[0]), ctypes.addressof(held[1]), ctypes.addressof(places)),
            *(ctypes.addressof(texts) if sink else None, self._l2),
            *(len(self._code), len(self._constants), len(ranges), *self._grid, self._launch.block),
            *(self._shared, self._image.registers, self._image.local_bytes, self._order, self._resident, counted),
        )
        machine = _library().machine_new(ctypes.byref(setup))
        try:
            yield machine
        finally:
            _library().machine_free(machine)

    def go_on(self, machine: int, deadline: float, timeout_s: float, barriers: int = _NO_BARRIER) -> bool:
        """To the launch's end, or to where CTAs have passed so many barriers; whether it is the end."""
        status = 0
        while status == 0:
            status = _library().machine_run(machine, _AT_ONCE, barriers)
            if status == 0 and time.monotonic() > deadline:
                ran = _library().machine_report(machine).contents.instructions
                raise TrialTimeout(
                    f"kernel {self._launch.kernel}: had not ended after {timeout_s:g} s and {ran} warp instructions: "
                    "an endless loop, or CTAs that wait for what none will bring"
                )
        if status == _FAULT:
            raise LaunchFailed(self._told(_library().machine_report(machine).contents))
        return status == _ENDED

    def tallies(self, machine: int) -> np.ndarray:
        """TALLY [instructions], up to now."""
        found = ctypes.string_at(_library().machine_tallies(machine), len(self._code) * TALLY.itemsize)
        return np.frombuffer(found, TALLY)

    def _ranges(self) -> Iterator[_Range]:
        """The operands. Counts and traces place them one after another, so that no run differs from another."""
        place = _TOLD
        for name, mapping in self._memory.mappings.items():
            told = place + mapping.address % mmap.PAGESIZE
            yield _Range(mapping.address, mapping.address + mapping.nbytes, told, name in self._memory.results, 0)
            place += -(-mapping.pages // _APART) * _APART

    @property
    def _shared(self) -> int:
        return self._image.static_shared_bytes + self._launch.shared.at(self._memory.tokens)

    def _bank_0(self) -> bytes:
        """Launch dimensions, the stack's begin and the parameters."""
        bank = bytearray(_PARAMETERS)
        for offset, value in enumerate((self._launch.block, 1, 1, *self._grid, 1)):
            bank[4 * offset : 4 * offset + 4] = value.to_bytes(4, "little")
        bank[_STACK : _STACK + 4] = self._image.local_bytes.to_bytes(4, "little")
        for name in self._launch.arguments:
            size = 4 if name in SCALARS else 8
            bank += bytes(-(len(bank) - _PARAMETERS) % size)
            bank += (self._memory.slot(name) & (1 << 8 * size) - 1).to_bytes(size, "little")
        there = len(sass.section(self._image, f".nv.constant0.{self._image.kernel}"))
        if there != len(bank):
            raise LaunchFailed(
                f"kernel {self._launch.kernel} takes {there - _PARAMETERS} bytes of parameters where the plan passes "
                f"{len(bank) - _PARAMETERS}: {', '.join(self._launch.arguments)}"
            )
        return bytes(bank)

    def _constant(self, each: Micro) -> int:
        """The 64 bits of the constant that an instruction reads; 0 where it reads none."""
        if each.constant is None:
            return 0
        bank, offset = each.constant
        known = bank != 0 or offset < 24 or offset == _STACK or offset >= _PARAMETERS
        held = self._constants if bank == 0 else sass.section(self._image, f".nv.constant{bank}.{self._image.kernel}")
        if not known or offset + 4 > len(held):
            raise UnknownInstruction(
                f"{self._image.kernel} pc {each.instruction.pc:#x}: {each.mnemonic} reads c[{bank:#x}][{offset:#x}], "
                "and what stands there is not known"
            )
        return int.from_bytes(held[offset : offset + 8], "little")

    def _told(self, report: _Report) -> str:
        """The report as one line: kernel, block, thread, instruction, and what happened."""
        index = report.pc // sass.SIZE
        name = self._code[index].mnemonic if index < len(self._code) else "past the end"
        thread = report.warp * 32 + report.lane
        at = f"block ({report.block_x},{report.block_y}), thread {thread}, pc {report.pc:#06x} ({name})"
        return f"kernel {self._launch.kernel}, {at}: {self._happened(report)}"

    def _happened(self, report: _Report) -> str:
        access = "write" if report.write else "read"
        place = self._memory.place(report.address)
        shared = f"shared memory, byte {report.address} of {self._shared}"
        match FAULTS[report.fault]:
            case "memory":
                return f"illegal {access} of {report.other} bytes at {place}"
            case "read-only":
                return f"illegal write at {place}"
            case "misaligned":
                return f"misaligned {access} of {report.other} bytes at address {report.address:#x}"
            case "shared":
                return f"illegal {access} of {report.other} bytes at {shared}"
            case "shared race":
                return f"{access} of {shared}, used by warp {report.other} since the last barrier"
            case "global race":
                return f"read at {place}, stored by warp {report.other} since the last barrier"
            case "local":
                return (
                    f"illegal {access} at byte {report.address} of a thread's {self._image.local_bytes} of local memory"
                )
            case "deadlock":
                return "no thread can go on: some wait at a barrier that others never reach"
            case "mask":
                return f"lanes meet with the mask {report.address:#010x}, which lacks this one"
            case "carry":
                return "two carries where the instruction has a place for one"
            case "special":
                return f"special register {report.address:#x} is not known"
            case other:
                return other


FAULTS = (
    *("", "memory", "read-only", "misaligned", "shared", "shared race", "global race", "local", "deadlock", "mask"),
    *("threads of a warp part where the instruction says they do not", "a jump out of the kernel", "carry", "special"),
    *("a constant outside its bank", "an instruction of the whole warp without all of its threads"),
)  # machine.cpp's Fault


def _parts(machine: int) -> Iterator[bytes]:
    size = ctypes.c_uint64()
    while True:
        text = _library().machine_text(machine, ctypes.byref(size))
        if not size.value:
            return
        yield ctypes.string_at(text, size.value)
