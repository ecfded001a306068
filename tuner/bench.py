"""Measures the op beside its stages, other ways to do its work, its loads alone, and a copy on the GPU.

All of one level and routing is timed in interleaved rounds, so that ratios hold whatever the clocks do. The practical
ceiling is the fastest variant of the fused plan that only loads, found by a quick screening of many configurations.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tuner import plan, render, routing, space, trial, verify, winners
from tuner.cases import Case, gaussian
from tuner.contract import Contract
from tuner.device import Array, available
from tuner.errors import BuildFailed, InvalidConfig, LaunchFailed, MissingTool, RequestError, TrialTimeout
from tuner.measure import COLD, ROUTINGS, DeviceExecutor, Mode, layers_needed
from tuner.plan import Plan, PlanName
from tuner.reference import compare
from tuner.report import ALL_EXPERTS, COMPACT, DENSE, LOADS, OP, W2, W13, Measured, Quantiles, Report, Row, Subject
from tuner.space import Config
from tuner.trial import Arm, Cell, Comparison, DenseSteps
from tuner.verify import Layers

Show = Callable[[str, str], None]

DEFAULT_ROUTINGS = ("uniform", "zipf", "hot")
ROUNDS = 30
FINALISTS = 3  # of the variants that only load, in the interleaved rounds; the rest is screened
DENSE_L2 = 2e-3  # relative L2 to float64: weights, hidden rows and products are rounded to f16 there
_VERIFIED: tuple[PlanName, ...] = ("fused", "staged", "all-experts")  # all that is timed and computes
_CHUNK = 32  # variants a job
_SCREEN_S, _DENSE_S = 300.0, 180.0


@dataclass(frozen=True)
class Request:
    """One `bench`. ceiling: of how many configurations the fastest to load is looked for; all where None."""

    contract: Contract
    levels: tuple[int, ...]
    routings: tuple[str, ...]
    subjects: tuple[Subject, ...]
    rounds: int = ROUNDS
    warm: bool = False
    ceiling: int | None = None
    seed: int = 0


class Executor(DeviceExecutor):
    """A DeviceExecutor that knows a benchmark's jobs."""

    def screen(self, arms: Sequence[Arm], cells: Sequence[Cell]) -> Array:
        """us [arm, cell]. Raises as `run` does."""
        us: Array = self._call(trial.screen, arms, cells, self.code, timeout_s=_SCREEN_S)
        return us

    def dense(self, request: DenseSteps) -> Array:
        """The dense arm's output, f16 [M, H]. Raises as `run` does, MissingTool where torch is not."""
        out: Array = self._call(trial.run_dense, request, timeout_s=_DENSE_S)
        return out


def routings(contract: Contract, text: str | None, levels: Sequence[int]) -> tuple[str, ...]:
    """Names and recorded files of "uniform,hot,FILE". Raises RequestError for one that does not give every level."""
    named = DEFAULT_ROUTINGS if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in named:
        for tokens in levels:
            routing.make(name, contract, tokens, 0)
    return named


def subjects(
    contract: Contract, key: str | None, given: Sequence[Path], found: Sequence[Path], levels: Sequence[int]
) -> tuple[Subject, ...]:
    """What `key` names, else the sets in `given`, else those of the contract among `found`, else the default.

    A level that a set lacks has the default. Raises RequestError where key or given sets do not fit the contract.
    """
    if key is not None and given:
        raise RequestError(f"--config {key} and --set {given[0]} both name configurations: give one of them")
    default = space.default(contract)
    if key is not None:
        try:
            chosen = space.parse(key)
            plan.make(contract, chosen)
        except InvalidConfig as error:
            raise RequestError(str(error)) from None
        return (Subject("--config", dict.fromkeys(levels, chosen), origin=key),)
    sets = []
    for folder in given or found:
        read = winners.read(folder)
        if read.contract.digest() == contract.digest():
            sets.append((folder, read))
        elif given:
            raise RequestError(
                f"{folder} is tuned for a contract with digest {read.contract.digest()}, and {contract.name} has "
                f"{contract.digest()}: give a set of this contract, or --config"
            )
    targets = [read.target for _, read in sets]
    return tuple(
        Subject(
            name=read.target if targets.count(read.target) == 1 else str(folder),
            configs={n: read.levels[n].config if n in read.levels else default for n in levels},
            origin=str(folder),
            device=read.device,
            word=read.word,
            defaults=tuple(n for n in levels if n not in read.levels),
        )
        for folder, read in sets
    ) or (Subject("default", dict.fromkeys(levels, default)),)


def check_output(path: Path) -> None:
    """Raises RequestError where a file cannot be written once the work is done."""
    if path.is_dir():
        raise RequestError(f"--output {path}: it is a folder; give a file in it")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--output {path}: expected a file in a folder that exists; make {path.parent} first")


def measure(request: Request, mode: Mode | None, show: Show) -> Report:
    """Measures on this machine's GPU. Raises MissingTool without one, WrongResult, and what a DeviceExecutor raises."""
    works, reason = available()
    if not works:
        raise MissingTool(f"{reason}; bench measures, and predicts nothing")
    with contextlib.closing(Executor(mode)) as executor:
        return _Run(request, executor, show).report()


@dataclass(frozen=True)
class _Limits:
    """What a plan asks of the GPU."""

    name: str
    shared_per_block: int
    registers_per_sm: int = 1 << 16
    threads_per_block: int = 1024


@dataclass(frozen=True, eq=False)
class _Place:
    """A level and routing with its calls."""

    tokens: int
    routed: str
    cases: tuple[Case, ...]
    layers: int
    touched: float  # bytes of weights between two uses of one copy, a call of the lightest stage

    @property
    def title(self) -> str:
        return f"C{self.tokens} {self.routed}"


class _Run:
    def __init__(self, request: Request, executor: Executor, show: Show) -> None:
        self._request, self._executor, self._show = request, executor, show
        self._contract = request.contract
        self._layers = Layers(request.contract, request.seed)
        self._weights = self._layers.weights(0)
        self._expert_bytes = [held.nbytes / request.contract.experts for held in (self._weights.w13, self._weights.w2)]
        self._default = space.default(request.contract)
        self._no_dense = ""  # why no level has a dense arm
        self._compiler = ""

    def report(self) -> Report:
        places = [self._place(tokens, name) for tokens in self._request.levels for name in self._request.routings]
        for place in places:  # before anything is timed
            self._verify(place)
        finalists, ceiling = self._finalists(places)
        cells = [self._measured(place, best) for place, best in zip(places, finalists, strict=True)]
        return Report(
            contract=self._contract,
            subjects=self._request.subjects,
            rounds=self._request.rounds,
            seed=self._request.seed,
            executor=self._executor.name,
            gpu=self._executor.info,
            code=self._executor.mode,
            compiler=self._compiler,
            copy_bytes=trial.COPY_L2S * self._executor.info.l2_bytes,
            ceiling=ceiling,
            cells=tuple(cells),
        )

    def _place(self, tokens: int, routed: str) -> _Place:
        seed = self._request.seed
        x = gaussian(self._contract, tokens, seed)
        made = [routing.make(routed, self._contract, tokens, seed * ROUTINGS + i) for i in range(ROUTINGS)]
        touched = min(each.active for each in made) * min(self._expert_bytes)
        layers = layers_needed(self._executor.info.l2_bytes, touched) if touched else 1
        cases = tuple(Case(f"C{tokens}, {each.name}, gaussian", x, each.ids, each.weights) for each in made)
        return _Place(tokens, made[0].name, cases, layers, touched)

    def _configs(self, tokens: int) -> dict[Config, tuple[str, ...]]:
        """Configurations of a level, and whose they are."""
        found: dict[Config, tuple[str, ...]] = {}
        for subject in self._request.subjects:
            config = subject.configs[tokens]
            found[config] = (*found.get(config, ()), subject.name)
        return found

    def _arm(self, made: Plan, stages: tuple[str, ...] = ()) -> Arm:
        return Arm(made, self._executor.images(made), stages)

    # Right before fast

    def _verify(self, place: _Place) -> None:
        """Raises WrongResult unless every arm that computes is right."""
        for config in self._configs(place.tokens):
            subject = verify.Subject(config, self._executor, self._layers)
            for name in _VERIFIED:
                self._show("verify", f"{place.title}: verifying {config.key()}, {name} plan")
                subject.require(0, place.cases[0], name)

    def _dense(self, place: _Place) -> tuple[DenseSteps | None, str]:
        """The dense arm's steps, or why there are none."""
        if self._no_dense:
            return None, self._no_dense
        named = verify.operands(plan.make(self._contract, self._default), self._weights, place.cases[0])
        weights = {name: value for name, value in named.items() if name.startswith(("W13_", "W2_"))}
        steps = [(case.x, case.ids, case.topk_weights) for case in place.cases]
        made = DenseSteps(self._contract, self._executor.held(weights), steps)
        try:
            out = self._executor.dense(made)
        except MissingTool as error:
            self._no_dense = str(error)
            return None, self._no_dense
        except (LaunchFailed, TrialTimeout) as error:
            return None, str(error)
        off = compare(out, self._layers.expected(0, place.cases[0]).exact.output).relative_l2
        if not off <= DENSE_L2:
            return None, f"wrong: relative L2 {off:.3g}, at most {DENSE_L2:.3g} allowed"
        return made, ""

    # The ceiling

    def _finalists(self, places: Sequence[_Place]) -> tuple[list[list[Config]], dict[str, int]]:
        """For each place the configurations whose loads alone seemed fastest; and how many there were."""
        info = self._executor.info
        limits = _Limits(info.name, info.shared_per_block)
        feasible = [c for c in space.candidates(self._contract) if plan.why_invalid(self._contract, c, limits) is None]
        count = len(feasible) if self._request.ceiling is None else min(self._request.ceiling, len(feasible))
        own = [config for tokens in self._request.levels for config in self._configs(tokens)]
        sampled = random.Random(self._request.seed).sample(feasible, count)
        arms, failed = self._loads(list(dict.fromkeys([*own, *sampled])))
        cells = [self._cell(place, ("fused",)) for place in places]
        us: dict[Config, Array] = {}
        for begin in range(0, len(arms), _CHUNK):
            self._show("ceiling", f"loads alone: {begin}/{len(arms)} configurations timed")
            us |= self._screened(arms[begin : begin + _CHUNK], cells)
        if not us:
            raise LaunchFailed("no variant that only loads could be timed: there is no ceiling to hold the op against")
        best = [sorted(us, key=lambda config: us[config][i])[:FINALISTS] for i in range(len(places))]
        return best, {"tried": len(us), "feasible": len(feasible), "failed": failed + len(arms) - len(us)}

    def _loads(self, configs: Sequence[Config]) -> tuple[list[Arm], int]:
        """Built variants that only load, and how many could not be built."""
        plans = [plan.make(self._contract, config, load_only=True) for config in configs]
        self._executor.builds.prefetch([render.render(made)["op"] for made in plans])
        arms = []
        for i, made in enumerate(plans):
            self._show("build", f"loads alone: {i}/{len(plans)} configurations built")
            try:
                arms.append(self._arm(made))
            except BuildFailed:
                continue
        return arms, len(plans) - len(arms)

    def _screened(self, arms: Sequence[Arm], cells: Sequence[Cell]) -> dict[Config, Array]:
        """us [cell] by configuration. Where a job fails, its arms are tried one by one; what fails is left out."""
        try:
            return {arm.plan.config: us for arm, us in zip(arms, self._executor.screen(arms, cells), strict=True)}
        except (LaunchFailed, TrialTimeout, InvalidConfig):
            if len(arms) == 1:
                return {}
        return {config: us for arm in arms for config, us in self._screened([arm], cells).items()}

    # The rounds

    def _cell(self, place: _Place, names: Sequence[PlanName]) -> Cell:
        pools = {}
        for name in names:
            made = plan.make(self._contract, self._default, name)
            pools[name] = [self._executor.held(verify.operands(made, self._weights, case)) for case in place.cases]
        return Cell(place.tokens, pools, place.layers)

    def _measured(self, place: _Place, loads: Sequence[Config]) -> Measured:
        self._show("rounds", f"{place.title}: {self._request.rounds} interleaved rounds")
        rows, arms = self._arms(place, loads)
        self._compiler = next(iter(arms[0].images.values())).compiler
        steps, why = self._dense(place)
        cell = self._cell(place, ("fused", "staged", "all-experts"))
        try:
            raw = self._executor.compare(Comparison(cell, arms, steps, self._request.warm, self._request.rounds))
        except (LaunchFailed, TrialTimeout) as error:
            if steps is None:
                raise
            steps, why = None, str(error)  # ours again without it
            raw = self._executor.compare(Comparison(cell, arms, None, self._request.warm, self._request.rounds))
        if steps is not None:
            rows.append(Row(DENSE))
        count = len(rows)
        columns = raw.us[:, :, 0]
        timed = [
            replace(
                row,
                cold=Quantiles.of(columns[i]),
                warm=Quantiles.of(columns[count + 1 + i]) if self._request.warm else None,
            )
            for i, row in enumerate(rows)
        ]
        others = [row for row in timed if row.arm != LOADS]
        best = min((row for row in timed if row.arm == LOADS), key=lambda row: row.cold.us if row.cold else 0.0)
        active = [len(np.unique(case.ids)) for case in place.cases]
        mean = float(np.mean(active))
        cold = {
            "cold_bytes": int((raw.layers - 1) * place.touched),
            "cold_wanted_bytes": COLD * self._executor.info.l2_bytes,
        }
        return Measured(
            tokens=place.tokens,
            routing=place.routed,
            active=(mean, min(active), max(active)),
            bytes=mean * sum(self._expert_bytes),
            rows=(*others, *((Row(DENSE, missing=why),) if steps is None else ()), best),
            copy_us=tuple(round(float(us), 4) for us in columns[count]),
            details={**raw.details, **cold},
        )

    def _arms(self, place: _Place, loads: Sequence[Config]) -> tuple[list[Row], list[Arm]]:
        rows, arms = [], []

        def add(row: Row, made: Plan, *stages: str) -> None:
            rows.append(row)
            arms.append(self._arm(made, stages))

        for config, names in self._configs(place.tokens).items():
            staged = plan.make(self._contract, config, "staged")
            add(Row(OP, names, config.key()), plan.make(self._contract, config))
            if len(rows) == 1:  # it is the same for every configuration
                add(Row(COMPACT), staged, "compact")
            add(Row(W13, names, config.key()), staged, "w13")
            add(Row(W2, names, config.key()), staged, "w2")
            add(Row(ALL_EXPERTS, names, config.key()), plan.make(self._contract, config, "all-experts"))
        for config in loads:
            add(Row(LOADS, (), config.key()), plan.make(self._contract, config, load_only=True))
        return rows, arms
