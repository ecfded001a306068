"""The main job, `tune`: the pipeline's stages, joined."""

import datetime
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tuner import build, choose, evaluate, host, model, plan, render, search, verify, winners
from tuner.contract import Contract
from tuner.device import available
from tuner.errors import MissingTool, RequestError, VoltuneError
from tuner.evaluate import ModelEvaluator
from tuner.ledger import Ledger
from tuner.measure import DeviceEvaluator, DeviceExecutor
from tuner.options import CodeName
from tuner.search import SearchInterrupted
from tuner.space import Config
from tuner.verify import HostExecutor, Layers, Verdict
from tuner.winners import Winners

EvaluatorName = Literal["auto", "device", "model"]
Show = Callable[[str, str], None]  # (phase, line): a line of progress, and which phase it belongs to
NOTE = "note"  # the phase of a line that is to stay

DEFAULT_GPU = "V100-PCIE-32GB"
WINNER_HEADERS = (
    *("tokens", "W13", "W2", "resident", "us", "floor us", "of floor", "default us", "registers", "verdict"),
    *("all experts us", "note"),
)


@dataclass(frozen=True)
class Request:
    """One `tune`. `gpu` is what the model predicts for, DEFAULT_GPU where None."""

    contract: Contract
    levels: tuple[int, ...]
    output: Path
    trials: int | None = None
    budget_s: float | None = None
    evaluator: EvaluatorName = "auto"
    gpu: str | None = None
    code: CodeName = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Done:
    """What a `tune` leaves."""

    winners: Winners
    folder: Path
    headline: str
    footnotes: tuple[str, ...]


@dataclass(frozen=True)
class _Bench:
    """What times and verifies, and for what: `toolchain` is what the results depend on besides the sources."""

    evaluator: ModelEvaluator | DeviceEvaluator
    executor: verify.Executor
    layers: Layers
    gpu: model.Device
    target: str
    toolchain: Mapping[str, str] = field(default_factory=dict)


def tune(request: Request, show: Show) -> Done:
    """Search, choose, verify, and write the set; a second time, answer from the ledger.

    Raises SearchInterrupted on Ctrl-C, RequestError where options contradict each other or the output holds another
    run's set, and any other VoltuneError.
    """
    try:
        if not _measures(request):
            return _predict(request, show)
        with DeviceExecutor(None if request.code == "auto" else request.code) as device:
            return _measure(request, device, show)
    except KeyboardInterrupt:
        raise SearchInterrupted("stopped; run the same command to go on from the ledger's last trial") from None


def _measures(request: Request) -> bool:
    """Whether a GPU of this machine is timed; a GPU that is named is predicted for."""
    if request.evaluator == "device" and request.gpu is not None:
        raise RequestError(
            f"--gpu {request.gpu} is what the model predicts for, and --evaluator device measures on this machine's "
            "own GPU: leave one of them out"
        )
    found, reason = available()
    if request.evaluator == "device" and not found:
        raise MissingTool(f"{reason}; --evaluator model predicts without one")
    if request.evaluator == "device" or (request.evaluator == "auto" and request.gpu is None and found):
        return True
    if request.code != "auto":
        raise RequestError(
            f"--code {request.code} says what this machine's GPU runs, and this run would predict without one: "
            "leave it out, or give --evaluator device"
        )
    return False


def _predict(request: Request, show: Show) -> Done:
    host.require_compiler()  # winners are verified with it: not found out after the search
    described = model.device(request.gpu or DEFAULT_GPU)
    evaluator = ModelEvaluator(request.contract, described)
    bench = _Bench(
        evaluator,
        HostExecutor(),
        Layers(request.contract, request.seed),
        described,
        winners.target(described.name, evaluator.word),
        {"model": evaluator.fingerprint},
    )
    made, folder = _run(request, bench, show)
    headline = (
        f"{request.contract.name}: PREDICTED for {described.name} by a model; nothing here was measured. "
        f"Kernels built for {described.arch} by {made.toolchain['compiler']}, verified by emulation on the CPU."
    )
    return Done(made, folder, headline, (*_notes(made, folder), "On a machine with the GPU the same command measures."))


def _measure(request: Request, device: DeviceExecutor, show: Show) -> Done:
    layers = Layers(request.contract, request.seed)
    evaluator = DeviceEvaluator(request.contract, device, layers, seed=request.seed)
    bench = _Bench(
        evaluator,
        device,
        layers,
        model.device(device.info.name),
        winners.target(device.info.name, evaluator.word),
        {"driver": device.info.driver, "code": device.mode},
    )
    made, folder = _run(request, bench, show)
    headline = (
        f"{request.contract.name}: MEASURED on {device.info.name} (driver {device.info.driver}), {device.name}, "
        "CUDA graph, cold weights; every kernel verified there before it was timed."
    )
    return Done(made, folder, headline, _notes(made, folder))


def _notes(made: Winners, folder: Path) -> tuple[str, ...]:
    """What stands under the table of winners."""
    notes = []
    if any(level.ambiguous for level in made.levels.values()):
        saved = f"{choose.MARGIN:.0%}"
        notes.append(f"AMBIGUOUS: something looked faster than the default by less than {saved}; the default stays.")
    alone = [str(tokens) for tokens, level in sorted(made.levels.items()) if level.default_us is None]
    if alone:
        notes.append(f"At {', '.join(alone)} tokens the default failed, and nothing is compared with it.")
    return (*notes, f"Winners: {folder}; every trial: {folder}.jsonl")


def _run(request: Request, bench: _Bench, show: Show) -> tuple[Winners, Path]:
    contract, evaluator = request.contract, bench.evaluator
    folder = request.output / contract.name / bench.target
    toolchain = {
        "compiler": build.compiler().name,
        "templates": templates_digest(),
        "seed": str(request.seed),
        **bench.toolchain,
    }
    circumstances = search.circumstances(contract, evaluator, **toolchain)
    file = folder.with_name(f"{folder.name}.jsonl")
    with Ledger.open(file, contract=contract.digest(), target=bench.target, circumstances=circumstances) as ledger:
        for note in ledger.notes:
            show(NOTE, note)
        winners.check_ours(ledger.id, folder)
        earlier = _earlier(folder, request.levels, toolchain, show)
        job = search.Job(
            contract=contract,
            levels=request.levels,
            trials=request.trials,
            budget_s=request.budget_s,
            seed=request.seed,
            incumbents={} if earlier is None else {tokens: each.config for tokens, each in earlier.levels.items()},
            guesses=lambda tokens: evaluate.guesses(contract, tokens, bench.gpu),
            why_invalid=lambda config: plan.why_invalid(contract, config, bench.gpu),
        )

        def progress(at: search.Progress) -> None:
            show(f"{at.tokens}/{at.phase}", _line(at, evaluator.word))

        def verdicts(config: Config, tokens: int) -> Iterator[Verdict]:
            routings = tuple(dict.fromkeys([*(each for each, _ in contract.routings), "single-hot"]))
            return verify.verify(
                bench.layers,
                config,
                bench.executor,
                ranks=(0,),
                tokens=(tokens,),
                routings=routings,
                inputs=("gaussian",),
                orders=choose.orders(tokens),
                seed=request.seed,
            )

        results = search.tune(job, evaluator, ledger, progress)
        chosen = choose.winners(job, results, evaluator, ledger, verdicts, progress)
        made = winners.gather(
            contract,
            bench.target,
            evaluator,
            chosen,
            registers=lambda config: evaluator.image(config).registers,
            floor=lambda tokens: evaluate.floor(contract, tokens, bench.gpu),
            toolchain=toolchain,
            date=datetime.date.today().isoformat(),
            ledger=ledger.id,
        )
        if isinstance(evaluator, DeviceEvaluator):
            made = _with_baseline(made, evaluator, ledger, show)
        made = _joined(made, earlier)
        winners.write(made, folder)
    return made, folder


def _earlier(folder: Path, asked: Sequence[int], toolchain: Mapping[str, str], show: Show) -> Winners | None:
    """The set that an earlier run of the same toolchain left, whose other levels are kept."""
    if not (folder / winners.MANIFEST).exists():
        return None
    try:
        found = winners.read(folder)
    except RequestError as error:
        show(NOTE, f"{error}; it is made anew")
        return None
    others = sorted(set(found.levels) - set(asked))
    if found.toolchain == toolchain:
        return found
    if others:
        changed = sorted({key for key, _ in toolchain.items() ^ found.toolchain.items()})
        show(
            NOTE,
            f"{folder}: its levels {', '.join(map(str, others))} were tuned under other circumstances "
            f"({', '.join(changed)}) and leave the set: tune them again to have them back",
        )
    return None


def _joined(made: Winners, earlier: Winners | None) -> Winners:
    """With the earlier set's other levels; with its date where nothing else changed, so that its bytes stay."""
    if earlier is None:
        return made
    made = replace(made, levels={**earlier.levels, **made.levels})
    same = replace(made, date=earlier.date)
    return same if winners.manifest(same) == winners.manifest(earlier) else made


def _with_baseline(made: Winners, evaluator: DeviceEvaluator, ledger: Ledger, show: Show) -> Winners:
    """Each level with the time that its tiles take when they walk every expert."""
    known = {(row["tokens"], row["key"]): row for row in ledger.rows("all-experts")}
    levels = dict(made.levels)
    for tokens, level in made.levels.items():
        key = level.config.key()
        if (tokens, key) not in known:
            show("baseline", f"C{tokens}: timing the winner's tiles over all {made.contract.experts} experts")
            try:
                timing = evaluator.all_experts(level.config, tokens)
            except (RequestError, MissingTool):
                raise
            except VoltuneError as error:  # the winner stands without it
                show(NOTE, f"C{tokens}: the tiles could not be timed over all experts: {error}")
                continue
            known[tokens, key] = ledger.append("all-experts", tokens=tokens, key=key, timing=timing.to_dict())
        levels[tokens] = replace(level, all_experts=known[tokens, key]["timing"])
    return replace(made, levels=levels)


def _line(at: search.Progress, word: str) -> str:
    best = "" if at.best_us is None else f", best {word} {at.best_us:.2f} us"
    left = "" if at.remaining_s is None else f", about {datetime.timedelta(seconds=round(at.remaining_s))} left"
    return f"C{at.tokens} {at.phase}: {at.done}/{at.planned}{best}{left}"


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
        ok = sum(verdict["ok"] for verdict in level.verdicts)
        yield (
            tokens,
            level.config.w13.key(),
            level.config.w2.key(),
            level.config.resident,
            level.us,
            level.floor_us,
            f"{level.floor_share:.0%}",
            level.default_us,
            level.registers,
            f"ok {ok}/{len(level.verdicts)}",
            None if level.all_experts is None else level.all_experts["us"],
            "AMBIGUOUS" if level.ambiguous else "",
        )
