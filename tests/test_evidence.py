"""What is demanded of machine code, and the record that a later kernel is held to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small import LAYOUTS, SMALL, TENSOR

from tuner import build, contract, evidence, model, plan, render, space
from tuner.errors import CodeFault, RequestError
from tuner.evidence import Evidence
from tuner.plan import Plan
from tuner.space import Config

V100 = model.device("V100-PCIE-32GB")
AWQ = LAYOUTS["awq"]


def examined(made: Plan, *, spill_bytes: int = 0, like: Plan | None = None) -> list[Evidence]:
    """Every launch of `made`, built and examined as if it were `like`'s."""
    return [
        evidence.examine(
            like or made,
            launch,
            replace(build.build(render.render_launch(launch, made.contract.digest())), spill_bytes=spill_bytes),
            2,
            V100,
        )
        for launch in made.launches
    ]


def tensor() -> Plan:
    return plan.make(SMALL, TENSOR)


def of(found: list[Evidence], operand: str) -> Evidence:
    return next(each for each in found if operand in each.weight_loads)


def test_the_budget_is_the_issue_slots_in_the_time_of_eight_weights_bytes() -> None:
    # 80 SMs x 4 schedulers x 32 lanes x 1.38 GHz over 900 GB/s; 4 bytes, and of a group of 32 a quarter of 3 bytes
    assert pytest.approx(62.8, abs=0.01) == 80 * 4 * 32 * 1.38e9 / (900e9 / 4)
    qwen = contract.load("qwen38-tp4")
    assert evidence.budget(qwen, "w13", V100) == pytest.approx(62.805 * 4.75 / 4, rel=1e-3)
    assert evidence.budget(LAYOUTS["sm70-u4 group 64"], "w2", V100) == pytest.approx(62.805 * 4.375 / 4, rel=1e-3)
    # the faster clock of an SXM2 board leaves more
    sxm = model.device("V100-SXM2-32GB")
    assert evidence.budget(qwen, "w13", sxm) == pytest.approx(62.805 * 4.75 / 4 * 1530 / 1380, rel=1e-3)


def test_parameters_stand_where_the_abi_aligns_them() -> None:
    launch = replace(tensor().launches[0], arguments=("X", "ID_BYTES", "W13_Q", "MAP_SIZE", "TOKENS"))
    assert evidence.parameters(launch) == ({0: "X", 16: "W13_Q"}, 32)


@pytest.mark.parametrize("name", plan.PLANS)
@pytest.mark.parametrize(
    ("small", "config", "width"),
    [(SMALL, TENSOR, "128"), (SMALL, space.default(SMALL), "128"), (AWQ, space.default(AWQ), "32")],
    ids=["tensor", "simt", "awq"],
)
def test_every_launch_of_every_plan_reads_its_weights_at_the_declared_width(
    small: contract.Contract, config: Config, width: str, name: plan.PlanName
) -> None:
    found = examined(plan.make(small, config, name))
    read = [operand for each in found for operand in each.weight_loads]
    assert sorted(read) == ["W13_Q", "W2_Q"]
    for each in found:
        assert each.faults == ()
        for operand, widths in each.weight_loads.items():
            assert set(widths) == {width}
            streams = [stream for stream in each.streams if stream.operand == operand]
            assert streams
            # more than to unpack a nibble each, less than a kernel's every instruction
            assert all(8 < stream.per_eight < each.code_bytes / 16 for stream in streams)
            tensor_cores = {"HMMA.884" in stream.opcodes for stream in streams}
            assert tensor_cores == {config is TENSOR}


def test_a_steps_tensor_instructions_are_those_of_its_mmas() -> None:
    """Of a step, 16 bytes a lane: two m8n8k4 for each of four columns, each four machine instructions."""
    for operand in ("W13_Q", "W2_Q"):
        for stream in of(examined(tensor()), operand).streams:
            if stream.operand == operand:
                assert stream.opcodes["HMMA.884"] * 16 == stream.nbytes * 32


def test_spills_are_a_fault() -> None:
    assert all("spills 8 bytes a thread" in each.faults for each in examined(tensor(), spill_bytes=8))


def test_another_width_than_the_layouts_is_a_fault() -> None:
    made = tensor()
    awq = replace(made, contract=replace(SMALL, layout="awq", stats_bytes=0, interleaved=False))
    for each in examined(made, like=awq):
        assert any(f"bits of {operand}, not 32" in fault for operand in each.weight_loads for fault in each.faults)


def test_a_family_without_its_instructions_and_instructions_without_the_family_are_faults() -> None:
    simt = plan.make(SMALL, space.default(SMALL))
    for each in examined(tensor(), like=simt):
        for operand in each.weight_loads:
            assert f"{operand}: HMMA.884 where its weights are used, of family simt" in each.faults
    for each in examined(simt, like=tensor()):
        for operand in each.weight_loads:
            assert f"{operand}: no HMMA.884 where its weights are used, of family tensor" in each.faults


def test_an_image_of_other_parameters_is_refused() -> None:
    made = tensor()
    launch = made.launches[0]
    image = build.build(render.render_launch(launch, SMALL.digest()))
    shorter = replace(launch, arguments=launch.arguments[:-1])
    with pytest.raises(CodeFault, match=r"takes \d+ bytes of parameters, its launch passes \d+: build"):
        evidence.examine(made, shorter, image, 1, V100)


def longer(each: Evidence, by: int) -> Evidence:
    return replace(each, streams=tuple(replace(s, instructions=s.instructions + by) for s in each.streams))


def test_a_record_reads_back_and_takes_the_same_and_a_better_one(tmp_path: Path) -> None:
    found = examined(tensor())
    for each in (found, found, [longer(each, -1) for each in found]):
        (tmp_path / evidence.FILE).write_text(evidence.record(tmp_path, each, V100.name))
        assert evidence.read(tmp_path) == json.loads(json.dumps(evidence.report(each, V100.name)))


def test_a_worse_one_is_not_recorded_and_its_figures_are_named(tmp_path: Path) -> None:
    found = examined(tensor())
    (tmp_path / evidence.FILE).write_text(evidence.record(tmp_path, found, V100.name))
    with pytest.raises(CodeFault, match=r"at 2 tokens: [\d.]+ instructions for 8 weights of W13_Q, recorded [\d.]+"):
        evidence.record(tmp_path, [longer(each, 1) for each in found], V100.name)
    (tmp_path / evidence.FILE).unlink()
    evidence.record(tmp_path, [longer(each, 1) for each in found], V100.name)


def test_code_with_a_fault_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(CodeFault, match=r"at 2 tokens: spills 8 bytes"):
        evidence.record(tmp_path, examined(tensor(), spill_bytes=8), V100.name)


def content(*ratios: int) -> dict[str, object]:
    streams = [{"operand": "W2_Q", "instructions": ratio, "nbytes": 4} for ratio in ratios]
    return {"levels": {"1": {"w2": {"weight_loads": {"W2_Q": {}}, "streams": streams}}}}


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ((40, 60), (60, 40), False),  # in another order
        ((40, 60), (41, 60), True),  # the shorter one
        ((40, 60), (40, 59), False),
        ((40, 60), (60,), False),  # one less: the longest is compared
        ((40, 60), (61,), True),
        ((60,), (40, 50, 61), True),
    ],
)
def test_streams_are_compared_each_with_its_like(before: tuple[int, ...], now: tuple[int, ...], worse: bool) -> None:
    assert bool(evidence.worse(content(*before), content(*now))) == worse


def test_levels_and_stages_that_were_not_recorded_are_not_compared() -> None:
    assert evidence.worse({"levels": {}}, content(60)) == []
    assert evidence.worse({"levels": {"1": {}}}, content(60)) == []


def test_a_folder_without_a_readable_record_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no evidence.json in .*inspect .*--record"):
        evidence.read(tmp_path)
    for text in ("{", "[]", '{"schema": 2}', "[" * 200_000):
        (tmp_path / evidence.FILE).write_text(text)
        with pytest.raises(RequestError, match=r"delete it, and make it with"):
            evidence.read(tmp_path)
