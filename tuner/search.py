"""Searches each stage's configurations at each level. The only importer of optuna.

The ledger is the truth: a run asks its questions in an order that the seed decides, and those the ledger can answer
cost nothing. So a stopped run resumes where it was, and a finished one repeats for free.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import optuna

from tuner import space
from tuner.contract import Contract
from tuner.errors import MissingTool, RequestError, VoltuneError
from tuner.ledger import Ledger, Row
from tuner.measure import Timing
from tuner.space import STAGES, Config, Stage, StageConfig

BATCH = 8  # proposals asked for at once, so that their builds run side by side
COSTED = 8  # trials before an estimate of the time left: the first ones pay for cold caches and first builds
ASKS_PER_TRIAL = 20  # TPE repeats up to half of its asks; past this the rest is drawn instead


class SearchInterrupted(VoltuneError):
    """Ctrl-C. Every finished trial is in the ledger."""


class NothingWorks(VoltuneError):
    """No configuration of a stage runs, or gives the right result."""


class Evaluator(Protocol):
    """Gives a stage's time at a level; a VoltuneError fails the trial, except RequestError and MissingTool."""

    @property
    def word(self) -> str: ...
    @property
    def device(self) -> str: ...
    def evaluate(self, stage: Stage, config: StageConfig, tokens: int) -> Timing: ...


@runtime_checkable
class Prefetching(Protocol):
    """An evaluator that builds ahead what it will be asked for."""

    def prefetch(self, stage: Stage, configs: Sequence[StageConfig]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `done` of `planned` at this level and stage; `remaining_s` for all trials left, if known."""

    tokens: int
    stage: str  # "w13", "w2" or "verify"
    done: int
    planned: int
    best_us: float | None
    remaining_s: float | None


@dataclass(frozen=True)
class Job:
    """What to search, and how much. `trials` is a level and stage; `budget_s` is for all, resumed runs together."""

    contract: Contract
    levels: tuple[int, ...]
    trials: int | None = None
    budget_s: float | None = None
    seed: int = 0
    incumbents: Mapping[int, Config] = field(default_factory=dict)  # an earlier run's winners
    guesses: Callable[[Stage, int], Sequence[StageConfig]] = lambda stage, tokens: ()  # e.g. the model's best
    why_invalid: Callable[[Stage, StageConfig], str | None] = lambda stage, config: None


@dataclass(frozen=True)
class Ranked:
    """A configuration that worked, with its Timing as the ledger holds it."""

    config: StageConfig
    us: float
    timing: Mapping[str, Any]
    interval: tuple[float, float] | None = None  # of the share of the default's time it saves


@dataclass(frozen=True)
class StageResult:
    """One study's outcome, fastest first. `default` is None where the default failed."""

    tokens: int
    stage: Stage
    ranked: tuple[Ranked, ...]
    default: Ranked | None
    failures: tuple[tuple[str, str], ...]  # (config key, "Class: text")
    evaluated: int  # in this run
    answered: int  # from the ledger


def tune(
    job: Job, evaluator: Evaluator, ledger: Ledger, progress: Callable[[Progress], None] = lambda progress: None
) -> dict[tuple[int, Stage], StageResult]:
    """Search every level and stage of the job.

    Raises SearchInterrupted on Ctrl-C, RequestError where no configuration fits the device or the ledger's trials are
    none, and what the evaluator raises as RequestError or MissingTool: those are not a configuration's fault.
    """
    run = _Run(job, evaluator, ledger, progress)
    with interruptible(ledger):
        for tokens in job.levels:
            for stage in STAGES:
                run.study(tokens, stage)
    return run.results


@contextlib.contextmanager
def interruptible(ledger: Ledger) -> Iterator[None]:
    """Turns Ctrl-C into a SearchInterrupted that says what is kept and how to go on."""
    before = sum(1 for _ in ledger.rows())
    try:
        yield
    except KeyboardInterrupt:
        new = sum(1 for _ in ledger.rows()) - before
        raise SearchInterrupted(
            f"stopped; {new} new results are in {ledger.path} and only the one in flight is lost; "
            "run the same command to go on from there"
        ) from None


class _Run:
    def __init__(self, job: Job, evaluator: Evaluator, ledger: Ledger, progress: Callable[[Progress], None]) -> None:
        self.job, self.evaluator, self.ledger, self.progress = job, evaluator, ledger, progress
        self.seconds = 0.0
        self.default = space.default(job.contract)
        self.feasible: dict[Stage, list[StageConfig]] = {
            stage: [c for c in space.candidates(job.contract, stage) if job.why_invalid(stage, c) is None]
            for stage in STAGES
        }
        for stage, found in self.feasible.items():
            if not found:
                first = self.default.stage(stage)
                raise RequestError(
                    f"contract {job.contract.name}: no {stage} configuration fits the device; "
                    f"{job.why_invalid(stage, first)}: lower the contract's highest level or its sizes, "
                    "or give another --gpu"
                )
        self.trials: dict[tuple[int, str], dict[str, Row]] = {}
        self.costs = _Costs()
        fitting = {(stage, config.key()) for stage, found in self.feasible.items() for config in found}
        for row in ledger.rows("trial"):
            if (row["stage"], row["key"]) in fitting:
                if not _has_outcome(row):
                    raise RequestError(
                        f"{ledger.path}: the trial of {row['stage']} {row['key']} at {row['tokens']} tokens has "
                        "neither a timing nor a failure: delete its line to measure it again"
                    )
                self.trials.setdefault((row["tokens"], row["stage"]), {})[row["key"]] = row
                self.costs.add(row)
        self.results: dict[tuple[int, Stage], StageResult] = {}
        self.open = [(tokens, stage) for tokens in job.levels for stage in STAGES]

    def study(self, tokens: int, stage: Stage) -> None:
        """Ask, answer from the ledger or evaluate, tell; until the trials, the budget or the space is used up.

        What the ledger knows counts as done, whoever asked for it. A resumed study asks again from the start, so that
        its sampler is where it was.
        """
        known = self.trials.setdefault((tokens, stage), {})
        answered, planned = len(known), self.planned(stage)
        proposer = self.proposer(tokens, stage, planned)
        allowance = self.allowance()
        spent = float(sum(row["seconds"] for row in known.values()))
        if known:
            self.report(tokens, stage)
        # One trial whatever the budget: the default comes first, and everything is compared with it.
        while len(known) < planned and (spent < allowance or not known) and (batch := proposer.ask()):
            new = [config for config in batch if config.key() not in known][: planned - len(known)]
            self.prefetch(stage, new)
            for config in batch:
                if config.key() not in known:
                    if config not in new or (known and spent >= allowance):
                        continue
                    known[config.key()] = row = self.trial(tokens, stage, config)
                    spent += row["seconds"]
                    self.report(tokens, stage)
                proposer.tell(config, _us(known[config.key()]))
        self.open.remove((tokens, stage))
        self.seconds += spent
        self.results[tokens, stage] = self.result(tokens, stage, answered)

    def planned(self, stage: Stage) -> int:
        count = len(self.feasible[stage])
        return count if self.job.trials is None else min(self.job.trials, count)

    def allowance(self) -> float:
        """This study's seconds: an equal share of what is left of the budget, trials of earlier runs counted in."""
        if self.job.budget_s is None:
            return float("inf")
        return max(0.0, self.job.budget_s - self.seconds) / len(self.open)

    def proposer(self, tokens: int, stage: Stage, planned: int) -> _Shuffled | _Sampled:
        feasible = self.feasible[stage]
        first = [c for c in self.first(tokens, stage) if c in feasible]
        rng = random.Random(f"{self.job.seed}/{tokens}/{stage}")
        if planned >= len(feasible):
            return _Shuffled(feasible, first, rng)
        return _Sampled(space.axes(self.job.contract, stage), stage, feasible, first, planned, rng)

    def first(self, tokens: int, stage: Stage) -> list[StageConfig]:
        """The default, an earlier run's winner, neighbouring levels' winners, guesses; each once."""
        near = sorted(self.job.incumbents, key=lambda level: (abs(level - tokens), level))[:3]
        found = [self.default.stage(stage), *(self.job.incumbents[level].stage(stage) for level in near)]
        for (level, other), result in sorted(self.results.items(), key=lambda item: -item[0][0]):
            if other == stage and level < tokens:
                found += [ranked.config for ranked in result.ranked[:3]]
                break
        return list(dict.fromkeys([*found, *self.job.guesses(stage, tokens)]))

    def prefetch(self, stage: Stage, configs: Sequence[StageConfig]) -> None:
        if configs and isinstance(self.evaluator, Prefetching):
            self.evaluator.prefetch(stage, configs)

    def trial(self, tokens: int, stage: Stage, config: StageConfig) -> Row:
        start = time.monotonic()
        outcome: dict[str, Any]
        try:
            outcome = {"timing": self.evaluator.evaluate(stage, config, tokens).to_dict()}
        except (RequestError, MissingTool):
            raise
        except VoltuneError as error:
            outcome = {"failure": {"class": type(error).__name__, "text": str(error)}}
        row = self.ledger.append(
            "trial",
            tokens=tokens,
            stage=stage,
            key=config.key(),
            config=config.to_dict(),
            word=self.evaluator.word,
            device=self.evaluator.device,
            seconds=round(time.monotonic() - start, 3),
            **outcome,
        )
        self.costs.add(row)
        return row

    def report(self, tokens: int, stage: Stage) -> None:
        known = self.trials[tokens, stage]
        figures = [us for us in map(_us, known.values()) if us is not None]
        best = min(figures, default=None)
        planned = self.planned(stage)  # the ledger may know more
        self.progress(Progress(tokens, stage, min(len(known), planned), planned, best, self.remaining()))

    def remaining(self) -> float | None:
        """Seconds for the trials that are not in the ledger yet; None before COSTED trials."""
        left = dict.fromkeys(STAGES, 0)
        for tokens, stage in self.open:
            left[stage] += max(0, self.planned(stage) - len(self.trials.get((tokens, stage), ())))
        estimate = self.costs.estimate(left, {stage: len(self.feasible[stage]) for stage in STAGES})
        if estimate is None or self.job.budget_s is None:
            return estimate
        return min(estimate, max(0.0, self.job.budget_s - self.costs.total))

    def result(self, tokens: int, stage: Stage, answered: int) -> StageResult:
        ranked, failures = [], []
        for key, row in self.trials[tokens, stage].items():
            us = _us(row)
            if us is None:
                failures.append((key, f"{row['failure']['class']}: {row['failure']['text']}"))
            else:
                ranked.append(Ranked(space.stage_from_dict(stage, row["config"]), us, row["timing"]))
        ranked.sort(key=lambda each: (each.us, each.config.key()))
        default = next((each for each in ranked if each.config == self.default.stage(stage)), None)
        evaluated = len(self.trials[tokens, stage]) - answered
        return StageResult(tokens, stage, tuple(ranked), default, tuple(sorted(failures)), evaluated, answered)


class _Costs:
    """Mean seconds of a trial, apart for a stage's configurations that are new, and so are built, and those known from
    another level."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._new: list[float] = []
        self._again: list[float] = []

    def add(self, row: Row) -> None:
        key = (row["stage"], row["key"])
        (self._again if key in self._seen else self._new).append(row["seconds"])
        self._seen.add(key)

    @property
    def total(self) -> float:
        return sum(self._new) + sum(self._again)

    def estimate(self, left: Mapping[Stage, int], feasible: Mapping[Stage, int]) -> float | None:
        if len(self._new) + len(self._again) < COSTED:
            return None
        new_mean = sum(self._new) / len(self._new)
        again_mean = sum(self._again) / len(self._again) if self._again else 0.0
        seconds = 0.0
        for stage, count in left.items():
            new = min(count, feasible[stage] - sum(1 for each, _ in self._seen if each == stage))
            seconds += new * new_mean + (count - new) * again_mean
        return seconds


class _Shuffled:
    """Every feasible configuration once: the given ones first, the rest in an order the seed decides."""

    def __init__(self, feasible: Sequence[StageConfig], first: Sequence[StageConfig], rng: random.Random) -> None:
        rest = [config for config in feasible if config not in first]
        rng.shuffle(rest)
        self._order = [*first, *rest]

    def ask(self) -> list[StageConfig]:
        order, self._order = self._order, []
        return order

    def tell(self, config: StageConfig, us: float | None) -> None:
        """Nothing to learn."""


class _Sampled:
    """Optuna's TPE over the axes as categories; combinations outside the space are told as violated constraints."""

    def __init__(
        self,
        axes: Mapping[str, Sequence[int]],
        stage: Stage,
        feasible: Sequence[StageConfig],
        first: Sequence[StageConfig],
        planned: int,
        rng: random.Random,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._stage = stage
        self._known = {config.key(): config for config in feasible}
        self._spare = _Shuffled(feasible, (), rng).ask()
        self._asks = planned * ASKS_PER_TRIAL
        self._axes: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(list(axes[name])) for name in axes
        }
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=rng.getrandbits(31)))
        self._pending: dict[str, list[optuna.Trial]] = {}
        for config in first:
            self._study.enqueue_trial(config.to_dict(), skip_if_exists=True)

    def ask(self) -> list[StageConfig]:
        batch: dict[str, StageConfig] = {}
        while len(batch) < BATCH and self._asks > 0:
            self._asks -= 1
            trial = self._study.ask(self._axes)
            config = self._known.get(space.stage_from_dict(self._stage, trial.params).key())
            if config is None:
                self._finish(trial, None)
            else:
                batch[config.key()] = config
                self._pending.setdefault(config.key(), []).append(trial)
        if not batch:
            batch = {config.key(): config for config in self._spare}
            self._spare = []
        return list(batch.values())

    def tell(self, config: StageConfig, us: float | None) -> None:
        for trial in self._pending.pop(config.key(), []):
            self._finish(trial, us)

    def _finish(self, trial: optuna.Trial, us: float | None) -> None:
        # TPE does not see a FAILed trial and would come back to it; a violated constraint teaches it to stay away.
        trial.set_constraint("works", 1.0 if us is None else 0.0)
        self._study.tell(trial, us, None if us is not None else optuna.trial.TrialState.PRUNED)


def circumstances(contract: Contract, evaluator: Evaluator, **others: str) -> dict[str, str]:
    """What a ledger's answers depend on: spaces, evaluator, and what the caller adds (toolchain, sources ...)."""
    spaces = {f"space_{stage}": space.space_digest(contract, stage) for stage in STAGES}
    return {**spaces, "word": evaluator.word, "device": evaluator.device, **others}


def _has_outcome(row: Row) -> bool:
    """Whether a trial has what `_us` and `result` read."""
    timing, failure = row.get("timing"), row.get("failure")
    if timing is not None:
        return isinstance(timing, dict) and isinstance(timing.get("us"), int | float)
    return isinstance(failure, dict) and {"class", "text"} <= failure.keys()


def _us(row: Row) -> float | None:
    timing = row.get("timing")
    return None if timing is None else float(timing["us"])
