"""A contract small enough to check every layout in seconds, and what tests need to run a plan on it."""

from collections.abc import Callable, Mapping
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
TENSOR = space.parse("tensor-t2-k2-u2-r8+tensor-t4-k1-u1-r4+m512")


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
    sources: Mapping[str, render.Source] | None = None,
    expert_map: np.ndarray | None = None,
    live_tokens: int | None = None,
    timeout_s: float = 60.0,
) -> plan.Outputs:
    """The plan's outputs from the CPU executor."""
    made = plan.make(small, config or space.default(small), name)
    given = {"expert_map": expert_map, "live_tokens": live_tokens}
    return execute(made, sources or render.render(made), x, ids, route_weights, order, timeout_s, **given)


def execute(
    made: plan.Plan,
    sources: Mapping[str, render.Source],
    x: np.ndarray,
    ids: np.ndarray,
    route_weights: np.ndarray,
    order: int = 0,
    timeout_s: float = 60.0,
    *,
    expert_map: np.ndarray | None = None,
    live_tokens: int | None = None,
) -> plan.Outputs:
    """A plan's outputs from the CPU executor, with the contract's `weights`."""
    held = weights(made.contract)
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
    if made.name == "sorted":
        held_sort = routing.sort(ids, made.contract.experts, expert_map=expert_map, live_tokens=live_tokens)
        operands |= {"SORTED_ROWS": held_sort.rows, "OFFSETS": held_sort.offsets}
    else:
        operands["TOPK_IDS"] = ids
    return host.execute(made, sources, operands, len(x), order=order, timeout_s=timeout_s)


def work_counts(
    small: contract.Contract, ids: np.ndarray, config: space.Config, text_of: Callable[[render.Source], str]
) -> tuple[np.ndarray, np.ndarray]:
    """How often the fused plan writes each element of HIDDEN, int32 [S, I], and of ROUTES, int32 [S, H].

    Work done twice may leave the result as it is, so a counter beside each element counts what is put there. `text_of`
    gives the source's text.
    """
    made = plan.make(small, config)
    (launch,), (source,) = made.launches, render.render(made).values()
    counted = (("HIDDEN_PUT", "HIDDEN"), ("ROUTES_PUT", "ROUTES"))
    shapes = {buffer.name: buffer.shape for buffer in made.buffers}
    made = replace(
        made,
        launches=(replace(launch, arguments=(*launch.arguments, *(name for name, _ in counted))),),
        buffers=(*made.buffers, *(plan.Buffer(name, "int32", shapes[of], "workspace") for name, of in counted)),
    )
    put = "put(long long at, float value) const {"
    text = text_of(source)
    assert put in text
    text = text.replace(put, f"{put}\n    atomicAdd((words == hidden_words ? hidden_put : routes_put) + at, 1);")
    head, body = text.split(f"{launch.kernel}(", 1)
    parameters, body = body.split(") {\n", 1)
    told = "hidden_put = hidden_put_, routes_put = routes_put_, hidden_words = hidden;"
    text = f"{head}{launch.kernel}({parameters}, int* hidden_put_, int* routes_put_) {{\n  {told}\n{body}"
    text = f"static int *hidden_put, *routes_put;\nstatic const unsigned* hidden_words;\n{text}"
    sources, ones = {launch.stage: replace(source, text=text)}, np.ones(ids.shape, np.float32)
    outputs = execute(made, sources, inputs(small, len(ids)), ids, ones)
    return outputs.buffers["HIDDEN_PUT"] + 1, outputs.buffers["ROUTES_PUT"] + 1  # from -1, the poison
