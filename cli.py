"""The command line: one function a command; each parses, calls, prints, and holds no logic of its own."""

import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:

    def leave(*_: object) -> None:
        """What click does at Ctrl-C, while modules load: click is not there yet, and they may swallow an exception."""
        os.write(2, b"\nAborted!\n")
        os._exit(1)

    signal.signal(signal.SIGINT, leave)

import errno
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import click
    import numpy.random  # noqa: F401  NumPy would load it at its first use, and lose a Ctrl-C meanwhile

    from tuner import (
        __version__,
        answer,
        bench,
        checks,
        export,
        inspection,
        jobs,
        options,
        plan,
        probe,
        probed,
        render,
        report,
        trial,
        verify,
        winners,
    )
    from tuner import checkpoint as checkpoints
    from tuner import contract as contracts
    from tuner import doctor as doctors
    from tuner import executed as execution
    from tuner.errors import VoltuneError
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: the Python package {missing.name!r} is missing from {sys.executable}: run `make env` and use "
        ".venv/bin/python, or install with `pip install -e .`"
    )


LINE_EVERY_S = 15.0  # of progress that goes to a file


class Group(click.Group):
    """Turns Voltune's failures, and the file system's, into one line on stderr and their exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
        try:
            return super().invoke(ctx)
        except VoltuneError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_status)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has read enough: click ends quietly
            click.echo(f"error: {error.filename or 'input or output'}: {error.strerror or error}", err=True)
            sys.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="voltune", message="%(prog)s %(version)s")
def main() -> None:
    """Generates, verifies and tunes SM70 CUDA kernels for AWQ mixture-of-experts decode.

    Exit status: 0 good, 1 the work failed, 2 the request was wrong.
    """


contract_option = click.option(
    "--contract", "contract_name", required=True, metavar="NAME|FILE", help="A built-in contract, or a TOML file."
)
config_option = click.option(
    "--config",
    "config_key",
    metavar="KEY",
    help="A configuration such as simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512; by default each level's winner in --set.",
)
set_option = click.option(
    "--set",
    "set_folder",
    type=click.Path(path_type=Path),
    help="A tuned set; by default the newest of tuned/ and generated/ for the contract.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
tokens_option = click.option(
    "--concurrency", metavar="LEVELS", help="Token counts, such as 8, 2-8 or 1,2,4; by default the contract's."
)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns without the empty ones; numbers to the right."""
    lines = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    numeric = [all(_is_number(line[i]) for line in lines[1:]) for i in range(len(headers))]
    filled = [any(line[i] not in ("", "-") for line in lines[1:]) for i in range(len(headers))]
    for line in lines:
        cells = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True))
        cells = (cell for cell, keep in zip(cells, filled, strict=True) if keep)
        click.echo("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("-").replace(".", "", 1).replace("e-", "", 1).rstrip("%").isdigit()


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))


@main.command("contracts")
@click.argument("name", required=False, metavar="[NAME|FILE]")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also check that this Hugging Face checkpoint is AWQ and fits the contract; no weight is read.",
)
@json_option
def contracts_command(name: str | None, checkpoint: Path | None, as_json: bool) -> None:
    """List the built-in contracts, or show and check one."""
    if name is None and checkpoint is not None:
        raise click.UsageError("--checkpoint: name the contract that it shall fit")
    if name is None:
        found = contracts.builtin()
        if as_json:
            print_json({key: value.to_dict() | {"digest": value.digest()} for key, value in found.items()})
            return
        table(
            ("contract", "model", "TP", "experts", "top-k", "hidden", "intermediate", "group", "layout", "levels"),
            (
                (
                    *(c.name, c.model, c.tensor_parallel, c.experts, c.top_k, c.hidden, c.intermediate, c.group),
                    *(c.layout, f"{c.levels[0]}..{c.levels[-1]}"),
                )
                for c in found.values()
            ),
        )
        return
    chosen = contracts.load(name)
    fit = None if checkpoint is None else checkpoints.check(checkpoint, chosen)
    if as_json:
        found_there = {} if fit is None else {"checkpoint": {"path": fit.path, "layers": list(fit.layers)}}
        print_json(chosen.to_dict() | {"digest": chosen.digest()} | found_there)
        return
    for key, value in inspection.describe(chosen):
        click.echo(f"{key:<22} {value}")
    if fit is not None:
        click.echo(f"{'checkpoint':<22} fits: AWQ GEMM, experts in {len(fit.layers)} layers from {fit.path}")


@main.command("tune")
@contract_option
@tokens_option
@click.option(
    "--trials", type=click.IntRange(min=1), default=32, show_default=True, help="Configurations a level, at most."
)
@click.option("--budget", metavar="TIME", help="Time for all trials, such as 90s, 10m or 2h; verdicts come on top.")
@click.option(
    "--evaluator",
    type=click.Choice(("auto", "device", "model")),
    default="auto",
    show_default=True,
    help="device measures on this machine's GPU; model predicts for --gpu; auto measures where there is a GPU "
    "and no --gpu is named.",
)
@click.option("--gpu", metavar="NAME", help=f"The described GPU to predict for; by default {jobs.DEFAULT_GPU}.")
@click.option(
    "--code",
    type=click.Choice(("auto", "cubin", "ptx", "native")),
    default="auto",
    show_default=True,
    help="What a GPU runs: sm_70 code, its PTX, or a build for that GPU; auto is cubin on a V100, else ptx.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of routings, inputs and the search's order.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("tuned"),
    show_default=True,
    help="The set goes to OUTPUT/<contract>/<target>, with the ledger that a later run resumes from.",
)
@json_option
def tune_command(
    contract_name: str,
    concurrency: str | None,
    trials: int,
    budget: str | None,
    evaluator: jobs.EvaluatorName,
    gpu: str | None,
    code: options.CodeName,
    seed: int,
    output: Path,
    as_json: bool,
) -> None:
    """Tune a contract's kernels and write the verified winners."""
    chosen = contracts.load(contract_name)
    request = jobs.Request(
        contract=chosen,
        levels=options.levels(chosen, concurrency),
        trials=trials,
        budget_s=options.seconds(budget),
        evaluator=evaluator,
        gpu=gpu,
        code=code,
        seed=seed,
        output=output,
    )
    with progress_line() as show:
        done = jobs.tune(request, show)
    if as_json:
        print_json(json.loads(winners.manifest(done.winners)) | {"folder": str(done.folder)})
        return
    click.echo(done.headline)
    table(jobs.WINNER_HEADERS, jobs.winner_rows(done.winners))
    for line in done.footnotes:
        click.echo(line)


@contextmanager
def progress_line() -> Iterator[jobs.Show]:
    """One line on stderr, rewritten on a terminal; elsewhere a new one a phase and every so often. Notes stay."""
    last, said = "", 0.0

    def show(key: str, text: str) -> None:
        nonlocal last, said
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", nl=key == jobs.NOTE, err=True)
        elif key == jobs.NOTE or key != last or time.monotonic() - said > LINE_EVERY_S:
            click.echo(text, err=True)
            said = time.monotonic()
        last = key

    try:
        yield show
    finally:
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", nl=False, err=True)


@main.command("render")
@contract_option
@config_option
@set_option
@tokens_option
@click.option(
    "--plan",
    "plan_name",
    type=click.Choice(plan.PLANS),
    default="fused",
    show_default=True,
    help="fused: the op in one launch; the others: its stages alone, after a compaction.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the .cu files there; by default they are printed.",
)
@json_option
def render_command(
    contract_name: str,
    config_key: str | None,
    set_folder: Path | None,
    concurrency: str | None,
    plan_name: plan.PlanName,
    output: Path | None,
    as_json: bool,
) -> None:
    """Render the CUDA sources of a configuration."""
    chosen = contracts.load(contract_name)
    if output is not None:
        output = options.output_folder(output)
    configs = options.configs(chosen, config_key, set_folder, options.levels(chosen, concurrency))
    sources = {
        source.file_name: source
        for config in configs.by_level.values()
        for source in render.render(plan.make(chosen, config, plan_name)).values()
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            winners.write_file(output / name, source.text)
    if as_json:
        print_json({name: {"kernel": s.kernel, "stage": s.stage, "text": s.text} for name, s in sources.items()})
    elif output is not None:
        click.echo("\n".join(str(output / name) for name in sources))
    else:
        click.echo("\n".join(source.text for source in sources.values()))


@main.command("inspect")
@contract_option
@config_option
@set_option
@tokens_option
@click.option("--gpu", default=jobs.DEFAULT_GPU, show_default=True, help="The described GPU to inspect for.")
@click.option(
    "--executed",
    is_flag=True,
    help="Also execute each level's sm_70 code on the CPU, and show what it does beside a V100's budget.",
)
@click.option("--routing", "routed", default="uniform", show_default=True, help="Of --executed: a name or a file.")
@click.option(
    "--record",
    is_flag=True,
    help="Also write what the machine code shows into the set, where tests hold later kernels to it.",
)
@json_option
def inspect_command(
    contract_name: str,
    config_key: str | None,
    set_folder: Path | None,
    concurrency: str | None,
    gpu: str,
    executed: bool,
    routed: str,
    record: bool,
    as_json: bool,
) -> None:
    """Show what each kernel of a level needs: registers, occupancy, bytes, and the least time any layout of them takes.

    For a V100 also what its machine code does for each eight weights; where that is not what is demanded of it, a FAULT
    line, and status 1.
    """
    if record and concurrency is not None:
        raise click.UsageError("--record is of all levels: leave --concurrency out")
    chosen = contracts.load(contract_name)
    configs = options.configs(chosen, config_key, set_folder, options.levels(chosen, concurrency))
    found = inspection.inspect(chosen, configs.by_level, gpu)
    code = inspection.machine_code(chosen, configs.by_level, gpu)
    written = inspection.record(configs, code, gpu) if record else None
    done = list(execution.count(chosen, configs.by_level, gpu, routed)) if executed else []
    if as_json:
        rows: dict[str, Any] = {"kernels": [row.to_dict() for row in found], "code": [each.to_dict() for each in code]}
        rows["executed"] = [each.to_dict() for each in done]
        print_json({"configs": configs.origin, "gpu": gpu, **rows})
    else:
        click.echo(f"{chosen.name} for {gpu}; configurations: {configs.origin}")
        table(inspection.HEADERS, (row.cells() for row in found))
        if code:
            click.echo("\nmachine code, built for sm_70")
            table(inspection.CODE_HEADERS, inspection.code_rows(code))
        if done:
            click.echo(f"\nexecuted as sm_70 code on CPU, {routed} routing")
            table(execution.HEADERS, (each.cells() for each in done))
        for each in code:
            for fault in each.faults:
                click.echo(f"FAULT {each.stage} at {each.tokens} tokens: {fault}")
        if written is not None:
            click.echo(f"\nrecorded in {written}")
    if any(each.faults for each in code):
        sys.exit(1)


@main.command("verify")
@contract_option
@config_option
@set_option
@click.option(
    "--concurrency",
    metavar="LEVELS",
    help="Token counts, such as 8, 2-8 or 1,2,4; by default 2, 4 and 8, or the highest of a contract without them.",
)
@click.option(
    "--executor",
    type=click.Choice(("host", "sass", "device")),
    default="host",
    show_default=True,
    help="host emulates the source on the CPU; sass executes its sm_70 machine code there, and compares with host; "
    "device runs it on this machine's GPU.",
)
@click.option(
    "--code",
    type=click.Choice(("auto", "cubin", "ptx", "native")),
    default="auto",
    show_default=True,
    help="What a GPU runs, as in tune.",
)
@click.option("--edges/--no-edges", default=True, show_default=True, help="Also odd ids, maps, padding, other plans.")
@click.option("--gate/--no-gate", default=True, show_default=True, help="Also the published operator gate.")
@click.option("--against-host", is_flag=True, help="With --executor device: also demand the source's bits on the CPU.")
@click.option("--replays", type=click.IntRange(min=1), default=3, show_default=True, help="Runs that must agree.")
@json_option
def verify_command(
    contract_name: str,
    config_key: str | None,
    set_folder: Path | None,
    concurrency: str | None,
    executor: options.ExecutorName,
    code: options.CodeName,
    edges: bool,
    gate: bool,
    against_host: bool,
    replays: int,
    as_json: bool,
) -> None:
    """Check kernels against the dense references and print the operator gate; status 1 when anything is wrong."""
    chosen = contracts.load(contract_name)
    levels = verify.default_tokens(chosen) if concurrency is None else options.levels(chosen, concurrency)
    configs = options.configs(chosen, config_key, set_folder, levels)
    with options.executor(executor, code) as runs:
        check = checks.Verification(chosen, configs, runs, edges, gate, against_host, replays)
        click.echo(f"{chosen.name}, {runs.name}; configurations: {configs.origin}", err=as_json)
        for heading, rows in check.sections():
            click.echo(f"\n{heading}", err=as_json)
            for line in rows:
                click.echo(line, err=as_json)
        click.echo(f"\n{check.summary()}", err=as_json)
    if as_json:
        print_json(check.to_dict())
    if not check.ok:
        sys.exit(1)


@main.command("export")
@contract_option
@click.option(
    "--set",
    "set_folder",
    type=click.Path(path_type=Path),
    help="A set tuned for a V100; by default the newest of tuned/ and generated/ for the contract.",
)
@click.option(
    "--target",
    type=click.Choice(export.TARGETS),
    default="op",
    show_default=True,
    help="op: a folder that torch and the driver alone load; source: the kernels as .cu files, the same registration "
    "and a test, for an engine's own nvcc.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder; by default exported/<contract>-<target>. An earlier export there is replaced.",
)
@json_option
def export_command(
    contract_name: str, set_folder: Path | None, target: export.Target, output: Path | None, as_json: bool
) -> None:
    """Export a contract's winners as Torch ops that an engine loads, or builds itself."""
    chosen = contracts.load(contract_name)
    folder = options.output_folder(output or Path("exported") / f"{chosen.name}-{target}")
    done = export.export(options.v100_set(chosen, set_folder), folder, target)
    if as_json:
        print_json(done.to_dict())
        return
    click.echo(
        f"{done.folder}: {done.files} files, {done.nbytes / 1e6:.1f} MB; torch.ops.{done.namespace}; {done.timings}"
    )


@main.command("probe")
@contract_option
@click.option(
    "--set",
    "set_folders",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Tuned sets whose winners it carries; by default the first one for a V100.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file; by default voltune-probe-<contract>.pyz.",
)
@click.option(
    "--read",
    "given",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead: check what a probe wrote, set predictions beside it, fit the model to it, and propose winners.",
)
@click.option(
    "--measurements",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --read: also write the timings as a file for python -m tuner.calibrate.",
)
@json_option
def probe_command(
    contract_name: str,
    set_folders: tuple[Path, ...],
    output: Path | None,
    given: Path | None,
    measurements: Path | None,
    as_json: bool,
) -> None:
    """Make one file that checks and times the kernels on a V100 elsewhere, or read what it wrote there."""
    if given is not None and (set_folders or output):
        raise click.UsageError("--read takes neither --set nor --output")
    if given is None and measurements is not None:
        raise click.UsageError("--measurements are of an answer: give --read FILE with it")
    chosen = contracts.load(contract_name)
    if given is not None:
        read_probe(answer.read(given, chosen), measurements, as_json)
        return
    sets = set_folders or (options.v100_set(chosen, None),)
    done = probe.make(chosen, sets, output or Path(f"voltune-probe-{chosen.name}.pyz"))
    if as_json:
        print_json(done.to_dict())
        return
    click.echo(f"{done.path}: {done.nbytes / 1e6:.2f} MB, {len(done.arms)} kernels by {done.compiler}")
    click.echo(f"on a V100: python3 {done.path.name}, then here: probe --contract {contract_name} --read FILE")


def read_probe(found: answer.Answer, measurements: Path | None, as_json: bool) -> None:
    """Prints what a probe's file says, and what follows."""
    means = probed.findings(found)
    if measurements is not None:
        winners.write_file(measurements, probed.measurements(found, means))
    if as_json:
        print_json({"told": list(found.told()), "marks": list(found.marks), **means.to_dict()})
        return
    for line in (*found.told(), *(f"MARKED: {mark}" for mark in found.marks), *means.remarks):
        click.echo(line)
    click.echo("\npredicted by the model as it is, against measured by the file's word")
    table(probed.CELL_HEADERS, means.rows)
    for heading, rows in (("the model as it is", means.quality), ("fitted to this file", means.refitted)):
        if rows:
            click.echo("\n" + "\n".join((heading, *map(str, rows))))
    if means.fit is not None:
        click.echo("\n".join(f"    {name}: float = {value:g}" for name, value in vars(means.fit).items()))
    if means.proposals:
        click.echo("\nproposed v100-measured winners, by the file's word; no set is written: tune there for one")
        table(probed.WINNER_HEADERS, (each.cells() for each in means.proposals))


@main.command("trace")
@contract_option
@config_option
@set_option
@click.option("--concurrency", "level", metavar="LEVEL", default="4", show_default=True, help="The step's token count.")
@click.option(
    "--plan",
    "plan_name",
    type=click.Choice(plan.PLANS),
    default="fused",
    show_default=True,
    help="fused: the op in one launch; the others: its stages alone, after a compaction.",
)
@click.option("--routing", "routed", default="uniform", show_default=True, help="A routing's name or a recorded file.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="A folder that is not there yet, or empty.",
)
@click.option("--check/--no-check", default=True, show_default=True, help="Read the trace back and compare.")
@json_option
def trace_command(
    contract_name: str,
    config_key: str | None,
    set_folder: Path | None,
    level: str,
    plan_name: plan.PlanName,
    routed: str,
    output: Path,
    check: bool,
    as_json: bool,
) -> None:
    """Execute one step's sm_70 code on the CPU and write what it did as Accel-Sim traces."""
    chosen = contracts.load(contract_name)
    configs = options.configs(chosen, config_key, set_folder, options.levels(chosen, level))
    folder = options.output_folder(output)
    written = execution.write_trace(chosen, *options.only(configs), plan_name, routed, folder, check)
    if as_json:
        print_json(written.to_dict())
        return
    click.echo(f"{chosen.name}, executed as sm_70 code on CPU, {routed} routing; configuration: {configs.origin}")
    table(execution.TRACE_HEADERS, execution.trace_rows(written))
    click.echo(f"{output}: {'read back: the same instructions, masks and addresses' if check else 'not read back'}")


@main.command("bench")
@contract_option
@config_option
@click.option(
    "--set",
    "set_folders",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A tuned set, given once for each; by default all of the contract in tuned/ and generated/.",
)
@tokens_option
@click.option(
    "--routing",
    metavar="NAMES",
    help="Routings such as uniform,hot, or recorded .json or .npy files; by default uniform,zipf,hot.",
)
@click.option(
    "--code",
    type=click.Choice(("auto", "cubin", "ptx", "native")),
    default="auto",
    show_default=True,
    help="What the GPU runs, as in tune.",
)
@click.option("--warm", is_flag=True, help="Also with the same weights and routing in each call.")
@click.option(
    "--rounds",
    type=click.IntRange(min=trial.SCREEN_ROUNDS),
    default=bench.ROUNDS,
    show_default=True,
    help="Of timing, in which all arms take turns.",
)
@click.option(
    "--ceiling",
    type=click.IntRange(min=1),
    metavar="N",
    help="Look for the fastest loads among N configurations drawn at random and the winners; by default among all.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of routings, inputs, that draw."
)
@click.option("--output", type=click.Path(path_type=Path), help="Also write the JSON to this file.")
@json_option
def bench_command(
    contract_name: str,
    config_key: str | None,
    set_folders: tuple[Path, ...],
    concurrency: str | None,
    routing: str | None,
    code: options.CodeName,
    warm: bool,
    rounds: int,
    ceiling: int | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the op on this machine's GPU beside its stages, other ways, its loads alone, and the memory's speed."""
    chosen = contracts.load(contract_name)
    levels = options.levels(chosen, concurrency)
    request = bench.Request(
        contract=chosen,
        levels=levels,
        routings=bench.routings(chosen, routing, levels),
        subjects=bench.subjects(chosen, config_key, set_folders, options.sets(chosen), levels),
        rounds=rounds,
        warm=warm,
        ceiling=ceiling,
        seed=seed,
    )
    if output is not None:
        bench.check_output(output)
    with progress_line() as show:
        found = bench.measure(request, None if code == "auto" else code, show)
    if output is not None:
        winners.write_file(output, json.dumps(found.to_dict(), indent=1, sort_keys=True) + "\n")
    if as_json:
        print_json(found.to_dict())
        return
    for line in found.heading():
        click.echo(line)
    for heading, rows in found.sections():
        click.echo(f"\n{heading}")
        table(report.HEADERS, rows)


@main.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Say what this machine has, what is missing, and the command that mends it."""
    found = doctors.examine()
    if as_json:
        print_json({item.name: item.to_dict() for item in found})
    else:
        for item in found:
            word = "ok" if item.ok else "MISSING" if item.needed else "none"
            click.echo(f"{word:<8} {item.name:<12} {item.text}")
    if any(item.needed and not item.ok for item in found):
        sys.exit(1)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half-made is taken away, as at Ctrl-C
    main()
