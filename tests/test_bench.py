"""A benchmark: what it times, what it makes of the times, and what it says. No GPU: CUDA is a fake."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result
from fake_cuda import L2_BYTES, FakeCuda, at, images
from small import SMALL

import cli
from tuner import bench, dense, device, measure, plan, reference, render, space, tensors, trial, winners
from tuner.build import Image
from tuner.errors import LaunchFailed, MissingTool, RequestError, WrongResult
from tuner.measure import DeviceExecutor
from tuner.plan import Plan
from tuner.report import ALL_EXPERTS, COMPACT, DENSE, LOADS, OP, W2, W13, Quantiles, Report, Row, Subject
from tuner.verify import Layers

TOKENS = 2
CONTRACT = replace(SMALL, experts=48, hidden=512, intermediate=128, levels=(1, 2))
DEFAULT = space.default(CONTRACT)
OTHER = next(c for c in space.candidates(CONTRACT) if c != DEFAULT)
ONE = Subject("one", {1: DEFAULT, 2: DEFAULT}, "tuned/one", "PTX on Fake V100", "measured")
TWO = Subject("two", {1: DEFAULT, 2: OTHER}, "tuned/two", "Slow GPU", "predicted")
LAYERS = Layers(CONTRACT)
# W13 of an expert: 512 x 256 nibbles, 3 bytes for each of 16 groups and 256 columns; W2: 128 x 512, 4 groups.
W13_BYTES, W2_BYTES = 512 * 256 // 2 + 16 * 256 * 3, 128 * 512 // 2 + 4 * 512 * 3
COPY_US = 50.0
KNOWN: dict[bytes, reference.Layer] = {}
Kernels = dict[str, Callable[[dict[str, int]], None]]


def exact(*step: np.ndarray) -> reference.Layer:
    """What a call gives in float64, each worked out once."""
    key = b"".join(array.tobytes() for array in step)
    if key not in KNOWN:
        KNOWN[key] = reference.Reference(CONTRACT, LAYERS.weights(0)).exact(*step)
    return KNOWN[key]


def right_kernels() -> Kernels:
    """The kernels of every plan, by the float64 reference."""
    given: dict[str, int] = {}

    def layer(arguments: dict[str, int]) -> Any:
        given.update(arguments)
        tokens = given["TOKENS"]
        x = at(given["X"], "float16", (tokens, CONTRACT.hidden))
        ids = at(given["TOPK_IDS"], "int32", (tokens, CONTRACT.top_k))
        done = exact(x, ids, at(given["TOPK_WEIGHTS"], "float32", (tokens, CONTRACT.top_k)))
        at(given["OUT"], "float16", done.output.shape)[...] = done.output
        return done

    def w2(arguments: dict[str, int]) -> None:
        done = layer(arguments)
        at(given["HIDDEN"], "float32", done.hidden.shape)[...] = done.hidden

    def op(arguments: dict[str, int]) -> None:
        layer(arguments)

    return {"voltune_op": op, "voltune_compact": given.update, "voltune_w13": given.update, "voltune_w2": w2}


def cost(launch: dict[str, Any]) -> float:
    text = launch["image"].decode()
    if launch["kernel"] == "voltune_op":
        return 8.0 if "kLoadOnly = 1" in text else 12.0
    if launch["kernel"] == "voltune_compact":
        return 31.0 if "kKeepEmpty = 1" in text else 1.0
    return {"voltune_w13": 5.0, "voltune_w2": 4.0, "memcpy": COPY_US}[launch["kernel"]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake GPU in this process, where the executor's jobs then run too; torch is not there."""
    fused, staged = plan.make(CONTRACT, DEFAULT), plan.make(CONTRACT, DEFAULT, "staged")
    made = FakeCuda(replace(fused, launches=(*fused.launches, *staged.launches)), right_kernels())
    made.us = cost

    def here(self: DeviceExecutor, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        for key in self._arrays.keys() - self._there:
            trial._session(0).held[key] = [trial._session(0).gpu.upload(self._arrays[key])]
            self._there.add(key)
        return function(0, *arguments)

    def images_of(self: DeviceExecutor, made: Plan) -> dict[str, Image]:
        return {
            stage: replace(images(made)[stage], digest=source.digest, cubin=source.text.encode())
            for stage, source in render.render(made).items()
        }

    def absent() -> Any:
        raise MissingTool("torch is not there")

    monkeypatch.setattr(device, "_bindings", lambda: (made, made))
    monkeypatch.setattr(DeviceExecutor, "_call", here)
    monkeypatch.setattr(DeviceExecutor, "images", images_of)
    monkeypatch.setattr(trial, "_settle", lambda replay: None)
    monkeypatch.setattr(measure, "_BIG", 1 << 16)
    monkeypatch.setattr(tensors, "load", absent)
    trial._session.cache_clear()
    yield made
    trial._session.cache_clear()


def request(*routings: str, **changes: Any) -> bench.Request:
    given = bench.Request(CONTRACT, (TOKENS,), routings or ("uniform",), (ONE,), rounds=4, ceiling=2)
    return replace(given, **changes)


def measured(*routings: str, **changes: Any) -> Report:
    return bench.measure(request(*routings, **changes), None, lambda phase, line: None)


def row(found: Report, arm: str, cell: int = 0) -> Row:
    (each,) = (each for each in found.cells[cell].rows if each.arm == arm)
    return each


def us(found: Report, arm: str) -> float:
    timing = row(found, arm).cold
    assert timing is not None
    return timing.us


# What is timed


def test_every_arm_is_timed_alone(fake: FakeCuda) -> None:
    found = measured()
    times = {arm: us(found, arm) for arm in (OP, COMPACT, W13, W2, ALL_EXPERTS, LOADS)}
    assert times == pytest.approx({OP: 12, COMPACT: 1, W13: 5, W2: 4, ALL_EXPERTS: 40, LOADS: 8})
    assert found.copy.us == pytest.approx(COPY_US)


def test_the_floor_is_the_active_experts_bytes_at_the_copy_rate_of_bytes_read_plus_written(fake: FakeCuda) -> None:
    found = measured("hot")
    (cell,) = found.cells
    assert cell.active == (3.0, 3, 3)
    assert cell.bytes == 3 * (W13_BYTES + W2_BYTES)
    assert found.copy_rate == pytest.approx(2 * 32 * L2_BYTES / COPY_US)
    floor = cell.bytes / (64 * L2_BYTES / COPY_US)
    arms = {arm["arm"]: arm for arm in found.to_dict()["cells"][0]["arms"]}
    assert found.to_dict()["cells"][0]["floor_us"] == pytest.approx(floor)
    assert (arms[OP]["over_ceiling"], arms[OP]["over_floor"]) == pytest.approx((12 / 8, 12 / floor))
    assert arms[ALL_EXPERTS]["over_ceiling"] == pytest.approx(40 / 8)
    assert (arms[W13]["over_ceiling"], arms[W13]["over_floor"]) == (None, None)


def test_hot_calls_share_their_experts_among_tokens_and_change_them_from_call_to_call(fake: FakeCuda) -> None:
    measured("hot")
    graph = next(graph for graph in fake.captured if graph[0]["kernel"] == "voltune_op" and len(graph) >= 24)
    seen = [at(launch["arguments"]["TOPK_IDS"], "int32", (TOKENS, CONTRACT.top_k)) for launch in graph[:24]]
    assert all((ids[0] == ids[1]).all() for ids in seen)
    assert len({tuple(ids[0]) for ids in seen}) > 12


def test_between_two_uses_of_a_copy_of_the_weights_the_lightest_stage_touches_three_times_the_l2(
    fake: FakeCuda,
) -> None:
    found = measured("hot")
    assert found.cells[0].details["cold_bytes"] >= 3 * L2_BYTES
    for graph in [graph for graph in fake.captured if {launch["kernel"] for launch in graph} == {"voltune_w2"}]:
        copies = len({launch["arguments"]["W2_Q"] for launch in graph})
        assert (copies - 1) * 3 * W2_BYTES >= 3 * L2_BYTES


def test_warm_calls_have_one_routing_and_one_copy_of_the_weights(fake: FakeCuda) -> None:
    seen: list[tuple[int, int]] = []

    def slower_when_cold(launch: dict[str, Any]) -> float:
        graph = next((each for each in fake.captured if any(launch is one for one in each)), [])
        calls = {launch["arguments"].get("OUT") for launch in graph}
        seen.append((len(graph), len(calls)))
        return cost(launch) * (1.0 if len(calls) > 1 or launch["kernel"] == "memcpy" else 0.5)

    fake.us = slower_when_cold
    found = measured(warm=True)
    timing = row(found, OP)
    assert timing.cold is not None and timing.warm is not None
    assert (timing.cold.us, timing.warm.us) == pytest.approx((12.0, 6.0))
    assert (24, 1) in seen
    assert found.copy.us == pytest.approx(COPY_US)
    assert measured().cells[0].rows[0].warm is None


def test_arms_are_interleaved_round_by_round(fake: FakeCuda) -> None:
    measured()
    order = [fake.graph_of(one)[0]["kernel"] for one in fake.replayed][::2]
    rounds = [order[-(i + 1) * 9 : len(order) - i * 9] for i in range(4)]  # six arms, two more that load, the copy
    assert all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # another arm goes first in each


def test_variants_that_only_load_do_not_share_the_ops_workspace(fake: FakeCuda) -> None:
    measured()
    places: dict[bool, set[int]] = {True: set(), False: set()}
    rounds = fake.captured[next(i for i, graph in enumerate(fake.captured) if graph[0]["kernel"] == "memcpy") :]
    for launch in [launch for graph in rounds for launch in graph if launch["kernel"] == "voltune_op"]:
        places["kLoadOnly = 1" in launch["image"].decode()].add(launch["arguments"]["HIDDEN"])
    assert places[True] and places[False] and not places[True] & places[False]


def test_what_only_loads_may_leave_values_that_nobody_awaits_and_the_op_may_not(fake: FakeCuda) -> None:
    right = fake.kernels["voltune_op"]
    only: list[bool] = [True]

    def leaves(arguments: dict[str, int]) -> None:
        right(arguments)
        image = fake.launches[-1]["image"].decode()
        if ("kLoadOnly = 1" in image) == only[0]:
            at(arguments["HIDDEN"], "uint32", (1,))[0] = 7

    fake.kernels = {**fake.kernels, "voltune_op": leaves}
    measured()
    only[0] = False
    with pytest.raises(LaunchFailed, match="counters HIDDEN were not left zero"):
        measured()


def test_a_counter_that_any_step_leaves_is_found_after_timing(fake: FakeCuda) -> None:
    right, runs = fake.kernels["voltune_op"], [0]

    def leaves(arguments: dict[str, int]) -> None:
        right(arguments)
        runs[0] += 1
        if runs[0] == 1 + 24:  # one to verify; then the last step of the pool
            at(arguments["COUNTERS"], "int32", (1,))[0] = 1

    fake.kernels = {**fake.kernels, "voltune_op": leaves}
    loads = replace(request(), ceiling=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LaunchFailed, match="counters COUNTERS"):
        patch.setattr(bench._Run, "_finalists", lambda self, places: ([[DEFAULT]], {"tried": 1}))
        bench.measure(loads, None, lambda phase, line: None)


# The ceiling


def test_the_ceiling_is_the_fastest_of_those_tried_the_winners_among_them(fake: FakeCuda) -> None:
    feasible = len(space.candidates(CONTRACT))
    best = OTHER.key()

    def faster(launch: dict[str, Any]) -> float:
        other = render.render(plan.make(CONTRACT, OTHER, load_only=True))["op"].text.encode()
        return 7.0 if launch["image"] == other else cost(launch)

    fake.us = faster
    found = measured(subjects=(ONE, TWO), ceiling=3)
    assert 3 <= found.ceiling["tried"] <= 5
    assert found.ceiling["feasible"] <= feasible
    assert (row(found, LOADS).config, us(found, LOADS)) == (best, pytest.approx(7.0))


def test_a_variant_that_faults_is_left_out_of_the_ceiling(fake: FakeCuda) -> None:
    right = fake.kernels["voltune_op"]
    faulty = render.render(plan.make(CONTRACT, OTHER, load_only=True))["op"].text.encode()

    def faults(arguments: dict[str, int]) -> None:
        if fake.launches[-1]["image"] == faulty:
            raise LaunchFailed("an illegal address")
        right(arguments)

    fake.kernels = {**fake.kernels, "voltune_op": faults}
    found = measured(subjects=(ONE, TWO), ceiling=1)
    assert found.ceiling["failed"] == 1
    assert us(found, LOADS) == pytest.approx(8.0)


# Right before fast


@pytest.mark.parametrize(("kernel", "named"), [("voltune_op", "fused plan"), ("voltune_w2", "staged plan")])
def test_a_wrong_kernel_is_refused_before_anything_is_timed(fake: FakeCuda, kernel: str, named: str) -> None:
    right = fake.kernels[kernel]

    def wrong(arguments: dict[str, int]) -> None:
        right(arguments)
        at(arguments["OUT"], "float16", (TOKENS, CONTRACT.hidden))[1, 5] += np.float16(0.25)

    fake.kernels = {**fake.kernels, kernel: wrong}
    with pytest.raises(WrongResult, match=rf"{named}, C2, uniform.*sm_70 code on Fake V100: output"):
        measured()
    assert fake.captured == []


def test_wrong_hidden_rows_of_a_stage_are_refused(fake: FakeCuda) -> None:
    right = fake.kernels["voltune_w2"]

    def wrong(arguments: dict[str, int]) -> None:
        right(arguments)
        at(arguments["HIDDEN"], "float32", (1, CONTRACT.local_intermediate))[0, 3] += 1.0

    fake.kernels = {**fake.kernels, "voltune_w2": wrong}
    with pytest.raises(WrongResult, match=r"staged plan.*hidden of routed slots"):
        measured()


# The dense arm


class Dense:
    """Stands for a captured torch graph."""

    def __init__(self, us: float) -> None:
        self._us = us

    def time_us(self) -> float:
        if self._us < 0:
            raise LaunchFailed("torch, replaying: out of memory")
        return self._us


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A dense arm that is right; `us` a call, `off` added to its output."""
    options = {"us": 300.0, "off": 0.0}

    def run(contract: Any, weights: Any, step: Any) -> Any:
        assert set(weights) == {"W13_Q", "W13_SCALES", "W2_Q", "W2_SCALES"}
        return (exact(*step).output + options["off"]).astype(np.float16)

    def capture(contract: Any, layers: Any, steps: Any, calls: int) -> Dense:
        assert calls >= len(steps)
        assert len({layer["W2_Q"].address for layer in layers}) == len(layers)
        return Dense(options["us"] if len(steps) == 24 else options["us"] / 2)

    monkeypatch.setattr(dense, "run", run)
    monkeypatch.setattr(dense, "capture", capture)
    return options


def test_the_dense_arm_is_timed_among_the_others(fake: FakeCuda, torch: dict[str, float]) -> None:
    found = measured(warm=True)
    timing = row(found, DENSE)
    assert timing.cold is not None and timing.warm is not None
    assert (timing.cold.us, timing.warm.us) == pytest.approx((300.0, 150.0))
    assert us(found, OP) == pytest.approx(12.0)


def test_without_torch_the_dense_arm_is_missing_and_says_why(fake: FakeCuda) -> None:
    found = measured("uniform", "hot")
    assert [row(found, DENSE, i) for i in range(2)] == [Row(DENSE, missing="torch is not there")] * 2


def test_a_wrong_dense_arm_is_not_timed(fake: FakeCuda, torch: dict[str, float]) -> None:
    torch["off"] = 0.5
    timing = row(measured(), DENSE)
    assert timing.cold is None
    assert "wrong: relative L2" in timing.missing


def test_a_dense_arm_that_fails_in_the_rounds_leaves_the_others_their_times(
    fake: FakeCuda, torch: dict[str, float]
) -> None:
    torch["us"] = -1.0
    found = measured()
    assert row(found, DENSE).missing == "torch, replaying: out of memory"
    assert us(found, OP) == pytest.approx(12.0)


# Figures


def test_quantiles_are_the_median_and_the_10th_and_90th_percentile() -> None:
    assert Quantiles.of([float(us) for us in range(101)]).cells == (50.0, 10.0, 90.0)


def test_a_configuration_of_two_sets_is_timed_once_and_named_by_both(fake: FakeCuda) -> None:
    found = measured(levels=(1, 2), subjects=(ONE, TWO))
    ops = [[(each.of, each.config) for each in cell.rows if each.arm == OP] for cell in found.cells]
    assert ops == [[(("one", "two"), DEFAULT.key())], [(("one",), DEFAULT.key()), (("two",), OTHER.key())]]


@pytest.mark.parametrize(
    ("made_on", "here", "same"),
    [
        ("PTX on NVIDIA H200", "NVIDIA H200", True),
        ("V100-PCIE-32GB", "Tesla V100-PCIE-32GB", True),
        ("V100-PCIE-32GB", "NVIDIA H200", False),
    ],
)
def test_a_set_made_for_another_device_says_so(made_on: str, here: str, same: bool) -> None:
    line = Subject("set", {}, "tuned/set", made_on, "predicted").line(here)
    assert ("ANOTHER DEVICE" in line) != same
    assert f"winners of tuned/set, predicted for {made_on}" in line


# What sets there are


def a_set(contract: Any, **levels: Any) -> SimpleNamespace:
    found = {int(name[1:]): SimpleNamespace(config=config) for name, config in levels.items()}
    return SimpleNamespace(contract=contract, target="gpu-measured", device="a GPU", word="measured", levels=found)


def test_every_set_that_is_there_is_measured_and_same_names_become_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {Path("a"): a_set(CONTRACT, C1=OTHER), Path("b"): a_set(CONTRACT, C1=DEFAULT, C2=OTHER)}
    read[Path("c")] = a_set(SMALL)
    monkeypatch.setattr(winners, "read", lambda folder: read[folder])
    first, second = bench.subjects(CONTRACT, None, (), list(read), (1, 2))
    assert (first.name, dict(first.configs), first.defaults) == ("a", {1: OTHER, 2: DEFAULT}, (2,))
    assert (second.name, dict(second.configs), second.defaults) == ("b", {1: DEFAULT, 2: OTHER}, ())
    (given,) = bench.subjects(CONTRACT, None, [Path("b")], list(read), (2,))
    assert (given.name, given.origin) == ("gpu-measured", "b")
    with pytest.raises(RequestError, match=f"c is tuned for a contract with digest {SMALL.digest()}"):
        bench.subjects(CONTRACT, None, [Path("c")], [], (2,))


def test_without_any_set_the_default_is_measured() -> None:
    (only,) = bench.subjects(CONTRACT, None, (), (), (1, 2))
    assert (only.name, dict(only.configs)) == ("default", {1: DEFAULT, 2: DEFAULT})
    assert only.line("a GPU") == "default: no set is there; the untuned default configuration"


# The command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *(str(each) for each in arguments)])


@pytest.fixture
def contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return tiny.write(tmp_path)


def test_table_json_and_file_say_the_same(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = measured("uniform", "hot", subjects=(ONE, TWO), warm=True)
    monkeypatch.setattr(bench, "measure", lambda request, mode, show: found)
    content = json.loads(run("--contract", tiny.write(tmp_path), "--json", "--output", "found.json").stdout)
    assert json.loads(Path("found.json").read_text()) == content
    printed = run("--contract", tiny.write(tmp_path)).stdout
    lines = printed.splitlines()
    assert lines[0].startswith("small: MEASURED on Fake V100 (driver unknown")
    assert any("two: winners of tuned/two, predicted for Slow GPU, which is ANOTHER DEVICE" in line for line in lines)
    assert [each["made_for_this_gpu"] for each in content["sets"]] == [True, False]
    for cell in content["cells"]:
        heading = next(line for line in lines if line.startswith(f"C2 {cell['routing']}: "))
        assert f"floor {cell['floor_us']:.2f} us, ceiling {cell['ceiling_us']:.2f} us" in heading
        for arm in cell["arms"]:
            figures = [arm[name][each] for name in ("cold", "warm") if arm[name] for each in ("us", "p10", "p90")]
            texts = {f"{figure:.2f}" for figure in figures}
            found_in = [line for line in lines if line.startswith(arm["arm"]) and arm["config"] in line]
            assert any(texts <= set(line.split()) for line in found_in), arm


def test_without_a_gpu_the_command_says_what_is_missing(contract: str) -> None:
    result = run("--contract", contract)
    assert result.exit_code == 1
    assert "error: " in result.stderr and "bench measures, and predicts nothing" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--routing", "warm"), "unknown routing 'warm'"),
        (("--routing", "uniform,"), "unknown routing ''"),
        (("--routing", "missing.npy"), "missing.npy: cannot be read"),
        (("--concurrency", "9"), "concurrency '9'"),
        (("--config", "t1"), "config 't1'"),
        (("--set", "nowhere"), "no manifest.json in nowhere"),
        (("--set", "nowhere", "--config", "t1"), "both name configurations"),
        (("--output", "no/such/file"), "expected a file in a folder that exists"),
        (("--rounds", "2"), "2 is not in the range x>=3"),
        (("--ceiling", "0"), "0 is not in the range x>=1"),
        (("--code", "sass"), "'sass' is not one of"),
    ],
)
def test_a_request_that_cannot_be_met_ends_with_status_2_before_a_gpu_is_looked_for(
    contract: str, arguments: tuple[str, ...], text: str
) -> None:
    result = run("--contract", contract, *arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert result.stdout == ""


def test_the_command_needs_no_optuna() -> None:
    program = "import sys; sys.modules['optuna'] = None; import cli; cli.main(['bench', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(cli.__file__).parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "beside its stages" in done.stdout


def test_a_recorded_routing_is_named_by_its_file(fake: FakeCuda, tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.arange(30).reshape(10, 3) % CONTRACT.experts)
    found = measured(str(tmp_path / "trace.npy"))
    assert found.cells[0].routing == "trace.npy"
