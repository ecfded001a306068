"""Tile configurations of the kernel families, and which of them a contract admits.

W13 and W2 are separate launches whose times add up, so each is a space of its own and is tuned on its own.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tuner.contract import Contract
from tuner.errors import InvalidConfig

Stage = Literal["w13", "w2"]
STAGES: tuple[Stage, ...] = ("w13", "w2")
Family = Literal["simt", "tensor"]  # fp32 products on the ordinary cores, or f16 operands on the tensor cores
FAMILIES: tuple[Family, ...] = ("simt", "tensor")

STEP = 32  # k a warp takes at once: four octets
MAX_WARPS = 32  # of a CTA, by the hardware
ROW_BYTES = 65536  # of staged rows a CTA, in a default: two thirds of a V100's shared memory
MIN_WARPS = 4  # of a CTA, where the contract's sizes allow: fewer leave an SM's schedulers idle
_UNROLLS = (1, 2, 3, 4, 5, 6, 8, 10)
_ROWS = (1, 2, 4, 8)
# Columns of an mma's B operand; a row of W2's fp32 activations takes two of them.
TENSOR_ROWS: dict[Stage, int] = {"w13": 8, "w2": 4}


@dataclass(frozen=True)
class W13Config:
    """One CTA a (segment, `tiles` column tiles); `split_k` warps share out K of each tile."""

    family: Family
    tiles: int
    split_k: int
    unroll: int  # steps of 32 k a lane has in flight
    rows: int  # at most so many in one pass over the weights; on tensor cores always TENSOR_ROWS

    @property
    def threads(self) -> int:
        return 32 * self.tiles * self.split_k

    def key(self) -> str:
        return f"{self.family}-t{self.tiles}-k{self.split_k}-u{self.unroll}-r{self.rows}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class W2Config:
    """One CTA a column tile; `segments` groups of `split_k` warps take the step's segments in turn."""

    family: Family
    segments: int
    split_k: int
    unroll: int
    rows: int

    @property
    def threads(self) -> int:
        return 32 * self.segments * self.split_k

    def key(self) -> str:
        return f"{self.family}-s{self.segments}-k{self.split_k}-u{self.unroll}-r{self.rows}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


StageConfig = W13Config | W2Config


@dataclass(frozen=True)
class Config:
    """The whole op's tile configuration."""

    w13: W13Config
    w2: W2Config

    def stage(self, stage: Stage) -> StageConfig:
        return self.w13 if stage == "w13" else self.w2

    def with_stage(self, config: StageConfig) -> "Config":
        """This configuration but for one stage's."""
        if isinstance(config, W13Config):
            return replace(self, w13=config)
        return replace(self, w2=config)

    @property
    def portable_bits(self) -> bool:
        """Whether every executor gives the same bits. Tensor cores round their sums each in their own way."""
        return all(self.stage(stage).family == "simt" for stage in STAGES)

    def key(self) -> str:
        return f"{self.w13.key()}+{self.w2.key()}"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {"w13": self.w13.to_dict(), "w2": self.w2.to_dict()}


_TYPES: dict[Stage, type[W13Config] | type[W2Config]] = {"w13": W13Config, "w2": W2Config}


def stage_from_dict(stage: Stage, values: Mapping[str, Any]) -> StageConfig:
    """The inverse of `to_dict`. Raises InvalidConfig for unknown, missing or wrong values."""
    kind = _TYPES[stage]
    expected = set(kind.__dataclass_fields__)
    sizes = {name: value for name, value in values.items() if name != "family"}
    known = set(values) == expected and values["family"] in FAMILIES
    if not known or not all(type(size) is int and size > 0 for size in sizes.values()):
        names = ", ".join(sorted(expected - {"family"}))
        raise InvalidConfig(
            f"{stage} config {dict(values)}: expected family simt or tensor, and positive integers for {names}"
        )
    return kind(**values)


def from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """The inverse of `Config.to_dict`. Raises InvalidConfig."""
    if set(values) != set(STAGES):
        raise InvalidConfig(f"config {values}: expected the keys {', '.join(STAGES)}")
    w13, w2 = (stage_from_dict(stage, values[stage]) for stage in STAGES)
    assert isinstance(w13, W13Config) and isinstance(w2, W2Config)
    return Config(w13, w2)


def parse(key: str) -> Config:
    """The inverse of `Config.key`, e.g. simt-t1-k8-u5-r2+tensor-s16-k1-u5-r4. Raises InvalidConfig."""
    found: list[Any] = []
    for stage, letter, part in zip(STAGES, "ts", key.split("+"), strict=False):
        match = re.fullmatch(rf"(simt|tensor)-{letter}([1-9]\d*)-k([1-9]\d*)-u([1-9]\d*)-r([1-9]\d*)", part)
        if match is not None:
            found.append(_TYPES[stage](match[1], *(int(n) for n in match.groups()[1:])))  # type: ignore[arg-type]
    if len(found) != len(STAGES) or key.count("+") != 1:
        raise InvalidConfig(f"config {key!r}: expected W13's and W2's keys, such as simt-t1-k8-u5-r2+simt-s16-k1-u5-r2")
    return Config(*found)


def tile_columns(contract: Contract) -> int:
    """Columns of a warp's tile: eight column groups of four (sm70-u4) or eight (awq) columns."""
    return 32 if contract.layout == "sm70-u4" else 64


def families(contract: Contract) -> tuple[Family, ...]:
    """The families that can read the contract's layout with its numerics."""
    return FAMILIES if contract.layout == "sm70-u4" and contract.numerics == "exact" else ("simt",)


def axes(contract: Contract, stage: Stage) -> dict[str, tuple[Any, ...]]:
    """The values each parameter takes for some candidate of the contract."""
    found = candidates(contract, stage)
    return {name: tuple(sorted({c.to_dict()[name] for c in found})) for name in _TYPES[stage].__dataclass_fields__}


def candidates(contract: Contract, stage: Stage) -> tuple[StageConfig, ...]:
    """Every configuration whose sizes divide the contract's, whatever the device, in a fixed order."""
    gemm = contract.w13 if stage == "w13" else contract.w2
    steps = gemm.k // STEP
    rows: dict[Family, tuple[int, ...]] = {
        "simt": tuple(r for r in _ROWS if r <= contract.max_tokens * contract.top_k),
        "tensor": (TENSOR_ROWS[stage],),
    }
    splits = tuple(s for s in range(1, MAX_WARPS + 1) if steps % s == 0)
    if stage == "w13":
        tiles = gemm.n // tile_columns(contract)
        outer = tuple(t for t in (1, 2, 5) if tiles % t == 0)
    else:
        outer = (1, 2, 4, 8, 16, 32)
    found: list[StageConfig] = []
    for family in families(contract):
        for first, split, unroll, r in itertools.product(outer, splits, _UNROLLS, rows[family]):
            if steps // split % unroll == 0 and first * split <= MAX_WARPS:
                found.append(_TYPES[stage](family, first, split, unroll, r))
    return tuple(c for c in found if c.threads >= 32 * MIN_WARPS) or tuple(found)


def default(contract: Contract) -> Config:
    """The candidates nearest to what suits any contract: eight warps splitting K of one W13 tile, sixteen warps each
    taking W2 segments, two rows a pass, five steps in flight; with rows that leave a V100's shared memory room."""

    def row_bytes(stage: Stage, c: StageConfig) -> int:
        gemm = contract.w13 if stage == "w13" else contract.w2
        return 4 * c.rows * gemm.k * (c.threads // 32 // c.split_k)

    def nearest(stage: Stage, **wanted: int) -> StageConfig:
        simt = [c for c in candidates(contract, stage) if c.family == "simt"]
        small = [c for c in simt if row_bytes(stage, c) <= ROW_BYTES]
        return min(small or simt, key=lambda c: tuple(abs(c.to_dict()[name] - value) for name, value in wanted.items()))

    w13 = nearest("w13", tiles=1, rows=2, split_k=8, unroll=5)
    w2 = nearest("w2", segments=16, rows=2, split_k=1, unroll=5)
    assert isinstance(w13, W13Config) and isinstance(w2, W2Config)
    return Config(w13, w2)


def space_digest(contract: Contract, stage: Stage) -> str:
    """16 hex digits that change when the candidates do, so that a study never mixes two spaces."""
    keys = [c.key() for c in candidates(contract, stage)]
    return hashlib.sha256(json.dumps([stage, keys]).encode()).hexdigest()[:16]
