"""Tile configurations of the op, and which of them a contract admits.

W13 and W2 are parts of one launch, so they share a CTA's threads and are tuned together.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tuner.contract import Contract
from tuner.errors import InvalidConfig

Stage = Literal["w13", "w2"]
STAGES: tuple[Stage, ...] = ("w13", "w2")
Family = Literal["simt", "tensor"]  # fp32 products on the ordinary cores, or f16 operands on the tensor cores
FAMILIES: tuple[Family, ...] = ("simt", "tensor")

STEP = 32  # k a warp takes at once: four octets
WARPS = (4, 5, 8, 10, 16, 20)  # of a CTA: fewer leave an SM's schedulers idle, more wait for one another
ROW_BYTES = 49152  # of staged rows a CTA, in a default: half of a V100's shared memory
MAX_W13_TILES = 4  # of a CTA: K is long there, so its warps rather share that out
RESIDENT = (256, 384, 512, 768, 1024)
_UNROLLS = (1, 2, 3, 4, 5, 6, 8, 10)
SIMT_ROWS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Tile:
    """How a CTA works on one stage: `tiles` column tiles of a segment, `split_k` warps sharing out K of each."""

    family: Family
    tiles: int
    split_k: int
    unroll: int  # steps of 32 k a lane has in flight
    rows: int  # at most so many in one pass over the weights; on tensor cores always tensor_rows

    @property
    def threads(self) -> int:
        return 32 * self.tiles * self.split_k

    def key(self) -> str:
        return f"{self.family}-t{self.tiles}-k{self.split_k}-u{self.unroll}-r{self.rows}"


@dataclass(frozen=True)
class Config:
    """The whole op's tile configuration."""

    w13: Tile
    w2: Tile
    resident: int  # threads of an SM that a kernel's registers must leave room for

    def stage(self, stage: Stage) -> Tile:
        return self.w13 if stage == "w13" else self.w2

    @property
    def portable_bits(self) -> bool:
        """Whether every executor gives the same bits. Tensor cores round their sums each in their own way."""
        return all(self.stage(stage).family == "simt" for stage in STAGES)

    def key(self) -> str:
        return f"{self.w13.key()}+{self.w2.key()}+m{self.resident}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _tile(stage: str, values: Mapping[str, Any]) -> Tile:
    expected = set(Tile.__dataclass_fields__)
    sizes = {name: value for name, value in values.items() if name != "family"}
    known = set(values) == expected and values["family"] in FAMILIES
    if not known or not all(type(size) is int and size > 0 for size in sizes.values()):
        names = ", ".join(sorted(expected - {"family"}))
        raise InvalidConfig(
            f"{stage} config {dict(values)}: expected family simt or tensor, and positive integers for {names}"
        )
    return Tile(**values)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `Config.to_dict`. Raises InvalidConfig for unknown, missing or wrong values."""
    resident = values.get("resident")
    if set(values) != {*STAGES, "resident"} or type(resident) is not int or resident < 1:
        raise InvalidConfig(f"config {values}: expected the keys {', '.join(STAGES)}, and resident, a positive integer")
    return Config(_tile("w13", values["w13"]), _tile("w2", values["w2"]), resident)


_TILE_KEY = r"(simt|tensor)-t([1-9]\d*)-k([1-9]\d*)-u([1-9]\d*)-r([1-9]\d*)"


def parse(key: str) -> Config:
    """The inverse of `Config.key`, e.g. simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512. Raises InvalidConfig."""
    match = re.fullmatch(rf"{_TILE_KEY}\+{_TILE_KEY}\+m([1-9]\d*)", key)
    if match is None:
        raise InvalidConfig(
            f"config {key!r}: expected W13's and W2's tiles and the resident threads, such as "
            "simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512"
        )
    found = match.groups()
    w13, w2 = (Tile(found[i], *(int(n) for n in found[i + 1 : i + 5])) for i in (0, 5))  # type: ignore[arg-type]
    return Config(w13, w2, int(found[10]))


def tile_columns(contract: Contract) -> int:
    """Columns of a warp's tile: eight column groups of four (sm70-u4) or eight (awq) columns."""
    return 32 if contract.layout == "sm70-u4" else 64


def families(contract: Contract) -> tuple[Family, ...]:
    """The families that can read the contract's layout."""
    return FAMILIES if contract.layout == "sm70-u4" else ("simt",)


def tensor_rows(contract: Contract, stage: Stage) -> int:
    """Rows of a tensor-core pass: an mma has eight columns of B, of which a row of W2's fp32 activations takes two."""
    return 4 if stage == "w2" and contract.numerics == "exact" else 8


def _tiles(contract: Contract, stage: Stage) -> Iterator[Tile]:
    gemm = contract.gemm(stage)
    steps, columns = gemm.k // STEP, gemm.n // tile_columns(contract)
    rows: dict[Family, tuple[int, ...]] = {
        "simt": tuple(r for r in SIMT_ROWS if r <= contract.max_tokens * contract.top_k),
        "tensor": (tensor_rows(contract, stage),),
    }
    for family, warps in itertools.product(families(contract), range(1, max(WARPS) + 1)):
        for split in (s for s in range(1, warps + 1) if warps % s == 0 and steps % s == 0):
            if columns % (warps // split) == 0 and (stage == "w2" or warps // split <= MAX_W13_TILES):
                unrolls = [u for u in _UNROLLS if steps // split % u == 0]
                for unroll, r in itertools.product(unrolls[-4:], rows[family]):  # fewer in flight never paid
                    yield Tile(family, warps // split, split, unroll, r)


def _residents(threads: int) -> Iterator[int]:
    """Of the counts that leave room for equally many CTAs, the least: they build the same kernel."""
    fitting = {resident // threads: resident for resident in reversed(RESIDENT) if threads <= resident}
    yield from sorted(fitting.values())


def candidates(contract: Contract) -> tuple[Config, ...]:
    """Every configuration whose sizes divide the contract's, whatever the device, in a fixed order. Both stages are of
    one family and, on the ordinary cores, of as many rows a pass: what suits a routing suits it in both."""
    pairs = itertools.product(_tiles(contract, "w13"), _tiles(contract, "w2"))
    fitting = [
        (w13, w2)
        for w13, w2 in pairs
        if w13.threads == w2.threads and w13.family == w2.family and (w13.family == "tensor" or w13.rows == w2.rows)
    ]
    wide = [pair for pair in fitting if pair[0].threads // 32 in WARPS] or fitting
    return tuple(Config(*pair, resident) for pair in wide for resident in _residents(pair[0].threads))


def parameters(config: Config) -> dict[str, str | int]:
    """The config as independent choices, for a sampler; what its two stages must agree on is one of them."""
    w13, w2 = config.w13, config.w2
    return {
        "multiply": w13.family if w13.family == "tensor" else f"{w13.family}-r{w13.rows}",
        "warps": f"t{w13.tiles}-k{w13.split_k}+t{w2.tiles}-k{w2.split_k}",
        "w13_unroll": w13.unroll,
        "w2_unroll": w2.unroll,
        "resident": config.resident,
    }


def default(contract: Contract) -> Config:
    """The candidate nearest to what suits any contract: eight warps that split K of one W13 tile and take eight tiles
    of W2, two rows a pass, at most five steps in flight, 512 threads an SM; with rows that leave a V100's shared memory
    room. Fewer steps of awq and fewer threads with 4-byte statistics, which take more registers: on sm_70 it spills for
    no built-in contract, nor for its other layouts."""
    unroll = 2 if contract.layout == "awq" else 5
    wanted = (8 * 32, 1, 2, unroll, 1, 2, unroll, 384 if contract.stats_bytes == 4 else 512)

    def sizes(c: Config) -> tuple[int, ...]:
        w13, w2 = c.w13, c.w2
        return w13.threads, w13.tiles, w13.rows, w13.unroll, w2.split_k, w2.rows, w2.unroll, c.resident

    portable = [c for c in candidates(contract) if c.portable_bits]
    simt = [c for c in portable if max(c.w13.unroll, c.w2.unroll) <= unroll] or portable
    small = [c for c in simt if 4 * max(c.w13.rows * contract.w13.k, c.w2.rows * contract.w2.k) <= ROW_BYTES]
    return min(small or simt, key=lambda c: tuple(abs(a - b) for a, b in zip(sizes(c), wanted, strict=True)))


def space_digest(contract: Contract) -> str:
    """16 hex digits that change when the candidates do, so that a study never mixes two spaces."""
    keys = [c.key() for c in candidates(contract)]
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]
