"""The model agrees with hand-worked figures, is monotone where physics is, and lands near what was simulated."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tuner import contract, model, plan, routing, space
from tuner.errors import InvalidConfig, RequestError
from tuner.model import Device, Prediction, Resources
from tuner.space import STAGES, Config, Stage
from tuner.work import Mix, StageWork, Work, assumed

QWEN = contract.load("qwen38-tp4")
V100 = model.device("V100-PCIE-32GB")
H200 = model.device("H200")
TENSOR = space.parse("tensor-t1-k8-u5-r8+tensor-t8-k1-u5-r4+m512")
SIMT = space.default(QWEN)


def predicted(
    rows: list[int],
    *,
    tokens: int = 8,
    dev: Device = V100,
    config: Config = TENSOR,
    registers: int = 128,
    spill_bytes: int = 0,
    of: contract.Contract = QWEN,
    name: plan.PlanName = "fused",
    stage: str = "op",
) -> Prediction:
    made = plan.make(of, config, name)
    resources = Resources(registers, made.launch(stage).shared.at(tokens), spill_bytes)
    return model.predict(of, made, resources, rows, tokens, dev, stage)


def changed(stage: Stage, config: Config = TENSOR, **values: int) -> Config:
    tiles = {each: replace(config.stage(each), **values) if each == stage else config.stage(each) for each in STAGES}
    return Config(tiles["w13"], tiles["w2"], config.resident)


def uniform(tokens: int, seed: int = 0) -> list[int]:
    return routing.make("uniform", QWEN, tokens, seed).rows_per_segment


def test_devices_carry_the_datasheets_figures() -> None:
    assert (V100.sms, V100.clock_mhz, V100.bandwidth_gbs, V100.l2_bytes) == (80, 1380, 900, 6 * 2**20)
    assert (V100.registers_per_sm, V100.warps_per_sm, V100.shared_per_block) == (65536, 64, 96 * 1024)
    assert model.device("V100-SXM2-32GB").clock_mhz == 1530
    assert (model.device("A100-SXM4-80GB").sms, H200.sms) == (108, 132)


@pytest.mark.parametrize("board", ["V100-PCIE", "V100-SXM2"])
def test_a_v100_of_16_gb_has_the_figures_of_the_32_gb_board(board: str) -> None:
    small, large = model.device(f"{board}-16GB"), model.device(f"{board}-32GB")
    assert replace(small, name=large.name) == large
    assert small.clock_mhz == (1380 if board == "V100-PCIE" else 1530)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Tesla V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA H200", "H200"),
        ("h200", "H200"),
    ],
)
def test_a_drivers_name_finds_the_device(said: str, name: str) -> None:
    assert model.device(said).name == name


@pytest.mark.parametrize("said", ["V100", "NVIDIA GeForce RTX 4090", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(said: str) -> None:
    with pytest.raises(RequestError, match="V100-PCIE-32GB, V100-SXM2-32GB"):
        model.device(said)


@pytest.mark.parametrize(("stats_bytes", "w13", "w2"), [(3, 486_400, 243_200), (4, 512_000, 256_000)])
def test_bytes_of_an_expert_in_the_engines_layout(stats_bytes: int, w13: int, w2: int) -> None:
    of = replace(QWEN, stats_bytes=stats_bytes)
    assert (model.expert_bytes(of, of.w13), model.expert_bytes(of, of.w2)) == (w13, w2)


def test_bytes_of_an_expert_in_the_checkpoints_layout() -> None:
    of = replace(QWEN, layout="awq", stats_bytes=0, interleaved=False)
    assert (model.expert_bytes(of, of.w13), model.expert_bytes(of, of.w2)) == (473_600, 236_800)


@pytest.mark.parametrize(
    ("active", "w13", "w2"), [(10.0, 5.3, 2.6), (19.8, 10.4, 5.2), (38.8, 20.4, 10.2), (74.7, 39.3, 19.7)]
)
def test_floors_are_the_published_ones_in_every_layout(active: float, w13: float, w2: float) -> None:
    for of in (QWEN, replace(QWEN, layout="awq", stats_bytes=0, interleaved=False)):
        assert model.floor(of, "w13", active, V100) == pytest.approx(w13, abs=0.05)
        assert model.floor(of, "w2", active, V100) == pytest.approx(w2, abs=0.05)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limit"),
    [
        (256, 64, 0, 4, "registers"),  # 2,048 a warp: 32 warps
        (256, 98, 0, 2, "registers"),  # 98 -> 104 a thread, 3,328 a warp: 19 warps, in fours 16
        (256, 32, 40_000, 2, "shared memory"),  # 40,192 in units of 256
        (1024, 32, 0, 2, "warps"),
        (32, 32, 0, 32, "blocks"),
    ],
)
def test_occupancy_is_what_the_calculator_says(
    threads: int, registers: int, shared: int, blocks: int, limit: str
) -> None:
    found = model.occupancy(V100, threads, Resources(registers, shared))
    assert (found.blocks, found.warps, found.limit) == (blocks, blocks * threads // 32, limit)


@pytest.mark.parametrize(("threads", "registers", "shared"), [(1024, 80, 0), (256, 64, 98_305), (2048, 16, 0)])
def test_what_does_not_fit_an_sm_is_an_invalid_config(threads: int, registers: int, shared: int) -> None:
    with pytest.raises(InvalidConfig, match=f"{threads} threads, {registers} registers"):
        model.occupancy(V100, threads, Resources(registers, shared))


@pytest.mark.parametrize("name", sorted(contract.builtin()))
def test_candidates_have_a_finite_time_above_the_floor(name: str) -> None:
    of = contract.load(name)
    some = space.candidates(of)[::97]
    for dev in (V100, H200):
        for tokens in (of.levels[0], of.max_tokens):
            rows = routing.make("uniform", of, tokens, 0).rows_per_segment
            least = sum(model.floor(of, stage, len(rows), dev) for stage in space.STAGES)
            for config in some:
                if plan.why_invalid(of, config, dev) is None:
                    us = predicted(rows, tokens=tokens, dev=dev, config=config, of=of, registers=48).us
                    assert least < us < 1e5, config.key()


@pytest.mark.parametrize("config", [TENSOR, SIMT], ids=["tensor", "simt"])
@pytest.mark.parametrize("name", ["single-hot", "hot", "zipf", "round-robin"])
def test_every_routing_has_a_finite_time_above_the_launch(config: Config, name: str) -> None:
    for tokens in QWEN.levels:
        rows = routing.make(name, QWEN, tokens, 0).rows_per_segment
        assert V100.launch_us < predicted(rows, tokens=tokens, config=config).us < 10_000


def test_a_step_without_routed_rows_costs_its_launch_and_the_trips_at_its_ends() -> None:
    us = predicted([], tokens=1).us
    trips = (model.START_TRIPS + model.FINISH_TRIPS) * V100.l2_latency_ns / 1e3
    assert us == pytest.approx(V100.launch_us + trips, abs=0.1)


def test_compaction_is_its_launch_and_the_trips_at_its_ends() -> None:
    found = predicted(uniform(8), name="staged", stage="compact")
    assert found.us == pytest.approx(
        V100.launch_us + (model.START_TRIPS + model.FINISH_TRIPS) * V100.l2_latency_ns / 1e3
    )


def test_the_time_of_memory_is_the_bytes_over_the_bandwidth() -> None:
    # Ten experts of 729,600 bytes; of W13, 96-byte runs of statistics move 112 on average: 3 of its 19 parts.
    w13, w2 = 10 * 486_400 * (16 + 3 * 112 / 96) / 19, 10 * 243_200
    found = predicted([1] * 10, tokens=1)
    assert found.parts["memory"] == pytest.approx((w13 + w2) / 790e3, rel=1e-6)
    assert found.parts["bytes"] == 10 * 729_600


def test_the_instructions_of_an_item_take_an_sms_slots() -> None:
    # W13: 10 tiles an expert, 8 warps of 10 steps; W2: 10 items of 8 warps of 5 steps. 147 instructions a step.
    instructions = 10 * 10 * 8 * ((10 * 147 + model.FITTED.instructions) + (5 * 147 + model.FITTED.instructions))
    combine = 10 * 8 * 190
    us = (instructions / model.FITTED.issue + combine) / V100.sms / 4 / V100.clock_mhz
    parts = predicted([1] * 10, tokens=1).parts
    assert parts["issue"] == pytest.approx(us, rel=1e-6)
    assert parts["instructions"] == pytest.approx(instructions + combine)


def counted(**changes: float) -> Work:
    """A work of round numbers: a step of 100 instructions, 200 around a pass, 100 an item."""
    step = replace(Mix(100.0, sectors=19.0), **changes)
    stage = StageWork(item=Mix(100.0), one=Mix(200.0), row=Mix(10.0), lone=step, full=step, walk=Mix(20.0))
    return Work(stage, stage, Mix(400.0), "executed")


def of_work(work: Work, rows: list[int], tokens: int = 1, config: Config = TENSOR) -> Prediction:
    made = plan.make(QWEN, config)
    return model.predict(QWEN, made, Resources(128, made.launch("op").shared.at(8)), rows, tokens, V100, work=work)


def test_a_given_work_is_what_an_item_takes() -> None:
    # Ten items a stage of eight warps; ten steps of W13, five of W2.
    an_expert = 10 * 8 * (100 + 200 + 10 * 100 + 100 + 200 + 5 * 100)
    assert of_work(counted(), [1]).parts["instructions"] == an_expert + 10 * 8 * 400
    # Nine rows: W13's passes take eight and one, W2's four, four and one. One item each all the same.
    # Each pass walks by the rows of the others: one and eight; five, five and eight.
    w13 = 100 + 2 * 200 + 7 * 10 + 9 * 20 + 2 * 10 * 100
    w2 = 100 + 3 * 200 + 6 * 10 + 18 * 20 + 3 * 5 * 100
    assert of_work(counted(), [9]).parts["instructions"] == 10 * 8 * (w13 + w2 + 400)


def test_what_is_assumed_is_what_is_predicted_without_a_work() -> None:
    for config in (TENSOR, SIMT):
        made = plan.make(QWEN, config)
        resources = Resources(128, made.launch("op").shared.at(8))
        known = assumed(QWEN, config, H200, model.FITTED.instructions)
        given = model.predict(QWEN, made, resources, uniform(8), 8, H200, work=known)
        assert given == model.predict(QWEN, made, resources, uniform(8), 8, H200)


@pytest.mark.parametrize(
    ("name", "count"),
    # Of 80 SMs' four schedulers 100 instructions take 25 clocks; so do 50 on 64 lanes, and 25 passes.
    [("fp32", 50.0), ("integer", 50.0), ("shared", 25.0)],
)
def test_a_step_takes_as_long_as_what_it_wants_most_of(name: str, count: float) -> None:
    issue = of_work(counted(), [1] * 20).parts["issue"]
    assert of_work(counted(**{name: count}), [1] * 20).parts["issue"] == issue
    assert of_work(counted(**{name: 2 * count}), [1] * 20).parts["issue"] > 1.4 * issue


def test_sectors_beyond_what_dram_delivers_cost_time() -> None:
    few, many = (of_work(counted(sectors=each), [1] * 80, 8) for each in (19.0, 190.0))
    assert many.parts["memory"] > 2 * few.parts["memory"]
    assert many.us > few.us


def test_fewer_instructions_are_never_slower() -> None:
    times = [of_work(counted(total=total), uniform(4), 4).us for total in range(60, 400, 20)]
    assert all(later > earlier for earlier, later in pairwise(times))


def test_configurations_are_told_apart() -> None:
    found = [c for c in space.candidates(QWEN)[::7] if plan.why_invalid(QWEN, c, V100) is None]
    rows = [*[1] * 20, *[2] * 4, 3, 4, 5]
    times = [predicted(rows, tokens=4, config=c, registers=48).us for c in found]
    # Without a build they differ in what `resident` makes of the registers, and by that alone not at all.
    assert len({round(us, 2) for us in times}) > 0.8 * len({c.key().rsplit("+m")[0] for c in found})
    assert max(times) > 1.5 * min(times)


@pytest.mark.parametrize("config", [TENSOR, SIMT], ids=["tensor", "simt"])
def test_more_experts_take_longer_to_stream(config: Config) -> None:
    # Fewer CTAs are left to wait as more have work, so that the sum may dip where all have.
    found = [predicted([1] * count, config=config) for count in range(1, 81)]
    times = [each.us - each.parts["waiting"] for each in found]
    assert all(later >= earlier for earlier, later in pairwise(times))
    assert times[-1] > 3 * times[0]


def test_rows_up_to_a_tensor_pass_cost_w13_nothing_and_w2_a_pass() -> None:
    one, four, five = (predicted([rows] * 10, name="staged", stage="w2").parts["latency"] for rows in (1, 4, 5))
    assert four == pytest.approx(one)
    assert five > 1.2 * four
    w13 = [predicted([rows] * 10, name="staged", stage="w13").parts["latency"] for rows in (1, 8)]
    assert w13[0] == pytest.approx(w13[1])


@pytest.mark.parametrize(
    ("name", "factor"), [("stream_gbs", 2.0), ("clock_mhz", 1.5), ("latency_ns", 0.5), ("l2_latency_ns", 0.5)]
)
def test_a_better_gpu_is_faster(name: str, factor: float) -> None:
    better = replace(V100, **{name: getattr(V100, name) * factor})
    assert predicted(uniform(8), dev=better).us < predicted(uniform(8)).us


def test_registers_and_spills_never_help() -> None:
    times = [predicted(uniform(8), registers=registers).us for registers in range(128, 257, 8) if registers < 256]
    assert all(later >= earlier for earlier, later in pairwise(times))
    assert predicted(uniform(8), spill_bytes=400).us > predicted(uniform(8)).us + 1


def test_more_steps_in_flight_wait_less() -> None:
    one, five = (predicted(uniform(4), config=changed("w13", unroll=unroll)).parts["latency"] for unroll in (1, 5))
    assert five < 0.9 * one


def test_bytes_in_flight_are_the_steps_that_resident_warps_have_asked_for() -> None:
    # Two CTAs of 8 warps on each of 80 SMs; five steps of 512 bytes of weights and 96 of statistics.
    assert predicted([1] * 80).parts["bytes_in_flight"] == 80 * 2 * 8 * 5 * (512 + 96)


def test_rows_a_pass_pay_where_experts_share_tokens_and_not_where_they_do_not() -> None:
    def us(rows: int, routed: list[int]) -> float:
        config = Config(replace(SIMT.w13, rows=rows), replace(SIMT.w2, rows=rows), SIMT.resident)
        return predicted(routed, config=config, registers=64).us

    assert us(4, [8] * 10) < 0.7 * us(1, [8] * 10)
    assert us(4, [1] * 80) >= us(1, [1] * 80)  # its shared memory leaves room for fewer CTAs


def test_warps_that_wait_cost_more_with_tight_registers_and_not_at_all_where_all_have_work() -> None:
    few, tight = (predicted([1] * 10, tokens=1, registers=registers).parts["waiting"] for registers in (128, 96))
    assert 0 < few < tight
    assert predicted([1] * 80).parts["waiting"] == 0


def test_what_bounds_a_kernel_has_a_name() -> None:
    assert predicted(uniform(8)).bound == "memory"
    assert predicted([80]).bound == "latency"
    assert predicted([]).bound == "launch"


def test_an_awq_row_shorter_than_an_access_wastes_memory() -> None:
    # 64 columns of an awq row are 32 bytes, half of what DRAM moves; two tiles side by side fill it.
    awq = replace(QWEN, layout="awq", stats_bytes=0, interleaved=False)
    one, five = (
        predicted([1] * 10, tokens=1, of=awq, config=space.parse(f"simt-{key}+m512"), registers=64).parts["sectors"]
        for key in ("t1-k4-u5-r1+simt-t4-k1-u5-r1", "t5-k4-u5-r1+simt-t20-k1-u5-r1")
    )
    assert one > 1.2 * five


@pytest.mark.parametrize(
    ("stage", "experts", "us"), [("w13", 10, 8.86), ("w2", 10, 7.9), ("w13", 40, 29.8), ("w2", 40, 23.6)]
)
def test_tensor_stages_are_predicted_at_most_a_fifth_below_and_six_tenths_above_the_cycle_simulator(
    stage: str, experts: int, us: float
) -> None:
    # Simulated: the same data flow on a V100, two launches, neither launch time nor instruction fetch.
    found = predicted([1] * experts, tokens=experts // 10, name="staged", stage=stage).us - V100.launch_us
    assert 0.8 < found / us < 1.6


def test_the_mean_over_a_pool_weighs_its_routings() -> None:
    made = plan.make(QWEN, TENSOR)
    resources = Resources(128, made.launch("op").shared.at(8))
    few, many = (predicted([1] * count).us for count in (10, 80))
    found = model.predict_op(QWEN, made, resources, [([1] * 10, 1.0), ([1] * 80, 3.0)], 8, V100)
    assert found.us == pytest.approx((few + 3 * many) / 4)
    assert math.isclose(found.parts["bytes"], (10 + 3 * 80) / 4 * 729_600)


def test_a_stage_that_the_plan_does_not_launch_is_refused() -> None:
    with pytest.raises(RequestError, match="launches no stage 'w13': op"):
        model.predict(QWEN, plan.make(QWEN, TENSOR), Resources(128, 0), [1], 1, V100, "w13")
