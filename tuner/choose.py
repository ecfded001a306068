"""Chooses a level's winners from its studies: right results before fast ones, and never slower than the default.

Verdicts and finals go to the ledger as well, so that a resumed run does not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from tuner import space
from tuner.errors import MissingTool, RequestError, VoltuneError
from tuner.ledger import Ledger, Row
from tuner.measure import Compared
from tuner.search import Evaluator, Job, NothingWorks, Progress, Ranked, StageResult, interruptible
from tuner.space import STAGES, Config, Stage, StageConfig, W2Config, W13Config
from tuner.verify import Verdict

MARGIN = 0.03  # of the default's time a challenger must save: less lies within what clocks and boards differ by
VERIFIED = 5  # best of each stage that are verified besides the default and the winner
FINALISTS = 8  # re-measured interleaved where the evaluator can

Struck = set[tuple[Stage, StageConfig]]


Verify = Callable[[Config, int], Iterable[Verdict]]


@runtime_checkable
class Comparing(Protocol):
    """An evaluator that measures finalists in interleaved rounds; the first is the default."""

    def compare(self, stage: Stage, configs: Sequence[StageConfig], tokens: int) -> Sequence[Compared]: ...


@dataclass(frozen=True)
class Choice:
    """A stage's winner. `ambiguous`: something looked faster than the default, not by MARGIN, so the default stays."""

    winner: Ranked
    default: Ranked | None
    ambiguous: bool


@dataclass(frozen=True)
class LevelResult:
    """A level's winner, every verdict of which is ok; `struck` names configurations whose verdict was not."""

    tokens: int
    config: Config
    choices: Mapping[Stage, Choice]
    verdicts: tuple[Mapping[str, Any], ...]
    struck: tuple[str, ...]
    studies: Mapping[Stage, StageResult]


def winners(
    job: Job,
    results: Mapping[tuple[int, Stage], StageResult],
    evaluator: Evaluator,
    ledger: Ledger,
    verify: Verify,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[LevelResult, ...]:
    """The winner of each of the job's levels.

    `verify` gives a configuration's verdicts at a level; a VoltuneError it raises counts as a failed one, RequestError
    and MissingTool go through. Raises SearchInterrupted on Ctrl-C, NothingWorks where no configuration is left.
    """
    chooser = _Chooser(space.default(job.contract), evaluator, ledger, verify, progress)
    with interruptible(ledger):
        return tuple(
            chooser.choose(tokens, {stage: results[tokens, stage] for stage in STAGES}) for tokens in job.levels
        )


class _Chooser:
    def __init__(
        self,
        default: Config,
        evaluator: Evaluator,
        ledger: Ledger,
        verify: Verify,
        progress: Callable[[Progress], None],
    ) -> None:
        self.default, self.evaluator, self.ledger = default, evaluator, ledger
        self.verify, self.progress = verify, progress
        self.known: dict[tuple[int, str], Row] = {(row["tokens"], row["key"]): row for row in ledger.rows("verdict")}
        self.finals = {(row["tokens"], row["stage"], tuple(row["keys"])): row for row in ledger.rows("final")}

    def choose(self, tokens: int, measured: Mapping[Stage, StageResult]) -> LevelResult:
        """Verify default and best, strike out what fails, and take the first pair of stage winners that passes."""
        studies = {stage: self.finalised(measured[stage]) for stage in STAGES}
        struck: Struck = set()
        sound = self.default if all(studies[stage].default for stage in STAGES) else None
        if sound and not self.passes(sound, tokens):
            struck = {(stage, sound.stage(stage)) for stage in STAGES}
            sound = None
        for place in range(min(VERIFIED, max(len(study.ranked) for study in studies.values()))):
            pair = {stage: study.ranked[min(place, len(study.ranked) - 1)].config for stage, study in studies.items()}
            self.strike(_config(pair), tokens, sound, struck)
        while True:
            choices = {stage: _pick(studies[stage], struck) for stage in STAGES}
            config = _config({stage: choice.winner.config for stage, choice in choices.items()})
            if self.strike(config, tokens, sound, struck):
                break
        verdicts = tuple(self.known[tokens, config.key()]["verdicts"])
        names = tuple(sorted(f"{stage} {each.key()}" for stage, each in struck))
        return LevelResult(tokens, config, choices, verdicts, names, studies)

    def strike(self, config: Config, tokens: int, sound: Config | None, struck: Struck) -> bool:
        """Whether the pair passes; if not, strike out the stage at fault: the one that fails beside a sound partner."""
        if self.passes(config, tokens):
            return True
        guilty: Struck = set()
        if sound is not None:
            alone = {"w13": Config(config.w13, sound.w2), "w2": Config(sound.w13, config.w2)}
            guilty = {(stage, config.stage(stage)) for stage in STAGES if not self.passes(alone[stage], tokens)}
        struck |= guilty or {(stage, config.stage(stage)) for stage in STAGES}
        return False

    def passes(self, config: Config, tokens: int) -> bool:
        """Whether all its verdicts at the level are ok, from the ledger where they stand there."""
        key = (tokens, config.key())
        if key not in self.known:
            done = sum(1 for level, _ in self.known if level == tokens)
            self.progress(Progress(tokens, "verify", done, max(done, VERIFIED) + 1, None, None))
            verdicts = self.judge(config, tokens)
            passed = bool(verdicts) and all(verdict["ok"] for verdict in verdicts)
            self.known[key] = self.ledger.append(
                "verdict", tokens=tokens, key=config.key(), passed=passed, verdicts=verdicts
            )
        return bool(self.known[key]["passed"])

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

    def finalised(self, study: StageResult) -> StageResult:
        """The study with its best and the default measured again, interleaved, where the evaluator can.

        Where that fails the study stays as it is: which finalist is at fault, its own verdict will say.
        """
        if not study.ranked:
            key, text = study.failures[0] if study.failures else ("none", "no trial ran")
            place = f"{study.stage} at {study.tokens} tokens"
            raise NothingWorks(f"{place}: none of {len(study.failures)} configurations ran; {key}: {text}")
        if study.default is None or not isinstance(self.evaluator, Comparing):
            return study
        finalists = list(dict.fromkeys([study.default.config, *(each.config for each in study.ranked[:FINALISTS])]))
        final = (study.tokens, study.stage, tuple(each.key() for each in finalists))
        if final not in self.finals:
            outcome: dict[str, Any]
            try:
                compared = self.evaluator.compare(study.stage, finalists, study.tokens)
                outcome = {"compared": [{"timing": x.timing.to_dict(), "low": x.low, "high": x.high} for x in compared]}
            except (RequestError, MissingTool):
                raise
            except VoltuneError as error:
                outcome = {"failure": {"class": type(error).__name__, "text": str(error)}}
            self.finals[final] = self.ledger.append("final", tokens=final[0], stage=final[1], keys=final[2], **outcome)
        if "failure" in self.finals[final]:
            return study
        again = [
            Ranked(config, row["timing"]["us"], row["timing"], (row["low"], row["high"]))
            for config, row in zip(finalists, self.finals[final]["compared"], strict=True)
        ]
        rest = [each for each in study.ranked if each.config not in finalists]
        ranked = (*sorted(again, key=lambda each: (each.us, each.config.key())), *rest)
        return replace(study, ranked=ranked, default=again[0])


def _pick(study: StageResult, struck: Struck) -> Choice:
    """The fastest left, if it saves MARGIN of the default's time: with certainty where there is an interval."""
    left = [each for each in study.ranked if (study.stage, each.config) not in struck]
    if not left:
        raise NothingWorks(f"{study.stage} at {study.tokens} tokens: every configuration that ran gave wrong results")
    default = next((each for each in left if study.default and each.config == study.default.config), None)
    if default is None:
        return Choice(left[0], None, False)
    sure = next((each for each in left if _saved(each, default) > MARGIN), None)
    return Choice(sure or default, default, sure is None and left[0].us < default.us)


def _saved(challenger: Ranked, default: Ranked) -> float:
    """The share of the default's time it surely saves; a default measured among finalists compares with them only."""
    if challenger.interval is not None:
        return challenger.interval[0]
    return 1 - challenger.us / default.us if default.interval is None else 0.0


def _config(stages: Mapping[Stage, StageConfig]) -> Config:
    w13, w2 = stages["w13"], stages["w2"]
    assert isinstance(w13, W13Config) and isinstance(w2, W2Config)
    return Config(w13, w2)
