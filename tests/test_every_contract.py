"""Every built-in contract at its own shapes: built for a V100 without spills, and right on the CPU executor with its
experts reduced. Takes minutes: `make lab`."""

from dataclasses import replace

import numpy as np
import pytest

from tuner import awq, build, contract, evaluate, host, model, plan, reference, render, routing, space
from tuner.contract import Contract
from tuner.space import Config

pytestmark = pytest.mark.lab

V100 = model.device("V100-PCIE-32GB")
TOKENS = 3
EXACT_L2 = 2.4e-4  # rounding a Gaussian output to f16 alone is 2.07e-4


def unspilled(whole: Contract, family: str) -> Config:
    """The default, or the first of the model's guesses for a V100 that the compiler builds without spills."""
    everything = len(space.candidates(whole))
    guesses = [space.default(whole)] if family == "simt" else evaluate.guesses(whole, 4, V100, count=everything)
    of_family = [config for config in guesses if config.w13.family == family]
    if not of_family:
        tried = next(config for config in space.candidates(whole) if config.w13.family == family)
        pytest.skip(f"no {family} configuration fits: {plan.why_invalid(whole, tried, V100)}")
    return next(c for c in of_family if not build.build(render.render(plan.make(whole, c))["op"]).spill_bytes)


@pytest.mark.parametrize("family", space.FAMILIES)
@pytest.mark.parametrize("name", sorted(contract.builtin()))
def test_the_op_builds_for_sm_70_without_spills_and_is_right(name: str, family: str) -> None:
    whole = contract.load(name)
    if family not in space.families(whole):
        pytest.skip(f"{whole.layout} is not read by the {family} family")
    config = unspilled(whole, family)
    few = replace(whole, experts=max(whole.top_k, 4))
    weights = awq.synthetic(few, 0, 1)
    tensors = {
        f"{prefix}_{part.upper()}": getattr(gemm, part)
        for prefix, gemm in (("W13", weights.w13), ("W2", weights.w2))
        for part in ("q", "scales", "zeros")
    }
    step = routing.make("uniform", few, TOKENS, 5)
    x = np.random.default_rng(2).standard_normal((TOKENS, few.hidden)).astype(np.float16)
    made = plan.make(few, config)
    operands = {**tensors, "X": x, "TOPK_IDS": step.ids, "TOPK_WEIGHTS": step.weights}
    out = host.execute(made, render.render(made), operands, TOKENS, order=1, timeout_s=600).out
    expected = reference.Reference(few, weights).exact(x, step.ids, step.weights).output
    found = reference.compare(out, expected)
    assert found.nonfinite == 0
    assert found.relative_l2 <= EXACT_L2
