"""A whole verification: which runs it asks for, what it counts as wrong, and the lines it gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from small import SMALL

from tuner import space
from tuner.checks import Verification
from tuner.errors import LaunchFailed, RequestError
from tuner.options import Configs
from tuner.plan import Outputs, Plan
from tuner.space import Config
from tuner.verify import HostExecutor

DEFAULT = space.default(SMALL)
OTHER = space.parse("simt-t1-k4-u1-r2+simt-t4-k1-u1-r2+m512")
Spoil = Callable[[Plan, Mapping[str, Any], Outputs], Outputs | None]


@dataclass
class Gpu:
    """Stands for a GPU: emulates, and spoils what it is told to."""

    spoil: Spoil = lambda plan, operands, outputs: None
    name: str = "PTX on a GPU"
    host: HostExecutor = field(default_factory=HostExecutor)
    runs: list[tuple[str, str, int, int]] = field(default_factory=list)

    def run(self, plan: Plan, operands: Mapping[str, Any], tokens: int, order: int) -> Outputs:
        self.runs.append((plan.config.key(), plan.name, tokens, order))
        outputs = self.host.run(plan, operands, tokens, order)
        return self.spoil(plan, operands, outputs) or outputs


def verification(executor: Any, by_level: dict[int, Config], **options: Any) -> Verification:
    given = {"edges": False, "operator_gate": False, "against_host": False, "replays": 1} | options
    return Verification(SMALL, Configs(by_level, "the test's"), executor, **given)


def lines(check: Verification) -> list[str]:
    return [line for _, rows in check.sections() for line in rows]


def test_each_level_runs_its_own_configuration_as_often_as_asked() -> None:
    gpu = Gpu()
    check = verification(gpu, {1: DEFAULT, 2: OTHER}, replays=2)
    lines(check)
    # One rank (there is one), four routings, two inputs, two replays, and one run that shows hidden rows.
    assert gpu.runs == [
        (config.key(), name, tokens, order)
        for tokens, config in ((1, DEFAULT), (2, OTHER))
        for _ in range(8)
        for name, order in (("fused", 0), ("fused", 1), ("staged", 0))
    ]
    assert check.ok
    assert check.summary() == "16 of 16 cases right, PTX on a GPU"


def test_odd_calls_run_once_for_each_different_configuration() -> None:
    gpu = Gpu()
    check = verification(gpu, {1: DEFAULT, 2: OTHER, 5: DEFAULT}, edges=True)
    sections = dict(check.sections())
    rows = list(sections["Odd ids, maps and padding; the other plans must give the fused plan's bits"])
    keys = [key for key, _, _, _ in gpu.runs]
    assert keys.index(OTHER.key()) == keys.count(DEFAULT.key())
    assert keys.count(OTHER.key()) == keys.count(DEFAULT.key())
    assert len(rows) == 1 + len(check.verdicts)
    assert {name for _, name, _, _ in gpu.runs} == {"fused", "staged", "sorted", "all-experts"}
    assert check.ok


def minus_zero(plan: Plan, operands: Mapping[str, Any], outputs: Outputs) -> Outputs:
    """Right by value, another bit: zeros become negative."""
    out = outputs.out.copy()
    out[out == 0] = np.float16(-0.0)
    return Outputs({**outputs.buffers, "OUT": out})


def test_bits_that_differ_from_the_cpus_are_wrong_only_where_they_are_compared() -> None:
    alone = verification(Gpu(minus_zero), {2: DEFAULT}, edges=True)
    lines(alone)
    assert alone.ok
    beside = verification(Gpu(minus_zero), {2: DEFAULT}, edges=True, against_host=True)
    said = lines(beside)
    assert not beside.ok
    wrong = {each.case: each.reasons for each in beside.verdicts if not each.ok}
    assert "rank 0, C2, no routed row at all" in wrong
    assert all(len(reasons) == 1 and "emulated on CPU gives " in reasons[0] for reasons in wrong.values())
    assert any(line.endswith("ok  same bits on the CPU") for line in said)
    assert f"{len(beside.verdicts) - len(wrong)} of {len(beside.verdicts)} cases right" in beside.summary()


def test_the_cpu_is_not_compared_with_itself() -> None:
    with pytest.raises(RequestError, match="--against-host compares with the bits of the CPU executor"):
        verification(HostExecutor(), {2: DEFAULT}, against_host=True)


def test_a_gate_that_fails_fails_the_verification() -> None:
    def too_large(plan: Plan, operands: Mapping[str, Any], outputs: Outputs) -> Outputs:
        hidden = outputs.hidden.copy()
        hidden[0, 3] += 0.01
        return Outputs({**outputs.buffers, "HIDDEN": hidden})

    gpu = Gpu()
    check = verification(gpu, {2: DEFAULT}, operator_gate=True)
    (_, cases), (_, gate) = check.sections()
    list(cases)
    gpu.spoil = too_large
    said = list(gate)
    assert all(verdict.ok for verdict in check.verdicts)
    assert not check.ok
    assert sum(" over " in line for line in said) == 2  # W13+SiLU against float64, of both routings
    judged = sum(row.gated for row in check.gates)
    assert f"operator gate: {judged - 2} of {judged} judged rows pass" in check.summary()


def test_a_right_gate_passes_and_is_in_the_json() -> None:
    check = verification(HostExecutor(), {2: DEFAULT}, operator_gate=True)
    lines(check)
    found = check.to_dict()
    assert found["ok"]
    assert found["configs"] == {"2": DEFAULT.key()}
    # Two routings, two stages, against float64 and engine numerics.
    assert len(found["gate"]) == 8
    assert found["faults"] == []


def test_a_kernel_that_faults_is_wrong_and_the_rest_still_runs() -> None:
    def faulting(plan: Plan, operands: Mapping[str, Any], outputs: Outputs) -> Outputs:
        if plan.config == OTHER:
            raise LaunchFailed("an illegal address")
        return outputs

    check = verification(Gpu(faulting), {1: OTHER, 2: DEFAULT}, operator_gate=True)
    said = lines(check)
    assert not check.ok
    assert [each.ok for each in check.verdicts] == [False] * 8 + [True] * 8
    assert check.faults == ["C1: an illegal address"]
    assert "FAULT C1: an illegal address" in said
    assert len(check.gates) == 8
    assert "kernels faulted in the gate at 1 levels" in check.summary()


def test_a_fault_in_the_gate_alone_fails_the_verification() -> None:
    def faulting(plan: Plan, operands: Mapping[str, Any], outputs: Outputs) -> Outputs:
        raise LaunchFailed("an illegal address")

    gpu = Gpu()
    check = verification(gpu, {2: DEFAULT}, operator_gate=True)
    (_, cases), (_, gate) = check.sections()
    list(cases)
    assert check.ok
    gpu.spoil = faulting
    list(gate)
    assert not check.ok


def test_a_verification_that_ran_nothing_is_not_ok() -> None:
    assert not verification(HostExecutor(), {2: DEFAULT}).ok
