"""The search asks well, never twice, and loses nothing."""

import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeEvaluator, keys, landscape, open_ledger
from small import SMALL

from tuner import contract, search, space
from tuner.errors import LaunchFailed, MissingTool, RequestError
from tuner.search import Job, Progress, SearchInterrupted, StageResult
from tuner.space import STAGES, Stage, StageConfig

QWEN = contract.load("qwen38-tp4")
DEFAULT = {stage: space.default(SMALL).stage(stage).key() for stage in STAGES}


def tuned(folder: Path, job: Job, evaluator: FakeEvaluator) -> dict[tuple[int, Stage], StageResult]:
    with open_ledger(folder, job.contract) as ledger:
        return search.tune(job, evaluator, ledger)


def ranking(results: dict[tuple[int, Stage], StageResult]) -> dict[tuple[int, Stage], list[tuple[str, float]]]:
    return {key: [(each.config.key(), each.us) for each in found.ranked] for key, found in results.items()}


def test_without_a_limit_every_candidate_is_evaluated_once_a_level_default_first(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    results = tuned(tmp_path, Job(SMALL, (1, 5)), evaluator)
    expected = {(tokens, stage, key) for tokens in (1, 5) for stage in STAGES for key in keys(SMALL, stage)}
    assert sorted(evaluator.calls) == sorted(expected)
    for tokens, stage in itertools.product((1, 5), STAGES):
        first = next(key for level, each, key in evaluator.calls if (level, each) == (tokens, stage))
        assert first == DEFAULT[stage]
        assert results[tokens, stage].evaluated == len(keys(SMALL, stage))


def test_the_ranking_is_by_time(tmp_path: Path) -> None:
    ranked = ranking(tuned(tmp_path, Job(SMALL, (1,)), FakeEvaluator()))[1, "w13"]
    times = {c.key(): landscape("w13", c, 1) for c in space.candidates(SMALL, "w13")}
    assert [us for _, us in ranked] == sorted(times.values())
    assert all(times[key] == us for key, us in ranked)


@pytest.mark.parametrize("trials", [None, 12])
def test_a_second_identical_run_evaluates_nothing_and_says_the_same(tmp_path: Path, trials: int | None) -> None:
    job = Job(QWEN, (1, 2), trials=trials, seed=3)
    first = tuned(tmp_path, job, FakeEvaluator())
    again = FakeEvaluator()
    second = tuned(tmp_path, job, again)
    assert again.calls == []
    assert ranking(second) == ranking(first)
    assert all(found.answered == first[key].evaluated and not found.evaluated for key, found in second.items())


@pytest.mark.parametrize("trials", [None, 12])
def test_the_seed_alone_decides_the_order(tmp_path: Path, trials: int | None) -> None:
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        evaluator = FakeEvaluator()
        tuned(tmp_path / name, Job(QWEN, (1,), trials=trials, seed=seed), evaluator)
        orders.append(evaluator.calls)
    assert orders[0] == orders[1] != orders[2]


def test_a_limit_counts_distinct_feasible_configurations_of_each_level_and_stage(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(QWEN, (1, 4), trials=25), evaluator)
    for tokens, stage in itertools.product((1, 4), STAGES):
        asked = [key for level, each, key in evaluator.calls if (level, each) == (tokens, stage)]
        assert len(asked) == len(set(asked)) == 25
        assert set(asked) <= set(keys(QWEN, stage))


def test_tpe_finds_better_than_drawing_as_often(tmp_path: Path) -> None:
    times = sorted(landscape("w13", c, 1) for c in space.candidates(QWEN, "w13"))
    found = []
    for seed in range(4):
        results = tuned(tmp_path / str(seed), Job(QWEN, (1,), trials=40, seed=seed), FakeEvaluator())
        found.append(times.index(results[1, "w13"].ranked[0].us))
    # The best of 40 draws out of 272 is expected at place 272 / 41 = 6.6, counted from 1.
    assert sum(found) / len(found) < 4


def test_a_limit_of_one_tries_the_default_alone(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(SMALL, (1,), trials=1), evaluator)
    assert evaluator.calls == [(1, stage, DEFAULT[stage]) for stage in STAGES]


@pytest.mark.parametrize("trials", [None, 20])
def test_after_the_default_come_incumbents_then_the_lower_levels_best_then_guesses(
    tmp_path: Path, trials: int | None
) -> None:
    w13 = space.candidates(QWEN, "w13")
    incumbent = replace(space.default(QWEN), w13=w13[5])
    evaluator = FakeEvaluator()
    job = Job(
        QWEN, (1, 2), trials=trials, incumbents={2: incumbent}, guesses=lambda s, t: w13[9:10] if s == "w13" else ()
    )
    results = tuned(tmp_path, job, evaluator)
    asked = [key for level, stage, key in evaluator.calls if (level, stage) == (2, "w13")]
    below = [each.config.key() for each in results[1, "w13"].ranked[:3]]
    expected = dict.fromkeys([space.default(QWEN).w13.key(), w13[5].key(), *below, w13[9].key()])
    assert asked[: len(expected)] == list(expected)


def test_a_failing_configuration_is_a_row_with_class_and_text_and_is_not_ranked(tmp_path: Path) -> None:
    bad = space.candidates(SMALL, "w13")[3]
    results = tuned(tmp_path, Job(SMALL, (1,)), FakeEvaluator(failing=lambda stage, config: config == bad))
    assert results[1, "w13"].failures == ((bad.key(), "BuildFailed: ptxas said no"),)
    assert bad not in [each.config for each in results[1, "w13"].ranked]
    again = FakeEvaluator()
    assert tuned(tmp_path, Job(SMALL, (1,)), again)[1, "w13"].failures == results[1, "w13"].failures
    assert again.calls == []


def test_tpe_keeps_away_from_where_configurations_fail(tmp_path: Path) -> None:
    def fails(stage: Stage, config: StageConfig) -> bool:
        return config.to_dict()["rows"] in (4, 8)

    asked: list[str] = []
    for seed in range(3):
        evaluator = FakeEvaluator(failing=fails, error=lambda: LaunchFailed("out of bounds"))
        tuned(tmp_path / str(seed), Job(QWEN, (1,), trials=80, seed=seed), evaluator)
        asked += [key for _, stage, key in evaluator.calls if stage == "w13"]
    # Three fifths of the space fail; a sampler that does not see failures asks there more often than that.
    assert sum(fails("w13", c) for c in space.candidates(QWEN, "w13")) == 204 and len(keys(QWEN, "w13")) == 340
    assert sum(key.endswith(("r4", "r8")) for key in asked) / len(asked) < 0.4


def test_a_default_that_fails_leaves_no_default(tmp_path: Path) -> None:
    results = tuned(tmp_path, Job(SMALL, (1,)), FakeEvaluator(failing=lambda s, c: c.key() == DEFAULT["w13"]))
    assert results[1, "w13"].default is None
    assert results[1, "w2"].default is not None


@pytest.mark.parametrize("error", [MissingTool("no NVRTC"), RequestError("no such device")])
def test_what_is_no_configurations_fault_stops_the_run_and_is_not_recorded(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        tuned(tmp_path, Job(SMALL, (1,)), FakeEvaluator(failing=lambda s, c: True, error=lambda: error))
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(SMALL, (1,)), evaluator)
    assert len(evaluator.calls) == sum(len(keys(SMALL, stage)) for stage in STAGES)


def test_an_error_that_is_a_bug_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        tuned(tmp_path, Job(SMALL, (1,)), FakeEvaluator(us=lambda s, c, t: 1 / 0))


def test_configurations_that_do_not_fit_the_device_are_not_asked(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    job = Job(SMALL, (1,), why_invalid=lambda s, c: "too many rows" if c.to_dict()["rows"] > 2 else None)
    tuned(tmp_path, job, evaluator)
    asked = {key for _, stage, key in evaluator.calls if stage == "w13"}
    assert asked == {c.key() for c in space.candidates(SMALL, "w13") if c.rows <= 2}


def test_a_device_that_nothing_fits_is_a_wrong_request_with_reason_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"contract small: no w2 .*needs 150000 bytes.*another --gpu"):
        tuned(
            tmp_path,
            Job(SMALL, (1,), why_invalid=lambda s, c: "needs 150000 bytes" if s == "w2" else None),
            FakeEvaluator(),
        )


@pytest.mark.parametrize("trials", [None, 30])
def test_ctrl_c_loses_only_the_trial_in_flight_and_the_same_command_ends_as_if_it_had_not_been(
    tmp_path: Path, trials: int | None
) -> None:
    job = Job(QWEN, (1,), trials=trials, seed=5)
    whole = FakeEvaluator()
    expected = tuned(tmp_path / "whole", job, whole)

    class Interrupted(FakeEvaluator):
        def evaluate(self, stage: Stage, config: StageConfig, tokens: int):  # type: ignore[no-untyped-def]
            if len(self.calls) == 19:
                raise KeyboardInterrupt
            return super().evaluate(stage, config, tokens)

    first = Interrupted()
    with pytest.raises(SearchInterrupted, match=r"19 new results .*ledger\.jsonl.*run the same command"):
        tuned(tmp_path / "cut", job, first)
    rest = FakeEvaluator()
    results = tuned(tmp_path / "cut", job, rest)
    assert first.calls + rest.calls == whole.calls
    assert ranking(results) == ranking(expected)


def test_kill_9_loses_only_the_trial_in_flight(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
import test_search
from fakes import FakeEvaluator, landscape
from small import SMALL

def slow(stage, config, tokens):
    time.sleep(0.05)
    return landscape(stage, config, tokens)

test_search.tuned(Path(sys.argv[1]), test_search.Job(SMALL, (1, 2)), FakeEvaluator(us=slow))
"""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    path = tmp_path / "ledger.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b'"kind":"trial"') < 7:
        assert child.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    kept = path.read_bytes().count(b'"kind":"trial"')
    rest = FakeEvaluator()
    results = tuned(tmp_path, Job(SMALL, (1, 2)), rest)
    assert 7 <= kept == 2 * sum(len(keys(SMALL, stage)) for stage in STAGES) - len(rest.calls)
    assert ranking(results) == ranking(tuned(tmp_path / "whole", Job(SMALL, (1, 2)), FakeEvaluator()))


def test_another_compiler_asks_everything_again(tmp_path: Path) -> None:
    job = Job(SMALL, (1,))
    tuned(tmp_path, job, FakeEvaluator())
    evaluator = FakeEvaluator()
    with open_ledger(tmp_path, SMALL, toolchain="NVRTC 12.6.20") as ledger:
        search.tune(job, evaluator, ledger)
    assert len(evaluator.calls) == sum(len(keys(SMALL, stage)) for stage in STAGES)


def test_a_larger_limit_keeps_what_a_smaller_one_found(tmp_path: Path) -> None:
    tuned(tmp_path, Job(QWEN, (1,), trials=10), FakeEvaluator())
    evaluator = FakeEvaluator()
    results = tuned(tmp_path, Job(QWEN, (1,), trials=None), evaluator)
    assert len(evaluator.calls) == sum(len(keys(QWEN, stage)) for stage in STAGES) - 20
    assert len(results[1, "w13"].ranked) == len(keys(QWEN, "w13"))


@pytest.mark.parametrize("trials", [None, 12])
def test_winners_of_the_first_run_as_incumbents_make_the_second_ask_nothing_new(
    tmp_path: Path, trials: int | None
) -> None:
    first = tuned(tmp_path, Job(QWEN, (1,), trials=trials), FakeEvaluator())
    winner = space.from_dict({stage: first[1, stage].ranked[0].config.to_dict() for stage in STAGES})
    assert winner != space.default(QWEN)
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(QWEN, (1,), trials=trials, incumbents={1: winner}), evaluator)
    assert evaluator.calls == []


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only evaluations move."""
    clock = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: clock[0])
    return clock


class TimedEvaluator(FakeEvaluator):
    clock: list[float]
    cost = 2.0

    def evaluate(self, stage: Stage, config: StageConfig, tokens: int):  # type: ignore[no-untyped-def]
        self.clock[0] += self.cost
        return super().evaluate(stage, config, tokens)


@pytest.mark.parametrize("trials", [None, 60])
def test_a_budget_is_shared_evenly_and_a_resumed_run_has_none_left(
    tmp_path: Path, seconds: list[float], trials: int | None
) -> None:
    job = Job(QWEN, (1, 2), trials=trials, budget_s=80.0)
    evaluator = TimedEvaluator()
    evaluator.clock = seconds
    tuned(tmp_path, job, evaluator)
    # 80 s over four studies of 2 s a trial: ten each.
    counts = [sum(call[:2] == (tokens, stage) for call in evaluator.calls) for tokens in (1, 2) for stage in STAGES]
    assert counts == [10, 10, 10, 10]
    again = TimedEvaluator()
    again.clock = seconds
    tuned(tmp_path, job, again)
    assert again.calls == []


def test_what_one_study_does_not_need_the_next_may_use(tmp_path: Path, seconds: list[float]) -> None:
    evaluator = TimedEvaluator()
    evaluator.clock = seconds
    tuned(tmp_path, Job(QWEN, (1,), budget_s=240.0), evaluator)
    w2 = len(keys(QWEN, "w2"))
    assert w2 < 60 < len(keys(QWEN, "w13"))
    tuned(tmp_path / "b", Job(replace(QWEN, levels=(1,)), (1,), budget_s=240.0), evaluator)
    counts = [sum(stage == each for _, each, _ in evaluator.calls) / 2 for stage in STAGES]
    assert counts == [60, w2]


def test_an_empty_budget_still_tries_the_default(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(SMALL, (1,), budget_s=0.0), evaluator)
    assert evaluator.calls == [(1, stage, DEFAULT[stage]) for stage in STAGES]


def test_progress_counts_every_trial_and_estimates_what_is_left(tmp_path: Path, seconds: list[float]) -> None:
    evaluator = TimedEvaluator()
    evaluator.clock = seconds
    told: list[Progress] = []
    with open_ledger(tmp_path, SMALL) as ledger:
        search.tune(Job(SMALL, (1,)), evaluator, ledger, told.append)
    counts = [len(keys(SMALL, stage)) for stage in STAGES]
    assert [each.done for each in told] == [*range(1, counts[0] + 1), *range(1, counts[1] + 1)]
    left = [2.0 * (sum(counts) - number) for number in range(1, sum(counts) + 1)]
    assert [each.remaining_s for each in told[:7]] == [None] * 7
    assert [each.remaining_s for each in told[7:]] == pytest.approx(left[7:])
    assert told[-1].best_us == min(landscape("w2", c, 1) for c in space.candidates(SMALL, "w2"))


def test_progress_never_has_done_more_than_was_planned(tmp_path: Path) -> None:
    told: list[Progress] = []
    tuned(tmp_path, Job(QWEN, (1,), trials=20), FakeEvaluator())
    with open_ledger(tmp_path, QWEN) as ledger:
        search.tune(Job(QWEN, (1,), trials=3), FakeEvaluator(), ledger, told.append)
    assert [(each.done, each.planned) for each in told] == [(3, 3), (3, 3)]


@pytest.mark.parametrize("outcome", [{"timing": None}, {}, {"timing": {}}, {"timing": 3}, {"failure": {"class": "X"}}])
def test_a_trial_in_the_ledger_without_an_outcome_is_refused(tmp_path: Path, outcome: dict[str, object]) -> None:
    key = DEFAULT["w13"]
    with open_ledger(tmp_path, SMALL) as ledger:
        config = space.default(SMALL).w13.to_dict()
        ledger.append("trial", tokens=1, stage="w13", key=key, config=config, seconds=1.0, **outcome)
        with pytest.raises(RequestError, match=rf"ledger\.jsonl: the trial of w13 {key} at 1 .*delete its line"):
            search.tune(Job(SMALL, (1,)), FakeEvaluator(), ledger)


def test_the_estimate_knows_that_later_levels_do_not_build(tmp_path: Path, seconds: list[float]) -> None:
    class Building(TimedEvaluator):
        def evaluate(self, stage: Stage, config: StageConfig, tokens: int):  # type: ignore[no-untyped-def]
            self.cost = 2.0 if tokens == 1 else 0.5
            return super().evaluate(stage, config, tokens)

    evaluator = Building()
    evaluator.clock = seconds
    told: list[Progress] = []
    with open_ledger(tmp_path, SMALL) as ledger:
        search.tune(Job(SMALL, (1, 2, 5)), evaluator, ledger, told.append)
    counts = [len(keys(SMALL, stage)) for stage in STAGES]
    first_of_level_2 = told[sum(counts)]
    assert first_of_level_2.remaining_s == pytest.approx(0.5 * (2 * sum(counts) - 1))


def test_only_what_the_ledger_cannot_answer_is_prefetched(tmp_path: Path) -> None:
    class Prefetching(FakeEvaluator):
        ahead: list[str]

        def prefetch(self, stage: Stage, configs: Sequence[StageConfig]) -> None:
            self.ahead.extend(config.key() for config in configs)

    tuned(tmp_path, Job(QWEN, (1,), trials=11), FakeEvaluator())
    evaluator = Prefetching()
    evaluator.ahead = []
    tuned(tmp_path, Job(QWEN, (1,), trials=20), evaluator)
    assert evaluator.ahead == [key for _, _, key in evaluator.calls]


def test_optuna_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned(tmp_path, Job(QWEN, (1,), trials=15), FakeEvaluator(failing=lambda s, c: c.to_dict()["rows"] == 1))
    assert capfd.readouterr() == ("", "")
