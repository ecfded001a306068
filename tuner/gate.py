"""The published operator gate of the V100 engine's AWQ experts, as a table beside its published results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.cases import make_case
from tuner.reference import Array, Difference, compare, ulp16, ulp_distance
from tuner.space import Config
from tuner.verify import Executor, Layers, Subject, default_ranks, default_tokens


@dataclass(frozen=True)
class GateRow:
    """One comparison under the operator gate's rule."""

    rank: int
    tokens: int
    routing: str
    stage: str  # "W13+SiLU" or "output"
    against: str  # "exact" (float64) or "engine"
    executor: str
    difference: Difference
    ok: bool
    gated: (
        bool  # `against` is the contract's own numerics, and rounding it to the result's dtype passes; else information
    )
    published: tuple[float, int] | None  # (max abs, max ULP) of the published run of that rank

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        published = None if self.published is None else list(self.published)
        return dict(vars(self)) | {"difference": self.difference.to_dict(), "published": published}


#: 1CatAI/1Cat-vLLM pull request 491, (max abs, max ULP) by rank, over C2, C4, C8 and both routings; and its shape.
PUBLISHED_GATE = {0: (2.44140625e-4, 22), 3: (1.220703125e-4, 2)}
_PUBLISHED_SHAPE = {
    "experts": 512, "top_k": 10, "hidden": 2560, "intermediate": 640, "tensor_parallel": 4, "group": 32
}  # fmt: skip
GATE_ABS, GATE_ULP, GATE_FLOOR = 2e-3, 256, 2e-6


def gate_passes(actual: Array, reference: Array) -> bool:
    """The gate's rule: max abs 2e-3; past 256 ULP and with another sign only below 2e-6; and nothing not finite."""
    difference = compare(actual, reference)
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.float64) - reference.astype(np.float64))
    far = (ulp_distance(actual, reference) > GATE_ULP) & (error > GATE_FLOOR)
    return bool(
        difference.max_abs <= GATE_ABS
        and not far.any()
        and difference.largest_flip < GATE_FLOOR
        and difference.nonfinite == difference.missing_inf == 0
    )


def _can_pass(numerics: str, dtype: np.dtype[Any], wanted: Array) -> bool:
    """Whether a kernel as good as its numerics allow passes on values of this size."""
    if numerics == "engine":
        return float(ulp16(np.nanmax(np.abs(wanted), initial=0.0))) <= GATE_ABS
    return gate_passes(wanted.astype(dtype), wanted)


def gate(
    layers: Layers,
    config: Config,
    executor: Executor,
    *,
    ranks: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[GateRow]:
    """The operator gate: ramp input, round-robin and single-hot, C2, C4 and C8, four rows a run, as each is done.

    The published gate compared three stages (W13, SiLU, W2) of two kernels that share one dequantisation. Here the op's
    two visible results, W13+SiLU (of the staged plan) and the combined output, stand against float64 and against the
    engine-numerics reference. Exact and engine numerics are further apart than the rule allows, so only rows against
    the contract's own are gated. The rule's bounds are absolute, and large outputs break 2e-3 by f16 rounding alone: in
    exact numerics a row is not gated where the perfect answer fails; in engine numerics where one f16 spacing of the
    largest value does, since two fp32 accumulations may round to either side. Raises what the executor raises.
    """
    contract, subject = layers.contract, Subject(config, executor, layers)
    shape = {key: getattr(contract, key) for key in _PUBLISHED_SHAPE}
    for rank in default_ranks(contract) if ranks is None else ranks:
        published = PUBLISHED_GATE.get(rank) if shape == _PUBLISHED_SHAPE else None
        for level in default_tokens(contract) if tokens is None else tokens:
            for routed in ("round-robin", "single-hot"):
                case = make_case(contract, level, routed, "ramp")
                out, hidden = subject.run(rank, case).out, subject.run(rank, case, "staged").hidden
                expected = layers.expected(rank, case)
                for against, layer in (("exact", expected.exact), ("engine", expected.engine)):
                    for stage, actual, wanted in (
                        ("W13+SiLU", hidden, layer.hidden),
                        ("output", out, layer.output),
                    ):
                        fair = against == contract.numerics and _can_pass(contract.numerics, actual.dtype, wanted)
                        yield GateRow(
                            rank, level, routed, stage, against, executor.name, compare(actual, wanted),
                            gate_passes(actual, wanted), fair, published,
                        )  # fmt: skip
