"""Timings: their statistics, what is launched for one, and the process a trial runs in. No GPU: CUDA is a fake."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import L2_BYTES, FakeCuda, at, images
from small import SMALL

from tuner import device, measure, plan, reference, render, space, trial
from tuner.build import Image
from tuner.device import GpuInfo
from tuner.errors import InvalidConfig, LaunchFailed, TrialTimeout, WrongResult
from tuner.measure import DeviceEvaluator, DeviceExecutor, Timing
from tuner.nvml import Clocks
from tuner.plan import Plan
from tuner.verify import Layers

TOKENS = 2
# Two routings of unequal share; weights large enough that they are kept on the GPU.
CONTRACT = replace(SMALL, experts=48, hidden=512, intermediate=128, routings=(("uniform", 0.75), ("round-robin", 0.25)))
DEFAULT = space.default(CONTRACT)
MADE = plan.make(CONTRACT, DEFAULT)
WALKING = plan.make(CONTRACT, DEFAULT, "all-experts")
(OP,) = (launch.kernel for launch in MADE.launches)
OTHER = next(c for c in space.candidates(CONTRACT) if c.w13 != DEFAULT.w13)
LAYERS = Layers(CONTRACT)


# Statistics


def test_a_timing_is_the_median_and_the_5th_and_95th_percentile_of_its_samples() -> None:
    timing = Timing.of([float(us) for us in range(101)], "GPU", {"layers": 2})
    assert (timing.us, timing.low, timing.high) == (50.0, 5.0, 95.0)
    assert timing.word == "measured"
    assert json.loads(json.dumps(timing.to_dict()))["samples"] == [float(us) for us in range(101)]


def test_pairing_by_round_removes_what_slows_both_alike() -> None:
    baseline = np.random.default_rng(0).uniform(10, 30, 20)
    assert measure.saving(0.9 * baseline, baseline) == pytest.approx((0.1, 0.1))


def test_the_interval_of_two_equal_noisy_kernels_contains_zero_and_of_a_slower_one_lies_below() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.normal(20, 1, 30), rng.normal(20, 1, 30)
    low, high = measure.saving(one, other)
    assert low < 0 < high
    low, high = measure.saving(1.2 * one, other)
    assert high < 0


def test_the_interval_of_the_same_samples_and_seed_is_the_same() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.normal(20, 1, 30), rng.normal(20, 1, 30)
    assert measure.saving(one, other, 7) == measure.saving(one, other, 7)


def test_enough_copies_are_used_that_three_times_the_l2_lies_between_two_uses() -> None:
    # H200, qwen38-tp4 at one token: 180 MB over 4.736 MB a launch is 38.007, so 39 launches between two uses.
    assert measure.layers_needed(60_000_000, 4_736_000) == 40
    assert measure.layers_needed(6_000_000, 18_000_000) == 2


# What is launched


def right_kernels() -> dict[str, Callable[[dict[str, int]], None]]:
    """Kernels of two plans, by the float64 reference: the last one writes the output of what the others were given."""
    given: dict[str, int] = {}
    known = reference.Reference(CONTRACT, LAYERS.weights(0))

    def op(arguments: dict[str, int]) -> reference.Layer:
        given.update(arguments)
        x = at(given["X"], "float16", (TOKENS, CONTRACT.hidden))
        ids = at(given["TOPK_IDS"], "int32", (TOKENS, CONTRACT.top_k))
        shares = at(given["TOPK_WEIGHTS"], "float32", (TOKENS, CONTRACT.top_k))
        layer = known.exact(x, ids, shares)
        at(given["OUT"], "float16", layer.output.shape)[...] = layer.output
        return layer

    def last(arguments: dict[str, int]) -> None:
        hidden = op(arguments).hidden
        at(given["HIDDEN"], "float32", hidden.shape)[...] = hidden  # which the op clears

    walking = [launch.kernel for launch in WALKING.launches]
    return {**dict.fromkeys(walking[:-1], given.update), OP: op, walking[-1]: last}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake GPU in this process, where the executor's jobs then run too."""
    made = FakeCuda(replace(MADE, launches=(*MADE.launches, *WALKING.launches)), right_kernels())
    monkeypatch.setattr(device, "_bindings", lambda: (made, made))

    def here(self: DeviceExecutor, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        for key in self._arrays.keys() - self._there:
            trial._session(0).held[key] = [trial._session(0).gpu.upload(self._arrays[key])]
            self._there.add(key)
        return function(0, *arguments)

    def images_of(self: DeviceExecutor, made: Plan) -> dict[str, Image]:
        # Kernels of a fake GPU are named, not built; another source is another digest.
        return {
            stage: replace(images(made)[stage], digest=source.digest, cubin=source.text.encode())
            for stage, source in render.render(made).items()
        }

    monkeypatch.setattr(DeviceExecutor, "_call", here)
    monkeypatch.setattr(DeviceExecutor, "images", images_of)
    monkeypatch.setattr(trial, "_settle", lambda replay: None)
    monkeypatch.setattr(measure, "_BIG", 1 << 16)
    trial._session.cache_clear()
    yield made
    trial._session.cache_clear()


@pytest.fixture
def evaluator(fake: FakeCuda) -> DeviceEvaluator:
    return DeviceEvaluator(CONTRACT, DeviceExecutor(), LAYERS)


def test_the_op_is_timed_over_every_routing_by_its_share(fake: FakeCuda, evaluator: DeviceEvaluator) -> None:
    def cost(launch: dict[str, Any]) -> float:
        uniform, _ = fake.captured
        assert launch["kernel"] == OP
        return 10.0 if any(launch is one for one in uniform) else 50.0

    fake.us = cost
    timing = evaluator.evaluate(DEFAULT, TOKENS)
    assert timing.details["us_by_routing"] == pytest.approx({"uniform": 10.0, "round-robin": 50.0})
    assert timing.us == pytest.approx(0.75 * 10.0 + 0.25 * 50.0)
    assert (timing.word, timing.device) == ("measured", "sm_70 code on Fake V100")
    assert len(timing.samples) == measure.ROUNDS
    json.dumps(timing.to_dict())


def test_between_two_uses_of_a_copy_of_the_weights_three_times_the_l2_is_touched(
    fake: FakeCuda, evaluator: DeviceEvaluator
) -> None:
    experts: dict[int, int] = {}  # distinct ones of a launch, by its ids' address

    def look(launch: dict[str, Any]) -> float:
        ids = launch["arguments"]["TOPK_IDS"]
        experts[ids] = len(np.unique(at(ids, "int32", (TOKENS, CONTRACT.top_k))))
        return 10.0

    fake.us = look
    timing = evaluator.evaluate(DEFAULT, TOKENS)
    # W13 of an expert: 512 x 256 nibbles, and 3 bytes for each of 16 groups and 256 columns; W2 is 128 x 512.
    touched = 512 * 256 // 2 + 16 * 256 * 3 + 128 * 512 // 2 + 4 * 512 * 3
    for graph in fake.captured:
        assert len(graph) >= 24
        weights = [launch["arguments"]["W13_Q"] for launch in graph]
        assert len({(launch["arguments"]["W13_Q"], launch["arguments"]["W2_Q"]) for launch in graph}) == len(
            set(weights)
        )
        assert len(set(weights)) == timing.details["layers"]
        for copy in set(weights):
            uses = [i for i, one in enumerate(weights) if one == copy]
            for begin, end in zip(uses, [*uses[1:], uses[0] + len(graph)], strict=True):
                between = [graph[i % len(graph)]["arguments"]["TOPK_IDS"] for i in range(begin + 1, end)]
                assert sum(experts[ids] for ids in between) * touched >= 3 * L2_BYTES
        assert len({launch["arguments"]["TOPK_IDS"] for launch in graph}) == 24
        assert len({launch["arguments"]["HIDDEN"] for launch in graph}) == 24


def test_where_memory_holds_fewer_copies_the_timing_says_how_cold_it_was(
    fake: FakeCuda, evaluator: DeviceEvaluator
) -> None:
    fake.free_memory = 15_000_000  # two more copies of 5.6 MB in four fifths of it
    timing = evaluator.evaluate(DEFAULT, TOKENS)
    assert timing.details["layers"] == 3
    assert 0 < timing.details["cold_bytes"] < timing.details["cold_wanted_bytes"]


def test_a_warm_timing_uses_one_routing_and_one_copy(fake: FakeCuda) -> None:
    DeviceEvaluator(CONTRACT, DeviceExecutor(), LAYERS, warm=True).evaluate(DEFAULT, TOKENS)
    for graph in fake.captured:
        assert len(graph) == 24
        assert len({(launch["arguments"]["W2_Q"], launch["arguments"]["OUT"]) for launch in graph}) == 1


def test_all_experts_are_walked_by_the_same_tiles_on_that_plans_operands(
    fake: FakeCuda, evaluator: DeviceEvaluator
) -> None:
    compact, w13, w2 = (launch.kernel for launch in WALKING.launches)
    costs = {compact: 2.0, w13: 6.0, w2: 5.0}
    fake.us = lambda launch: costs[launch["kernel"]]
    timing = evaluator.all_experts(DEFAULT, TOKENS)
    assert timing.us == pytest.approx(13.0)
    assert timing.word == "measured"
    for graph in fake.captured:
        assert [launch["kernel"] for launch in graph] == [compact, w13, w2] * (len(graph) // 3)
        assert all(launch["arguments"]["SEGMENT_ROWS"] for launch in graph)
    sources = render.render(WALKING)
    assert {launch["image"] for launch in fake.captured[0]} == {source.text.encode() for source in sources.values()}


@pytest.mark.parametrize("name", ["fused", "all-experts"])
def test_a_wrong_kernel_is_found_before_anything_is_timed(
    fake: FakeCuda, evaluator: DeviceEvaluator, name: str
) -> None:
    last = {"fused": MADE, "all-experts": WALKING}[name].launches[-1].kernel
    right = fake.kernels[last]

    def wrong(arguments: dict[str, int]) -> None:
        right(arguments)
        at(arguments["OUT"], "float16", (TOKENS, CONTRACT.hidden))[1, 5] += np.float16(0.25)

    fake.kernels = {**fake.kernels, last: wrong}
    time_it = {"fused": evaluator.evaluate, "all-experts": evaluator.all_experts}[name]
    with pytest.raises(WrongResult, match=rf"{name} plan, C2, uniform.*sm_70 code on Fake V100.*output"):
        time_it(DEFAULT, TOKENS)
    assert fake.captured == []


def zeros(tokens: int) -> Callable[[dict[str, int]], None]:
    """A kernel that is wrong."""

    def kernel(arguments: dict[str, int]) -> None:
        at(arguments["OUT"], "float16", (tokens, CONTRACT.hidden))[...] = 0

    return kernel


def test_a_config_is_verified_once_at_a_level_and_again_at_another(fake: FakeCuda, evaluator: DeviceEvaluator) -> None:
    evaluator.evaluate(DEFAULT, TOKENS)
    fake.kernels = {**fake.kernels, OP: zeros(TOKENS)}
    evaluator.evaluate(DEFAULT, TOKENS)
    fake.kernels = {**fake.kernels, OP: zeros(1)}
    with pytest.raises(WrongResult, match="C1"):
        evaluator.evaluate(DEFAULT, 1)


def test_a_config_at_twice_the_best_gets_no_more_than_the_screening_rounds(
    fake: FakeCuda, evaluator: DeviceEvaluator
) -> None:
    slow = render.render(plan.make(CONTRACT, OTHER))["op"].text.encode()
    fake.us = lambda launch: 25.0 if launch["image"] == slow else 10.0
    assert not evaluator.evaluate(DEFAULT, TOKENS).details["screened_out"]
    timing = evaluator.evaluate(OTHER, TOKENS)
    assert timing.details["screened_out"]
    assert timing.samples == pytest.approx((25.0,) * 3)


def test_finalists_are_interleaved_and_held_against_the_first(fake: FakeCuda, evaluator: DeviceEvaluator) -> None:
    fast = render.render(plan.make(CONTRACT, OTHER))["op"].text.encode()
    drift = iter(np.linspace(1.0, 2.0, 20_000))
    fake.us = lambda launch: next(drift) * (8.0 if launch["image"] == fast else 10.0)
    first, second = evaluator.compare([DEFAULT, OTHER], TOKENS)
    assert (first.low, first.high) == (0.0, 0.0)
    assert first.timing.samples[-1] > 1.01 * first.timing.samples[0]
    assert second.low == pytest.approx(0.2, abs=0.01) and second.high == pytest.approx(0.2, abs=0.01)
    order = [next(i for i, graph in enumerate(fake.captured) if graph is fake.graph_of(one)) for one in fake.replayed]
    assert order[::2][:8] == [0, 1, 2, 3, 2, 3, 0, 1]  # graphs of two routings each; the other plan goes first next


def test_rounds_at_a_lowered_clock_are_discarded_and_counted(
    fake: FakeCuda, evaluator: DeviceEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([Clocks(1380), Clocks(1380), Clocks(1200), Clocks(1380, 0, ("thermal slowdown",))])
    monkeypatch.setattr(device.Gpu, "clocks", lambda gpu: next(moments, Clocks(1375, 0, ("power cap",))))
    timing = evaluator.evaluate(DEFAULT, TOKENS)
    assert timing.details["discarded_rounds"] == 2
    assert len(timing.samples) == measure.ROUNDS
    assert timing.details["sm_mhz"] == 1380


def test_a_gpu_that_never_holds_its_clock_is_a_failure_and_no_timing(
    fake: FakeCuda, evaluator: DeviceEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([Clocks(1380)])
    monkeypatch.setattr(device.Gpu, "clocks", lambda gpu: next(moments, Clocks(900, 0, ("power brake",))))
    with pytest.raises(LaunchFailed, match=r"60 of 60 rounds, the last at 900 MHz \(power brake\) after 1380 MHz"):
        evaluator.evaluate(DEFAULT, TOKENS)


# The process


def opens(ordinal: int) -> GpuInfo:
    return GpuInfo("Stand-in", (9, 0), 132, 60 << 20, 227 << 10, 1 << 37, "", "")


_HERE: dict[int, float] = {}


def holds(ordinal: int, key: int, path: str) -> None:
    _HERE[key] = float(np.load(path).sum())


def runs(
    ordinal: int, made: Plan, built: dict[str, Image], code: str, given: dict[str, Any], tokens: int
) -> tuple[int, float]:
    if given["X"] == "crash":
        os._exit(1)
    if given["X"] == "hang":
        time.sleep(600)
    if given["X"] == "invalid":
        raise InvalidConfig("too much shared memory")
    return os.getpid(), _HERE[given["W13_Q"].key]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceExecutor]:
    monkeypatch.setattr(trial, "open_gpu", opens)
    monkeypatch.setattr(trial, "hold", holds)
    monkeypatch.setattr(trial, "run", runs)
    monkeypatch.setattr(DeviceExecutor, "images", lambda self, made: images(made))
    monkeypatch.setattr(measure, "_RUN_S", 5.0)
    with DeviceExecutor() as made:
        yield made


def ask(executor: DeviceExecutor, weights: np.ndarray, word: str = "go") -> Any:
    return executor.run(MADE, {"X": word, "W13_Q": weights}, TOKENS, 0)  # type: ignore[dict-item]


def test_without_a_mode_another_gpu_runs_ptx_and_is_named_so(executor: DeviceExecutor) -> None:
    assert (executor.mode, executor.name) == ("ptx", "PTX on Stand-in")


def test_weights_are_sent_once_and_again_only_to_a_new_process(executor: DeviceExecutor, tmp_path: Path) -> None:
    weights = np.ones(1 << 18, np.float64)
    process, total = ask(executor, weights)
    assert total == weights.sum()
    weights[0] = 5.0  # a second upload would see it
    assert ask(executor, weights) == (process, total)
    with pytest.raises(LaunchFailed, match="ended its process with status 1"):
        ask(executor, weights, "crash")
    again, fresh = ask(executor, weights)
    assert again != process
    assert fresh == total + 4.0


def test_a_hung_kernel_is_a_timeout_and_the_next_run_works(
    executor: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.ones(1 << 18, np.float64)
    ask(executor, weights)
    monkeypatch.setattr(measure, "_RUN_S", 0.3)
    with pytest.raises(TrialTimeout, match="runs did not end"):
        ask(executor, weights, "hang")
    monkeypatch.setattr(measure, "_RUN_S", 5.0)
    assert ask(executor, weights)[1] == weights.sum()


def test_a_config_that_does_not_fit_keeps_the_process(executor: DeviceExecutor) -> None:
    weights = np.ones(1 << 18, np.float64)
    process, _ = ask(executor, weights)
    with pytest.raises(InvalidConfig, match="too much shared memory"):
        ask(executor, weights, "invalid")
    assert ask(executor, weights)[0] == process
