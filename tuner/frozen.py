"""The ops of a frozen folder as data: schemas, operands, arguments and kernels, from the launch plans of a contract's
levels.

The ops: `moe_out` is the whole op; `compact` lists the segments of raw ids, `compact_sorted` those of an engine's own
sort; `w13` and `w2_out` are the two grouped GEMMs over listed segments. The C shim and the Python package read the same
tables, so that neither knows a kernel's argument order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner import plan, render
from tuner.contract import Contract
from tuner.plan import Buffer, Launch, Linear, Plan, PlanName
from tuner.render import Source
from tuner.space import Config

Argument = Literal["POINTER", "ABSENT", "TOKENS", "ITEM_BYTES", "LENGTH"]

ANY = -1  # as a size's constant: any length but zero
WORKSPACE = "WORKSPACE"
# The plan and stage whose kernel an op launches.
_OPS: dict[str, tuple[PlanName, str]] = {
    "moe_out": ("fused", "op"),
    "compact": ("staged", "compact"),
    "compact_sorted": ("sorted", "compact"),
    "w13": ("staged", "w13"),
    "w2_out": ("staged", "w2"),
}
# Operands in the order of schemas, by the plan's names; those that an op writes come after those it reads.
_ORDER = (
    *("X", "HIDDEN", "TOPK_IDS", "TOPK_WEIGHTS", "OFFSETS", "EXPERT_MAP", "LIVE_TOKENS"),
    *("SEGMENT_COUNT", "SEGMENT_EXPERT", "SEGMENT_BEGIN", "SEGMENT_ROWS"),
    *("W13_Q", "W13_SCALES", "W13_ZEROS", "W2_Q", "W2_SCALES", "W2_ZEROS"),
    *(WORKSPACE, "OUT"),
)
# Scalars of a kernel, which follow from an operand.
_SCALARS: dict[str, tuple[Argument, str]] = {
    "TOKENS": ("TOKENS", ""),
    "ID_BYTES": ("ITEM_BYTES", "TOPK_IDS"),
    "MAP_SIZE": ("LENGTH", "EXPERT_MAP"),
}
_NULL = ("W13_ZEROS", "W2_ZEROS")  # where the statistics hold the zeros
# What kernels read or write an element at a time: such an operand may begin at any element. Others are read 16 bytes at
# a time.
_BY_ELEMENT = (
    *("TOPK_IDS", "TOPK_WEIGHTS", "OFFSETS", "EXPERT_MAP", "LIVE_TOKENS"),
    *("SEGMENT_COUNT", "SEGMENT_EXPERT", "SEGMENT_BEGIN", "SEGMENT_ROWS"),
)
_VECTOR = 16
_SPAN = 256  # what a buffer's place in the workspace is a multiple of
_ITEM_BYTES = {"float16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class Operand:
    """A tensor of an op. `types` are torch's names; `alignment` in bytes; `written`: the op changes it."""

    name: str
    types: tuple[str, ...]
    shape: tuple[Linear, ...]
    alignment: int
    optional: bool = False
    written: bool = False

    def to_dict(self) -> dict[str, Any]:
        shape = [[size.constant, size.per_token] for size in self.shape]
        return {"name": self.name, "types": list(self.types), "shape": shape, "optional": self.optional}


@dataclass(frozen=True)
class Passed:
    """What a kernel gets in one place; `operand` is an index into the op's, `offset` in bytes from its start."""

    source: Argument
    operand: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Kernel:
    """One kernel of the folder. `file` is its name without suffix; block in threads, shared in bytes."""

    source: Source
    block: int
    shared: int
    by_ticket: bool

    @property
    def entry(self) -> str:
        return self.source.kernel

    @property
    def file(self) -> str:
        return self.source.file_name.removesuffix(".cu")


@dataclass(frozen=True)
class Level:
    """Which kernel serves a level, and its grid."""

    kernel: int
    grid: tuple[Linear, Linear]


@dataclass(frozen=True)
class Op:
    """One op; its levels in the contract's order. `entry` is the name of its kernels."""

    name: str
    entry: str
    operands: tuple[Operand, ...]
    arguments: tuple[Passed, ...]
    levels: tuple[Level, ...]

    @property
    def schema(self) -> str:
        """As torch reads it. What is written is marked; nothing is returned, which torch.compile carries through."""
        marks = map(chr, itertools.count(ord("a")))
        parts = []
        for each in self.operands:
            mark = f"({next(marks)}!)" if each.written else "?" if each.optional else ""
            parts.append(f"Tensor{mark} {each.name}")
        return f"{self.name}({', '.join(parts)}) -> ()"

    def to_dict(self) -> dict[str, Any]:
        arguments = ["i" if each.source in ("TOKENS", "ITEM_BYTES", "LENGTH") else "p" for each in self.arguments]
        operands = [each.to_dict() for each in self.operands]
        levels = [level.kernel for level in self.levels]
        return {"entry": self.entry, "operands": operands, "arguments": "".join(arguments), "levels": levels}


@dataclass(frozen=True)
class Tables:
    """Everything about a contract's ops but their kernels' code.

    workspace_bytes: of one step's scratch memory, zero before and after each call. level_of[tokens] is the index of the
    level that serves so many, the next larger one; level_of[0] means nothing.
    """

    contract: Contract
    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    workspace_bytes: int
    level_of: tuple[int, ...]


def tables(contract: Contract, configs: Mapping[int, Config]) -> Tables:
    """The ops of a contract whose level `tokens` runs configs[tokens], for every level of it."""
    spans, workspace_bytes = _workspace(plan.make(contract, configs[contract.levels[0]]))
    kernels: dict[str, Kernel] = {}
    ops = []
    for name, (plan_name, stage) in _OPS.items():
        levels = []
        for tokens in contract.levels:
            made = plan.make(contract, configs[tokens], plan_name)
            launch = made.launch(stage)
            source = render.render_launch(launch, contract.digest())
            shared = launch.shared.at(contract.max_tokens)
            kernels.setdefault(source.file_name, Kernel(source, launch.block, shared, launch.by_ticket))
            levels.append(Level(list(kernels).index(source.file_name), launch.grid))
        ops.append(_op(name, made, launch, spans, workspace_bytes, levels))
    level_of = [next(i for i, most in enumerate(contract.levels) if tokens <= most) for tokens in _counts(contract)]
    return Tables(contract, tuple(ops), tuple(kernels.values()), workspace_bytes, tuple(level_of))


def _counts(contract: Contract) -> range:
    return range(contract.max_tokens + 1)


def _workspace(fused: Plan) -> tuple[dict[str, int], int]:
    """Where each of the buffers that are zero before and after a step lies, and the bytes of all of them."""
    spans: dict[str, int] = {}
    end = 0
    for buffer in fused.buffers:
        if buffer.role == "counters":
            spans[buffer.name] = end
            end += -(-buffer.nbytes(fused.contract.max_tokens) // _SPAN) * _SPAN
    return spans, end


def _op(
    name: str, made: Plan, launch: Launch, spans: Mapping[str, int], workspace_bytes: int, levels: Sequence[Level]
) -> Op:
    buffers = {buffer.name: buffer for buffer in made.buffers}
    held = [buffers[each] for each in launch.arguments if each in buffers]
    earlier = itertools.takewhile(lambda each: each is not launch, made.launches)
    produced = {each for before in earlier for each in before.arguments}
    found = {each.name: _operand(each, each.name not in produced) for each in held if each.role != "counters"}
    if any(each.role == "counters" for each in held):
        found[WORKSPACE] = Operand("workspace", ("uint8",), (Linear(workspace_bytes),), _VECTOR, written=True)
    if "EXPERT_MAP" in launch.arguments:
        found["EXPERT_MAP"] = Operand("expert_map", ("int32",), (Linear(ANY),), 4, optional=True)
    order = sorted(found, key=lambda each: (found[each].written, _ORDER.index(each)))

    def passed(argument: str) -> Iterator[Passed]:
        if argument in _SCALARS:
            source, of = _SCALARS[argument]
            yield Passed(source, order.index(of) if of else 0)
        elif argument in buffers and buffers[argument].role == "counters":
            yield Passed("POINTER", order.index(WORKSPACE), spans[argument])
        elif argument in found:
            yield Passed("POINTER", order.index(argument))
        else:
            assert argument in _NULL, f"{name}: nothing is known of the argument {argument}"
            yield Passed("ABSENT")

    arguments = tuple(each for argument in launch.arguments for each in passed(argument))
    return Op(name, launch.kernel, tuple(found[each] for each in order), arguments, tuple(levels))


def _operand(buffer: Buffer, first: bool) -> Operand:
    """`first`: no launch of the plan has written it before."""
    kind = buffer.dtype.replace("uint32", "int32")  # whose words torch has no unsigned arithmetic for
    types = ("int32", "int64") if buffer.name == "TOPK_IDS" else (kind,)
    alignment = _ITEM_BYTES[types[0]] if buffer.name in _BY_ELEMENT else _VECTOR
    written = buffer.role == "output" or (buffer.role == "workspace" and first)
    return Operand(buffer.name.lower(), types, buffer.shape, alignment, buffer.optional, written)
