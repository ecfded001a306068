"""A contract small enough to check every layout in seconds, and what tests need to run a plan on it."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from tuner import awq, contract, host, plan, reference, render, routing, space

SMALL = replace(
    contract.load("qwen38-tp4"),
    name="small",
    tensor_parallel=1,
    experts=6,
    top_k=3,
    hidden=256,
    intermediate=64,
    checkpoint_group=32,
    group=32,
    levels=(1, 2, 5, 12),
)

LAYOUTS = {
    "sm70-u4 3-byte interleaved": SMALL,
    "sm70-u4 3-byte concatenated": replace(SMALL, interleaved=False),
    "sm70-u4 4-byte interleaved": replace(SMALL, stats_bytes=4),
    "sm70-u4 4-byte concatenated": replace(SMALL, stats_bytes=4, interleaved=False),
    "sm70-u4 group 64": replace(SMALL, checkpoint_group=64, group=64),
    "awq": replace(SMALL, layout="awq", stats_bytes=0, interleaved=False),
    "awq group 64": replace(SMALL, layout="awq", stats_bytes=0, interleaved=False, checkpoint_group=64, group=64),
}

# On tensor cores: split K, a ring that turns, several tiles a CTA.
TENSOR = space.Config(space.W13Config("tensor", 2, 2, 2, 8), space.W2Config("tensor", 4, 1, 1, 4))


@lru_cache
def weights(small: contract.Contract) -> awq.LayerWeights:
    return awq.synthetic(small, 0, 7)


@lru_cache
def references(small: contract.Contract) -> reference.Reference:
    return reference.Reference(small, weights(small))


def inputs(small: contract.Contract, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, small.hidden)).astype(np.float16)


def run(
    small: contract.Contract,
    x: np.ndarray,
    ids: np.ndarray,
    route_weights: np.ndarray,
    *,
    config: space.Config | None = None,
    name: plan.PlanName = "fused",
    order: int = 0,
    sources: dict[str, render.Source] | None = None,
    expert_map: np.ndarray | None = None,
    live_tokens: int | None = None,
) -> plan.Outputs:
    """The plan's outputs from the CPU executor."""
    made = plan.make(small, config or space.default(small), name)
    held = weights(small)
    operands: dict[str, Any] = {
        "X": x,
        "TOPK_WEIGHTS": route_weights,
        "W13_Q": held.w13.q,
        "W13_SCALES": held.w13.scales,
        "W13_ZEROS": held.w13.zeros,
        "W2_Q": held.w2.q,
        "W2_SCALES": held.w2.scales,
        "W2_ZEROS": held.w2.zeros,
        "EXPERT_MAP": expert_map,
        "LIVE_TOKENS": None if live_tokens is None else np.array([live_tokens], np.int32),
    }
    if name == "sorted":
        held_sort = routing.sort(ids, small.experts, expert_map=expert_map, live_tokens=live_tokens)
        operands |= {"SORTED_ROWS": held_sort.rows, "OFFSETS": held_sort.offsets}
    else:
        operands["TOPK_IDS"] = ids
    return host.execute(made, sources or render.render(made), operands, len(x), order=order)


def work_counts(
    small: contract.Contract, ids: np.ndarray, config: space.Config, text_of: Callable[[render.Source], str]
) -> tuple[np.ndarray, np.ndarray]:
    """How often the fused plan multiplies each row: by W13 [S, I], by W2 [M, H] summed over a token's rows and
    the parts of split K.

    Work done twice leaves the result as it is, so the kernels count instead: what starts as poison, all bits set, gets
    1 more at each write of W13, and becomes 1.0 after one write of W2 and something huge after two. `text_of` gives a
    source's text.
    """
    stores = {
        "w13": ("hidden[(long long)slots[r] * C::kIntermediate + ", "] = activate(gate, up);", "1"),
        "w2": ("outputs[slots[r] * ", "] = sum;", "0x3f800001"),
    }
    sources = {}
    for stage, source in render.render(plan.make(small, config)).items():
        begin, end, added = stores[stage]
        before, after = text_of(source).split(begin)
        index, after = after.split(end)
        array, first = begin.split("[", 1)
        text = f"{before}atomicAdd(reinterpret_cast<int*>({array}) + ({first}{index}), {added});{after}"
        sources[stage] = replace(source, text=text)
    ones = np.ones(ids.shape, np.float32)
    outputs = run(small, inputs(small, len(ids)), ids, ones, config=config, sources=sources)
    return outputs.hidden.view(np.int32) + 1, outputs.out
