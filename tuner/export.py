"""A tuned set as a folder that an engine loads with torch and the NVIDIA driver alone, or builds itself.

Targets:
  op      the layout of Hugging Face kernels: build/<variant>/ has a Python package with the built library; src/ holds
          every input of that build, tests/ what proves the folder
  source  the kernels as .cu files, the same registration, and a test, for an engine's own nvcc

The op's C files, Python and tests are `templates/frozen/`; what is particular to a contract are tables of data.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tuner import __version__, awq, build, frozen, golden, render, winners
from tuner.build import Image
from tuner.contract import Contract
from tuner.errors import BuildFailed, MissingTool, RequestError
from tuner.frozen import Tables
from tuner.reference import Reference
from tuner.winners import Winners

Target = Literal["op", "source"]
TARGETS: tuple[Target, ...] = ("op", "source")

VARIANT = "torch-stable-abi28-cu126-x86_64-linux"
MANIFEST = "manifest.json"
SCHEMA = 1
_KIND = "voltune export"
_COMPILE = ("gcc", "-std=c11", "-O2", "-fPIC", "-fexceptions", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared")
_LINK = ("-Wl,--no-as-needed", "-L.", "-ltorch", "-Wl,--build-id=none", "-Wl,-z,relro,-z,now", "-s")
_PACKAGE = ("__init__.py", "_ops.py", "_weights.py")
_UNITS = ("frozen_op.c", "driver.c", "code.c")
_ARCH = "sm_70"


@dataclass(frozen=True)
class Exported:
    """An exported folder. `timings` says what its timings are worth."""

    folder: Path
    target: Target
    namespace: str
    timings: str
    files: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class _Parts:
    """What both targets are made of; files by their path in the folder."""

    found: Winners
    tables: Tables
    namespace: str
    sources: Mapping[str, bytes]  # what the library is built from

    @property
    def timings(self) -> str:
        """What `available` says, and the README."""
        if self.found.word == "measured":
            return f"timings measured on {self.found.device}"
        return f"timings {self.found.word} for {self.found.device}, not measured on one"

    @property
    def name(self) -> str:
        return f"voltune-{self.found.contract.name}"

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def library(self) -> str:
        return f"_{self.python_name}_{self.namespace.removeprefix('voltune_')}.abi3.so"


def export(set_folder: Path, output: Path, target: Target = "op") -> Exported:
    """Writes the folder `output` from the V100 set in `set_folder`, replacing an earlier export there.

    Raises RequestError for a set of another GPU or of kernels that this version does not render, for a level without
    a winner, where NVRTC is not the set's, or where `output` holds something else; BuildFailed and MissingTool from
    NVRTC and gcc.
    """
    output = output.resolve()  # a link's target is replaced, not the link
    found = _admitted(set_folder)
    _check_ours(output)
    tables = frozen.tables(found.contract, {tokens: level.config for tokens, level in found.levels.items()})
    images = _images(tables)
    _check_compilers(found, images)
    parts = _parts(found, tables, images)
    output.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        making.chmod(0o755)
        (_fill_op if target == "op" else _fill_source)(making, parts, images)
        _write(making, MANIFEST, _json(_manifest(making, parts, images, target)))
        _put(making, output)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    files = [path for path in output.rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    return Exported(output, target, parts.namespace, parts.timings, len(files), nbytes)


def _admitted(folder: Path) -> Winners:
    """The set, if every kernel that would be exported has been verified as it is rendered now."""
    found = winners.read(folder)  # which demands good verdicts of every level it holds
    if not found.target.startswith("v100"):
        raise RequestError(f"{folder} is the set of {found.target}, and an export is for a V100: give a v100 set")
    missing = [str(tokens) for tokens in found.contract.levels if tokens not in found.levels]
    if missing:
        raise RequestError(f"{folder} has no verified winner at {', '.join(missing)} tokens: tune those levels first")
    texts = winners.rerender(found)
    stale = sorted(
        name for name, text in texts.items() if not (folder / name).is_file() or (folder / name).read_text() != text
    )
    if stale:
        raise RequestError(
            f"{folder}: its verdicts are stale: this version renders {', '.join(stale)} instead of what was verified; "
            "tune again, or use the version that made the set"
        )
    return found


def _check_ours(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        kind = json.loads((output / MANIFEST).read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    if kind != _KIND:
        raise RequestError(f"{output} is there and holds no export: move it away, or give another folder")


def _put(making: Path, output: Path) -> None:
    """`making` in the place of `output`, which is there whole at every moment but one."""
    former = Path(tempfile.mkdtemp(prefix=f".{output.name}.former.", dir=output.parent))
    try:
        if output.exists():
            os.replace(output, former)
        os.replace(making, output)
    finally:
        shutil.rmtree(former, ignore_errors=True)


def _images(tables: Tables) -> list[Image]:
    outcomes = build.build_many([kernel.source for kernel in tables.kernels], _ARCH)
    for kernel, outcome in zip(tables.kernels, outcomes, strict=True):
        if isinstance(outcome, BuildFailed):
            raise BuildFailed(f"{kernel.file}: {outcome}")
    return [outcome for outcome in outcomes if isinstance(outcome, Image)]


def _check_compilers(found: Winners, images: list[Image]) -> None:
    """Raises RequestError where the machine code is another than the winners were chosen for."""
    own = found.toolchain.get("compiler")
    others = sorted({image.compiler for image in images if image.compiler != own})
    if others:
        raise RequestError(
            f"the set was made with {own}, and its kernels are built by {', '.join(others)} here: its verdicts and "
            "timings are stale; use that compiler, or tune again"
        )


def _parts(found: Winners, tables: Tables, images: list[Image]) -> _Parts:
    """The library's sources. The namespace hashes them, and what else a user of the op can tell apart."""
    plain = {name: render.frozen_file(f"src/{name}").encode() for name in ("frozen_op.c", "backend.h", "torch_shim.h")}
    plain |= {name: render.frozen_file(f"src/{name}").encode() for name in ("driver.c", "stub.c")}
    for kernel, image in zip(tables.kernels, images, strict=True):
        plain[f"{kernel.file}.cubin"] = image.cubin
    identity = {
        "files": {name: _digest(content) for name, content in sorted(plain.items())},
        "package": {name: _digest(render.frozen_file(f"package/{name}").encode()) for name in _PACKAGE},
        "kernels": [[kernel.file, _digest(image.ptx)] for kernel, image in zip(tables.kernels, images, strict=True)],
        "ops": {op.name: [op.schema, op.to_dict()] for op in tables.ops},
        "set": _set(found),
    }
    namespace = f"voltune_{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]}"
    values = {"namespace": namespace, "contract": found.contract, "ops": tables.ops, "kernels": tables.kernels}
    values |= {"level_of": tables.level_of}
    for name in ("kernels.h", "tables.h", "code.c"):
        plain[name] = render.frozen_file(f"src/{name}.j2", **values).encode()
    return _Parts(found, tables, namespace, plain)


def _set(found: Winners) -> dict[str, Any]:
    names = ("target", "word", "device", "date", "ledger")
    return {name: getattr(found, name) for name in names} | {"contract_digest": found.contract.digest()}


def _fill_op(folder: Path, parts: _Parts, images: list[Image]) -> None:
    library = parts.library
    commands = [["gcc", "-shared", "-o", "libtorch.so", "stub.c"], [*_COMPILE, "-o", library, *_UNITS, *_LINK]]
    values = {"library": library, "command": " && ".join(map(shlex.join, commands)), "compiler": _compiler()}
    for name, content in parts.sources.items():
        _write(folder, f"src/{name}", content)
    for kernel in parts.tables.kernels:
        _write(folder, f"src/{kernel.file}.cu", kernel.source.text)
    _write(folder, "src/Makefile", render.frozen_file("src/Makefile.j2", **values))
    for command in commands:
        _run(command, folder / "src")
    (folder / "src" / "libtorch.so").unlink()
    package = folder / "build" / VARIANT / parts.python_name
    package.mkdir(parents=True)
    os.replace(folder / "src" / library, package / library)
    for kernel, image in zip(parts.tables.kernels, images, strict=True):
        _write(package, f"ptx/{kernel.file}.ptx", image.ptx)
    _fill_package(package, parts, "op")
    about = {"id": library.removesuffix(".abi3.so"), "name": parts.name, "version": 1, "license": "Apache-2.0"}
    about |= {"python-depends": [], "backend": {"type": "cuda", "archs": ["7.0"]}}
    _write(package.parent, "metadata.json", _json(about))
    own = ("conftest.py", "fake_driver.c", "test_op.py", "test_package.py")
    _fill_rest(folder, parts, "README.md.j2", [f"tests/{name}" for name in own])


def _fill_source(folder: Path, parts: _Parts, images: list[Image]) -> None:
    for name in ("frozen_op.c", "backend.h", "torch_shim.h", "kernels.h", "tables.h"):
        _write(folder, f"csrc/{name}", parts.sources[name])
    for kernel in parts.tables.kernels:
        _write(folder, f"csrc/kernels/{kernel.file}.cu", kernel.source.text)
    _write(folder, "csrc/launch.cu", render.frozen_file("source/launch.cu"))
    _write(folder, "csrc/kernels.cu", render.frozen_file("source/kernels.cu.j2", kernels=parts.tables.kernels))
    makefile = render.frozen_file("source/Makefile.j2", python_name=parts.python_name, library=parts.library)
    _write(folder, "Makefile", makefile)
    _fill_package(folder / parts.python_name, parts, "source")
    _fill_rest(folder, parts, "source/README.md.j2", ["source/conftest.py", "source/test_source.py"])


def _fill_package(package: Path, parts: _Parts, target: Target) -> None:
    for name in _PACKAGE:
        _write(package, name, render.frozen_file(f"package/{name}"))
    _write(package, "op.json", _json(_spec(package, parts, target)))


def _fill_rest(folder: Path, parts: _Parts, readme: str, tests: list[str]) -> None:
    """README, licence, and the tests: some of the target alone, and those on a GPU."""
    _write(folder, "README.md", _readme(parts, readme))
    _write(folder, "LICENSE", (Path(__file__).parent.parent / "LICENSE").read_bytes())
    for name in (*tests, "tests/test_gpu.py"):
        _write(folder, f"tests/{Path(name).name}", render.frozen_file(name))
    _write(folder, "tests/golden.py", Path(golden.__file__).read_bytes())
    archive = io.BytesIO()
    np.save(archive, _golden(parts.found.contract))
    _write(folder, "tests/golden.npy", archive.getvalue())


def _golden(contract: Contract) -> np.ndarray:
    """f32 [golden.ROWS, H]: the float64 reference of the golden step, one rounding away."""
    content = contract.to_dict()
    held = golden.weights(content)

    def gemm(name: str) -> awq.GemmWeights:
        scales, zeros = held[f"{name}_scales"], held.get(f"{name}_zeros")
        words = scales.view(np.uint32) if scales.dtype == np.int32 else scales
        return awq.GemmWeights(
            held[f"{name}_q"].view(np.uint32), words, None if zeros is None else zeros.view(np.uint32)
        )

    reference = Reference(contract, awq.LayerWeights(gemm("w13"), gemm("w2")))
    return reference.exact(*golden.step(content, golden.ROWS)).output.astype(np.float32)


def _spec(package: Path, parts: _Parts, target: Target) -> dict[str, Any]:
    """op.json: what the package needs to know, and the digests of the files beside it and of itself."""
    contract, tables = parts.found.contract, parts.tables
    content = {
        "namespace": parts.namespace,
        "target": target,
        "library": parts.library,
        "variable": parts.python_name.upper(),
        "contract": contract.to_dict(),
        "max_tokens": contract.max_tokens,
        "workspace_bytes": tables.workspace_bytes,
        "timings": parts.timings,
        "ops": {op.name: op.to_dict() for op in tables.ops},
        "kernels": [kernel.file for kernel in tables.kernels],
        "files": _digests(package),
    }
    return content | {"digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _manifest(folder: Path, parts: _Parts, images: list[Image], target: Target) -> dict[str, Any]:
    """Where everything in the folder comes from, and the digest of every other file."""
    found = parts.found
    levels = [
        {
            "tokens": tokens,
            "config": level.config.to_dict(),
            "us": level.us,
            "word": found.word,
            "device": found.device,
            "default_us": level.default_us,
            "verdicts": [{key: verdict.get(key) for key in ("case", "executor", "ok")} for verdict in level.verdicts],
        }
        for tokens, level in sorted(found.levels.items())
    ]
    kernels = {
        kernel.file: {"entry": kernel.entry, "registers": image.registers, "cubin_bytes": len(image.cubin)}
        for kernel, image in zip(parts.tables.kernels, images, strict=True)
    }
    return {
        "kind": _KIND,
        "schema": SCHEMA,
        "voltune": __version__,
        "target": target,
        "namespace": parts.namespace,
        "contract": found.contract.to_dict(),
        "tolerance": found.contract.tolerance,
        "set": _set(found),
        "timings": parts.timings,
        "levels": levels,
        "kernels": kernels,
        "toolchain": {
            "nvrtc": sorted({image.compiler for image in images}),
            "options": [*build.OPTIONS, f"-arch={_ARCH}"],
            **({"gcc": _compiler()} if target == "op" else {}),
        },
        "files": _digests(folder),
    }


def _readme(parts: _Parts, name: str) -> str:
    contract, found = parts.found.contract, parts.found
    operands = {each.name: each for each in parts.tables.ops[0].operands}
    weights = [each for name, each in operands.items() if name.startswith(("w13_", "w2_"))]
    return render.frozen_file(
        name,
        name=parts.name,
        contract=contract,
        found=found,
        namespace=parts.namespace,
        timings=parts.timings,
        variable=parts.python_name.upper(),
        package=f"build/{VARIANT}/{parts.python_name}",
        python_name=parts.python_name,
        library=parts.library,
        weights=[(each.name, each.types[0], [size.constant for size in each.shape]) for each in weights],
        workspace_bytes=parts.tables.workspace_bytes,
        levels=sorted(found.levels.items()),
    )


def _compiler() -> str:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise MissingTool(f"the op's library is built on Linux on x86-64, for it; here is {platform.platform()}")
    if shutil.which("gcc") is None:
        raise MissingTool("gcc was not found, which builds the op's library; install it with: apt-get install gcc")
    done = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _run(command: list[str], folder: Path) -> None:
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _digest(path.read_bytes()) for path in paths}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _write(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
