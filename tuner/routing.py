"""Routings: which experts each token goes to, with which weights; and the sorted form an engine may hold.

S = M*k routed rows ("slots"); slot t*k+j is column j of token t.
"""

from __future__ import annotations

import json
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.contract import ROUTING_FILES, ROUTINGS, Contract
from tuner.errors import RequestError

Array = np.ndarray[Any, np.dtype[Any]]

#: Exponent s of the zipf routing, p(rank) ~ 1/rank**s. 1 is Zipf's own law; with 512 experts, top-10, it leaves
#: 18, 32 and 55 experts active at 2, 4 and 8 tokens where the uniform routing has 19.8, 38.8 and 74.7.
ZIPF_EXPONENT = 1.0


@dataclass(frozen=True, eq=False)
class Routing:
    """Ids int32 [M, k] and weights float32 [M, k] (positive, summing to 1 a token) of one decode step.

    An id below 0, or at or past `experts` where that is given, names no expert and is not counted.
    """

    name: str
    ids: Array
    weights: Array
    experts: int | None = None

    @property
    def tokens(self) -> int:
        """M."""
        return int(self.ids.shape[0])

    @property
    def rows_per_segment(self) -> list[int]:
        """Routed rows of each active expert, by ascending expert."""
        valid = (
            self.ids[self.ids >= 0] if self.experts is None else self.ids[(self.ids >= 0) & (self.ids < self.experts)]
        )
        return [int(rows) for rows in np.unique(valid, return_counts=True)[1]]

    @property
    def active(self) -> int:
        """How many distinct experts have at least one row."""
        return len(self.rows_per_segment)


def expected_active(experts: int, top_k: int, tokens: int) -> float:
    """Mean active experts under the uniform routing, E*(1 - (1 - k/E)**M): each token misses an expert with 1 - k/E.

    512 experts, top-10: 10.0, 19.8, 38.8 and 74.7 at 1, 2, 4 and 8 tokens.
    """
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def _top(scores: Array, k: int) -> Array:
    """Columns of the k largest scores of each row, largest first, as a router's top-k gives them."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def _uniform(contract: Contract, tokens: int, rng: np.random.Generator) -> Array:
    """k distinct experts a token, every set equally likely."""
    return _top(rng.random((tokens, contract.experts)), contract.top_k)


def _zipf(contract: Contract, tokens: int, rng: np.random.Generator) -> Array:
    """k distinct experts a token, one after another with p ~ 1/rank**ZIPF_EXPONENT; the seed decides who is popular."""
    log_p = -ZIPF_EXPONENT * np.log(np.arange(1, contract.experts + 1))
    # The k largest of log p + Gumbel noise are k draws without replacement (Gumbel top-k).
    ranks = _top(log_p + rng.gumbel(size=(tokens, contract.experts)), contract.top_k)
    return rng.permutation(contract.experts)[ranks]


def _round_robin(contract: Contract, tokens: int, rng: np.random.Generator) -> Array:
    """Slot s goes to expert s % E, whatever the seed."""
    del rng
    slots = np.arange(tokens * contract.top_k)
    return (slots % contract.experts).reshape(tokens, contract.top_k)


def _single_hot(contract: Contract, tokens: int, rng: np.random.Generator) -> Array:
    """Every slot goes to one expert, so that a token names it k times."""
    return np.full((tokens, contract.top_k), rng.integers(contract.experts))


def _hot(contract: Contract, tokens: int, rng: np.random.Generator) -> Array:
    """All tokens share the same k distinct experts."""
    return np.tile(rng.permutation(contract.experts)[: contract.top_k], (tokens, 1))


_MAKERS: dict[str, Callable[[Contract, int, np.random.Generator], Array]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "round-robin": _round_robin,
    "single-hot": _single_hot,
    "hot": _hot,
}


def make(name: str, contract: Contract, tokens: int, seed: int) -> Routing:
    """A routing of `tokens` tokens over the contract's experts; the same arguments give the same routing.

    `name` is one of contract.ROUTINGS or the path of a recorded file, from which `tokens` consecutive tokens are taken,
    the first chosen by the seed. A recorded file is one of
      .json  an object {"ids": [[k expert ids] a token], "weights": [[k numbers] a token]}, "weights" optional
      .npy   an integer array [T, k] of expert ids
    Weights are normalised to sum to 1 a token; where a file has none they are drawn like the synthetic ones.
    Raises RequestError for an unknown name, tokens below 1, and a file that is missing, malformed, shorter than
    `tokens`, of another top-k, or with an id outside 0..E-1.
    """
    if tokens < 1:
        raise RequestError(f"routing {name!r}: {tokens} tokens asked for; expected 1 or more")
    rng = np.random.default_rng(seed)
    if name in _MAKERS:
        ids = _MAKERS[name](contract, tokens, rng).astype(np.int32)
        return Routing(name, ids, _weights(tokens, contract.top_k, rng), contract.experts)
    path = Path(name)
    if path.suffix not in ROUTING_FILES:
        raise RequestError(
            f"unknown routing {name!r}; expected one of {', '.join(ROUTINGS)}, "
            "or the path of a recorded .json or .npy file"
        )
    ids, weights = _read(path, contract)
    if len(ids) < tokens:
        raise RequestError(f"{name}: {len(ids)} recorded tokens, {tokens} needed; record a longer trace")
    start = int(rng.integers(len(ids) - tokens + 1))
    taken = slice(start, start + tokens)
    chosen = _weights(tokens, contract.top_k, rng) if weights is None else weights[taken]
    return Routing(path.name, ids[taken].astype(np.int32), chosen, contract.experts)


def _weights(tokens: int, top_k: int, rng: np.random.Generator) -> Array:
    """Softmax over k unit-normal logits, largest first, as normalised top-k routers give; float32 [M, k]."""
    logits = -np.sort(-rng.standard_normal((tokens, top_k)), axis=1)
    return _normalised(np.exp(logits))


def _normalised(weights: Array) -> Array:
    normalised: Array = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return normalised


def _read(path: Path, contract: Contract) -> tuple[Array, Array | None]:
    """Ids [T, k] and normalised weights [T, k] or None of a recorded file."""
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                ids, weights = np.lib.format.read_array(file, allow_pickle=False), None
        else:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or "ids" not in document or set(document) - {"ids", "weights"}:
                raise RequestError(f'{path}: expected an object with "ids" and optionally "weights", and nothing else')
            ids = np.asarray(document["ids"])
            weights = None if document.get("weights") is None else np.asarray(document["weights"])
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give an existing .json or .npy file") from error
    except (ValueError, RecursionError, MemoryError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        # Bad JSON or nested too deeply, ragged lists; a .npy whose header is no Python or names a size nobody has.
        raise RequestError(
            f"{path}: not a recorded routing ({error}); expected ids as [tokens, {contract.top_k}]"
        ) from error
    _check_ids(path, ids, contract)
    if weights is None:
        return ids, None
    if weights.shape != ids.shape or weights.dtype.kind not in "iuf":
        raise RequestError(
            f"{path}: weights are {weights.dtype}{list(weights.shape)}; expected numbers {list(ids.shape)}"
        )
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        raise RequestError(f"{path}: a weight is not a positive finite number; record the router's normalised weights")
    return ids, _normalised(weights.astype(np.float64))


def _check_ids(path: Path, ids: Array, contract: Contract) -> None:
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"{path}: ids are {ids.dtype}{list(ids.shape)}; expected integers [tokens, {contract.top_k}]"
        )
    if ids.shape[1] != contract.top_k:
        raise RequestError(
            f"{path}: {ids.shape[1]} experts a token; contract {contract.name} has top-k {contract.top_k}, "
            "record a model of that contract"
        )
    outside = np.argwhere((ids < 0) | (ids >= contract.experts))
    if len(outside):
        token, column = outside[0]
        raise RequestError(
            f"{path}: expert {ids[token, column]} at token {token}, column {column}; expected 0..{contract.experts - 1}"
        )


def resolve(ids: Array, experts: int, *, expert_map: Array | None = None, live_tokens: int | None = None) -> Array:
    """Local experts int32 [M, k] of ids [M, k] (int32 or int64), -1 where a slot contributes nothing.

    A slot contributes when its token is below `live_tokens` (clamped to 0..M; None: all are live), its id is in
    0..len(expert_map)-1 (0..E-1 without a map) and the map, global id -> local expert or -1, leads to one of 0..E-1.
    """
    known = experts if expert_map is None else len(expert_map)
    valid = (ids >= 0) & (ids < known)
    if live_tokens is not None:
        valid &= (np.arange(len(ids)) < live_tokens)[:, None]
    local = np.where(valid, ids, 0).astype(np.int64)
    if expert_map is not None and known:
        local = expert_map.astype(np.int64)[local]
        valid &= (local >= 0) & (local < experts)
    return np.where(valid, local, -1).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Sorted:
    """Slots int32 [S] by ascending expert, slots of no expert last, and offsets int32 [E+1] of each expert's first."""

    rows: Array
    offsets: Array


def sort(ids: Array, experts: int, *, expert_map: Array | None = None, live_tokens: int | None = None) -> Sorted:
    """The order an engine's stable radix sort leaves: expert e owns rows[offsets[e]:offsets[e+1]], slots ascending."""
    local = resolve(ids, experts, expert_map=expert_map, live_tokens=live_tokens).ravel()
    keys = np.where(local < 0, experts, local)
    rows = np.argsort(keys, kind="stable").astype(np.int32)
    counts = np.bincount(keys, minlength=experts + 1)[:experts]
    return Sorted(rows, np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
