"""Fits the model's numbers to measurements, and says how good its predictions are.

    python -m tuner.calibrate report FILE...       quality of the model as it is, level by level
    python -m tuner.calibrate fit FILE...          fits Fit to the levels of FIT_LEVELS, prints it and the quality
    python -m tuner.calibrate import LEDGER FILE   a tuning ledger as such a file; builds each kernel anew

A file is CSV under lines `# name: value`, of which `contract` and `device` are read; a row is one configuration timed
at one level. Files of several contracts or GPUs may be given together; a V100's kernels are built and executed here, as
its predictions rest on what they do (tuner/items.py). The fit is a pattern search over the
logarithms of the numbers. Quality is within a level (one contract, GPU, token count and routing), over kernels:
configurations that give the same kernel count once.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from tuner import build, contract, items, model, plan, render, routing, sass, space
from tuner.contract import Contract
from tuner.errors import RequestError, VoltuneError
from tuner.model import FITTED, Fit, Resources, Work
from tuner.space import Config

COLUMNS = ("tokens", "routing", "config", "us", "registers", "spill_bytes", "shared")
FIT_LEVELS = (1, 4, 20)  # tokens, under uniform routing; all else is held out
FIT_ROUTING = "uniform"
SEEDS = (0, 1, 2)  # of the routings a level is predicted for
TOP = 8  # of the model's favourites, whose best is compared with the measured best
GROSS = 0.3  # of a logarithm: an error beyond it counts a tenth, so that a few kernels do not bend the fit
STEP, ROUNDS = 0.2, 14  # of the search: first change of a number; passes over all numbers
BOUNDS = {"issue": (0.1, 1.0), "dram": (0.1, 1.0)}


@dataclass(frozen=True)
class Level:
    """What configurations are compared at."""

    contract: Contract
    device: str  # of devices.toml
    tokens: int
    routing: str

    @property
    def held_out(self) -> bool:
        return not (self.tokens in FIT_LEVELS and self.routing == FIT_ROUTING)

    def __str__(self) -> str:
        return f"{self.contract.name}, {self.device}, {self.tokens} tokens, {self.routing}"


@dataclass(frozen=True)
class Observation:
    """One kernel timed at one level."""

    level: Level
    plan: plan.Plan
    resources: Resources
    us: float
    work: Work | None = None

    def predicted(self, fit: Fit) -> float:
        """Microseconds."""
        level = self.level
        pool = _pool(level.contract, level.routing, level.tokens)
        dev = model.device(level.device)
        made, held, tokens = self.plan, self.resources, level.tokens
        return model.predict_op(level.contract, made, held, pool, tokens, dev, fit=fit, work=self.work).us


Timed = tuple[int, str, str, float, Resources]  # tokens, routing, the configuration's key, us, what its kernel takes


@dataclass(frozen=True)
class Quality:
    """How well a level's kernels are predicted. `regret`: how much slower the best measured of the model's TOP is than
    the best measured of all; `first` the same of the model's favourite. `error`: median |predicted / measured - 1|."""

    level: Level
    kernels: int
    spearman: float
    regret: float
    first: float
    error: float

    def __str__(self) -> str:
        held = "held out" if self.level.held_out else "fitted  "
        return (
            f"{held} {self.level!s:42} {self.kernels:4} kernels  Spearman {self.spearman:.3f}  "
            f"top {TOP} +{self.regret:.1%}  top 1 +{self.first:.1%}  median error {self.error:.1%}"
        )


@cache
def _pool(of: Contract, name: str, tokens: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    return tuple((tuple(routing.make(name, of, tokens, seed).rows_per_segment), 1.0) for seed in SEEDS)


@cache
def counted(of: Contract, config: Config, device: str) -> Work | None:
    """What the op's kernel does, built and executed here, where the GPU runs sm_70 code; None for another GPU, and for
    a kernel that spills: its pointers are not followed through local memory. Raises as build.build and items.work."""
    if model.device(device).arch != sass.ARCH:
        return None
    image = build.build(render.render_op(of, config))
    return None if image.spill_bytes else items.work(of, config, image)


def read(paths: Iterable[Path]) -> list[Observation]:
    """The files' kernels; the mean of a kernel's timings.

    Raises RequestError for a file that is none of these; and as `counted` does, for those of a V100.
    """
    found: dict[tuple[Level, str], list[tuple[plan.Plan, Resources, float]]] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        said = dict(line[1:].split(":", 1) for line in lines if line.startswith("#") and ":" in line)
        said = {name.strip(): value.strip() for name, value in said.items()}
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        if not {"contract", "device"} <= said.keys() or not rows or tuple(rows[0]) != COLUMNS:
            raise RequestError(
                f"{path}: expected lines '# contract: NAME' and '# device: NAME', then CSV with {','.join(COLUMNS)}"
            )
        of, device = contract.load(said["contract"]), model.device(said["device"]).name
        for row in rows:
            config = space.parse(row["config"])
            level = Level(of, device, int(row["tokens"]), row["routing"])
            resources = Resources(int(row["registers"]), int(row["shared"]), int(row["spill_bytes"]))
            # `resident` is only in the kernel as CTAs an SM.
            same = f"{config.w13.key()}+{config.w2.key()}/{max(1, config.resident // config.w13.threads)}"
            found.setdefault((level, same), []).append((plan.make(of, config), resources, float(row["us"])))
    return [
        Observation(
            *(level, *timed[0][:2], statistics.fmean(us for _, _, us in timed)),
            counted(level.contract, timed[0][0].config, level.device),
        )
        for (level, _), timed in found.items()
    ]


def quality(observations: Sequence[Observation], fit: Fit = FITTED) -> list[Quality]:
    """Of each level, fitted levels first."""
    levels: dict[Level, list[Observation]] = {}
    for each in observations:
        levels.setdefault(each.level, []).append(each)
    found = []
    for level, kernels in sorted(levels.items(), key=lambda item: (item[0].held_out, str(item[0]))):
        measured = [each.us for each in kernels]
        predicted = [each.predicted(fit) for each in kernels]
        favourites = [us for _, us in sorted(zip(predicted, measured, strict=True))]
        found.append(
            Quality(
                level,
                len(kernels),
                spearman(predicted, measured),
                min(favourites[:TOP]) / min(measured) - 1,
                favourites[0] / min(measured) - 1,
                statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)),
            )
        )
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing theirs; 0 where one side is all ties."""
    ranks = [[(sum(y < x for y in side) + sum(y <= x for y in side)) / 2 for x in side] for side in (a, b)]
    if any(len(set(side)) < 2 for side in ranks):
        return 0.0
    return statistics.correlation(*ranks)


def loss(observations: Sequence[Observation], fit: Fit) -> float:
    """Mean error of the logarithm, a tenth of it beyond GROSS."""
    errors = [abs(math.log(each.predicted(fit) / each.us)) for each in observations]
    return statistics.fmean(min(error, GROSS) + 0.1 * max(0.0, error - GROSS) for error in errors)


def search(observations: Sequence[Observation], start: Fit = FITTED, rounds: int = ROUNDS, step: float = STEP) -> Fit:
    """A Fit with less loss on the fitted levels: a number at a time, by a factor that shrinks when it no longer helps.

    Raises RequestError where no observation is of a fitted level.
    """
    fitted = [each for each in observations if not each.level.held_out]
    if not fitted:
        raise RequestError(f"nothing to fit: no timing at {FIT_LEVELS} tokens under {FIT_ROUTING} routing")
    best, least = start, loss(fitted, start)
    steps = {field.name: step for field in fields(Fit)}
    for _ in range(rounds):
        before = asdict(best)
        for name in steps:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                trial = _within(replace(best, **{name: getattr(best, name) * factor}))
                found = loss(fitted, trial)
                if found < least:
                    best, least = trial, found
                    break
            else:
                steps[name] /= 2
        # Numbers that trade off against one another move together: the whole pass again, while that helps.
        moves = {name: value / before[name] for name, value in asdict(best).items()}
        while best != Fit(**before):
            trial = _within(Fit(**{name: value * moves[name] for name, value in asdict(best).items()}))
            found = loss(fitted, trial)
            if found >= least:
                break
            best, least = trial, found
    return Fit(**{name: float(f"{value:.4g}") for name, value in asdict(best).items()})


def _within(fit: Fit) -> Fit:
    """The Fit within BOUNDS."""
    return replace(fit, **{name: min(high, max(low, getattr(fit, name))) for name, (low, high) in BOUNDS.items()})


def from_ledger(ledger: Path, of: Contract | None = None) -> str:
    """A file's text with a ledger's trials, a row a routing where they are told apart.

    `of`: the contract, by default the built-in one of the ledger's digest. Kernels are built for the GPU that the
    timings name. Raises RequestError for what is no ledger of measurements, BuildFailed and MissingTool as build does.
    """
    try:
        rows = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise RequestError(f"{ledger}: not a ledger ({error})") from error
    digest = rows[0].get("contract") if rows else None
    known = {each.digest(): each for each in contract.builtin().values()}
    of = of or known.get(str(digest))
    if of is None or of.digest() != digest:
        raise RequestError(f"{ledger}: made for the contract {digest}, which is not built in; give its file")
    trials = [row for row in rows if row.get("kind") == "trial" and row.get("timing")]
    devices = {str(row["timing"]["device"]) for row in trials}
    if len(devices) != 1 or any(row["timing"]["word"] != "measured" for row in trials):
        raise RequestError(f"{ledger}: expected measured trials of one device, found {sorted(devices)}")
    (device,) = devices
    arch = model.device(device).arch
    timed: list[Timed] = []
    for row in trials:
        made = plan.make(of, space.parse(row["key"]))
        image = build.build(render.render(made)["op"], arch)
        held = Resources.of(image, made.launch("op"), row["tokens"])
        timed += [(row["tokens"], name, row["key"], us, held) for name, us in _routed(of, row["timing"])]
    said = {"method": "trials of a tuning ledger, cold CUDA graph"}
    said["registers and spills"] = f"{build.compiler().name} for {arch}"
    return text(of, device, said, timed)


def text(of: Contract, device: str, said: Mapping[str, str], rows: Iterable[Timed]) -> str:
    """A file of measurements, as `read` takes it. said: what else its first lines say."""
    found = io.StringIO()
    for name, value in {"contract": of.name, "device": device, **said}.items():
        found.write(f"# {name}: {value}\n")
    out = csv.writer(found, lineterminator="\n")
    out.writerow(COLUMNS)
    for tokens, routed, key, us, held in rows:
        out.writerow((tokens, routed, key, f"{us:.3f}", held.registers, held.spill_bytes, held.shared))
    return found.getvalue()


def _routed(of: Contract, timing: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    details = timing.get("details")
    routed = details.get("us_by_routing") if isinstance(details, Mapping) else None
    if isinstance(routed, Mapping):
        yield from ((str(name), float(us)) for name, us in routed.items())
    elif len(of.routings) == 1:
        yield of.routings[0][0], float(str(timing["us"]))
    else:
        raise RequestError("a trial's timing does not tell the contract's routings apart (details.us_by_routing)")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tuner.calibrate", description="Fits and judges the model.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("report", "judge the model as it is"), ("fit", "fit its numbers, print and judge them")):
        commands.add_parser(name, help=text).add_argument("files", type=Path, nargs="+")
    imports = commands.add_parser("import", help="write a tuning ledger's trials as a file of measurements")
    imports.add_argument("ledger", type=Path)
    imports.add_argument("file", type=Path)
    imports.add_argument("--contract", help="name or TOML file, where the ledger's is not built in")
    given = parser.parse_args(arguments)
    try:
        _obey(given)
    except (OSError, UnicodeDecodeError, VoltuneError) as error:
        parser.error(str(error))


def _obey(given: argparse.Namespace) -> None:
    if given.command == "import":
        of = contract.load(given.contract) if given.contract else None
        given.file.write_text(from_ledger(given.ledger, of), encoding="utf-8")
        return
    observations = read(given.files)
    fit = search(observations) if given.command == "fit" else FITTED
    if given.command == "fit":
        print("\n".join(f"    {name}: float = {value:g}" for name, value in asdict(fit).items()))
    for each in quality(observations, fit):
        print(each)


if __name__ == "__main__":
    main()
