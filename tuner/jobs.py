"""What the command line's long commands do: the pipeline's stages, joined."""

import contextlib
import datetime
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tuner import build, choose, evaluate, model, plan, render, search, space, verify, winners
from tuner.contract import Contract
from tuner.device import available
from tuner.errors import InvalidConfig, RequestError
from tuner.evaluate import ModelEvaluator
from tuner.ledger import Ledger
from tuner.measure import DeviceEvaluator, DeviceExecutor
from tuner.space import STAGES, Config, Stage, StageConfig
from tuner.verify import HostExecutor, Layers, Verdict
from tuner.winners import LevelWinner, Winners

EvaluatorName = Literal["auto", "device", "model"]
ExecutorName = Literal["host", "device"]
CodeName = Literal["auto", "cubin", "ptx", "native"]
Show = Callable[[str, str], None]  # (phase, line): a line of progress, and which phase it belongs to

DEFAULT_GPU = "V100-PCIE-32GB"
ROOT = Path(__file__).parent.parent
WINNER_HEADERS = (
    *("tokens", "W13", "W2", "us", "floor us", "of floor", "default us", "registers", "verdict"),
    *("one graph us", "all experts us", "note"),
)


def levels(contract: Contract, text: str | None) -> tuple[int, ...]:
    """Token counts named by "8", "2-8" or "1,2,4"; the contract's own without a text. Raises RequestError."""
    if text is None:
        return contract.levels
    wanted: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise RequestError(f"concurrency {text!r}: expected token counts such as 8, 2-8 or 1,2,4")
        first, last = int(match[1]), int(match[2] or match[1])
        within = {level for level in contract.levels if first <= level <= last}
        if not within or (match[2] is None and first not in contract.levels):
            raise RequestError(
                f"concurrency {part.strip()!r}: contract {contract.name} has the levels "
                f"{', '.join(map(str, contract.levels))}; name some of them, or add levels to the contract"
            )
        wanted |= within
    return tuple(sorted(wanted))


def seconds(text: str | None) -> float | None:
    """Seconds of "90s", "10m" or "2h". Raises RequestError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise RequestError(f"budget {text!r}: expected a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class Configs:
    """A configuration for each level, and where they come from in words."""

    by_level: Mapping[int, Config]
    origin: str


def configs(contract: Contract, key: str | None, folder: Path | None, wanted: Sequence[int]) -> Configs:
    """The configuration `key` names, else the winners of the set in `folder`, else of the first set found, else the
    default. Raises RequestError where the key or the set does not fit the contract."""
    if key is not None:
        try:
            chosen = space.parse(key)
            plan.make(contract, chosen)
        except InvalidConfig as error:
            raise RequestError(str(error)) from None
        return Configs(dict.fromkeys(wanted, chosen), key)
    for place in [folder] if folder else _sets(contract):
        found = winners.read(place)
        if found.contract.digest() == contract.digest():
            default = space.default(contract)
            chosen_by = {n: found.levels[n].config if n in found.levels else default for n in wanted}
            missing = [str(n) for n in wanted if n not in found.levels]
            origin = f"winners of {place}" + (f", default at {', '.join(missing)}" if missing else "")
            return Configs(chosen_by, origin)
        if folder:
            raise RequestError(
                f"{folder} is tuned for a contract with digest {found.contract.digest()}, and {contract.name} has "
                f"{contract.digest()}: give a set of this contract, or --config"
            )
    return Configs(dict.fromkeys(wanted, space.default(contract)), "default")


def _sets(contract: Contract) -> list[Path]:
    """Folders of sets of a contract of that name: a user's own before the checked-in ones, V100s before others."""
    found = [
        p.parent
        for base in (Path("tuned"), ROOT / "generated")
        for p in base.glob(f"{contract.name}/*/{winners.MANIFEST}")
    ]
    return sorted(found, key=lambda p: (not p.is_relative_to("tuned"), not p.name.startswith("v100"), p.name))


@contextlib.contextmanager
def executor(name: ExecutorName, code: CodeName) -> Iterator[verify.Executor]:
    """What runs kernels: the CPU, or this machine's GPU. Raises MissingTool."""
    if name == "host":
        yield HostExecutor()
        return
    with DeviceExecutor(None if code == "auto" else code) as device:
        yield device


def target(device_name: str, word: str) -> str:
    """A set's folder name: the GPU without brand, memory size and its commonest socket, and the word.

    >>> target("V100-PCIE-32GB", "predicted"), target("NVIDIA H200", "measured"), target("V100-SXM2-32GB", "predicted")
    ('v100-predicted', 'h200-measured', 'v100-sxm2-predicted')
    """
    slug = re.sub(r"^(nvidia|tesla)[ -]+|[ -]\d+gb$", "", device_name.lower().strip())
    slug = re.sub(r"^(nvidia|tesla)[ -]+", "", slug).removesuffix("-pcie")
    return f"{re.sub(r'[^a-z0-9]+', '-', slug)}-{word}"


@dataclass(frozen=True)
class Request:
    """One `tune`."""

    contract: Contract
    levels: tuple[int, ...]
    trials: int | None
    budget_s: float | None
    evaluator: EvaluatorName
    gpu: str
    code: CodeName
    seed: int
    output: Path


@dataclass(frozen=True)
class Done:
    """What a `tune` leaves."""

    winners: Winners
    folder: Path
    headline: str
    footnotes: tuple[str, ...]


def tune(request: Request, show: Show) -> Done:
    """Search, choose, verify, and write the set. Raises any VoltuneError."""
    on_gpu, reason = available()
    if request.evaluator == "model" or (request.evaluator == "auto" and not on_gpu):
        return _predict(request, show)
    del reason
    with DeviceExecutor(None if request.code == "auto" else request.code) as device:
        return _measure(request, device, show)


def _predict(request: Request, show: Show) -> Done:
    described = model.device(request.gpu)
    evaluator = ModelEvaluator(request.contract, described)

    def registers(stage: Stage, config: StageConfig) -> int:
        return evaluator.image(stage, config).registers

    made, folder = _run(
        request,
        show,
        evaluator,
        HostExecutor(),
        described,
        registers,
        target(described.name, "predicted"),
        {"model": evaluator.fingerprint},
    )
    headline = (
        f"{request.contract.name}: PREDICTED for {described.name} by a model; nothing here was measured. "
        f"Kernels built for sm_70 by {made.toolchain['compiler']}, verified by emulation on the CPU."
    )
    return Done(made, folder, headline, (_where(folder), "On a V100 the same command measures instead."))


def _measure(request: Request, device: DeviceExecutor, show: Show) -> Done:
    described = model.device(device.info.name)
    layers = Layers(request.contract, request.seed)
    evaluator = DeviceEvaluator(request.contract, device, layers, seed=request.seed)

    def registers(stage: Stage, config: StageConfig) -> int:
        return evaluator.image(stage, config).registers

    made, folder = _run(
        request,
        show,
        evaluator,
        device,
        described,
        registers,
        target(device.info.name, "measured"),
        {"driver": device.info.driver, "code": device.mode},
        layers,
    )
    levels = dict(made.levels)
    for tokens in request.levels:
        show(
            "whole", f"C{tokens}: timing the whole op, and the same kernels over all {request.contract.experts} experts"
        )
        level = levels[tokens]
        whole, baseline = evaluator.whole((level.config, "fused"), (level.config, "all-experts"), tokens=tokens)
        levels[tokens] = replace(level, whole=whole.to_dict(), all_experts=baseline.to_dict())
    made = replace(made, levels=levels)
    winners.write(made, folder)
    headline = (
        f"{request.contract.name}: MEASURED on {device.info.name} (driver {device.info.driver}), {device.name}, "
        "CUDA graph, cold weights; every kernel verified there before it was timed."
    )
    return Done(made, folder, headline, (_where(folder),))


def _where(folder: Path) -> str:
    return f"Winners: {folder}; every trial: {folder}.jsonl"


def _run(
    request: Request,
    show: Show,
    evaluator: search.Evaluator,
    runs: verify.Executor,
    described: model.Device,
    registers: Callable[[Stage, StageConfig], int],
    name: str,
    others: Mapping[str, str],
    layers: Layers | None = None,
) -> tuple[Winners, Path]:
    contract = request.contract
    folder = request.output / contract.name / name
    toolchain = {"compiler": build.compiler().name, "templates": templates_digest(), **others}
    held = layers or Layers(contract, request.seed)
    circumstances = search.circumstances(contract, evaluator, seed=str(request.seed), **toolchain)
    with Ledger.open(
        folder.with_name(f"{folder.name}.jsonl"), contract=contract.digest(), target=name, circumstances=circumstances
    ) as ledger:
        for note in ledger.notes:
            show("note", note)
        earlier = _earlier(folder, ledger.id, toolchain)
        job = search.Job(
            contract=contract,
            levels=request.levels,
            trials=request.trials,
            budget_s=request.budget_s,
            seed=request.seed,
            incumbents={tokens: level.config for tokens, level in earlier.items()},
            why_invalid=lambda stage, config: plan.why_invalid(contract, stage, config, described),
        )

        def progress(at: search.Progress) -> None:
            show(f"{at.tokens}/{at.stage}", _line(at, evaluator.word))

        def verdicts(config: Config, tokens: int) -> Iterator[Verdict]:
            routings = tuple(dict.fromkeys([*(each for each, _ in contract.routings), "single-hot"]))
            yield from verify.verify(
                held, config, runs, ranks=(0,), tokens=(tokens,), routings=routings, inputs=("gaussian",), orders=(0, 1)
            )

        results = search.tune(job, evaluator, ledger, progress)
        chosen = choose.winners(job, results, evaluator, ledger, verdicts, progress)
        made = winners.gather(
            contract,
            name,
            evaluator,
            chosen,
            registers=registers,
            floor=lambda stage, tokens: evaluate.floor(contract, stage, tokens, described),
            toolchain=toolchain,
            date=datetime.date.today().isoformat(),
            ledger=ledger.id,
        )
    made = replace(made, levels={**earlier, **made.levels})
    winners.write(made, folder)
    return made, folder


def _earlier(folder: Path, ledger: str, toolchain: Mapping[str, str]) -> Mapping[int, LevelWinner]:
    """The levels an earlier run of the same ledger and toolchain left, which a run over other levels keeps."""
    if not (folder / winners.MANIFEST).exists():
        return {}
    found = winners.read(folder)
    return found.levels if found.ledger == ledger and found.toolchain == toolchain else {}


def _line(at: search.Progress, word: str) -> str:
    best = "" if at.best_us is None else f", best {word} {at.best_us:.2f} us"
    left = "" if at.remaining_s is None else f", about {datetime.timedelta(seconds=round(at.remaining_s))} left"
    return f"C{at.tokens} {at.stage}: {at.done}/{at.planned}{best}{left}"


def templates_digest() -> str:
    """16 hex digits of every template: kernels rendered by others are other kernels."""
    digest = hashlib.sha256()
    for path in sorted(render.TEMPLATES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def winner_rows(made: Winners) -> Iterator[tuple[object, ...]]:
    """The table `tune` prints, a row a level, under WINNER_HEADERS."""
    for tokens, level in sorted(made.levels.items()):
        w13, w2 = (level.stages[stage] for stage in STAGES)
        ok = sum(verdict["ok"] for verdict in level.verdicts)
        yield (
            tokens,
            level.config.w13.key(),
            level.config.w2.key(),
            level.us,
            level.floor_us,
            f"{level.floor_share:.0%}",
            level.default_us,
            f"{w13.registers}/{w2.registers}",
            f"ok {ok}/{len(level.verdicts)}",
            None if level.whole is None else level.whole["us"],
            None if level.all_experts is None else level.all_experts["us"],
            "AMBIGUOUS" if w13.ambiguous or w2.ambiguous else "",
        )
