"""Compiles a rendered Source into an Image (machine code, PTX, what the assembler said) with NVRTC. No GPU is needed.

NVRTC is reached through CuPy's low-level binding, which finds it in the wheel `nvidia-cuda-nvrtc-*` of the same
environment. One compile for sm_70 yields cubin and PTX; that PTX is byte for byte the one `-arch=compute_70` gives.
"""

import functools
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import cache, worker
from tuner.errors import BuildFailed, MissingTool, RequestError, TrialTimeout, VoltuneError
from tuner.render import Source

# -fmad=false: fusions are written out in the source, so that every executor rounds alike.
# --ptxas-options=-v: the assembler's figures are in the log.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--ptxas-options=-v")
COMPILE_TIMEOUT_S = 600.0
INSTALL = "python3 -m venv sm70 && sm70/bin/pip install cupy-cuda12x 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"

_KIND, _SUFFIX = "image", ".image"
_CHECK = re.compile(r"\.[0-9a-f]+" + re.escape(_SUFFIX) + "$")
_WARNING = re.compile(r": warning\b|ptxas warning")
# True of every sm_70 build, and said once in the documentation; any other warning is kept.
_DEPRECATED = "Architectures prior to '<compute/sm>_75' are deprecated"
_EM_CUDA = 190


@dataclass(frozen=True)
class Image:
    """One built kernel.

    cubin: ELF for `arch`; ptx: text for the virtual architecture of the same number. registers: a thread's.
    spill_bytes: bytes of the register spill stores plus loads in the code, for a thread. local_bytes: a thread's stack.
    static_shared_bytes: a block's. warnings: the compiler's, as it wrote them. compiler: what made it, which need not
    be on this machine. digest: 16 hex digits of source, options and compiler.
    """

    kernel: str
    arch: str
    cubin: bytes
    ptx: bytes
    registers: int
    spill_bytes: int
    local_bytes: int
    static_shared_bytes: int
    warnings: tuple[str, ...]
    compiler: str
    digest: str

    def to_bytes(self) -> bytes:
        """One line of JSON (every field but the code, and the cubin's length), then cubin, then PTX."""
        header = {k: v for k, v in asdict(self).items() if k not in ("cubin", "ptx")}
        return json.dumps({**header, "cubin_bytes": len(self.cubin)}).encode() + b"\n" + self.cubin + self.ptx

    @classmethod
    def from_bytes(cls, data: bytes) -> "Image":
        """Reads `to_bytes` back."""
        line, _, code = data.partition(b"\n")
        header = json.loads(line)
        size = header.pop("cubin_bytes")
        header["warnings"] = tuple(header["warnings"])
        return cls(cubin=code[:size], ptx=code[size:], **header)


@dataclass(frozen=True)
class Compiler:
    """The NVRTC of this environment. name: e.g. "NVRTC 12.9.86"; architectures: what it builds for, 70 for sm_70."""

    name: str
    architectures: tuple[int, ...]


@functools.cache
def compiler() -> Compiler:
    """The NVRTC that CuPy loads here. Raises MissingTool, with the command that mends it, when there is none."""
    nvrtc = _nvrtc()
    # nvrtcVersion gives 12.9 alone; the PTX it writes names the exact release.
    program = nvrtc.createProgram("", "version.cu", (), ())
    try:
        nvrtc.compileProgram(program, ())
        said = re.search(r"release [\d.]+, V([\d.]+)", nvrtc.getPTX(program).decode())
    finally:
        nvrtc.destroyProgram(program)
    version = said[1] if said else ".".join(str(part) for part in nvrtc.getVersion())
    return Compiler(f"NVRTC {version}", tuple(int(arch) for arch in nvrtc.getSupportedArchs()))


def build(source: Source, arch: str = "sm_70") -> Image:
    """The Image of source for arch, from the cache or from this environment's NVRTC.

    Where that NVRTC cannot build for arch (NVRTC 13 and sm_70) or there is none, an Image that any compiler put into
    the cache serves, so that a cache carried from another machine does (VOLTUNE_CACHE_DIR).
    Raises BuildFailed with the compiler's log, MissingTool with the command that mends it, or RequestError for a
    malformed arch.
    """
    try:
        present = _able(arch)
    except MissingTool:
        carried = find(source, arch)
        if carried is None:
            raise
        return carried

    def make(path: Path) -> None:
        path.write_bytes(_compile(source, arch, present.name).to_bytes())

    entry = f"{_key(source, arch)}-{_slug(present.name)}"
    return Image.from_bytes(cache.get_or_make(_KIND, entry, _SUFFIX, make).read_bytes())


def find(source: Source, arch: str = "sm_70", made_by: str = "") -> Image | None:
    """The cached Image of source for arch made by the compiler `made_by`, by default the newest that made one, or None.

    Needs no compiler.
    """
    prefix = f"{_key(source, arch)}-"
    files = (cache.cache_dir() / _KIND).glob(f"{prefix}{_slug(made_by)}*{_SUFFIX}")
    entries = {_CHECK.sub("", path.name) for path in files}

    def refuse(path: Path) -> None:
        raise MissingTool(f"a cached image beside {path} is damaged, and it is not known how to make it again")

    for entry in sorted(entries, key=lambda name: _version(name.removeprefix(prefix)), reverse=True):
        try:
            image = Image.from_bytes(cache.get_or_make(_KIND, entry, _SUFFIX, refuse).read_bytes())
        except MissingTool:
            continue  # another compiler's may be sound
        if made_by in ("", image.compiler):
            return image
    return None


def build_each(
    sources: Sequence[Source], arch: str = "sm_70", workers: int | None = None
) -> Iterator[tuple[int, Image | BuildFailed]]:
    """Builds every source on `workers` processes (default: the CPUs); yields (index, outcome) as each one ends.

    Cached ones come first. A source that is refused, or that crashes the compiler or outlasts COMPILE_TIMEOUT_S, is a
    BuildFailed and harms no other. Raises MissingTool when a source is not cached and this machine cannot build it, and
    what else is no source's fault: RequestError for a cache that cannot be used.
    """
    missing: MissingTool | None = None
    made_by = ""
    try:
        made_by = _able(arch).name
    except MissingTool as error:
        missing = error
    todo: list[int] = []
    for index, source in enumerate(sources):
        image = find(source, arch, made_by)
        if image is None:
            todo.append(index)
        else:
            yield index, image
    if todo and missing is not None:
        raise missing
    jobs = [(sources[index], arch) for index in todo]
    count = workers if workers is not None else len(os.sched_getaffinity(0))
    for job, outcome in worker.run_all(build, jobs, workers=count, timeout_s=COMPILE_TIMEOUT_S, crash=BuildFailed):
        if isinstance(outcome, VoltuneError) and not isinstance(outcome, BuildFailed | TrialTimeout):
            raise outcome
        yield todo[job], BuildFailed(str(outcome)) if isinstance(outcome, TrialTimeout) else outcome


def build_many(sources: Sequence[Source], arch: str = "sm_70", workers: int | None = None) -> list[Image | BuildFailed]:
    """`build_each`, in the order of sources."""
    outcomes = dict(build_each(sources, arch, workers))
    return [outcomes[index] for index in range(len(sources))]


def build_all(sources: Sequence[Source]) -> list[Image]:
    """Every source for sm_70, in their order. Raises BuildFailed for the first that is refused, and as `build_each`."""
    images = []
    for outcome in build_many(sources):
        if isinstance(outcome, BuildFailed):
            raise outcome
        images.append(outcome)
    return images


class Ahead:
    """Images for one architecture, some of them built by other processes while the caller does something else."""

    def __init__(self, arch: str = "sm_70", workers: int | None = None) -> None:
        self.arch = arch
        self._workers = workers
        self._built: dict[Source, Image | BuildFailed] = {}
        self._coming: Sequence[Source] = ()
        self._builds: Iterator[tuple[int, Image | BuildFailed]] = iter(())

    def prefetch(self, sources: Sequence[Source]) -> None:
        """Starts building these, in order. What an earlier call named and nobody has begun is dropped."""
        self._coming = [source for source in sources if source not in self._built]
        self._builds = build_each(self._coming, self.arch, self._workers)

    def image(self, source: Source) -> Image:
        """The Image of source. Raises BuildFailed, or MissingTool or RequestError as `build_each` does."""
        while source in self._coming and source not in self._built:
            try:
                index, outcome = next(self._builds)
            except VoltuneError:
                self._coming = ()  # a generator that raised gives nothing more
                raise
            self._built[self._coming[index]] = outcome
        if source not in self._built:
            self._built[source] = build_many([source], self.arch, 1)[0]  # in a process of its own: NVRTC may crash
        outcome = self._built[source]
        if isinstance(outcome, BuildFailed):
            raise outcome
        return outcome


def _able(arch: str) -> Compiler:
    """This environment's compiler, if it builds for arch; else MissingTool."""
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise RequestError(f"{arch!r} is no GPU architecture: expected one like 'sm_70'")
    present = compiler()
    if int(number[1]) not in present.architectures:
        range_here = f"sm_{min(present.architectures)} to sm_{max(present.architectures)}"
        raise MissingTool(
            f"the compiler here is {present.name}, which builds for {range_here}, not for {arch}. sm_70 needs NVRTC 12 "
            f"alone in its environment; make one with: {INSTALL}. Or set VOLTUNE_CACHE_DIR to a cache filled elsewhere"
        )
    return present


def _nvrtc() -> Any:
    """CuPy's NVRTC binding. Imported late: it takes a tenth of a second and half a second more to load the library."""
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise MissingTool(f"CuPy cannot be imported ({error}). Install it with: {INSTALL}") from error
    try:
        nvrtc.getVersion()
    except RuntimeError as error:  # cuda-pathfinder's DynamicLibNotFoundError is one
        raise MissingTool(f"CuPy found no NVRTC ({str(error).strip()}). Install it with: {INSTALL}") from error
    return nvrtc


def _compile(source: Source, arch: str, made_by: str) -> Image:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source.text, f"{source.kernel}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"-arch={arch}"))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise BuildFailed(f"{made_by} refused {source.kernel} for {arch} ({error}):\n{log}") from error
        log, cubin, ptx = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program), nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return Image(
        kernel=source.kernel,
        arch=arch,
        cubin=_whole_elf(cubin),
        ptx=ptx,
        **_resources(log, source.kernel),
        warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line) and _DEPRECATED not in line),
        compiler=made_by,
        digest=hashlib.sha256(f"{_key(source, arch)}-{made_by}".encode()).hexdigest()[:16],
    )


def _resources(log: str, kernel: str) -> dict[str, int]:
    """One kernel's figures from the log of `--ptxas-options=-v`, with the spills and stack of what it calls."""
    entries = re.split(r"Compiling entry function '([^']+)'", log)
    sections = dict(zip(entries[1::2], entries[2::2], strict=True))
    if kernel not in sections:
        raise BuildFailed(f'the source has no extern "C" __global__ function {kernel!r}; it has {sorted(sections)}')
    section = sections[kernel]
    used = re.search(r"Used (\d+) registers.*", section)
    if used is None:
        raise BuildFailed(f"the compiler did not say how many registers {kernel} uses; its log:\n{log}")
    stack = re.search(r"(\d+) bytes cumulative stack size", used[0])
    shared = re.search(r"(\d+) bytes smem", used[0])
    return {
        "registers": int(used[1]),
        "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", section)),
        "local_bytes": int(stack[1]) if stack else 0,
        "static_shared_bytes": int(shared[1]) if shared else 0,
    }


def _whole_elf(cubin: bytes) -> bytes:
    """The cubin to its last byte: CuPy 14's getCUBIN cuts one off, a zero, and ELF readers then refuse the file."""
    ident, _, machine, _, _, programs, sections, _, _, program_size, program_count, section_size, section_count, _ = (
        struct.unpack_from("<16sHHIQQQIHHHHHH", cubin)
    )
    end = max(programs + program_size * program_count, sections + section_size * section_count)
    if ident[:4] != b"\x7fELF" or machine != _EM_CUDA or end - len(cubin) not in (0, 1):
        raise BuildFailed(f"NVRTC's cubin is not a whole CUDA ELF: {len(cubin)} bytes, its headers end at {end}")
    return cubin.ljust(end, b"\0")


def _key(source: Source, arch: str) -> str:
    """Everything an Image depends on but the compiler."""
    return hashlib.sha256(json.dumps([source.kernel, source.text, arch, OPTIONS]).encode()).hexdigest()[:32]


def _slug(compiler_name: str) -> str:
    return compiler_name.lower().replace(" ", "-")


def _version(slug: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", slug))
