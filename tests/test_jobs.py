"""The main job on a GPU, which here is a fake that emulates kernels and makes times up; without one, see test_cli."""

import doctest
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from tuner import choose, evaluate, jobs, model, plan, render, space, trial, verify, winners
from tuner.build import Ahead, Image
from tuner.contract import Contract
from tuner.device import GpuInfo
from tuner.errors import LaunchFailed, MissingTool, RequestError
from tuner.jobs import Done, Request
from tuner.plan import Outputs, Plan
from tuner.search import SearchInterrupted
from tuner.verify import HostExecutor, Layers, Verdict


class FakeGpu:
    """A DeviceExecutor on the CPU. `fault` is raised when that plan is timed."""

    mode = "ptx"
    name = "PTX on NVIDIA H200"
    info = GpuInfo("NVIDIA H200", (9, 0), 132, 1 << 20, 232448, 1 << 37, "GPU-0", "580.1")

    def __init__(self) -> None:
        self.host, self.builds = HostExecutor(), Ahead()
        self.asked: list[tuple[str, ...]] = []  # plan names of each timing
        self.faults: dict[str, BaseException] = {}

    def __call__(self, mode: str | None) -> "FakeGpu":
        assert mode in (None, "ptx")
        return self

    def __enter__(self) -> "FakeGpu":
        return self

    def __exit__(self, *ended: object) -> None:
        pass

    def run(self, plan: Plan, operands: Mapping[str, Any], tokens: int, order: int) -> Outputs:
        return self.host.run(plan, operands, tokens, order)

    def images(self, plan: Plan) -> dict[str, Image]:
        return {stage: self.builds.image(source) for stage, source in render.render(plan).items()}

    def held(self, operands: Mapping[str, Any]) -> Mapping[str, Any]:
        return operands

    def time(self, request: trial.Request) -> trial.Raw:
        self.asked.append(tuple(one.name for one in request.plans))
        for one in request.plans:
            if one.name in self.faults:
                raise self.faults[one.name]
        us = [fake_us(one) for one in request.plans]
        each = np.array(us)[:, None, None] * np.ones((1, request.rounds, len(request.shares)))
        return trial.Raw(each, request.layers, {"limits": ()})


def fake_us(made: Plan) -> float:
    """Nothing like another configuration's; five times as long for all experts."""
    return (10.0 + zlib.crc32(made.config.key().encode()) % 97) * (5 if made.name == "all-experts" else 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    monkeypatch.setattr(jobs, "available", lambda: (True, ""))
    monkeypatch.setattr(jobs, "DeviceExecutor", made)
    return made


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request(tiny.load(tmp_path), (1,), tmp_path / "out", trials=2)


def tune(request: Request) -> tuple[Done, list[str]]:
    notes: list[str] = []
    return jobs.tune(request, lambda phase, line: notes.append(line) if phase == jobs.NOTE else None), notes


def test_a_gpu_is_measured_and_the_set_says_which_and_how(gpu: FakeGpu, request_: Request) -> None:
    done, notes = tune(request_)
    assert notes == []
    assert done.folder == request_.output / "tiny" / "h200-measured"
    assert "MEASURED on NVIDIA H200 (driver 580.1), PTX on NVIDIA H200" in done.headline
    made = winners.read(done.folder)
    assert (made.word, made.device) == ("measured", "PTX on NVIDIA H200")
    assert made.toolchain.items() >= {("driver", "580.1"), ("code", "ptx"), ("seed", str(request_.seed))}
    level = made.levels[1]
    assert all(verdict["ok"] and verdict["executor"] == gpu.name for verdict in level.verdicts)
    assert level.us == fake_us(plan.make(request_.contract, level.config))


def test_a_measured_level_has_the_time_of_its_tiles_over_all_experts(gpu: FakeGpu, request_: Request) -> None:
    done, _ = tune(request_)
    level = winners.read(done.folder).levels[1]
    assert gpu.asked[-1] == ("all-experts",)
    assert level.all_experts is not None
    assert level.all_experts["us"] == 5 * level.us
    row = next(iter(jobs.winner_rows(done.winners)))
    assert row[jobs.WINNER_HEADERS.index("all experts us")] == 5 * level.us
    assert row[jobs.WINNER_HEADERS.index("resident")] == level.config.resident
    assert len(row) == len(jobs.WINNER_HEADERS)
    (kept,) = (row for row in ledger_rows(done) if row["kind"] == "all-experts")
    assert (kept["tokens"], kept["key"], kept["timing"]["us"]) == (1, level.config.key(), 5 * level.us)


def ledger_rows(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.folder.with_name(f"{done.folder.name}.jsonl").read_text().splitlines()]


def test_trials_and_finals_are_of_whole_ops(gpu: FakeGpu, request_: Request) -> None:
    done, _ = tune(request_)
    assert gpu.asked == [("fused",), ("fused",), ("fused", "fused"), ("all-experts",)]
    rows = [row for row in ledger_rows(done) if row["kind"] in ("trial", "final", "verdict")]
    assert [row["kind"] for row in rows] == ["trial", "trial", "final", "verdict", "verdict"]
    default = space.default(request_.contract).key()
    assert (rows[0]["key"], rows[2]["keys"][0], rows[3]["key"]) == (default, default, default)
    assert all(space.parse(row["key"]).key() == row["key"] for row in rows if row["kind"] != "final")
    assert not any("stage" in row or "config" in row for row in rows)


def test_guesses_of_the_gpus_own_model_are_tried_after_the_default(
    gpu: FakeGpu, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = space.candidates(request_.contract)[7]
    asked = []

    def guesses(contract: Contract, tokens: int, dev: model.Device) -> tuple[space.Config, ...]:
        asked.append((contract, tokens, dev.name))
        return (guess,)

    monkeypatch.setattr(evaluate, "guesses", guesses)
    done, _ = tune(request_)
    assert asked == [(request_.contract, 1, "H200")]
    trials = [row["key"] for row in ledger_rows(done) if row["kind"] == "trial"]
    assert trials == [space.default(request_.contract).key(), guess.key()]


def test_measuring_again_takes_every_time_from_the_ledger_and_leaves_the_bytes(gpu: FakeGpu, request_: Request) -> None:
    tune(request_)
    before = {path: path.read_bytes() for path in request_.output.rglob("*") if path.is_file()}
    gpu.asked.clear()
    tune(request_)
    assert gpu.asked == []
    assert {path: path.read_bytes() for path in request_.output.rglob("*") if path.is_file()} == before


def test_a_level_measured_later_leaves_the_others_as_they_are(gpu: FakeGpu, request_: Request) -> None:
    first, _ = tune(request_)
    both, _ = tune(replace(request_, levels=(2,)))
    made = winners.read(both.folder)
    assert set(made.levels) == {1, 2}
    assert made.levels[1] == winners.read(first.folder).levels[1]
    assert made.levels[1].all_experts is not None


def test_all_experts_that_fault_are_noted_and_cost_no_winner(gpu: FakeGpu, request_: Request) -> None:
    gpu.faults["all-experts"] = LaunchFailed("an illegal address")
    done, notes = tune(request_)
    assert notes == ["C1: the tiles could not be timed over all experts: an illegal address"]
    assert winners.read(done.folder).levels[1].all_experts is None
    gpu.faults.clear()
    again, notes = tune(request_)
    assert notes == []
    assert winners.read(again.folder).levels[1].all_experts is not None


def test_ctrl_c_after_the_search_says_how_to_go_on_and_loses_no_trial(gpu: FakeGpu, request_: Request) -> None:
    gpu.faults["all-experts"] = KeyboardInterrupt()
    with pytest.raises(SearchInterrupted, match="run the same command to go on"):
        tune(request_)
    assert not (request_.output / "tiny/h200-measured").exists()
    gpu.faults.clear()
    gpu.asked.clear()
    tune(request_)
    assert gpu.asked == [("all-experts",)]


def test_a_gpu_nobody_described_is_refused_before_anything_is_timed(gpu: FakeGpu, request_: Request) -> None:
    gpu.info = replace(gpu.info, name="NVIDIA T1000")
    with pytest.raises(RequestError, match="no description of device 'NVIDIA T1000'"):
        tune(request_)
    assert gpu.asked == []
    assert not request_.output.exists()


@pytest.mark.parametrize(
    ("there", "evaluator", "named", "measures"),
    [
        (True, "auto", None, True),
        (True, "auto", "H200", False),
        (True, "device", None, True),
        (True, "model", None, False),
        (False, "auto", None, False),
        (False, "model", "H200", False),
    ],
)
def test_a_gpu_is_measured_where_there_is_one_unless_another_or_the_model_is_named(
    monkeypatch: pytest.MonkeyPatch,
    request_: Request,
    there: bool,
    evaluator: jobs.EvaluatorName,
    named: str | None,
    measures: bool,
) -> None:
    monkeypatch.setattr(jobs, "available", lambda: (there, "" if there else "no GPU"))
    assert jobs._measures(replace(request_, evaluator=evaluator, gpu=named)) is measures


def test_options_that_contradict_each_other_or_the_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch, request_: Request
) -> None:
    monkeypatch.setattr(jobs, "available", lambda: (False, "no GPU"))
    with pytest.raises(MissingTool, match="no GPU; --evaluator model predicts without one"):
        tune(replace(request_, evaluator="device"))
    with pytest.raises(RequestError, match="leave one of them out"):
        tune(replace(request_, evaluator="device", gpu="H200"))
    with pytest.raises(RequestError, match="--code native says what this machine's GPU runs"):
        tune(replace(request_, evaluator="auto", code="native"))


def test_another_gpu_is_predicted_into_its_own_folder_from_its_own_code(request_: Request) -> None:
    done, _ = tune(replace(request_, evaluator="model", gpu="V100-SXM2-32GB"))
    assert done.folder.name == "v100-sxm2-predicted"
    assert "PREDICTED for V100-SXM2-32GB" in done.headline
    done, _ = tune(replace(request_, evaluator="model", gpu="H200"))
    assert done.folder.name == "h200-predicted"
    assert "built for sm_90" in done.headline


@pytest.mark.parametrize("ambiguous", [True, False])
def test_a_row_marked_ambiguous_is_explained_under_the_table_and_only_then(
    gpu: FakeGpu, request_: Request, ambiguous: bool
) -> None:
    made = tune(request_)[0].winners
    levels = {tokens: replace(level, ambiguous=ambiguous) for tokens, level in made.levels.items()}
    made = replace(made, levels=levels)
    assert [row[-1] for row in jobs.winner_rows(made)] == ["AMBIGUOUS" if ambiguous else ""]
    notes = jobs._notes(made, Path("folder"))
    assert notes[-1] == "Winners: folder; every trial: folder.jsonl"
    assert [note.startswith("AMBIGUOUS: ") and "less than 3%" in note for note in notes[:-1]] == [True] * ambiguous


def test_the_doctests_hold() -> None:
    assert doctest.testmod(winners).failed == 0
    assert doctest.testmod(winners).attempted > 0


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Tesla V100-SXM2-16GB", "v100-sxm2-measured"),
        ("Tesla V100-PCIE-32GB", "v100-measured"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-measured"),
        ("NVIDIA Tesla V100 (PG500/216)", "v100-pg500-216-measured"),
    ],
)
def test_a_drivers_name_becomes_a_folders(name: str, folder: str) -> None:
    assert winners.target(name, "measured") == folder


def test_the_templates_digest_changes_with_any_template_and_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = set()
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    for name, text in (("a.cuh", "one"), ("a.cuh", "two"), ("b.cuh", "two")):
        (tmp_path / name).write_text(text)
        found.add(jobs.templates_digest())
    (tmp_path / "a.cuh").unlink()
    found.add(jobs.templates_digest())
    assert len(found) == 4


def test_the_seed_reaches_the_verdicts_weights_routings_and_inputs(
    monkeypatch: pytest.MonkeyPatch, request_: Request
) -> None:
    real, seeds = verify.verify, []

    def spy(layers: Layers, *arguments: Any, **options: Any) -> Iterator[Verdict]:
        seeds.append((layers._seed, options["seed"]))
        return real(layers, *arguments, **options)

    monkeypatch.setattr(verify, "verify", spy)
    tune(replace(request_, evaluator="model", seed=3, trials=1))
    assert set(seeds) == {(3, 3)}


@pytest.mark.parametrize(("many", "orders"), [(1, [(0, 1), (1,)]), (8, [(0, 1), (0, 1)]), (0, [(1,), (1,)])])
def test_a_level_of_many_tokens_is_verified_in_one_order(
    gpu: FakeGpu, request_: Request, monkeypatch: pytest.MonkeyPatch, many: int, orders: list[tuple[int, ...]]
) -> None:
    found: dict[int, tuple[int, ...]] = {}
    real = verify.verify

    def spy(*arguments: Any, **options: Any) -> Iterator[Verdict]:
        found[options["tokens"][0]] = options["orders"]
        return real(*arguments, **options)

    monkeypatch.setattr(verify, "verify", spy)
    monkeypatch.setattr(choose, "MANY_TOKENS", many)
    tune(replace(request_, levels=(1, 2), trials=1))
    assert found == dict(zip((1, 2), orders, strict=True))


def test_a_set_of_the_version_that_tuned_stages_apart_is_refused_before_anything_is_timed(
    gpu: FakeGpu, request_: Request
) -> None:
    folder = request_.output / "tiny/h200-measured"
    folder.mkdir(parents=True)
    (folder / winners.MANIFEST).write_text('{"schema": 1}')
    with pytest.raises(
        RequestError, match=r"has schema 1, and this Voltune reads 2: .* delete the folder and tune again"
    ):
        tune(request_)
    assert gpu.asked == []
