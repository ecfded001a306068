"""Chooses a level's winners from its studies: right results before fast ones, and never slower than the default.

Verdicts and finals go to the ledger as well, so that a resumed run does not repeat them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from tuner.errors import MissingTool, RequestError, VoltuneError
from tuner.ledger import Ledger, Row
from tuner.measure import Compared
from tuner.search import Evaluator, Job, NothingWorks, Progress, Ranked, Study, interruptible
from tuner.space import Config
from tuner.verify import Verdict

MARGIN = 0.03  # of the default's time a challenger must save: less lies within what clocks and boards differ by
VERIFIED = 5  # best that are verified besides the default and the winner
MANY_TOKENS = 8  # above which emulation takes many seconds a run: the winner and the default alone, in one order
FINALISTS = 8  # re-measured interleaved where the evaluator can
RECENT = 5  # verdicts that an estimate of the time left goes by: a level's first ones pay for compiling

Verify = Callable[[Config, int], Iterable[Verdict]]


@runtime_checkable
class Comparing(Protocol):
    """An evaluator that measures finalists in interleaved rounds; the first is the default."""

    def compare(self, configs: Sequence[Config], tokens: int) -> Sequence[Compared]: ...


@dataclass(frozen=True)
class LevelResult:
    """A level's winner, every verdict of which is ok.

    ambiguous: something looked faster than the default, not by MARGIN, so the default stays. struck: configurations
    whose verdict was not ok.
    """

    tokens: int
    winner: Ranked
    default: Ranked | None
    ambiguous: bool
    verdicts: tuple[Mapping[str, Any], ...]
    struck: tuple[str, ...]
    study: Study


def winners(
    job: Job,
    results: Mapping[int, Study],
    evaluator: Evaluator,
    ledger: Ledger,
    verify: Verify,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[LevelResult, ...]:
    """The winner of each of the job's levels.

    `verify` gives a configuration's verdicts at a level; a VoltuneError it raises counts as a failed one, RequestError
    and MissingTool go through. Raises SearchInterrupted on Ctrl-C, NothingWorks where no configuration is left.
    """
    chooser = _Chooser(job.levels, evaluator, ledger, verify, progress)
    with interruptible(ledger):
        return tuple(chooser.choose(results[tokens]) for tokens in job.levels)


def orders(tokens: int) -> tuple[int, ...]:
    """Of threads and CTAs, that a verdict runs a level in."""
    return (0, 1) if tokens <= MANY_TOKENS else (1,)


class _Chooser:
    def __init__(
        self,
        levels: Sequence[int],
        evaluator: Evaluator,
        ledger: Ledger,
        verify: Verify,
        progress: Callable[[Progress], None],
    ) -> None:
        self.evaluator, self.ledger = evaluator, ledger
        self.verify, self.progress = verify, progress
        self.known: dict[tuple[int, str], Row] = {(row["tokens"], row["key"]): row for row in ledger.rows("verdict")}
        self.open = list(levels)
        self.rates: list[float] = []  # seconds a verdict took, for each token and order
        self.finals = {(row["tokens"], tuple(row["keys"])): row for row in ledger.rows("final")}

    def choose(self, measured: Study) -> LevelResult:
        """Verify default and best, strike out what fails, and take the first winner that passes."""
        study, tokens = self.finalised(measured), measured.tokens
        suspects = [each.config for each in study.ranked[: _best_verified(tokens)]]
        if study.default is not None:
            suspects.insert(0, study.default.config)
        struck = {config for config in dict.fromkeys(suspects) if not self.passes(config, tokens)}
        while True:
            winner, default, ambiguous = _pick(study, struck)
            if self.passes(winner.config, tokens):
                break
            struck.add(winner.config)
        self.open.remove(tokens)
        verdicts = tuple(self.known[tokens, winner.config.key()]["verdicts"])
        names = tuple(sorted(config.key() for config in struck))
        return LevelResult(tokens, winner, default, ambiguous, verdicts, names, study)

    def passes(self, config: Config, tokens: int) -> bool:
        """Whether all its verdicts at the level are ok, from the ledger where they stand there."""
        key = (tokens, config.key())
        if key not in self.known:
            done = self.done(tokens)
            planned = max(done + 1, _to_verify(tokens))
            self.progress(Progress(tokens, "verify", done, planned, None, self.remaining()))
            start = time.monotonic()
            verdicts = self.judge(config, tokens)
            self.rates.append((time.monotonic() - start) / _runs(tokens))
            passed = bool(verdicts) and all(verdict["ok"] for verdict in verdicts)
            self.known[key] = self.ledger.append(
                "verdict", tokens=tokens, key=config.key(), passed=passed, verdicts=verdicts
            )
        return bool(self.known[key]["passed"])

    def done(self, tokens: int) -> int:
        """Configurations with verdicts at a level."""
        return sum(1 for level, _ in self.known if level == tokens)

    def remaining(self) -> float | None:
        """Seconds for the verdicts left at all levels, if they take as long a token as the latest; None before any."""
        if not self.rates:
            return None
        left = sum(max(0, _to_verify(tokens) - self.done(tokens)) * _runs(tokens) for tokens in self.open)
        return left * statistics.median(self.rates[-RECENT:])

    def judge(self, config: Config, tokens: int) -> list[dict[str, Any]]:
        """Its verdicts up to the first that is not ok."""
        found: list[dict[str, Any]] = []
        try:
            for verdict in self.verify(config, tokens):
                found.append(verdict.to_dict())
                if not verdict.ok:
                    break
        except (RequestError, MissingTool):
            raise
        except VoltuneError as error:
            found.append({"ok": False, "reasons": [f"{type(error).__name__}: {error}"]})
        return found

    def finalised(self, study: Study) -> Study:
        """The study with its best and the default measured again, interleaved, where the evaluator can.

        Where that fails the study stays as it is: which finalist is at fault, its own verdict will say.
        """
        if not study.ranked:
            key, text = study.failures[0] if study.failures else ("none", "no trial ran")
            raise NothingWorks(
                f"at {study.tokens} tokens none of {len(study.failures)} configurations ran; {key}: {text}"
            )
        if study.default is None or not isinstance(self.evaluator, Comparing):
            return study
        finalists = list(dict.fromkeys([study.default.config, *(each.config for each in study.ranked[:FINALISTS])]))
        final = (study.tokens, tuple(each.key() for each in finalists))
        if final not in self.finals:
            outcome: dict[str, Any]
            try:
                compared = self.evaluator.compare(finalists, study.tokens)
                outcome = {"compared": [{"timing": x.timing.to_dict(), "low": x.low, "high": x.high} for x in compared]}
            except (RequestError, MissingTool):
                raise
            except VoltuneError as error:
                outcome = {"failure": {"class": type(error).__name__, "text": str(error)}}
            self.finals[final] = self.ledger.append("final", tokens=final[0], keys=final[1], **outcome)
        if "failure" in self.finals[final]:
            return study
        again = [
            Ranked(config, row["timing"]["us"], row["timing"], (row["low"], row["high"]))
            for config, row in zip(finalists, self.finals[final]["compared"], strict=True)
        ]
        rest = [each for each in study.ranked if each.config not in finalists]
        ranked = (*sorted(again, key=lambda each: (each.us, each.config.key())), *rest)
        return replace(study, ranked=ranked, default=again[0])


def _best_verified(tokens: int) -> int:
    """How many of a level's best are verified whether they win or not."""
    return VERIFIED if tokens <= MANY_TOKENS else 0


def _to_verify(tokens: int) -> int:
    """How many of a level are verified, most often: the best, the default, and a winner beyond those."""
    return max(_best_verified(tokens), 1) + 1


def _runs(tokens: int) -> int:
    """What a verdict's time goes by."""
    return tokens * len(orders(tokens))


def _pick(study: Study, struck: Set[Config]) -> tuple[Ranked, Ranked | None, bool]:
    """(winner, default, ambiguous): the fastest left, if it saves MARGIN of the default's time, with certainty where
    there is an interval; else the default."""
    left = [each for each in study.ranked if each.config not in struck]
    if not left:
        raise NothingWorks(f"at {study.tokens} tokens every configuration that ran gave wrong results")
    default = next((each for each in left if study.default and each.config == study.default.config), None)
    if default is None:
        return left[0], None, False
    sure = next((each for each in left if _saved(each, default) > MARGIN), None)
    return sure or default, default, sure is None and left[0].us < default.us


def _saved(challenger: Ranked, default: Ranked) -> float:
    """The share of the default's time it surely saves; a default measured among finalists compares with them only."""
    if challenger.interval is not None:
        return challenger.interval[0]
    return 1 - challenger.us / default.us if default.interval is None else 0.0
