"""Winners are right first, then fast, and never slower than the default."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fakes import ComparingEvaluator, FakeEvaluator, FakeVerifier, open_ledger, scattered
from small import SMALL

from tuner import choose, search, space
from tuner.choose import LevelResult
from tuner.errors import LaunchFailed, MissingTool
from tuner.measure import Compared
from tuner.search import Job, NothingWorks, SearchInterrupted
from tuner.space import Config, Stage, StageConfig, W13Config

DEFAULT = space.default(SMALL)


def chosen(
    folder: Path,
    evaluator: FakeEvaluator,
    verifier: FakeVerifier | None = None,
    levels: tuple[int, ...] = (1,),
) -> tuple[LevelResult, ...]:
    job = Job(SMALL, levels)
    with open_ledger(folder, SMALL) as ledger:
        results = search.tune(job, evaluator, ledger)
        return choose.winners(job, results, evaluator, ledger, verifier or FakeVerifier())


def saving(share: float) -> Callable[[Stage, StageConfig, int], float]:
    """A scattered in which one W13 configuration saves that share of the default's 100 us, and nothing else any."""
    fast = best()

    def us(stage: Stage, config: StageConfig, tokens: int) -> float:
        return 100.0 if config == DEFAULT.stage(stage) else 100.0 * (1 - share) if config == fast else 200.0

    return us


def best() -> W13Config:
    found = next(c for c in space.candidates(SMALL, "w13") if c != DEFAULT.w13)
    assert isinstance(found, W13Config)
    return found


def test_the_fastest_of_each_stage_wins_where_all_are_right(tmp_path: Path) -> None:
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered))
    for stage in ("w13", "w2"):
        times = {c: scattered(stage, c, 1) for c in space.candidates(SMALL, stage)}
        assert times[level.config.stage(stage)] == min(times.values())
        assert level.choices[stage].winner.us == min(times.values())
        assert level.choices[stage].default is not None
        assert level.choices[stage].default.us == times[DEFAULT.stage(stage)]


@pytest.mark.parametrize(
    ("share", "wins", "ambiguous"), [(0.031, True, False), (0.029, False, True), (-0.01, False, False)]
)
def test_a_challenger_must_save_three_percent_of_the_default(
    tmp_path: Path, share: float, wins: bool, ambiguous: bool
) -> None:
    (level,) = chosen(tmp_path, FakeEvaluator(us=saving(share)))
    assert level.config.w13 == (best() if wins else DEFAULT.w13)
    assert level.choices["w13"].ambiguous is ambiguous
    assert (level.config.w2, level.choices["w2"].ambiguous) == (DEFAULT.w2, False)


@pytest.mark.parametrize(("share", "wins"), [(0.06, True), (0.04, False)])
def test_with_finalists_the_whole_interval_must_lie_beyond_the_margin(tmp_path: Path, share: float, wins: bool) -> None:
    evaluator = ComparingEvaluator(us=saving(share))
    evaluator.slack = 0.02
    (level,) = chosen(tmp_path, evaluator)
    assert level.config.w13 == (best() if wins else DEFAULT.w13)
    assert level.choices["w13"].ambiguous is not wins
    if wins:
        assert level.choices["w13"].winner.interval == pytest.approx((0.04, 0.08))


def test_finals_run_once(tmp_path: Path) -> None:
    first, second = ComparingEvaluator(us=scattered), ComparingEvaluator(us=scattered)
    before = chosen(tmp_path, first)
    assert chosen(tmp_path, second)[0].config == before[0].config
    assert (first.compared, second.compared) == (2, 0)


def test_finals_that_fault_leave_the_first_figures_and_the_plain_margin(tmp_path: Path) -> None:
    class Faulting(ComparingEvaluator):
        def compare(self, stage: Stage, configs: Sequence[StageConfig], tokens: int) -> list[Compared]:
            raise LaunchFailed("out of bounds")

    (level,) = chosen(tmp_path, Faulting(us=saving(0.04)))
    assert level.config.w13 == best()
    assert level.choices["w13"].winner.interval is None
    with open_ledger(tmp_path, SMALL) as ledger:
        assert [row["failure"]["class"] for row in ledger.rows("final")] == ["LaunchFailed"] * 2


def test_the_five_best_of_each_stage_the_default_and_the_winner_are_verified(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    verified = [key for key, _ in verifier.calls]
    assert verified[0] == DEFAULT.key()
    for stage in ("w13", "w2"):
        for ranked in level.studies[stage].ranked[:5]:
            assert any(ranked.config.key() in key.split("+") for key in verified)
    assert level.config.key() in verified
    assert len(verified) == len(set(verified)) <= 7


@pytest.mark.parametrize("stage", ["w13", "w2"])
def test_a_wrong_configuration_is_struck_out_and_its_partner_is_not(tmp_path: Path, stage: Stage) -> None:
    fastest = min(space.candidates(SMALL, stage), key=lambda c: (scattered(stage, c, 1), c.key()))
    verifier = FakeVerifier(wrong=lambda config: config.stage(stage) == fastest)
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    assert level.struck == (f"{stage} {fastest.key()}",)
    assert level.config.stage(stage) == level.studies[stage].ranked[1].config
    other: Stage = "w2" if stage == "w13" else "w13"
    assert level.config.stage(other) == level.studies[other].ranked[0].config
    assert all(verdict["ok"] for verdict in level.verdicts)


def test_no_winner_goes_unverified_however_many_are_wrong(tmp_path: Path) -> None:
    right = {c for c in space.candidates(SMALL, "w13") if c.key().endswith("r8")} | {DEFAULT.w13}
    verifier = FakeVerifier(wrong=lambda config: config.w13 not in right)
    evaluator = FakeEvaluator(us=lambda s, c, t: 5.0 if c in right and c != DEFAULT.w13 else scattered(s, c, t) / 10)
    (level,) = chosen(tmp_path, evaluator, verifier)
    assert level.config.w13 in right
    assert (level.config.key(), 1) in verifier.calls
    wrong_and_faster = [r for r in level.studies["w13"].ranked if r.us < level.choices["w13"].winner.us]
    assert {f"w13 {r.config.key()}" for r in wrong_and_faster} <= set(level.struck)


def test_a_pair_that_is_wrong_only_together_is_struck_out_together(tmp_path: Path) -> None:
    first = chosen(tmp_path / "a", FakeEvaluator(us=scattered))[0].config
    (level,) = chosen(tmp_path / "b", FakeEvaluator(us=scattered), FakeVerifier(wrong=lambda config: config == first))
    assert level.struck == (f"w13 {first.w13.key()}", f"w2 {first.w2.key()}")
    assert level.config.w13 != first.w13
    assert level.config.w2 != first.w2


def test_a_kernel_that_faults_in_its_check_is_struck_out(tmp_path: Path) -> None:
    fastest = chosen(tmp_path / "a", FakeEvaluator(us=scattered))[0].config.w13
    verifier = FakeVerifier(faulting=lambda c: c.w13 == fastest, error=lambda: LaunchFailed("out of bounds"))
    (level,) = chosen(tmp_path / "b", FakeEvaluator(us=scattered), verifier)
    assert level.struck == (f"w13 {fastest.key()}",)
    with open_ledger(tmp_path / "b", SMALL) as ledger:
        texts = [str(row["verdicts"]) for row in ledger.rows("verdict") if not row["passed"]]
    assert texts
    assert all("LaunchFailed: out of bounds" in text for text in texts)


def test_no_verdict_at_all_is_not_a_pass(tmp_path: Path) -> None:
    class Mute(FakeVerifier):
        def __call__(self, config: Config, tokens: int):  # type: ignore[no-untyped-def]
            return []

    with pytest.raises(NothingWorks, match="wrong results"):
        chosen(tmp_path, FakeEvaluator(us=scattered), Mute())


def test_a_wrong_default_is_no_fallback_and_no_baseline(tmp_path: Path) -> None:
    verifier = FakeVerifier(wrong=lambda config: config == DEFAULT)
    (level,) = chosen(tmp_path, FakeEvaluator(us=saving(0.01)), verifier)
    assert level.config.w13 == best()
    assert level.choices["w13"].default is None
    assert not level.choices["w13"].ambiguous


def test_a_default_that_does_not_run_leaves_the_fastest(tmp_path: Path) -> None:
    (level,) = chosen(tmp_path, FakeEvaluator(failing=lambda stage, config: config == DEFAULT.stage(stage)))
    assert level.choices["w13"].default is None
    assert level.config.w13 == level.studies["w13"].ranked[0].config


def test_nothing_right_is_an_error_that_names_stage_and_level(tmp_path: Path) -> None:
    with pytest.raises(NothingWorks, match="w13 at 1 tokens"):
        chosen(tmp_path, FakeEvaluator(us=scattered), FakeVerifier(wrong=lambda config: True))


def test_nothing_that_runs_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(NothingWorks, match=r"w2 at 1 tokens: none of .* BuildFailed: ptxas said no"):
        chosen(tmp_path, FakeEvaluator(failing=lambda stage, config: stage == "w2"))


def test_a_missing_compiler_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(MissingTool):
        chosen(
            tmp_path,
            FakeEvaluator(us=scattered),
            FakeVerifier(faulting=lambda c: True, error=lambda: MissingTool("no g++")),
        )
    verifier = FakeVerifier()
    chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    assert (DEFAULT.key(), 1) in verifier.calls


def test_verdicts_are_not_repeated_and_ctrl_c_among_them_loses_one(tmp_path: Path) -> None:
    class Interrupted(FakeVerifier):
        def __call__(self, config: Config, tokens: int):  # type: ignore[no-untyped-def]
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().__call__(config, tokens)

    whole = FakeVerifier()
    expected = chosen(tmp_path / "whole", FakeEvaluator(us=scattered), whole, (1, 2))
    first = Interrupted()
    with pytest.raises(SearchInterrupted, match="3 new results"):
        chosen(tmp_path / "cut", FakeEvaluator(us=scattered), first, (1, 2))
    rest, none = FakeVerifier(), FakeVerifier()
    assert [r.config for r in chosen(tmp_path / "cut", FakeEvaluator(us=scattered), rest, (1, 2))] == [
        r.config for r in expected
    ]
    assert first.calls + rest.calls == whole.calls
    chosen(tmp_path / "cut", FakeEvaluator(us=scattered), none, (1, 2))
    assert none.calls == []
