"""The search asks well, never twice, and loses nothing."""

import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import FEW, FakeEvaluator, keys, landscape, open_ledger, timing

from tuner import contract, search, space
from tuner.contract import Contract
from tuner.errors import LaunchFailed, MissingTool, RequestError
from tuner.ledger import Ledger
from tuner.measure import Timing
from tuner.search import Job, Progress, SearchInterrupted, Study
from tuner.space import Config

QWEN = contract.load("qwen38-tp4")
DEFAULT = space.default(FEW)
ALL = len(keys(FEW))

# All of a small space, which is shuffled, and some of a large one, which is sampled.
both = pytest.mark.parametrize(("of", "trials"), [(FEW, None), (QWEN, 30)], ids=["all", "some"])


def tuned(folder: Path, job: Job, evaluator: FakeEvaluator) -> dict[int, Study]:
    with open_ledger(folder, job.contract) as ledger:
        return search.tune(job, evaluator, ledger)


def ranking(results: dict[int, Study]) -> dict[int, list[tuple[str, float]]]:
    return {tokens: [(each.config.key(), each.us) for each in found.ranked] for tokens, found in results.items()}


@pytest.mark.parametrize("name", contract.builtin())
def test_a_samplers_choices_are_of_one_kind_each_and_name_one_candidate(name: str) -> None:
    candidates = space.candidates(contract.load(name))
    chosen = [space.parameters(config) for config in candidates]
    assert len({tuple(choice.items()) for choice in chosen}) == len(candidates)
    for axis in chosen[0]:
        assert len({type(choice[axis]) for choice in chosen}) == 1


def test_without_a_limit_every_candidate_is_evaluated_once_a_level_default_first(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    results = tuned(tmp_path, Job(FEW, (1, 5)), evaluator)
    assert sorted(evaluator.calls) == sorted((tokens, key) for tokens in (1, 5) for key in keys(FEW))
    for tokens in (1, 5):
        assert next(key for level, key in evaluator.calls if level == tokens) == DEFAULT.key()
        assert results[tokens].evaluated == ALL


def test_the_ranking_is_by_time(tmp_path: Path) -> None:
    ranked = ranking(tuned(tmp_path, Job(FEW, (1,)), FakeEvaluator()))[1]
    times = {c.key(): landscape(c, 1) for c in space.candidates(FEW)}
    assert [us for _, us in ranked] == sorted(times.values())
    assert all(times[key] == us for key, us in ranked)


@both
def test_a_second_identical_run_evaluates_nothing_and_says_the_same(
    tmp_path: Path, of: Contract, trials: int | None
) -> None:
    job = Job(of, (1, 2), trials=trials, seed=3)
    first = tuned(tmp_path, job, FakeEvaluator())
    again = FakeEvaluator()
    second = tuned(tmp_path, job, again)
    assert again.calls == []
    assert ranking(second) == ranking(first)
    assert all(found.answered == first[tokens].evaluated and not found.evaluated for tokens, found in second.items())


@both
def test_the_seed_alone_decides_the_order(tmp_path: Path, of: Contract, trials: int | None) -> None:
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        evaluator = FakeEvaluator()
        tuned(tmp_path / name, Job(of, (1,), trials=trials, seed=seed), evaluator)
        orders.append(evaluator.calls)
    assert orders[0] == orders[1] != orders[2]


def test_a_limit_counts_distinct_feasible_configurations_of_each_level(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(QWEN, (1, 4), trials=25), evaluator)
    for tokens in (1, 4):
        asked = [key for level, key in evaluator.calls if level == tokens]
        assert len(asked) == len(set(asked)) == 25
        assert set(asked) <= set(keys(QWEN))


def test_a_limit_just_below_the_whole_space_is_reached_though_a_sampler_repeats_itself(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(FEW, (1,), trials=ALL - 1), evaluator)
    assert len(set(evaluator.calls)) == len(evaluator.calls) == ALL - 1


def test_tpe_finds_better_than_drawing_as_often(tmp_path: Path) -> None:
    times = sorted(landscape(c, 1) for c in space.candidates(QWEN))
    found = []
    for seed in range(4):
        results = tuned(tmp_path / str(seed), Job(QWEN, (1,), trials=40, seed=seed), FakeEvaluator())
        found.append(times.index(results[1].ranked[0].us))
    # The best of 40 draws out of n is expected at place (n + 1) / 41, counted from 1.
    assert sum(found) / len(found) < (len(times) + 1) / 41 / 2


def test_a_limit_of_one_tries_the_default_alone(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(QWEN, (1,), trials=1), evaluator)
    assert evaluator.calls == [(1, space.default(QWEN).key())]


@pytest.mark.parametrize(("of", "trials"), [(FEW, None), (QWEN, 20)], ids=["all", "some"])
def test_after_the_default_come_incumbents_then_the_lower_levels_best_then_guesses(
    tmp_path: Path, of: Contract, trials: int | None
) -> None:
    default, (one, other, third, *_) = space.default(of), space.candidates(of)[5:]
    evaluator = FakeEvaluator()
    job = Job(of, (1, 2), trials=trials, incumbents={2: one, 1: other}, guesses=lambda tokens: (third, one))
    results = tuned(tmp_path, job, evaluator)
    asked = [key for level, key in evaluator.calls if level == 2]
    below = [each.config for each in results[1].ranked[: search.NEIGHBOURS]]
    expected = list(dict.fromkeys([default, one, other, *below, third]))
    assert asked[: len(expected)] == [config.key() for config in expected]


def test_of_many_incumbents_those_of_the_three_nearest_levels_come_first(tmp_path: Path) -> None:
    four = [c for c in space.candidates(FEW) if c != DEFAULT][:4]
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(FEW, (5,), incumbents=dict(zip((1, 2, 5, 12), four, strict=True))), evaluator)
    assert [key for _, key in evaluator.calls[:4]] == [c.key() for c in (DEFAULT, four[2], four[1], four[0])]


@both
def test_guesses_are_not_asked_for_where_nothing_is_left_to_try(
    tmp_path: Path, of: Contract, trials: int | None
) -> None:
    def never(tokens: int) -> Sequence[Config]:
        raise AssertionError("a guess takes seconds")

    tuned(tmp_path, Job(of, (1,), trials=trials), FakeEvaluator())
    tuned(tmp_path, Job(of, (1,), trials=trials, guesses=never), FakeEvaluator())
    tuned(tmp_path / "default alone", Job(of, (1,), trials=1, guesses=never), FakeEvaluator())


def test_a_failing_configuration_is_a_row_with_class_and_text_and_is_not_ranked(tmp_path: Path) -> None:
    bad = space.candidates(FEW)[3]
    results = tuned(tmp_path, Job(FEW, (1,)), FakeEvaluator(failing=lambda config: config == bad))
    assert results[1].failures == ((bad.key(), "BuildFailed: ptxas said no"),)
    assert bad not in [each.config for each in results[1].ranked]
    again = FakeEvaluator()
    assert tuned(tmp_path, Job(FEW, (1,)), again)[1].failures == results[1].failures
    assert again.calls == []


def test_tpe_keeps_away_from_where_configurations_fail(tmp_path: Path) -> None:
    def fails(config: Config) -> bool:
        return config.w13.family == "simt" and config.w13.rows != 2

    asked: list[str] = []
    for seed in range(3):
        evaluator = FakeEvaluator(failing=fails, error=lambda: LaunchFailed("out of bounds"))
        tuned(tmp_path / str(seed), Job(QWEN, (1,), trials=80, seed=seed), evaluator)
        asked += [key for _, key in evaluator.calls]
    # Three fifths of the space fail; a sampler that does not see failures asks there as often.
    assert 5 * sum(map(fails, space.candidates(QWEN))) == 3 * len(keys(QWEN))
    assert sum(fails(space.parse(key)) for key in asked) / len(asked) < 0.4


def test_a_default_that_fails_leaves_no_default(tmp_path: Path) -> None:
    results = tuned(tmp_path, Job(FEW, (1,)), FakeEvaluator(failing=lambda config: config == DEFAULT))
    assert results[1].default is None
    assert len(results[1].ranked) == ALL - 1


@pytest.mark.parametrize("error", [MissingTool("no NVRTC"), RequestError("no such device")])
def test_what_is_no_configurations_fault_stops_the_run_and_is_not_recorded(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        tuned(tmp_path, Job(FEW, (1,)), FakeEvaluator(failing=lambda config: True, error=lambda: error))
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(FEW, (1,)), evaluator)
    assert len(evaluator.calls) == ALL


def test_an_error_that_is_a_bug_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        tuned(tmp_path, Job(FEW, (1,)), FakeEvaluator(us=lambda config, tokens: 1 / 0))


def test_configurations_that_do_not_fit_the_device_are_not_asked_not_even_incumbents(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    large = next(c for c in space.candidates(FEW) if c.w13.rows == 8)
    job = Job(
        *(FEW, (1,)),
        incumbents={1: large},
        guesses=lambda tokens: (large,),
        why_invalid=lambda c: "too many rows" if c.w13.rows > 2 else None,
    )
    tuned(tmp_path, job, evaluator)
    assert {key for _, key in evaluator.calls} == {c.key() for c in space.candidates(FEW) if c.w13.rows <= 2}


def test_a_device_that_nothing_fits_is_a_wrong_request_with_reason_and_remedy(tmp_path: Path) -> None:
    job = Job(FEW, (1,), why_invalid=lambda config: "needs 150000 bytes")
    with pytest.raises(RequestError, match=r"contract few: no configuration fits .*needs 150000 bytes.*another --gpu"):
        tuned(tmp_path, job, FakeEvaluator())


@pytest.mark.parametrize(("of", "trials"), [(FEW, None), (QWEN, 30)], ids=["all", "some"])
def test_ctrl_c_loses_only_the_trial_in_flight_and_the_same_command_ends_as_if_it_had_not_been(
    tmp_path: Path, of: Contract, trials: int | None
) -> None:
    job = Job(of, (1,), trials=trials, seed=5)
    whole = FakeEvaluator()
    expected = tuned(tmp_path / "whole", job, whole)

    class Interrupted(FakeEvaluator):
        def evaluate(self, config: Config, tokens: int) -> Timing:
            if len(self.calls) == 19:
                raise KeyboardInterrupt
            return super().evaluate(config, tokens)

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
from fakes import FEW, FakeEvaluator, landscape

def slow(config, tokens):
    time.sleep(0.02)
    return landscape(config, tokens)

test_search.tuned(Path(sys.argv[1]), test_search.Job(FEW, (1, 2)), FakeEvaluator(us=slow))
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
    results = tuned(tmp_path, Job(FEW, (1, 2)), rest)
    assert 7 <= kept == 2 * ALL - len(rest.calls)
    assert ranking(results) == ranking(tuned(tmp_path / "whole", Job(FEW, (1, 2)), FakeEvaluator()))


def test_another_compiler_asks_everything_again(tmp_path: Path) -> None:
    job = Job(FEW, (1,))
    tuned(tmp_path, job, FakeEvaluator())
    evaluator = FakeEvaluator()
    with open_ledger(tmp_path, FEW, toolchain="NVRTC 12.6.20") as ledger:
        search.tune(job, evaluator, ledger)
    assert len(evaluator.calls) == ALL


def test_rows_of_the_version_that_tuned_stages_apart_are_kept_and_answer_nothing(tmp_path: Path) -> None:
    path, names = tmp_path / "ledger.jsonl", {"contract": FEW.digest(), "target": "v100-predicted"}
    key = "simt-t1-k4-u1-r2"
    with Ledger.open(path, **names, circumstances={"space": "w13 and w2", "toolchain": "NVRTC 12.9.86"}) as ledger:
        config = {"family": "simt", "tiles": 1, "split_k": 4, "unroll": 1, "rows": 2}
        ledger.append("trial", tokens=1, stage="w13", key=key, config=config, timing=timing(0.1).to_dict(), seconds=1.0)
        ledger.append("final", tokens=1, stage="w13", keys=[key], compared=[])
        ledger.append("whole", tokens=1, key=key, whole={}, all_experts={})
        identity = ledger.id
    before = path.read_bytes()
    evaluator = FakeEvaluator()
    with open_ledger(tmp_path, FEW) as ledger:
        results = search.tune(Job(FEW, (1,)), evaluator, ledger)
        assert ledger.id == identity
    assert len(evaluator.calls) == len(results[1].ranked) == ALL
    assert path.read_bytes().startswith(before)


def test_a_larger_limit_keeps_what_a_smaller_one_found(tmp_path: Path) -> None:
    tuned(tmp_path, Job(FEW, (1,), trials=10), FakeEvaluator())
    evaluator = FakeEvaluator()
    results = tuned(tmp_path, Job(FEW, (1,), trials=None), evaluator)
    assert len(evaluator.calls) == ALL - 10
    assert len(results[1].ranked) == ALL


@both
def test_winners_of_the_first_run_as_incumbents_make_the_second_ask_nothing_new(
    tmp_path: Path, of: Contract, trials: int | None
) -> None:
    first = tuned(tmp_path, Job(of, (1,), trials=trials), FakeEvaluator())
    winner = first[1].ranked[0].config
    assert winner != space.default(of)
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(of, (1,), trials=trials, incumbents={1: winner}), evaluator)
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

    def evaluate(self, config: Config, tokens: int) -> Timing:
        self.clock[0] += self.cost
        return super().evaluate(config, tokens)


@pytest.mark.parametrize(("of", "trials"), [(FEW, None), (QWEN, 60)], ids=["all", "some"])
def test_a_budget_is_shared_evenly_and_a_resumed_run_has_none_left(
    tmp_path: Path, seconds: list[float], of: Contract, trials: int | None
) -> None:
    job = Job(of, (1, 2), trials=trials, budget_s=80.0)
    evaluator = TimedEvaluator()
    evaluator.clock = seconds
    tuned(tmp_path, job, evaluator)
    # 80 s over two studies of 2 s a trial: twenty each.
    assert [sum(level == tokens for level, _ in evaluator.calls) for tokens in (1, 2)] == [20, 20]
    again = TimedEvaluator()
    again.clock = seconds
    tuned(tmp_path, job, again)
    assert again.calls == []


def test_what_one_study_does_not_need_the_next_may_use(tmp_path: Path, seconds: list[float]) -> None:
    class Quicker(TimedEvaluator):
        def evaluate(self, config: Config, tokens: int) -> Timing:
            self.cost = 0.5 if tokens == 1 else 2.0
            return super().evaluate(config, tokens)

    evaluator = Quicker()
    evaluator.clock = seconds
    tuned(tmp_path, Job(FEW, (1, 2), budget_s=2.0 * ALL), evaluator)
    # All at the first level take half of its half of the time; three quarters are left, at 2 s a trial.
    assert [sum(level == tokens for level, _ in evaluator.calls) for tokens in (1, 2)] == [ALL, math.ceil(0.75 * ALL)]


def test_an_empty_budget_still_tries_the_default(tmp_path: Path) -> None:
    evaluator = FakeEvaluator()
    tuned(tmp_path, Job(FEW, (1,), budget_s=0.0), evaluator)
    assert evaluator.calls == [(1, DEFAULT.key())]


def test_progress_counts_every_trial_and_estimates_what_is_left(tmp_path: Path, seconds: list[float]) -> None:
    evaluator = TimedEvaluator()
    evaluator.clock = seconds
    told: list[Progress] = []
    with open_ledger(tmp_path, FEW) as ledger:
        search.tune(Job(FEW, (1,)), evaluator, ledger, told.append)
    assert [(each.phase, each.done) for each in told] == [("search", done) for done in range(1, ALL + 1)]
    left = [2.0 * (ALL - done) for done in range(1, ALL + 1)]
    assert [each.remaining_s for each in told[:7]] == [None] * 7
    assert [each.remaining_s for each in told[7:]] == pytest.approx(left[7:])
    assert told[-1].best_us == min(landscape(c, 1) for c in space.candidates(FEW))


def test_progress_never_has_done_more_than_was_planned(tmp_path: Path) -> None:
    told: list[Progress] = []
    tuned(tmp_path, Job(QWEN, (1,), trials=20), FakeEvaluator())
    with open_ledger(tmp_path, QWEN) as ledger:
        search.tune(Job(QWEN, (1,), trials=3), FakeEvaluator(), ledger, told.append)
    assert [(each.done, each.planned) for each in told] == [(3, 3)]


@pytest.mark.parametrize("outcome", [{"timing": None}, {}, {"timing": {}}, {"timing": 3}, {"failure": {"class": "X"}}])
def test_a_trial_in_the_ledger_without_an_outcome_is_refused(tmp_path: Path, outcome: dict[str, object]) -> None:
    key = DEFAULT.key()
    with open_ledger(tmp_path, FEW) as ledger:
        ledger.append("trial", tokens=1, key=key, seconds=1.0, **outcome)
        with pytest.raises(RequestError, match=rf"ledger\.jsonl: the trial of {re.escape(key)} at 1 .*delete its line"):
            search.tune(Job(FEW, (1,)), FakeEvaluator(), ledger)


def test_the_estimate_knows_that_later_levels_do_not_build(tmp_path: Path, seconds: list[float]) -> None:
    class Building(TimedEvaluator):
        def evaluate(self, config: Config, tokens: int) -> Timing:
            self.cost = 2.0 if tokens == 1 else 0.5
            return super().evaluate(config, tokens)

    evaluator = Building()
    evaluator.clock = seconds
    told: list[Progress] = []
    with open_ledger(tmp_path, FEW) as ledger:
        search.tune(Job(FEW, (1, 2, 5)), evaluator, ledger, told.append)
    first_of_level_2 = told[ALL]
    assert first_of_level_2.remaining_s == pytest.approx(0.5 * (2 * ALL - 1))


def test_only_what_the_ledger_cannot_answer_is_prefetched(tmp_path: Path) -> None:
    class Prefetching(FakeEvaluator):
        ahead: list[str]

        def prefetch(self, configs: Sequence[Config]) -> None:
            self.ahead.extend(config.key() for config in configs)

    tuned(tmp_path, Job(QWEN, (1,), trials=11), FakeEvaluator())
    evaluator = Prefetching()
    evaluator.ahead = []
    tuned(tmp_path, Job(QWEN, (1,), trials=20), evaluator)
    assert evaluator.ahead == [key for _, key in evaluator.calls]


def test_optuna_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned(tmp_path, Job(QWEN, (1,), trials=15), FakeEvaluator(failing=lambda config: config.w13.rows == 1))
    assert capfd.readouterr() == ("", "")
