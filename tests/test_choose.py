"""Winners are right first, then fast, and never slower than the default."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from fakes import FEW, ComparingEvaluator, FakeEvaluator, FakeVerifier, open_ledger, scattered

from tuner import choose, search, space
from tuner.choose import LevelResult
from tuner.errors import LaunchFailed, MissingTool
from tuner.measure import Compared
from tuner.search import Job, NothingWorks, Progress, SearchInterrupted
from tuner.space import Config
from tuner.verify import Verdict

DEFAULT = space.default(FEW)
FAST = next(c for c in space.candidates(FEW) if c != DEFAULT)
BY_TIME = sorted(space.candidates(FEW), key=lambda config: scattered(config, 1))  # FEW has the levels 1, 2, 5 and 12


def chosen(
    folder: Path,
    evaluator: FakeEvaluator,
    verifier: FakeVerifier | None = None,
    levels: tuple[int, ...] = (1,),
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[LevelResult, ...]:
    job = Job(FEW, levels)
    with open_ledger(folder, FEW) as ledger:
        results = search.tune(job, evaluator, ledger)
        return choose.winners(job, results, evaluator, ledger, verifier or FakeVerifier(), progress)


def saving(share: float) -> Callable[[Config, int], float]:
    """Times in which FAST saves that share of the default's 100 us, and nothing else any."""

    def us(config: Config, tokens: int) -> float:
        return 100.0 if config == DEFAULT else 100.0 * (1 - share) if config == FAST else 200.0

    return us


def test_the_fastest_wins_where_all_are_right(tmp_path: Path) -> None:
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered))
    assert level.winner.config == BY_TIME[0]
    assert level.winner.us == scattered(BY_TIME[0], 1)
    assert level.default is not None
    assert (level.default.config, level.default.us) == (DEFAULT, scattered(DEFAULT, 1))
    assert (level.tokens, level.struck, level.ambiguous) == (1, (), False)


def test_each_level_has_its_own_winner(tmp_path: Path) -> None:
    fast = {1: BY_TIME[3], 2: BY_TIME[7]}
    found = chosen(tmp_path, FakeEvaluator(us=lambda c, t: 5.0 if c == fast[t] else 50.0), levels=(1, 2))
    assert {level.tokens: level.winner.config for level in found} == fast


@pytest.mark.parametrize(
    ("share", "wins", "ambiguous"), [(0.031, True, False), (0.029, False, True), (-0.01, False, False)]
)
def test_a_challenger_must_save_three_percent_of_the_default(
    tmp_path: Path, share: float, wins: bool, ambiguous: bool
) -> None:
    (level,) = chosen(tmp_path, FakeEvaluator(us=saving(share)))
    assert level.winner.config == (FAST if wins else DEFAULT)
    assert level.ambiguous is ambiguous


@pytest.mark.parametrize(("share", "wins"), [(0.06, True), (0.04, False)])
def test_with_finalists_the_whole_interval_must_lie_beyond_the_margin(tmp_path: Path, share: float, wins: bool) -> None:
    evaluator = ComparingEvaluator(us=saving(share))
    evaluator.slack = 0.02
    (level,) = chosen(tmp_path, evaluator)
    assert level.winner.config == (FAST if wins else DEFAULT)
    assert level.ambiguous is not wins
    if wins:
        assert level.winner.interval == pytest.approx((0.04, 0.08))


def test_finals_decide_over_the_first_figures(tmp_path: Path) -> None:
    class Otherwise(ComparingEvaluator):
        def compare(self, configs: Sequence[Config], tokens: int) -> list[Compared]:
            assert configs[0] == DEFAULT
            assert set(BY_TIME[: choose.FINALISTS]) <= set(configs)
            self.us = lambda config, tokens: 5.0 if config == BY_TIME[1] else 50.0
            return super().compare(configs, tokens)

    (level,) = chosen(tmp_path, Otherwise(us=scattered))
    assert (level.winner.config, level.winner.us) == (BY_TIME[1], 5.0)
    assert level.default is not None and level.default.us == 50.0


def test_finals_run_once(tmp_path: Path) -> None:
    first, second = ComparingEvaluator(us=scattered), ComparingEvaluator(us=scattered)
    (before,), (after,) = chosen(tmp_path, first), chosen(tmp_path, second)
    assert (after.winner, after.default) == (before.winner, before.default)
    assert (first.compared, second.compared) == (1, 0)


def test_finals_that_fault_leave_the_first_figures_and_the_plain_margin(tmp_path: Path) -> None:
    class Faulting(ComparingEvaluator):
        def compare(self, configs: Sequence[Config], tokens: int) -> list[Compared]:
            raise LaunchFailed("out of bounds")

    (level,) = chosen(tmp_path, Faulting(us=saving(0.04)))
    assert level.winner.config == FAST
    assert level.winner.interval is None
    with open_ledger(tmp_path, FEW) as ledger:
        assert [row["failure"]["class"] for row in ledger.rows("final")] == ["LaunchFailed"]


def test_the_default_and_the_five_best_with_the_winner_are_verified_once_each(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    assert verifier.calls == [(config.key(), 1) for config in dict.fromkeys([DEFAULT, *BY_TIME[:5]])]
    assert level.winner.config == BY_TIME[0]


def test_where_emulation_takes_long_the_default_and_the_winner_alone_are_verified(tmp_path: Path) -> None:
    fastest = min(space.candidates(FEW), key=lambda config: scattered(config, 12))
    verifier = FakeVerifier()
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier, (12,))
    assert verifier.calls == [(DEFAULT.key(), 12), (fastest.key(), 12)]
    assert level.winner.config == fastest
    assert [verdict["ok"] for verdict in level.verdicts] == [True, True]


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_wrong_fastest_is_struck_out_and_the_next_one_wins_verified(tmp_path: Path, tokens: int) -> None:
    fastest, second, *_ = sorted(space.candidates(FEW), key=lambda config: scattered(config, tokens))
    verifier = FakeVerifier(wrong=lambda config: config == fastest)
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier, (tokens,))
    assert level.struck == (fastest.key(),)
    assert level.winner.config == second
    assert (second.key(), tokens) in verifier.calls
    assert all(verdict["ok"] for verdict in level.verdicts)


def test_no_winner_goes_unverified_however_many_are_wrong(tmp_path: Path) -> None:
    verifier = FakeVerifier(wrong=lambda config: config in BY_TIME[:9])
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    assert level.winner.config == next(c for c in BY_TIME if c not in BY_TIME[:9])
    assert (level.winner.config.key(), 1) in verifier.calls
    assert level.struck == tuple(sorted(config.key() for config in BY_TIME[:9]))


def test_a_kernel_that_faults_in_its_check_is_struck_out(tmp_path: Path) -> None:
    verifier = FakeVerifier(faulting=lambda c: c == BY_TIME[0], error=lambda: LaunchFailed("out of bounds"))
    (level,) = chosen(tmp_path, FakeEvaluator(us=scattered), verifier)
    assert level.struck == (BY_TIME[0].key(),)
    with open_ledger(tmp_path, FEW) as ledger:
        texts = [str(row["verdicts"]) for row in ledger.rows("verdict") if not row["passed"]]
    assert len(texts) == 1
    assert "LaunchFailed: out of bounds" in texts[0]


def test_progress_is_of_verification_with_never_more_done_than_planned(tmp_path: Path) -> None:
    for tokens, wrong in ((1, 0), (1, 9), (12, 0), (12, 3)):
        told: list[Progress] = []
        bad = sorted(space.candidates(FEW), key=lambda config: scattered(config, tokens))[:wrong]
        verifier = FakeVerifier(wrong=lambda config, bad=bad: config in bad)  # type: ignore[misc]
        chosen(tmp_path / f"{tokens}-{wrong}", FakeEvaluator(us=scattered), verifier, (tokens,), told.append)
        assert [(each.tokens, each.phase, each.done) for each in told] == [
            (tokens, "verify", done) for done in range(len(verifier.calls))
        ]
        assert all(each.done < each.planned for each in told)
        assert told[0].planned == (2 if tokens == 12 else 6)


def test_the_time_left_is_by_the_latest_verdicts_and_the_tokens_to_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FakeVerifier):
        def __call__(self, config: Config, tokens: int) -> Iterable[Verdict]:
            nonlocal clock
            clock += 3.0 * tokens * len(choose.orders(tokens))  # three seconds a token and order
            return super().__call__(config, tokens)

    clock = 100.0
    monkeypatch.setattr(choose.time, "monotonic", lambda: clock)
    told: list[Progress] = []
    chosen(tmp_path, FakeEvaluator(us=scattered), Slow(), (1, 2, 12), told.append)
    first, second = told[:2]
    assert first.remaining_s is None
    # Six configurations a level in two orders, two at twelve tokens in one; one is done.
    assert second.remaining_s == pytest.approx(3.0 * (5 * 1 * 2 + 6 * 2 * 2 + 2 * 12))
    assert told[-1].remaining_s == pytest.approx(3.0 * 12)
    left = [each.remaining_s for each in told[1:]]
    assert left == sorted(left, reverse=True)


def test_no_verdict_at_all_is_not_a_pass(tmp_path: Path) -> None:
    class Mute(FakeVerifier):
        def __call__(self, config: Config, tokens: int) -> Iterable[Verdict]:
            return []

    with pytest.raises(NothingWorks, match="wrong results"):
        chosen(tmp_path, FakeEvaluator(us=scattered), Mute())


def test_a_wrong_default_is_no_fallback_and_no_baseline(tmp_path: Path) -> None:
    verifier = FakeVerifier(wrong=lambda config: config == DEFAULT)
    (level,) = chosen(tmp_path, FakeEvaluator(us=saving(0.01)), verifier)
    assert level.winner.config == FAST
    assert level.default is None
    assert not level.ambiguous


@pytest.mark.parametrize("kind", [FakeEvaluator, ComparingEvaluator])
def test_a_default_that_does_not_run_leaves_the_fastest(tmp_path: Path, kind: type[FakeEvaluator]) -> None:
    (level,) = chosen(tmp_path, kind(us=scattered, failing=lambda config: config == DEFAULT))
    assert level.default is None
    assert level.winner.config == next(c for c in BY_TIME if c != DEFAULT)


def test_nothing_right_is_an_error_that_names_the_level(tmp_path: Path) -> None:
    with pytest.raises(NothingWorks, match="at 1 tokens every configuration that ran gave wrong results"):
        chosen(tmp_path, FakeEvaluator(us=scattered), FakeVerifier(wrong=lambda config: True))


def test_nothing_that_runs_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(NothingWorks, match=r"at 1 tokens none of \d+ .* BuildFailed: ptxas said no"):
        chosen(tmp_path, FakeEvaluator(failing=lambda config: True))


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
        def __call__(self, config: Config, tokens: int) -> Iterable[Verdict]:
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().__call__(config, tokens)

    whole = FakeVerifier()
    expected = chosen(tmp_path / "whole", FakeEvaluator(us=scattered), whole, (1, 2))
    first = Interrupted()
    with pytest.raises(SearchInterrupted, match="3 new results"):
        chosen(tmp_path / "cut", FakeEvaluator(us=scattered), first, (1, 2))
    rest, none = FakeVerifier(), FakeVerifier()
    assert [r.winner for r in chosen(tmp_path / "cut", FakeEvaluator(us=scattered), rest, (1, 2))] == [
        r.winner for r in expected
    ]
    assert first.calls + rest.calls == whole.calls
    chosen(tmp_path / "cut", FakeEvaluator(us=scattered), none, (1, 2))
    assert none.calls == []
