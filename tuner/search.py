"""Searches the configurations at each level. The only importer of optuna.

The ledger is the truth: a run asks its questions in an order that the seed decides, and those the ledger can answer
cost nothing. So a stopped run resumes where it was, and a finished one repeats for free.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from tuner import space
from tuner.contract import Contract
from tuner.errors import MissingTool, RequestError, VoltuneError
from tuner.ledger import Ledger, Row
from tuner.measure import Timing
from tuner.space import Config

try:
    import optuna
except ModuleNotFoundError:  # only a search that samples needs it
    optuna = None  # type: ignore[assignment]

BATCH = 8  # proposals asked for at once, so that their builds run side by side
COSTED = 8  # trials before an estimate of the time left: the first ones pay for cold caches and first builds
NEIGHBOURS = 6  # best of the level below that are tried first
ASKS_PER_TRIAL = 20  # TPE repeats up to half of its asks; past this the rest is drawn instead


class SearchInterrupted(VoltuneError):
    """Ctrl-C. Every finished trial is in the ledger."""


class NothingWorks(VoltuneError):
    """No configuration runs, or gives the right result."""


class Evaluator(Protocol):
    """Gives a configuration's time at a level; a VoltuneError fails the trial, except RequestError and MissingTool."""

    @property
    def word(self) -> str: ...
    @property
    def device(self) -> str: ...
    def evaluate(self, config: Config, tokens: int) -> Timing: ...


@runtime_checkable
class Prefetching(Protocol):
    """An evaluator that builds ahead what it will be asked for."""

    def prefetch(self, configs: Sequence[Config]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `done` of `planned` of a level's phase; `remaining_s` for all trials left, if known."""

    tokens: int
    phase: Literal["search", "verify"]
    done: int
    planned: int
    best_us: float | None
    remaining_s: float | None


@dataclass(frozen=True)
class Job:
    """What to search, and how much. `trials` is a level; `budget_s` is for all, resumed runs together."""

    contract: Contract
    levels: tuple[int, ...]
    trials: int | None = None
    budget_s: float | None = None
    seed: int = 0
    incumbents: Mapping[int, Config] = field(default_factory=dict)  # an earlier run's winners
    guesses: Callable[[int], Sequence[Config]] = lambda tokens: ()  # at a level, e.g. the model's best
    why_invalid: Callable[[Config], str | None] = lambda config: None


@dataclass(frozen=True)
class Ranked:
    """A configuration that worked, with its Timing as the ledger holds it."""

    config: Config
    us: float
    timing: Mapping[str, Any]
    interval: tuple[float, float] | None = None  # of the share of the default's time it saves


@dataclass(frozen=True)
class Study:
    """A level's outcome, fastest first. `default` is None where the default failed."""

    tokens: int
    ranked: tuple[Ranked, ...]
    default: Ranked | None
    failures: tuple[tuple[str, str], ...]  # (config key, "Class: text")
    evaluated: int  # in this run
    answered: int  # from the ledger


def tune(
    job: Job, evaluator: Evaluator, ledger: Ledger, progress: Callable[[Progress], None] = lambda progress: None
) -> dict[int, Study]:
    """Search every level of the job.

    Raises SearchInterrupted on Ctrl-C, RequestError where no configuration fits the device or the ledger's trials are
    none, and what the evaluator raises as RequestError or MissingTool: those are not a configuration's fault.
    """
    run = _Run(job, evaluator, ledger, progress)
    with interruptible(ledger):
        for tokens in job.levels:
            run.study(tokens)
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
        self.feasible = [c for c in space.candidates(job.contract) if job.why_invalid(c) is None]
        if not self.feasible:
            raise RequestError(
                f"contract {job.contract.name}: no configuration fits the device; "
                f"{job.why_invalid(self.default)}: lower the contract's highest level or its sizes, "
                "or give another --gpu"
            )
        self.trials: dict[int, dict[str, Row]] = {}
        self.costs = _Costs()
        fitting = {config.key() for config in self.feasible}
        for row in ledger.rows("trial"):
            if row["key"] in fitting:
                if not _has_outcome(row):
                    raise RequestError(
                        f"{ledger.path}: the trial of {row['key']} at {row['tokens']} tokens has "
                        "neither a timing nor a failure: delete its line to measure it again"
                    )
                self.trials.setdefault(row["tokens"], {})[row["key"]] = row
                self.costs.add(row)
        self.results: dict[int, Study] = {}
        self.open = list(job.levels)
        count = len(self.feasible)
        self.planned = count if job.trials is None else min(job.trials, count)

    def study(self, tokens: int) -> None:
        """Ask, answer from the ledger or evaluate, tell; until the trials, the budget or the space is used up.

        What the ledger knows counts as done, whoever asked for it. A resumed study asks again from the start, so that
        its sampler is where it was.
        """
        known = self.trials.setdefault(tokens, {})
        answered, planned = len(known), self.planned
        allowance = self.allowance()
        spent = float(sum(row["seconds"] for row in known.values()))
        if known:
            self.report(tokens)

        def unfinished() -> bool:
            # One trial whatever the budget: the default comes first, and everything is compared with it.
            return len(known) < planned and (spent < allowance or not known)

        proposer = self.proposer(tokens) if unfinished() else None
        while proposer is not None and unfinished() and (batch := proposer.ask()):
            new = [config for config in batch if config.key() not in known][: planned - len(known)]
            self.prefetch(new)
            skipped = set(batch).difference(new)
            for config in batch:
                if config.key() not in known:
                    if config in skipped or (known and spent >= allowance):
                        continue
                    known[config.key()] = row = self.trial(tokens, config)
                    spent += row["seconds"]
                    self.report(tokens)
                proposer.tell(config, _us(known[config.key()]))
        self.open.remove(tokens)
        self.seconds += spent
        self.results[tokens] = self.result(tokens, answered)

    def allowance(self) -> float:
        """This study's seconds: an equal share of what is left of the budget, trials of earlier runs counted in."""
        if self.job.budget_s is None:
            return float("inf")
        return max(0.0, self.job.budget_s - self.seconds) / len(self.open)

    def proposer(self, tokens: int) -> _Shuffled | _Sampled:
        fitting = set(self.feasible)
        first = [c for c in self.first(tokens) if c in fitting]
        rng = random.Random(f"{self.job.seed}/{tokens}")
        if self.planned >= len(self.feasible):
            return _Shuffled(self.feasible, first, rng)
        return _Sampled(self.feasible, first, self.planned, rng)

    def first(self, tokens: int) -> list[Config]:
        """The default, an earlier run's winners of near levels, this run's best of the level below, and guesses."""
        near = sorted(self.job.incumbents, key=lambda level: (abs(level - tokens), level))[:3]
        found = [self.default, *(self.job.incumbents[level] for level in near)]
        below = [level for level in self.results if level < tokens]
        if below:
            found += [ranked.config for ranked in self.results[max(below)].ranked[:NEIGHBOURS]]
        if len(found) < self.planned:  # guesses may take seconds
            found += self.job.guesses(tokens)
        return list(dict.fromkeys(found))

    def prefetch(self, configs: Sequence[Config]) -> None:
        if configs and isinstance(self.evaluator, Prefetching):
            self.evaluator.prefetch(configs)

    def trial(self, tokens: int, config: Config) -> Row:
        start = time.monotonic()
        outcome: dict[str, Any]
        try:
            outcome = {"timing": self.evaluator.evaluate(config, tokens).to_dict()}
        except (RequestError, MissingTool):
            raise
        except VoltuneError as error:
            outcome = {"failure": {"class": type(error).__name__, "text": str(error)}}
        row = self.ledger.append(
            "trial",
            tokens=tokens,
            key=config.key(),
            word=self.evaluator.word,
            device=self.evaluator.device,
            seconds=round(time.monotonic() - start, 3),
            **outcome,
        )
        self.costs.add(row)
        return row

    def report(self, tokens: int) -> None:
        known = self.trials[tokens]
        figures = [us for us in map(_us, known.values()) if us is not None]
        best = min(figures, default=None)
        done = min(len(known), self.planned)  # the ledger may know more
        self.progress(Progress(tokens, "search", done, self.planned, best, self.remaining()))

    def remaining(self) -> float | None:
        """Seconds for the trials that are not in the ledger yet; None before COSTED trials."""
        left = sum(max(0, self.planned - len(self.trials.get(tokens, ()))) for tokens in self.open)
        estimate = self.costs.estimate(left, len(self.feasible))
        if estimate is None or self.job.budget_s is None:
            return estimate
        return min(estimate, max(0.0, self.job.budget_s - self.costs.total))

    def result(self, tokens: int, answered: int) -> Study:
        ranked, failures = [], []
        for key, row in self.trials[tokens].items():
            us = _us(row)
            if us is None:
                failures.append((key, f"{row['failure']['class']}: {row['failure']['text']}"))
            else:
                ranked.append(Ranked(space.parse(key), us, row["timing"]))
        ranked.sort(key=lambda each: (each.us, each.config.key()))
        default = next((each for each in ranked if each.config == self.default), None)
        evaluated = len(self.trials[tokens]) - answered
        return Study(tokens, tuple(ranked), default, tuple(sorted(failures)), evaluated, answered)


class _Costs:
    """Mean seconds of a trial, apart for configurations that are new, and so are built, and those known from another
    level."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._new: list[float] = []
        self._again: list[float] = []

    def add(self, row: Row) -> None:
        (self._again if row["key"] in self._seen else self._new).append(row["seconds"])
        self._seen.add(row["key"])

    @property
    def total(self) -> float:
        return sum(self._new) + sum(self._again)

    def estimate(self, left: int, feasible: int) -> float | None:
        if len(self._new) + len(self._again) < COSTED:
            return None
        new_mean = sum(self._new) / len(self._new)
        again_mean = sum(self._again) / len(self._again) if self._again else 0.0
        new = min(left, feasible - len(self._seen))
        return new * new_mean + (left - new) * again_mean


class _Shuffled:
    """Every feasible configuration once: the given ones first, the rest in an order the seed decides."""

    def __init__(self, feasible: Sequence[Config], first: Sequence[Config], rng: random.Random) -> None:
        given = set(first)
        rest = [config for config in feasible if config not in given]
        rng.shuffle(rest)
        self._order = [*first, *rest]

    def ask(self) -> list[Config]:
        order, self._order = self._order, []
        return order

    def tell(self, config: Config, us: float | None) -> None:
        """Nothing to learn."""


class _Sampled:
    """Optuna's TPE over `space.parameters` as categories; combinations outside the space are told as violated
    constraints."""

    def __init__(self, feasible: Sequence[Config], first: Sequence[Config], planned: int, rng: random.Random) -> None:
        if optuna is None:
            raise MissingTool("Optuna is missing, which a sampled search needs: run `make env`, or search everything")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        chosen = [space.parameters(config) for config in feasible]
        self._known = {_combination(choice): config for choice, config in zip(chosen, feasible, strict=True)}
        self._spare = _Shuffled(feasible, (), rng).ask()
        self._asks = planned * ASKS_PER_TRIAL
        self._axes: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(sorted({choice[name] for choice in chosen}))
            for name in chosen[0]
        }
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=rng.getrandbits(31)))
        self._pending: dict[str, list[optuna.Trial]] = {}
        for config in first:
            self._study.enqueue_trial(space.parameters(config), skip_if_exists=True)

    def ask(self) -> list[Config]:
        batch: dict[str, Config] = {}
        while len(batch) < BATCH and self._asks > 0:
            self._asks -= 1
            trial = self._study.ask(self._axes)
            config = self._known.get(_combination(trial.params))
            if config is None:
                self._finish(trial, None)
            else:
                batch[config.key()] = config
                self._pending.setdefault(config.key(), []).append(trial)
        if not batch:
            batch = {config.key(): config for config in self._spare}
            self._spare = []
        return list(batch.values())

    def tell(self, config: Config, us: float | None) -> None:
        for trial in self._pending.pop(config.key(), []):
            self._finish(trial, us)

    def _finish(self, trial: optuna.Trial, us: float | None) -> None:
        # TPE does not see a FAILed trial and would come back to it; a violated constraint teaches it to stay away.
        trial.set_constraint("works", 1.0 if us is None else 0.0)
        self._study.tell(trial, us, None if us is not None else optuna.trial.TrialState.PRUNED)


def _combination(parameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(parameters.items()))


def circumstances(contract: Contract, evaluator: Evaluator, **others: str) -> dict[str, str]:
    """What a ledger's answers depend on: space, evaluator, and what the caller adds (toolchain, sources ...)."""
    return {"space": space.space_digest(contract), "word": evaluator.word, "device": evaluator.device, **others}


def _has_outcome(row: Row) -> bool:
    """Whether a trial has what `_us` and `result` read."""
    timing, failure = row.get("timing"), row.get("failure")
    if timing is not None:
        return isinstance(timing, dict) and isinstance(timing.get("us"), int | float)
    return isinstance(failure, dict) and {"class", "text"} <= failure.keys()


def _us(row: Row) -> float | None:
    timing = row.get("timing")
    return None if timing is None else float(timing["us"])
