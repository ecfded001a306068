"""Calls of the op to verify kernels on: inputs, routings, and what an engine may send that a kernel may get wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner import routing
from tuner.contract import Contract
from tuner.errors import RequestError
from tuner.reference import Array


def ramp(contract: Contract, tokens: int) -> Array:
    """The operator gate's input, f16 [M, H]: x[i] = (i % 1024) / 512 - 1 over the flat buffer."""
    flat = np.arange(tokens * contract.hidden)
    return ((flat % 1024) / 512 - 1).astype(np.float16).reshape(tokens, contract.hidden)


def gaussian(contract: Contract, tokens: int, seed: int) -> Array:
    """Unit normal f16 [M, H]."""
    return np.random.default_rng(seed).standard_normal((tokens, contract.hidden)).astype(np.float16)


INPUTS: dict[str, Callable[[Contract, int, int], Array]] = {
    "ramp": lambda contract, tokens, seed: ramp(contract, tokens),
    "gaussian": gaussian,
}


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the op: x f16 [M, H], ids int32 or int64 [M, k], topk_weights f32 [M, k], expert_map int32 [G]."""

    name: str
    x: Array
    ids: Array
    topk_weights: Array
    expert_map: Array | None = None
    live_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """M."""
        return len(self.x)

    def local(self, experts: int) -> Array:
        """The local expert of each slot, int32 [M, k], or -1."""
        return routing.resolve(self.ids, experts, expert_map=self.expert_map, live_tokens=self.live_tokens)

    def digest(self) -> str:
        """sha256 of everything but the name: equal digests, equal calls."""
        arrays = (self.x, self.ids, self.topk_weights, np.zeros(0) if self.expert_map is None else self.expert_map)
        text = repr((self.expert_map is None, self.live_tokens, [(a.shape, str(a.dtype)) for a in arrays]))
        return hashlib.sha256(b"".join((text.encode(), *(a.tobytes() for a in arrays)))).hexdigest()


def make_case(contract: Contract, tokens: int, routed: str, given: str, seed: int = 0) -> Case:
    """Routing `routed` (see routing.make) on input `given`, one of INPUTS. Raises RequestError."""
    if given not in INPUTS:
        raise RequestError(f"unknown input {given!r}; expected one of {', '.join(INPUTS)}")
    if not 1 <= tokens <= contract.max_tokens:
        raise RequestError(f"{tokens} tokens; contract {contract.name} runs 1 to {contract.max_tokens}")
    made = routing.make(routed, contract, tokens, seed)
    return Case(f"C{tokens}, {made.name}, {given}", INPUTS[given](contract, tokens, seed), made.ids, made.weights)


def edge_cases(contract: Contract, tokens: int, seed: int = 0) -> tuple[Case, ...]:
    """Calls an engine may make and a kernel may get wrong, each of `tokens` tokens."""
    rng = np.random.default_rng(seed)
    made, x = routing.make("uniform", contract, tokens, seed), gaussian(contract, tokens, seed)
    experts, k = contract.experts, contract.top_k
    flat = np.arange(tokens * k).reshape(tokens, k)

    def with_every_other(values: Sequence[int], kind: type[np.signedinteger[Any]] = np.int32) -> Array:
        """Every other slot of the uniform ids, from the first, takes the next of `values`."""
        return np.where(flat % 2 == 0, np.array(values, kind)[flat // 2 % len(values)], made.ids.astype(kind))

    def case(name: str, ids: Array = made.ids, **options: Any) -> Case:
        return Case(f"C{tokens}, {name}", x, ids, made.weights, **options)

    scattered = rng.permutation(2 * experts)
    global_map = np.full(2 * experts, -1, np.int32)
    global_map[scattered[:experts]] = rng.permutation(experts)
    mapped = np.where(
        flat % 2 == 0, scattered[:experts][flat % experts], rng.integers(-1, 2 * experts + 1, (tokens, k))
    )
    live = tokens // 2
    # Times top-k, these two come to a few slots where 32 bits wrap.
    wrapping = min(2**32 // k + 1, 2**31 - 1)
    padded = Case(
        f"C{tokens}, {live} live tokens, the others poison", x.copy(), made.ids, made.weights.copy(), live_tokens=live
    )
    padded.x[live:], padded.topk_weights[live:] = np.nan, np.nan
    zeros = Case(f"C{tokens}, a token of zeros", x.copy(), made.ids, made.weights)
    zeros.x[0] = 0
    return (
        case("ids below 0", with_every_other([-1, -7, -(2**31)])),
        case("ids past the last expert", with_every_other([experts, experts + 1, 2**31 - 1])),
        case("int64 ids", made.ids.astype(np.int64)),
        # The low half of each names an expert: a kernel that cuts ids to 32 bits would route them.
        case("int64 ids past 32 bits", with_every_other([2**32, -(2**32), 2**62 + experts - 1], np.int64)),
        case("a token naming experts twice", made.ids[:, np.arange(k) // 2 * 2]),
        case("expert map", mapped.astype(np.int32), expert_map=global_map),
        case("expert map, int64 ids", mapped.astype(np.int64), expert_map=global_map),
        case("expert map shorter than the experts", expert_map=np.arange(max(1, experts // 2), dtype=np.int32)),
        case("no live token", live_tokens=0),
        case("a negative count of live tokens", live_tokens=2 - wrapping),
        padded,
        case("more live tokens than tokens", live_tokens=wrapping),
        # Gates of hundreds, where e^-x leaves fp32 either way; powers of two, so that nothing rounds otherwise.
        Case(f"C{tokens}, activations far out on SiLU", x * np.float16(64), made.ids, made.weights / np.float32(64)),
        # Values that are zero pass from stage to stage where zero says that there is none yet.
        zeros,
        case("no routed row at all", np.full_like(made.ids, -1)),
    )
