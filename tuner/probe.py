"""Makes a probe: one file that checks and times a contract's kernels on a GPU its makers do not have.

The file is a zipapp of `tuner/probing.py`, the modules and templates that needs, and images of sm_70 code and PTX. The
same set, space and compiler give the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import build, gpu, plan, probing, render, space, winners
from tuner.contract import Contract
from tuner.errors import RequestError
from tuner.probing import BARE, IMAGES, KIT, LOADS, Kit
from tuner.render import Source
from tuner.space import Config

CONFIGS = 40
MOST = 4_000_000  # bytes of a probe
_FIRST = b"#!/usr/bin/env python3\n"
_GPU = "V100-PCIE-32GB"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Made:
    """A probe's file. arms: kernels that are timed, each by its name."""

    path: Path
    nbytes: int
    arms: tuple[str, ...]
    compiler: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path)}


def strata(contract: Contract, count: int, seed: int = 0) -> tuple[Config, ...]:
    """`count` configurations that fit a V100: of each way to multiply and number of threads in turn, any of them."""
    device = gpu.device(_GPU)
    groups: dict[tuple[str | int, int], list[Config]] = {}
    for config in space.candidates(contract):
        if plan.why_invalid(contract, config, device) is None:
            groups.setdefault((space.parameters(config)["multiply"], config.w13.threads), []).append(config)
    rng = random.Random(seed)
    waiting = [rng.sample(groups[key], len(groups[key])) for key in sorted(groups, key=str)]
    rng.shuffle(waiting)
    found: list[Config] = []
    while waiting and len(found) < count:
        found += [group.pop() for group in waiting]
        waiting = [group for group in waiting if group]
    return tuple(found[:count])


def make(contract: Contract, sets: Sequence[Path], output: Path, count: int = CONFIGS) -> Made:
    """Writes the probe of a contract and the winners of its sets to `output`.

    Raises RequestError for a set of another contract or a file that would be too large, BuildFailed and MissingTool
    from the compiler.
    """
    found = {}
    digests = {}
    for folder in sets:
        read = winners.read(folder)
        if read.contract.digest() != contract.digest():
            raise RequestError(f"{folder} is tuned for another contract than {contract.name}: give a set of this one")
        found[read.target] = {tokens: level.config.key() for tokens, level in read.levels.items()}
        digests[read.target] = hashlib.sha256((folder / winners.MANIFEST).read_bytes()).hexdigest()
    default = space.default(contract).key()
    chosen = list(dict.fromkeys([*(key for each in found.values() for key in each.values()), default]))
    names = list(dict.fromkeys([*chosen, *(LOADS + key for key in chosen)]))
    names += [key for config in strata(contract, count) if (key := config.key()) not in names]
    sources = {name: render.render(probing.plan_of(contract, name))["op"] for name in names}
    needed = [*sources.values(), *bare_sources().values()]
    images = dict(zip(needed, build.build_all(needed), strict=True))
    kernels = {name: images[source].digest for name, source in sources.items()}
    compiler = next(iter(images.values())).compiler
    kit = Kit(contract, compiler, digests, found, default, kernels)
    files = {KIT: json.dumps(kit.to_dict(), sort_keys=True).encode(), **_program()}
    files |= {f"{IMAGES}/{source.digest}.image": images[source].to_bytes() for source in sources.values()}
    files |= {f"{IMAGES}/{name}.image": images[source].to_bytes() for name, source in bare_sources().items()}
    content = _zipped(files)
    if len(content) > MOST:
        raise RequestError(f"the probe would have {len(content)} bytes, at most {MOST} wanted: give fewer sets")
    output.parent.mkdir(parents=True, exist_ok=True)
    winners.write_file(output, content, 0o755)
    return Made(output, len(content), tuple(names), compiler)


def bare_sources() -> dict[str, Source]:
    """The kernels beside the op, which are one file, by name."""
    text = (render.TEMPLATES / "probe" / "bare.cu").read_text(encoding="utf-8")
    return {name: Source(f"voltune_{name}", name, text) for name in BARE}


def _program() -> dict[str, bytes]:
    """The modules that probing.py needs, and the templates, by their path in the file."""
    files = {"__main__.py": (render.TEMPLATES / "probe" / "main.py").read_bytes()}
    files["tuner/__init__.py"] = (_HERE / "__init__.py").read_bytes()
    for name in sorted(_needed("probing")):
        files[f"tuner/{name}.py"] = (_HERE / f"{name}.py").read_bytes()
    for path in sorted(render.TEMPLATES.iterdir()):
        if path.is_file():
            files[f"templates/{path.name}"] = path.read_bytes()
    return files


def _needed(name: str, found: set[str] | None = None) -> set[str]:
    """A module, and every module of ours that it imports, or those do."""
    found = set() if found is None else found
    if name not in found:
        found.add(name)
        for other in _imports(_HERE / f"{name}.py"):
            _needed(other, found)
    return found


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module == "tuner":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tuner."):
            yield (node.module or "").split(".")[1]


def _zipped(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    target.write(_FIRST)
    with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)  # ZipInfo: the same date always
    return target.getvalue()
