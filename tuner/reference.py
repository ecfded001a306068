"""What the layer should give, in float64 from the integers and with a V100 engine's roundings; and distances from it.

S = M*k routed rows ("slots", slot t*k+j is column j of token t), I the rank's own intermediate size, H hidden.
For each slot with an expert e: hidden = silu(x @ gate_e) * (x @ up_e); a token's output is the sum over its slots of
topk_weight * (hidden @ w2_e), with silu(v) = v / (1 + exp(-v)) and weight = (q - z) * s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from tuner import awq
from tuner.contract import Contract
from tuner.routing import resolve

Array = np.ndarray[Any, np.dtype[Any]]
Which = Literal["w13", "w2"]


@dataclass(frozen=True, eq=False)
class Layer:
    """hidden [S, I], NaN in rows of slots with no expert; output [M, H], zero rows where no slot of a token has one."""

    hidden: Array
    output: Array


class Reference:
    """The layer's references under one rank's weights. Unpacks only the experts a call names, and keeps the latest.

    `cache_bytes` bounds what is kept (a qwen38-tp4 expert is 1.3 MB); a call over more experts than fit is only slower.
    """

    def __init__(self, contract: Contract, weights: awq.LayerWeights, *, cache_bytes: int = 512 << 20) -> None:
        self.contract = contract
        self.weights = weights
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[tuple[Which, int], awq.Integers] = OrderedDict()

    def exact(
        self,
        x: Array,
        ids: Array,
        topk_weights: Array,
        *,
        expert_map: Array | None = None,
        live_tokens: int | None = None,
    ) -> Layer:
        """Everything in float64: hidden float64 [S, I], output float64 [M, H].

        x f16 [M, H]; ids int32 or int64 [M, k], whose meaning with `expert_map` (int32 [G]) and `live_tokens` is
        routing.resolve's; topk_weights f32 [M, k]. Tokens past `live_tokens` are not read.
        """
        local = resolve(ids, self.contract.experts, expert_map=expert_map, live_tokens=live_tokens)
        rows, intermediate = local.size, self.contract.local_intermediate
        hidden = np.full((rows, intermediate), np.nan)
        routed = np.zeros((rows, self.contract.hidden))
        for expert, slots in _segments(local):
            gate_up = x[slots // local.shape[1]].astype(np.float64) @ self._dequantised("w13", expert, _exact_weights)
            gate, up = gate_up[:, :intermediate], gate_up[:, intermediate:]
            hidden[slots] = _silu(gate) * up
            routed[slots] = hidden[slots] @ self._dequantised("w2", expert, _exact_weights)
        weights = np.where(local < 0, 0.0, topk_weights.astype(np.float64))
        return Layer(hidden, np.einsum("mk,mkh->mh", weights, routed.reshape(*local.shape, -1)))

    def engine(
        self,
        x: Array,
        ids: Array,
        topk_weights: Array,
        *,
        expert_map: Array | None = None,
        live_tokens: int | None = None,
    ) -> Layer:
        """A V100 engine's stages with its roundings: hidden f16 [S, I], output f16 [M, H]; arguments as `exact`.

        Weights f16(fma(q, s, f16(-z*s))); gate and up rounded to f16; silu in fp32, rounded to f16, times up in f16;
        each slot's W2 row rounded to f16; a token's weighted sum in fp32, column after column, each step one fused
        multiply-add as nvcc makes it; output rounded to f16. An engine's order of fp32 accumulation inside a product is
        its own: here products accumulate in float64 and are rounded to fp32 once, so an engine differs by fp32 rounding
        before each f16 one.
        """
        local = resolve(ids, self.contract.experts, expert_map=expert_map, live_tokens=live_tokens)
        rows, intermediate = local.size, self.contract.local_intermediate
        hidden = np.full((rows, intermediate), np.nan, np.float16)
        routed = np.zeros((rows, self.contract.hidden), np.float16)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # f16 overflow is the engine's own: infinities, and what follows
            for expert, slots in _segments(local):
                gate_up = _half_product(x[slots // local.shape[1]], self._dequantised("w13", expert, _engine_weights))
                gate, up = gate_up[:, :intermediate], gate_up[:, intermediate:]
                hidden[slots] = _silu(gate.astype(np.float32)).astype(np.float16) * up
                routed[slots] = _half_product(hidden[slots], self._dequantised("w2", expert, _engine_weights))
            output = np.zeros((len(local), self.contract.hidden), np.float32)
            weights = np.where(local < 0, 0.0, topk_weights.astype(np.float64))
            by_token = routed.reshape(*local.shape, -1).astype(np.float64)
            for column in range(local.shape[1]):  # float64 holds the 35-bit product exactly
                output = (output + weights[:, column, None] * by_token[:, column]).astype(np.float32)
            return Layer(hidden, output.astype(np.float16))

    def _dequantised(self, which: Which, expert: int, rule: Callable[[awq.Integers, int], Array]) -> Array:
        """float64 [K, N] of one expert; N of w13 is gate columns, then up columns."""
        key = (which, expert)
        if key in self._cache:
            self._cache.move_to_end(key)
            integers = self._cache[key]
        else:
            integers = awq.integers(self.contract, self.weights, which, expert)
            self._cache[key] = integers
            self._cached_bytes += _nbytes(integers)
            while self._cached_bytes > self._cache_bytes:
                self._cached_bytes -= _nbytes(self._cache.popitem(last=False)[1])
        return rule(integers, self.contract.group).astype(np.float64)


def _nbytes(integers: awq.Integers) -> int:
    return integers.q.nbytes + integers.z.nbytes + integers.s.nbytes


def _segments(local: Array) -> Iterator[tuple[int, Array]]:
    """(expert, its slots ascending) of every expert that local ids [M, k] name."""
    flat = local.ravel()
    for expert in np.unique(flat[flat >= 0]):
        yield int(expert), np.flatnonzero(flat == expert)


def _exact_weights(integers: awq.Integers, group: int) -> Array:
    """(q - z) * s, float32 [K, N]: exact, since |q - z| has 4 bits and s 11."""
    k, n = integers.q.shape
    grouped = integers.q.reshape(k // group, group, n).astype(np.float32)
    grouped -= integers.z[:, None].astype(np.float32)
    grouped *= integers.s[:, None].astype(np.float32)
    return grouped.reshape(k, n)


def _engine_weights(integers: awq.Integers, group: int) -> Array:
    """f16(fma(q, s, f16(-z*s))), f16 [K, N].

    In fp32 the fused sum is exact, so the one rounding is the last: q*s and f16(-z*s) are both multiples of s's last
    place and below 2**16 of them.
    """
    k, n = integers.q.shape
    scale = integers.s.astype(np.float32)
    bias = (-integers.z.astype(np.float32) * scale).astype(np.float16).astype(np.float32)
    grouped = integers.q.reshape(k // group, group, n).astype(np.float32)
    grouped *= scale[:, None]
    grouped += bias[:, None]
    return grouped.reshape(k, n).astype(np.float16)


def _half_product(a: Array, b: Array) -> Array:
    """a f16 [R, K] @ b float64 [K, N], f16 values, through fp32 to f16."""
    return (a.astype(np.float64) @ b).astype(np.float32).astype(np.float16)


def _silu(v: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-v) = inf gives the right limit, -0
        activated: Array = v / (1 + np.exp(-v))
    return activated


@dataclass(frozen=True)
class Difference:
    """How far an output is from a reference.

    The measures run over the pairs finite on both sides; the others are counted. "Finite" of a reference is after
    rounding to the output's dtype. With no pair to measure they are 0.
    """

    max_abs: float
    relative_l2: float  # |actual - reference| / |reference|, Euclidean; inf where only the reference is zero
    max_ulp: int  # both rounded to f16, counted in representable numbers, -0 = 0
    max_scaled_ulp: (
        float  # |actual - reference| in f16 spacings at max(|reference|, largest |reference| / 64), reference unrounded
    )
    sign_flips: int  # both non-zero, signs differ
    largest_flip: float  # largest magnitude on either side of a flip
    nonfinite: int  # elements not finite where the reference is
    missing_inf: int  # elements that are not the reference's infinity (or NaN) where it has one
    where: tuple[int, ...]  # first element counted in nonfinite or missing_inf, else the one of max_scaled_ulp

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: it goes as the text "inf"."""
        return {key: "inf" if value == float("inf") else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Difference:
        """What to_dict wrote."""
        floats = {key: float(content[key]) for key in ("max_abs", "relative_l2", "max_scaled_ulp", "largest_flip")}
        return cls(**(content | floats | {"where": tuple(content["where"])}))


def compare(actual: Array, reference: Array) -> Difference:
    """Difference of `actual`, f16 or f32, from `reference`, float64 or f16 of the same shape."""
    if actual.shape != reference.shape:
        raise ValueError(f"output {actual.shape} against reference {reference.shape}; expected the same shape")
    exact = reference.astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = reference.astype(actual.dtype)
    unlike = ~(np.isfinite(actual) & np.isfinite(rounded)) & ~(
        (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
    )
    nonfinite = unlike & np.isfinite(rounded)
    pairs = np.isfinite(actual) & np.isfinite(rounded)
    a, r = np.where(pairs, actual, 0).astype(np.float64), np.where(pairs, exact, 0)
    error = np.abs(a - r)
    scaled = scaled_ulp(a, r)
    flips = a * np.sign(r) < 0
    worst = int(np.argmax(unlike if unlike.any() else scaled)) if actual.size else None
    return Difference(
        max_abs=float(error.max(initial=0)),
        relative_l2=_ratio(float(np.linalg.norm(error)), float(np.linalg.norm(r))),
        max_ulp=int(ulp_distance(a, r).max(initial=0)),
        max_scaled_ulp=float(scaled.max(initial=0)),
        sign_flips=int(flips.sum()),
        largest_flip=float(np.maximum(np.abs(a), np.abs(r))[flips].max(initial=0)),
        nonfinite=int(nonfinite.sum()),
        missing_inf=int((unlike & ~nonfinite).sum()),
        where=() if worst is None else tuple(int(i) for i in np.unravel_index(worst, actual.shape)),
    )


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return error / size


def ulp16(values: Array) -> Array:
    """Spacing of f16 at |value|, float64: 2**-24 among subnormals and at 0, 32 at and past the largest finite."""
    exponent = np.frexp(np.maximum(np.abs(values.astype(np.float64)), 2.0**-24))[1] - 1
    spacing: Array = np.ldexp(1.0, np.clip(exponent, -14, 15) - 10)
    return spacing


def scaled_ulp(actual: Array, reference: Array) -> Array:
    """|actual - reference| in f16 spacings at max(|reference|, largest |reference| / 64), float64; finite arguments.

    The floor is there because an element that cancels to near zero has the absolute error of its large terms.
    """
    magnitude = np.abs(reference)
    scaled: Array = np.abs(actual - reference) / ulp16(np.maximum(magnitude, magnitude.max(initial=0) / 64))
    return scaled


def ulp_distance(a: Array, b: Array) -> Array:
    """How many f16 numbers apart a and b are once rounded to f16, int64; infinity counts as the number after 65504."""
    distance: Array = np.abs(_ordered(a) - _ordered(b))
    return distance


def _ordered(values: Array) -> Array:
    """Integers in the order of the f16 values, with -0 and 0 both 0."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)
