"""The launch plan as data: kernels, grids, blocks, shared memory, workspace and arguments of a contract and config.

Plans, all with the same bits for the same config:
  fused        W13 and W2, each finding the step's segments by ballots: two launches, the default
  staged       segment compaction from raw ids, then W13 and W2 over the listed segments
  sorted       the same from an engine's own sort (sorted rows and expert offsets)
  all-experts  compaction that keeps empty experts: what a grouped GEMM without compaction walks, as a baseline
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tuner.contract import Contract
from tuner.errors import InvalidConfig, RequestError
from tuner.space import (
    STAGES,
    STEP,
    TENSOR_ROWS,
    Config,
    Family,
    Stage,
    StageConfig,
    W2Config,
    W13Config,
    families,
    tile_columns,
)

PlanName = Literal["fused", "staged", "sorted", "all-experts"]
PLANS: tuple[PlanName, ...] = ("fused", "staged", "sorted", "all-experts")
SCALARS = ("TOKENS", "ID_BYTES", "MAP_SIZE")
COMPACT_THREADS = 256


@dataclass(frozen=True)
class Linear:
    """A size that grows with the step: constant + per_token * tokens."""

    constant: int
    per_token: int = 0

    def at(self, tokens: int) -> int:
        return self.constant + self.per_token * tokens


@dataclass(frozen=True)
class Buffer:
    """An operand in memory. `dtype` is numpy's name; TOPK_IDS may be int64 as well."""

    name: str
    dtype: str
    shape: tuple[Linear, ...]
    role: Literal["input", "workspace", "output"]
    optional: bool = False

    def dimensions(self, tokens: int) -> tuple[int, ...]:
        return tuple(d.at(tokens) for d in self.shape)

    def nbytes(self, tokens: int) -> int:
        return int(np.prod(self.dimensions(tokens), dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are operand names in the kernel's order: a pointer, or an int32 for a scalar."""

    stage: str  # compact, w13, w2
    template: str  # of templates/, without .cu.j2
    grid: tuple[Linear, Linear]  # x, y
    block: int  # threads
    shared: Linear  # dynamic shared memory, bytes
    arguments: tuple[str, ...]
    constants: Mapping[str, int]  # what the template renders
    family: Family | None = None  # of W13 and W2

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


def _align(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _constants(contract: Contract, threads: int, arena: int) -> dict[str, int]:
    return {
        "kExperts": contract.experts,
        "kTopK": contract.top_k,
        "kHidden": contract.hidden,
        "kIntermediate": contract.local_intermediate,
        "kGroup": contract.group,
        "kMaxSlots": contract.max_tokens * contract.top_k,
        "kSm70U4": int(contract.layout == "sm70-u4"),
        "kStatsBytes": contract.stats_bytes,
        "kInterleaved": int(contract.interleaved),
        "kEngineNumerics": int(contract.numerics == "engine"),
        "kThreads": threads,
        "kArenaBytes": arena,
    }


def _rows_argument(name: PlanName) -> str:
    return "SORTED_ROWS" if name == "sorted" else "SEGMENT_ROWS"


def _step_arguments(name: PlanName) -> tuple[str, ...]:
    return _ROUTING if name == "fused" else (*_SEGMENTS, _rows_argument(name), "TOKENS")


def _with_warps(nbytes: int, warps: int, config: StageConfig, share: int, fp32: bool) -> int:
    """`nbytes` of a CTA's arena followed by each warp's own part: the slots of its pass, then its rows."""
    nbytes += 4 * warps * config.rows
    if config.family == "simt":
        return _align(nbytes) + warps * 4 * config.rows * share  # floats
    if fp32:
        return _align(nbytes) + warps * _align(2 * config.rows * 2 * (share + 8) + 4 * config.rows)  # two f16 planes
    return -(-(nbytes + warps) // 4) * 4  # rows are read where they are; an empty struct takes a byte


def _tile(contract: Contract, config: StageConfig, arena: int) -> dict[str, int]:
    sizes = {"kSplitK": config.split_k, "kUnroll": config.unroll, "kRows": config.rows}
    return {**_constants(contract, config.threads, arena), **sizes}


def _w13(contract: Contract, config: W13Config, name: PlanName) -> Launch:
    columns = tile_columns(contract)
    warps = config.tiles * config.split_k
    arena = 4 * contract.max_tokens * contract.top_k
    arena = _with_warps(arena, warps, config, contract.hidden // config.split_k, fp32=False)
    arena = _align(arena + 4 * config.split_k * config.rows * config.tiles * columns)
    segments = Linear(contract.experts) if name == "all-experts" else Linear(0, contract.top_k)
    return Launch(
        stage="w13",
        template="w13" if name == "fused" else "w13_listed",
        grid=(Linear(contract.w13.n // columns // config.tiles), segments),
        block=config.threads,
        shared=Linear(arena),
        arguments=("X", *_step_arguments(name), "W13_Q", "W13_SCALES", "W13_ZEROS", "HIDDEN"),
        constants={**_tile(contract, config, arena), "kTiles": config.tiles},
        family=config.family,
    )


def _w2(contract: Contract, config: W2Config, name: PlanName) -> Launch:
    columns = tile_columns(contract)
    warps = config.segments * config.split_k
    arena = 2 * 4 * contract.max_tokens * contract.top_k
    arena = _align(_with_warps(arena, warps, config, contract.local_intermediate // config.split_k, fp32=True))
    routes = 4 * config.split_k * contract.top_k * columns  # of a token, after the arena
    return Launch(
        stage="w2",
        template="w2" if name == "fused" else "w2_listed",
        grid=(Linear(contract.w2.n // columns), Linear(1)),
        block=config.threads,
        shared=Linear(arena, routes),
        arguments=("HIDDEN", *_step_arguments(name), "TOPK_WEIGHTS", "W2_Q", "W2_SCALES", "W2_ZEROS", "OUT"),
        constants={**_tile(contract, config, arena), "kWarps": config.segments},
        family=config.family,
    )


def _compact(contract: Contract, name: PlanName) -> Launch:
    arguments: tuple[str, ...] = (*_ROUTING, *_SEGMENTS, "SEGMENT_ROWS")
    template, arena = "compact", 2 * 4 * contract.max_tokens * contract.top_k
    if name == "sorted":
        arguments = ("OFFSETS", *_SEGMENTS)
        template, arena = "compact_sorted", 4 * -(-contract.experts // 32)
    return Launch(
        stage="compact",
        template=template,
        grid=(Linear(1), Linear(1)),
        block=COMPACT_THREADS,
        shared=Linear(arena),
        arguments=arguments,
        constants={**_constants(contract, COMPACT_THREADS, arena), "kKeepEmpty": int(name == "all-experts")},
    )


def _buffers(contract: Contract, name: PlanName) -> tuple[Buffer, ...]:
    k, hidden = contract.top_k, contract.hidden
    one, tokens, slots = Linear(1), Linear(0, 1), Linear(0, k)
    segments = contract.experts if name == "all-experts" else 0
    listed = Linear(segments, 0 if segments else k)
    found = [
        Buffer("X", "float16", (tokens, Linear(hidden)), "input"),
        Buffer("TOPK_WEIGHTS", "float32", (tokens, Linear(k)), "input"),
        Buffer("HIDDEN", "float32", (slots, Linear(contract.local_intermediate)), "workspace"),
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


def make(contract: Contract, config: Config, name: PlanName = "fused") -> Plan:
    """The plan `name` of `config`. Raises RequestError for an unknown name, InvalidConfig where sizes do not divide.

    EXPERT_MAP (int32, any length) is not in `buffers`, since its length is not the contract's; it may be None, as may
    LIVE_TOKENS. The ZEROS of an sm70-u4 contract are null.
    """
    if name not in PLANS:
        raise RequestError(f"plan {name!r}: expected one of {', '.join(PLANS)}")
    for stage in STAGES:
        chosen, gemm = config.stage(stage), contract.w13 if stage == "w13" else contract.w2
        if chosen.family not in families(contract):
            raise InvalidConfig(
                f"{stage} config {chosen.key()}: the tensor family reads sm70-u4 with exact numerics; contract "
                f"{contract.name} is {contract.layout}, {contract.numerics}"
            )
        if chosen.family == "tensor" and chosen.rows != TENSOR_ROWS[stage]:
            raise InvalidConfig(f"{stage} config {chosen.key()}: a tensor pass takes {TENSOR_ROWS[stage]} rows")
        steps = gemm.k // STEP
        if steps % chosen.split_k or steps // chosen.split_k % chosen.unroll:
            raise InvalidConfig(
                f"{stage} config {chosen.key()}: split-K must divide the {steps} steps of K={gemm.k}, "
                f"and unroll what is left of them for a warp"
            )
    tiles = contract.w13.n // tile_columns(contract)
    if tiles % config.w13.tiles:
        raise InvalidConfig(f"w13 config {config.w13.key()}: tiles must divide the {tiles} column tiles of W13")
    launches = [_w13(contract, config.w13, name), _w2(contract, config.w2, name)]
    if name != "fused":
        launches.insert(0, _compact(contract, name))
    return Plan(name, contract, config, tuple(launches), _buffers(contract, name))


def why_invalid(contract: Contract, stage: Stage, config: StageConfig, limits: Limits) -> str | None:
    """Why the stage cannot be launched on a device at the contract's largest level; None when it can."""
    launch = _w13(contract, config, "fused") if isinstance(config, W13Config) else _w2(contract, config, "fused")
    shared = launch.shared.at(contract.max_tokens)
    if shared > limits.shared_per_block:
        there = f"{limits.name} has {limits.shared_per_block} a block"
        return f"{stage} {config.key()} needs {shared} bytes of shared memory; {there}"
    if launch.block > limits.threads_per_block:
        return (
            f"{stage} {config.key()} needs {launch.block} threads; {limits.name} has {limits.threads_per_block} a block"
        )
    return None
