"""The launch plan as data: kernels, grids, blocks, shared memory, workspace and arguments of a contract and config.

Plans, all with the same bits for the same config:
  fused        one launch that finds the step's segments and does W13 and W2 as one stream of work: the default
  staged       segment compaction from raw ids, then W13 and W2 over the listed segments, a launch each
  sorted       the same from an engine's own sort (sorted rows and expert offsets)
  all-experts  compaction that keeps empty experts: what a grouped GEMM without compaction walks, as a baseline
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from tuner.contract import Contract
from tuner.errors import InvalidConfig, LaunchFailed, RequestError
from tuner.space import (
    SIMT_ROWS,
    STAGES,
    STEP,
    Config,
    Family,
    Stage,
    Tile,
    families,
    tensor_rows,
    tile_columns,
)

PlanName = Literal["fused", "staged", "sorted", "all-experts"]
PLANS: tuple[PlanName, ...] = ("fused", "staged", "sorted", "all-experts")
SCALARS = ("TOKENS", "ID_BYTES", "MAP_SIZE")
COMPACT_THREADS = 256
MAX_RESIDENT = 2048  # threads of an SM, by the hardware


Role = Literal["input", "workspace", "counters", "output"]


@dataclass(frozen=True)
class Linear:
    """A size that grows with the step: constant + per_token * tokens."""

    constant: int
    per_token: int = 0

    def at(self, tokens: int) -> int:
        return self.constant + self.per_token * tokens


@dataclass(frozen=True)
class Buffer:
    """An operand in memory. `dtype` is numpy's name; TOPK_IDS may be int64 as well.

    Counters are workspace that is zero before the first launch of a step and that the plan's kernels leave zero, so
    that the next step finds it as the first did: counts, and values that are their own flags.
    """

    name: str
    dtype: str
    shape: tuple[Linear, ...]
    role: Role
    optional: bool = False

    def dimensions(self, tokens: int) -> tuple[int, ...]:
        return tuple(d.at(tokens) for d in self.shape)

    def nbytes(self, tokens: int) -> int:
        return int(np.prod(self.dimensions(tokens), dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are operand names in the kernel's order: a pointer, or an int32 for a scalar."""

    stage: str  # op, compact, w13, w2
    template: str  # of templates/, without .cu.j2
    grid: tuple[Linear, Linear]  # x, y
    block: int  # threads
    shared: Linear  # dynamic shared memory, bytes
    arguments: tuple[str, ...]
    constants: Mapping[str, Mapping[str, int]]  # what the template renders, by struct
    families: Mapping[Stage, Family] = field(default_factory=dict)
    by_ticket: bool = False  # right with any number of CTAs: more than the GPU holds at once only cost their start

    @property
    def kernel(self) -> str:
        return f"voltune_{self.template}"


@dataclass(frozen=True)
class Plan:
    name: PlanName
    contract: Contract
    config: Config
    launches: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]

    def launch(self, stage: str) -> Launch:
        return next(launch for launch in self.launches if launch.stage == stage)


@dataclass(frozen=True)
class Outputs:
    """What an executor brings back: OUT and the workspace, by operand name."""

    buffers: Mapping[str, np.ndarray]

    @property
    def out(self) -> np.ndarray:
        """f16 [M, H]."""
        return self.buffers["OUT"]

    @property
    def hidden(self) -> np.ndarray:
        """f32 [S, I]: silu(gate) * up of each routed slot; rows of slots that are not routed are poison."""
        return self.buffers["HIDDEN"]


@runtime_checkable
class Operand(Protocol):
    """An operand in memory, wherever that is."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


AnyOperand = TypeVar("AnyOperand", bound=Operand)


def resolve(
    plan: Plan, operands: Mapping[str, AnyOperand | int | None], tokens: int
) -> tuple[dict[str, AnyOperand], dict[str, int]]:
    """The inputs that are present, and the scalars, of a plan's launches at `tokens`; both by operand name.

    ID_BYTES and MAP_SIZE follow from TOPK_IDS and EXPERT_MAP. Raises RequestError for tokens outside the contract's
    levels, a missing operand, another dtype or shape than the plan's, or a scalar that contradicts the others.
    """
    most = plan.contract.max_tokens
    if not 1 <= tokens <= most:
        raise RequestError(f"{tokens} tokens: expected 1 to {most}, the top level of contract {plan.contract.name}")
    inputs: dict[str, AnyOperand] = {}
    scalars = {"TOKENS": tokens, "ID_BYTES": 4, "MAP_SIZE": 0}
    for buffer in plan.buffers:
        given = operands.get(buffer.name)
        if buffer.role != "input" or (given is None and buffer.optional):
            continue
        dtypes, shape = ("int32", "int64") if buffer.name == "TOPK_IDS" else (buffer.dtype,), buffer.dimensions(tokens)
        if not isinstance(given, Operand) or given.dtype.name not in dtypes or given.shape != shape:
            raise RequestError(
                f"operand {buffer.name} is {_described(given)}: expected {' or '.join(dtypes)} {list(shape)}"
            )
        inputs[buffer.name] = given
        if buffer.name == "TOPK_IDS":
            scalars["ID_BYTES"] = given.dtype.itemsize
    mapped = operands.get("EXPERT_MAP")
    if mapped is not None:
        if not isinstance(mapped, Operand) or mapped.dtype.name != "int32" or len(mapped.shape) != 1:
            raise RequestError(f"operand EXPERT_MAP is {_described(mapped)}: expected int32 [global experts], or None")
        inputs["EXPERT_MAP"] = mapped
        scalars["MAP_SIZE"] = mapped.shape[0]
    for name, value in scalars.items():
        told = operands.get(name)
        if told is not None and (isinstance(told, Operand) or told != value):
            raise RequestError(f"operand {name} is {_described(told)}: expected {value}, as the other operands have it")
    return inputs, scalars


def _described(given: object) -> str:
    if isinstance(given, Operand):
        return f"{given.dtype.name} {list(given.shape)}"
    return "missing" if given is None else repr(given)


def check_counters(buffers: Iterable[Buffer], left: Mapping[str, np.ndarray]) -> None:
    """Raises LaunchFailed for counters that a plan's launches did not leave zero. `left`: what they left, by name."""
    for buffer in buffers:
        if buffer.role == "counters" and left[buffer.name].any():
            found = np.argwhere(left[buffer.name])
            first = tuple(int(index) for index in found[0])
            raise LaunchFailed(
                f"{len(found)} elements of the counters {buffer.name} were not left zero, first {list(first)}: "
                f"{left[buffer.name][first]}"
            )


class Limits(Protocol):
    """What a plan asks of a device's description."""

    @property
    def name(self) -> str: ...
    @property
    def shared_per_block(self) -> int: ...
    @property
    def registers_per_sm(self) -> int: ...
    @property
    def threads_per_block(self) -> int: ...


_ROUTING = ("TOPK_IDS", "ID_BYTES", "EXPERT_MAP", "MAP_SIZE", "LIVE_TOKENS", "TOKENS")
_SEGMENTS = ("SEGMENT_COUNT", "SEGMENT_EXPERT", "SEGMENT_BEGIN")
_WEIGHTS: dict[Stage, tuple[str, ...]] = {
    "w13": ("W13_Q", "W13_SCALES", "W13_ZEROS"),
    "w2": ("W2_Q", "W2_SCALES", "W2_ZEROS"),
}
_WORKSPACE = ("HIDDEN", "ROUTES", "COUNTERS")


def _align(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _slots(contract: Contract) -> int:
    return contract.max_tokens * contract.top_k


def _constants(contract: Contract, threads: int, arena: int) -> dict[str, int]:
    return {
        "kExperts": contract.experts,
        "kTopK": contract.top_k,
        "kHidden": contract.hidden,
        "kIntermediate": contract.local_intermediate,
        "kGroup": contract.group,
        "kMaxSlots": _slots(contract),
        "kSm70U4": int(contract.layout == "sm70-u4"),
        "kStatsBytes": contract.stats_bytes,
        "kInterleaved": int(contract.interleaved),
        "kEngineNumerics": int(contract.numerics == "engine"),
        "kThreads": threads,
        "kArenaBytes": arena,
    }


def _tile_constants(
    contract: Contract, tile: Tile, resident: int, arena: int, published: bool, load_only: bool
) -> dict[str, int]:
    return {
        **_constants(contract, tile.threads, arena),
        "kTiles": tile.tiles,
        "kSplitK": tile.split_k,
        "kUnroll": tile.unroll,
        "kRows": tile.rows,
        "kMinCtas": max(1, resident // tile.threads),
        "kPublished": int(published),
        "kLoadOnly": int(load_only),
    }


def _arena(contract: Contract, stage: Stage, tile: Tile) -> int:
    """Shared memory of a CTA at work on one stage: each warp's stage, the rows, and the slots of a pass a warp."""
    gemm = contract.gemm(stage)
    warps = tile.threads // 32
    rows = 0
    if tile.family == "simt":
        rows = 4 * tile.rows * gemm.k  # floats
    elif stage == "w2":
        rows = _align(2 * 8 * (gemm.k + 16) + 4 * tile.rows)  # eight f16 columns of B
    else:
        rows = 4  # rows are read where they are; an empty struct takes a byte
    return _align(4 * warps * tile.rows * tile_columns(contract) + rows + 4 * warps * tile.rows)


def items(contract: Contract, stage: Stage, tile: Tile) -> int:
    """CTAs' worth of work of one segment."""
    gemm = contract.gemm(stage)
    return gemm.n // tile_columns(contract) // tile.tiles


def _op(contract: Contract, config: Config, load_only: bool) -> Launch:
    slots = _slots(contract)
    listed = 8 * min(slots, contract.experts)
    segments = listed + 4 * (2 * slots + contract.experts + -(-contract.experts // 32) + 1) + 8  # and two tickets
    arena = _align(segments) + max(_arena(contract, stage, config.stage(stage)) for stage in STAGES)
    work = sum(items(contract, stage, config.stage(stage)) for stage in STAGES)
    return Launch(
        stage="op",
        template="op",
        grid=(Linear(0, contract.top_k * work), Linear(1)),
        block=config.w13.threads,
        shared=Linear(arena),
        arguments=("X", *_ROUTING, "TOPK_WEIGHTS", *_WEIGHTS["w13"], *_WEIGHTS["w2"], *_WORKSPACE, "OUT"),
        constants={
            "W13Config": _tile_constants(contract, config.w13, config.resident, arena, True, load_only),
            "W2Config": _tile_constants(contract, config.w2, config.resident, arena, True, load_only),
        },
        families={stage: config.stage(stage).family for stage in STAGES},
        by_ticket=True,
    )


def _listed(name: PlanName) -> tuple[str, ...]:
    return (*_SEGMENTS, "SORTED_ROWS" if name == "sorted" else "SEGMENT_ROWS", "TOKENS")


def _stage(contract: Contract, stage: Stage, config: Config, name: PlanName) -> Launch:
    tile = config.stage(stage)
    arena, work = _arena(contract, stage, tile), items(contract, stage, tile)
    arguments: tuple[str, ...] = ("X", *_listed(name), *_WEIGHTS["w13"], "HIDDEN")
    segments = Linear(contract.experts) if name == "all-experts" else Linear(0, contract.top_k)
    grid = Linear(work), segments
    if stage == "w2":
        arena += _align(4 * _slots(contract) + 8)
        arguments = ("HIDDEN", *_listed(name), "TOPK_WEIGHTS", *_WEIGHTS["w2"], "ROUTES", "COUNTERS", "OUT")
        grid = Linear(work * segments.constant, work * segments.per_token), Linear(1)
    return Launch(
        stage=stage,
        template=stage,
        grid=grid,
        block=tile.threads,
        shared=Linear(arena),
        arguments=arguments,
        constants={f"{stage.upper()}Config": _tile_constants(contract, tile, config.resident, arena, False, False)},
        families={stage: tile.family},
        by_ticket=stage == "w2",
    )


def _compact(contract: Contract, name: PlanName) -> Launch:
    arguments: tuple[str, ...] = (*_ROUTING, *_SEGMENTS, "SEGMENT_ROWS")
    words = -(-contract.experts // 32)
    template, arena = "compact", 4 * (2 * _slots(contract) + contract.experts + words)
    if name == "sorted":
        arguments = ("OFFSETS", *_SEGMENTS)
        template, arena = "compact_sorted", 4 * words
    return Launch(
        stage="compact",
        template=template,
        grid=(Linear(1), Linear(1)),
        block=COMPACT_THREADS,
        shared=Linear(arena),
        arguments=arguments,
        constants={
            "Config": {**_constants(contract, COMPACT_THREADS, arena), "kKeepEmpty": int(name == "all-experts")}
        },
    )


def _buffers(contract: Contract, name: PlanName, load_only: bool) -> tuple[Buffer, ...]:
    k, hidden = contract.top_k, contract.hidden
    one, tokens, slots = Linear(1), Linear(0, 1), Linear(0, k)
    segments = contract.experts if name == "all-experts" else 0
    listed = Linear(segments, 0 if segments else k)
    published: Role = "workspace" if load_only else "counters"  # loads alone await no value, and clear none
    hidden_role: Role = published if name == "fused" else "workspace"
    found = [
        Buffer("X", "float16", (tokens, Linear(hidden)), "input"),
        Buffer("TOPK_WEIGHTS", "float32", (tokens, Linear(k)), "input"),
        Buffer("HIDDEN", "float32", (slots, Linear(contract.local_intermediate)), hidden_role),
        Buffer("ROUTES", "float32", (slots, Linear(hidden)), published),
        Buffer("COUNTERS", "int32", (Linear(1, k),), "counters"),
        Buffer("OUT", "float16", (tokens, Linear(hidden)), "output"),
    ]
    for prefix, gemm in (("W13", contract.w13), ("W2", contract.w2)):
        experts, groups = Linear(contract.experts), Linear(gemm.groups)
        found.append(Buffer(f"{prefix}_Q", "uint32", (experts, Linear(gemm.k), Linear(gemm.n // 8)), "input"))
        shape = (experts, groups, Linear(gemm.n))
        if contract.layout == "awq":
            found.append(Buffer(f"{prefix}_SCALES", "float16", shape, "input"))
            found.append(Buffer(f"{prefix}_ZEROS", "uint32", (experts, groups, Linear(gemm.n // 8)), "input"))
        elif contract.stats_bytes == 4:
            found.append(Buffer(f"{prefix}_SCALES", "uint32", shape, "input"))
        else:
            found.append(Buffer(f"{prefix}_SCALES", "uint8", (*shape, Linear(3)), "input"))
    if name == "sorted":
        found.append(Buffer("SORTED_ROWS", "int32", (slots,), "input"))
        found.append(Buffer("OFFSETS", "int32", (Linear(contract.experts + 1),), "input"))
    else:
        found.append(Buffer("TOPK_IDS", "int32", (tokens, Linear(k)), "input"))
        found.append(Buffer("LIVE_TOKENS", "int32", (one,), "input", optional=True))
    if name in ("staged", "all-experts"):
        found.append(Buffer("SEGMENT_ROWS", "int32", (slots,), "workspace"))
    if name != "fused":
        found.append(Buffer("SEGMENT_COUNT", "int32", (one,), "workspace"))
        found.append(Buffer("SEGMENT_EXPERT", "int32", (listed,), "workspace"))
        found.append(Buffer("SEGMENT_BEGIN", "int32", (Linear(listed.constant + 1, listed.per_token),), "workspace"))
    return tuple(found)


def make(contract: Contract, config: Config, name: PlanName = "fused", *, load_only: bool = False) -> Plan:
    """The plan `name` of `config`. Raises RequestError for an unknown name, InvalidConfig where sizes do not divide.

    EXPERT_MAP (int32, any length) is not in `buffers`, since its length is not the contract's; it may be None, as may
    LIVE_TOKENS. The ZEROS of an sm70-u4 contract are null. With load_only, the fused plan's kernel loads what it would
    multiply and writes nothing that means anything: how fast its loads alone are. It takes no other plan.
    """
    if name not in PLANS:
        raise RequestError(f"plan {name!r}: expected one of {', '.join(PLANS)}")
    for stage in STAGES:
        chosen, gemm = config.stage(stage), contract.gemm(stage)
        if chosen.family not in families(contract):
            raise InvalidConfig(
                f"{stage} config {chosen.key()}: the tensor family reads sm70-u4; contract {contract.name} is "
                f"{contract.layout}"
            )
        rows = (tensor_rows(contract, stage),) if chosen.family == "tensor" else SIMT_ROWS
        if chosen.rows not in rows:
            raise InvalidConfig(
                f"{stage} config {chosen.key()}: a {chosen.family} pass takes {' or '.join(map(str, rows))} rows"
            )
        steps, tiles = gemm.k // STEP, gemm.n // tile_columns(contract)
        if steps % chosen.split_k or steps // chosen.split_k % chosen.unroll:
            raise InvalidConfig(
                f"{stage} config {chosen.key()}: split-K must divide the {steps} steps of K={gemm.k}, "
                f"and unroll what is left of them for a warp"
            )
        if tiles % chosen.tiles:
            raise InvalidConfig(f"{stage} config {chosen.key()}: tiles must divide the {tiles} column tiles of its N")
    if config.w13.threads != config.w2.threads:
        raise InvalidConfig(
            f"config {config.key()}: W13 and W2 share one launch, but take {config.w13.threads} and "
            f"{config.w2.threads} threads"
        )
    if config.resident > MAX_RESIDENT:
        raise InvalidConfig(f"config {config.key()}: an SM holds at most {MAX_RESIDENT} threads")
    if name == "fused":
        launches = [_op(contract, config, load_only)]
    elif load_only:
        raise RequestError(f"plan {name}: only the fused plan has a kernel that only loads")
    else:
        launches = [_compact(contract, name), *(_stage(contract, stage, config, name) for stage in STAGES)]
    return Plan(name, contract, config, tuple(launches), _buffers(contract, name, load_only))


def why_invalid(contract: Contract, config: Config, limits: Limits) -> str | None:
    """Why the op cannot be launched on a device at the contract's largest level; None when it can."""
    launch = _op(contract, config, load_only=False)
    shared = launch.shared.at(contract.max_tokens)
    if shared > limits.shared_per_block:
        there = f"{limits.name} has {limits.shared_per_block} a block"
        return f"{config.key()} needs {shared} bytes of shared memory; {there}"
    if launch.block > limits.threads_per_block:
        return f"{config.key()} needs {launch.block} threads; {limits.name} has {limits.threads_per_block} a block"
    return None
