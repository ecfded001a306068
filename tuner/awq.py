"""An expert layer's 4-bit weights: the AWQ checkpoint order, the order V100 engines hold, and the integers both mean.

A weight is (q - z) * s with q and z in 0..15; z is the raw nibble, nothing added. Nibble n of a word is bits 4n..4n+3.

awq      q     uint32 [E, K, N/8]     column 8c+j is nibble NIBBLES[j] of word c
         zeros uint32 [E, K/g, N/8]   likewise;  scales float16 [E, K/g, N]
sm70-u4  q     uint32 [E, K, N/8]     an expert's words run (N/32, K/8, 32): 32 columns side by side, then 8 rows on,
                                      then 32 columns on; row 8o+i of a column is nibble NIBBLES[i] of its word
         scales uint8  [E, K/g, N, 3] {scale's low byte, its high byte, z}, or
                uint32 [E, K/g, N]    half2: scale in the low half, f16(-z * s) in the high half

Sources: AutoAWQ's packing order for awq; what the public TurboMind-derived V100 engines hold after loading for sm70-u4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.contract import Contract, Gemm
from tuner.errors import CheckpointError, ContractError

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F16 = NDArray[np.float16]


@dataclass(frozen=True)
class GemmWeights:
    """One GEMM's tensors of all experts, as an engine holds them: shapes and dtypes in this module's docstring."""

    q: U32
    scales: NDArray[np.generic]
    zeros: U32 | None

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return sum(part.nbytes for part in (self.q, self.scales, self.zeros) if part is not None)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's experts on one tensor-parallel rank."""

    w13: GemmWeights
    w2: GemmWeights

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return self.w13.nbytes + self.w2.nbytes


@dataclass(frozen=True)
class Integers:
    """One expert's matrix in the open: q uint8 [K, N], z uint8 [K/g, N], both 0..15, s float16 [K/g, N].

    W13's columns are all gate columns, then all up columns, whatever the layout interleaves.
    """

    q: U8
    z: U8
    s: F16


def gemm(contract: Contract, which: str) -> Gemm:
    """The shape of "w13" or "w2" on one rank."""
    return {"w13": contract.w13, "w2": contract.w2}[which]


def integers(contract: Contract, weights: LayerWeights, which: str, expert: int) -> Integers:
    """Unpack one expert's "w13" or "w2" from the contract's layout.

    4-byte statistics {s, b} give z = rint(-b / s), the z that was packed, except where s = 0: there the weight is 0
    whatever z was, and z reads 0.
    Raises CheckpointError where statistics are none that (q - z) * s with a finite s and z in 0..15 can mean.
    """
    held = weights.w13 if which == "w13" else weights.w2
    label = f"{which}, expert {expert}"
    if held.zeros is not None:
        numbers = Integers(
            unpack_columns(held.q[expert]), unpack_columns(held.zeros[expert]), held.scales[expert].view(np.float16)
        )
    else:
        s, z = _read_statistics(held.scales[expert], label)
        numbers = Integers(_unpack_rows(held.q[expert]), z, s)
        if contract.interleaved and which == "w13":
            numbers = Integers(_apart(numbers.q), _apart(numbers.z), _apart(numbers.s))
    _check(numbers, gemm(contract, which), label)
    return numbers


def pack(contract: Contract, which: str, experts: Iterable[Integers]) -> GemmWeights:
    """Pack every expert's integers of "w13" or "w2" into the contract's layout, taking one expert at a time.

    Raises CheckpointError: not contract.experts of them, shapes that are not the contract's, a q or z above 15, a scale
    that is not finite, or (4-byte statistics) a z * s beyond f16.
    """
    shape = gemm(contract, which)
    held = _empty(contract, shape)
    count = 0
    for expert, numbers in enumerate(experts):
        count = expert + 1
        if count > contract.experts:
            break
        label = f"{which}, expert {expert}"
        _check(numbers, shape, label)
        if held.zeros is not None:
            held.q[expert] = pack_columns(numbers.q)
            held.zeros[expert] = pack_columns(numbers.z)
            held.scales[expert] = numbers.s
            continue
        if contract.interleaved and which == "w13":
            numbers = Integers(_together(numbers.q), _together(numbers.z), _together(numbers.s))
        held.q[expert] = _pack_rows(numbers.q)
        held.scales[expert] = _statistics(numbers.s, numbers.z, contract.stats_bytes, label)
    if count != contract.experts:
        more = "more" if count > contract.experts else f"{count}"
        raise CheckpointError(
            f"{which}: expected {contract.experts} experts, as contract {contract.name!r} says, and got {more}"
        )
    return held


def synthetic(contract: Contract, rank: int, seed: int) -> LayerWeights:
    """Random weights made straight in the contract's layout: q and z anywhere in 0..15, a scale a column and group.

    Scales spread over two octaves placed by K, so that activations keep their size through both GEMMs: unit normal
    inputs give outputs of order 0.05 to 1. Another rank or seed gives other weights; so does another layout.
    Raises ContractError: no such rank.
    """
    check_rank(contract, rank)
    return LayerWeights(
        *(_random(contract, gemm(contract, which), [seed, rank, i]) for i, which in enumerate(("w13", "w2")))
    )


def check_rank(contract: Contract, rank: int) -> None:
    """Raises ContractError where the contract has no such tensor-parallel rank."""
    if not 0 <= rank < contract.tensor_parallel:
        raise ContractError(f"rank {rank}: expected 0 to {contract.tensor_parallel - 1} of contract {contract.name!r}")


def pack_columns(values: U8) -> U32:
    """AWQ's order: 0..15 in [R, N] -> words [R, N/8]."""
    rows, n = values.shape
    return _words(np.moveaxis(values.reshape(rows, n // 8, 8), 2, 0))


def unpack_columns(words: U32) -> U8:
    """AWQ's order: words [R, N/8] -> 0..15 in [R, N]."""
    rows, count = words.shape
    values = np.empty((rows, count, 8), np.uint8)
    _spread(words, np.moveaxis(values, 2, 0))
    return values.reshape(rows, count * 8)


def _pack_rows(q: U8) -> U32:
    """sm70-u4's order: [K, N] -> words [K, N/8], in memory (N/32, K/8, 32)."""
    k, n = q.shape
    words = _words(np.moveaxis(q.reshape(k // 8, 8, n // 32, 32), 1, 0))
    return np.ascontiguousarray(words.swapaxes(0, 1)).reshape(k, n // 8)


def _unpack_rows(words: U32) -> U8:
    k, n = words.shape[0], words.shape[1] * 8
    values = np.empty((k // 8, 8, n // 32, 32), np.uint8)
    _spread(np.ascontiguousarray(words.reshape(n // 32, k // 8, 32).swapaxes(0, 1)), np.moveaxis(values, 1, 0))
    return values.reshape(k, n)


def _words(planes: U8) -> U32:
    """[8, ...] -> words [...], the i-th plane in nibble NIBBLES[i]."""
    words = np.zeros(planes.shape[1:], np.uint32)
    for plane, nibble in zip(planes, NIBBLES, strict=True):
        words |= plane.astype(np.uint32) << np.uint32(4 * nibble)
    return words


def _spread(words: U32, planes: U8) -> None:
    """Words [...] into planes [8, ...], a view of where the values belong."""
    for plane, nibble in zip(planes, NIBBLES, strict=True):
        plane[...] = (words >> np.uint32(4 * nibble)) & np.uint32(15)


def _together(part: NDArray[Any]) -> NDArray[Any]:
    """[R, gate columns then up columns] -> [R, gate 0, up 0, gate 1, up 1, ...]."""
    rows, n = part.shape
    return np.ascontiguousarray(part.reshape(rows, 2, n // 2).swapaxes(1, 2)).reshape(rows, n)


def _apart(part: NDArray[Any]) -> NDArray[Any]:
    rows, n = part.shape
    return np.ascontiguousarray(part.reshape(rows, n // 2, 2).swapaxes(1, 2)).reshape(rows, n)


def _bias(s: F16, z: U8) -> F16:
    """f16(-z * s), rounded once: four bits times eleven are exact in f32. Infinite where it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (-(z.astype(np.float32) * s.astype(np.float32))).astype(np.float16)


def _statistics(s: F16, z: U8, stats_bytes: int, label: str) -> U8 | U32:
    if stats_bytes == 3:
        halves = np.ascontiguousarray(s, "<f2").view(np.uint8).reshape(*s.shape, 2)
        return np.concatenate((halves, z[..., None]), axis=-1)
    b = _bias(s, z)
    _refuse(
        ~np.isfinite(b), label, "z * s is beyond f16, which 4-byte statistics cannot hold; use 3-byte ones", s=s, z=z
    )
    return np.ascontiguousarray(np.stack((s, b), axis=-1), "<f2").view("<u4")[..., 0]


def _read_statistics(stats: NDArray[Any], label: str) -> tuple[F16, U8]:
    if stats.dtype == np.uint8:
        return np.ascontiguousarray(stats[..., :2]).view("<f2")[..., 0], np.ascontiguousarray(stats[..., 2])
    halves = np.ascontiguousarray(stats, "<u4").view("<f2").reshape(*stats.shape, 2)
    s, b = np.ascontiguousarray(halves[..., 0]), halves[..., 1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        z = np.where(s == 0, np.float32(0), np.rint(-b.astype(np.float32) / s.astype(np.float32)))
        known = np.isfinite(s) & (z >= 0) & (z <= 15)
        z = np.where(known, z, 0).astype(np.uint8)
    _refuse(
        ~(known & (_bias(s, z) == b)), label, "no z in 0..15 gives this b = f16(-z * s): not AWQ statistics", s=s, b=b
    )
    return s, z


def _check(numbers: Integers, shape: Gemm, label: str) -> None:
    groups = (shape.groups, shape.n)
    expected: dict[str, tuple[tuple[int, int], type]] = {
        "q": ((shape.k, shape.n), np.uint8),
        "z": (groups, np.uint8),
        "s": (groups, np.float16),
    }
    for name, (size, dtype) in expected.items():
        part = getattr(numbers, name)
        if part.shape != size or part.dtype != dtype:
            raise CheckpointError(
                f"{label}: {name} is {part.dtype} {list(part.shape)}; the contract has {np.dtype(dtype)} {list(size)}"
            )
    _refuse(numbers.q > 15, label, "a weight takes 0..15", q=numbers.q)
    _refuse(numbers.z > 15, label, "a zero point takes 0..15", z=numbers.z)
    _refuse(~np.isfinite(numbers.s), label, "a scale has to be finite", s=numbers.s)


def _refuse(bad: NDArray[np.bool_], label: str, why: str, **parts: NDArray[Any]) -> None:
    """Raises CheckpointError naming the first bad place and its values."""
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        values = ", ".join(f"{name} = {part[row, column]}" for name, part in parts.items())
        raise CheckpointError(f"{label}, row or group {row}, column {column}: {values}: {why} ({int(bad.sum())} such)")


def _empty(contract: Contract, shape: Gemm) -> GemmWeights:
    experts = contract.experts
    q = np.empty((experts, shape.k, shape.n // 8), np.uint32)
    groups = (experts, shape.groups, shape.n)
    if contract.layout == "awq":
        return GemmWeights(q, np.empty(groups, np.float16), np.empty((experts, shape.groups, shape.n // 8), np.uint32))
    three = contract.stats_bytes == 3
    return GemmWeights(q, np.empty((*groups, 3), np.uint8) if three else np.empty(groups, np.uint32), None)


def _random(contract: Contract, shape: Gemm, seed: list[int]) -> GemmWeights:
    rng = np.random.default_rng(seed)
    held = _empty(contract, shape)
    # q - z has root mean square 6.5, scales 2.4 times the start of the lower octave: K products then sum to about 1.
    octave = round(-math.log2(6.5 * 2.4 * math.sqrt(shape.k)))
    _fill(rng, held.q)
    if held.zeros is not None:
        _fill(rng, held.zeros)
    for expert in range(contract.experts):
        bits = rng.integers(0, 1 << 15, (shape.groups, shape.n), np.uint16)
        s = (((octave + 15) << 10) + (bits & 2047)).astype(np.uint16).view(np.float16)
        z = (bits >> 11).astype(np.uint8)
        held.scales[expert] = s if contract.layout == "awq" else _statistics(s, z, contract.stats_bytes, "synthetic")
    return held


def _fill(rng: np.random.Generator, words: U32) -> None:
    for part in words:  # one expert at a time: the whole would be held twice
        part[...] = rng.integers(0, 1 << 32, part.shape, np.uint32)
