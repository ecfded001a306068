"""The shape of the project: who imports whom, and what tracked files may not hold."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from small import LAYOUTS, SMALL

import cli
from tuner import plan, render, space

ROOT = Path(__file__).parent.parent
# A module imports only what stands to its left.
ORDER = (
    *("errors", "nvml", "worker", "cache", "chain", "cuda"),
    *("contract", "awq", "checkpoint", "routing", "reference"),
    *("space", "plan", "render", "build", "sass", "dataflow", "microcode", "memory", "host", "device", "gpu"),
    *("machine", "counts", "trace", "work", "model", "evidence"),
    *("cases", "verify", "gate", "tensors", "dense", "engine", "trial", "measure", "probing", "items", "evaluate"),
    *("ledger", "search", "choose", "winners", "golden", "frozen", "export", "probe", "answer", "report", "bench"),
    *("calibrate", "probed", "options", "jobs", "checks", "executed", "inspection", "doctor"),
)
SOLE_IMPORTERS = {
    "jinja2": {"render"},
    "optuna": {"search"},
    "cupy_backends": {"build", "device"},
    "safetensors": {"checkpoint"},
    "click": {"cli"},
    "torch": {"tensors"},
}
FOREIGN = {"cupy", "cuda", "pycuda", "numba", "triton"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[str]:
    """Dotted names a file imports, at its top or inside a function."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


SOURCES = {path.stem: path for path in sorted((ROOT / "tuner").glob("*.py")) if path.stem != "__init__"}
PROGRAM = SOURCES | {"cli": ROOT / "cli.py"}


def tracked() -> list[Path]:
    """Files of the project that are text, those about to be added too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_the_order_names_every_module() -> None:
    assert sorted(ORDER) == sorted(SOURCES)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_modules_before_it(name: str) -> None:
    used = {parts[1] for parts in (each.split(".") for each in imported(SOURCES[name])) if parts[0] == "tuner"}
    assert used <= {"__version__", *ORDER[: ORDER.index(name)]}


@pytest.mark.parametrize("package", sorted(SOLE_IMPORTERS))
def test_a_package_has_the_importers_it_should_and_no_other(package: str) -> None:
    found = {name for name, path in PROGRAM.items() if package in {each.split(".")[0] for each in imported(path)}}
    assert found == SOLE_IMPORTERS[package]


def test_no_module_imports_a_framework() -> None:
    used = {each.split(".")[0] for path in PROGRAM.values() for each in imported(path)}
    assert not used & FOREIGN


def test_no_handler_catches_every_exception() -> None:
    """BaseException may be caught to clean up, if it is raised again."""
    for path in [*PROGRAM.values(), *(ROOT / "tests").glob("*.py")]:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} if node.type else {""}
            assert not names & {"", "Exception"}, f"{path.name}:{node.lineno}"
            ends = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert "BaseException" not in names or ends, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize(
    "pattern",
    [
        r"T[O]DO|F[I]XME|X[X]X\b|Not[I]mplementedError",
        r"(?<![\w.~)}$*])/(?:w[o]rk|t[m]p|h[o]me|r[o]ot|U[s]ers)/",
        r"(?i)\bis[s]ues?\s+#?\d|\bfi[x]es\s+#\d",
    ],
    ids=["unfinished work", "a path of one machine", "the number of an item on a list"],
)
def test_no_tracked_file_holds(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)


def test_every_template_is_part_of_some_plans_kernel() -> None:
    launches = {
        launch.template
        for contract in LAYOUTS.values()
        for name in plan.PLANS
        for launch in plan.make(contract, space.default(contract), name).launches
    }
    used, waiting = set(), {f"{name}.cu.j2" for name in launches}
    while waiting:
        used |= waiting
        texts = [(render.TEMPLATES / name).read_text() for name in waiting]
        waiting = {name for text in texts for name in re.findall(r'(?:include|plain\() ?"([^"]+)"', text)}
        if any('plain(family ~ ".cuh")' in text for text in texts):
            waiting |= {f"{family}.cuh" for contract in LAYOUTS.values() for family in space.families(contract)}
        waiting -= used
    assert used == {path.name for path in render.TEMPLATES.iterdir() if path.is_file()}


def test_a_value_enters_a_template_only_as_a_constant() -> None:
    """What the shapes change is the header and the configurations' structs; the rest of a kernel is the same text."""
    other = replace(SMALL, hidden=512, experts=32)
    texts = [render.render(plan.make(c, space.default(c)))["op"].text for c in (SMALL, other)]
    bodies = [text[text.index("};\n", text.index("struct W2Config")) :] for text in texts]
    assert texts[0] != texts[1]
    assert bodies[0] == bodies[1]


COMMANDS = sorted(cli.main.commands)


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"cli.py {name}" not in readme] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_options_have_help(name: str) -> None:
    command = cli.main.commands[name]
    assert command.help
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert options
    assert [each.name for each in options if not each.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_json(name: str) -> None:
    assert "as_json" in {each.name for each in cli.main.commands[name].params}
