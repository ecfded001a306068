"""NVRTC builds without a GPU. The ELF reader here is independent of the module: it reads section tables."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import build
from tuner.errors import BuildFailed, MissingTool, RequestError
from tuner.render import Source

ROOT = Path(__file__).parent.parent

SMALL = """
extern "C" __global__ void small(const float* x, float* y) {
    __shared__ float t[32];
    t[threadIdx.x & 31] = x[threadIdx.x];
    __syncthreads();
    int unused;
    y[threadIdx.x] = t[31 - (threadIdx.x & 31)] * x[0] + x[1];
}
"""
# 64 live floats a thread, and a bound that leaves 32 registers (65,536 / 2048): some must spill.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const float* x, float* y, int n) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[threadIdx.x * 64 + i];
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 7) & 63] + y[i];
    for (int i = 0; i < 64; ++i) y[threadIdx.x * 64 + i] = a[i];
}
"""
BROKEN = """
extern "C" __global__ void broken(float* y) {
    y[0] = nowhere;
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def only_nvrtc_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: build.Compiler("NVRTC 13.5.37", (75, 80, 90, 121)))


def source(kernel: str, text: str) -> Source:
    return Source(kernel=kernel, stage="w13", text=text)


def small(comment: str = "") -> Source:
    return source("small", f"{SMALL}// {comment}")


def sections(elf: bytes) -> dict[str, tuple[int, int, int, int]]:
    """Name -> (offset, size, type, end of the section header table) by the ELF64 section header table."""
    offset = struct.unpack_from("<Q", elf, 40)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, kind, _, _, at, length, *_ in headers:
        start = strings + name
        found[elf[start : elf.index(b"\0", start)].decode()] = (at, length, kind, offset + size * count)
    return found


def register_count(elf: bytes) -> int:
    """EIATTR_REGCOUNT (0x2f, format 4: a size and then symbol and count) of a cubin with one kernel, from .nv.info."""
    at, length, _, _ = sections(elf)[".nv.info"]
    info = elf[at : at + length]
    counts = [struct.unpack_from("<I", info, m.end() + 4)[0] for m in re.finditer(rb"\x04\x2f\x08\x00", info)]
    assert len(counts) == 1
    return int(counts[0])


def test_the_cubin_is_a_cuda_elf_that_ends_with_its_last_table() -> None:
    cubin = build.build(small()).cubin
    assert cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin, 18)[0] == 190  # EM_CUDA
    program_offset, program_size, program_count = (
        *struct.unpack_from("<Q", cubin, 32),
        *struct.unpack_from("<HH", cubin, 54),
    )
    found = sections(cubin)
    no_bits = 8
    ends = [at + length for at, length, kind, _ in found.values() if kind != no_bits]
    ends += [found[".text.small"][3], program_offset + program_size * program_count]
    assert len(cubin) == max(ends)


def test_the_ptx_is_what_a_compile_for_compute_70_gives() -> None:
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(small().text, "small.cu", (), ())
    nvrtc.compileProgram(program, (*build.OPTIONS, "-arch=compute_70"))
    expected = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    ptx = build.build(small()).ptx
    assert ptx == expected
    assert re.findall(rb"^\.target (.*)$", ptx, re.MULTILINE) == [b"sm_70"]


@pytest.mark.parametrize(("kernel", "text"), [("small", SMALL), ("spilling", SPILLING)])
def test_the_register_count_is_the_one_the_cubin_declares(kernel: str, text: str) -> None:
    image = build.build(source(kernel, text))
    assert image.registers == register_count(image.cubin)


def test_a_kernel_bound_to_32_registers_spills_and_its_image_says_so() -> None:
    image = build.build(source("spilling", SPILLING))
    assert image.registers == 32
    assert image.spill_bytes > 0
    assert image.local_bytes > 0


def test_a_small_kernel_spills_nothing_and_its_static_shared_memory_is_the_array_it_declares() -> None:
    image = build.build(small())
    assert (image.spill_bytes, image.local_bytes, image.static_shared_bytes) == (0, 0, 32 * 4)


def test_warnings_are_kept_but_not_the_one_every_sm_70_build_gets() -> None:
    (warning,) = build.build(small()).warnings
    assert warning.startswith("small.cu(6): warning")
    assert '"unused"' in warning


def test_products_and_sums_are_not_contracted() -> None:
    ptx = build.build(small()).ptx
    assert b"mul.f32" in ptx or b"mul.rn.f32" in ptx
    assert b"fma" not in ptx


def test_the_same_source_builds_for_another_architecture() -> None:
    image = build.build(small(), "sm_90")
    assert image.arch == "sm_90"
    assert b".target sm_90" in image.ptx
    assert image.digest != build.build(small()).digest


def test_a_refused_source_raises_the_compilers_log_with_the_line() -> None:
    with pytest.raises(BuildFailed, match=r'broken\.cu\(3\): error: identifier "nowhere" is undefined'):
        build.build(source("broken", BROKEN))


def test_a_source_without_the_named_kernel_is_refused_with_the_kernels_it_has() -> None:
    with pytest.raises(BuildFailed, match=r"'other'.*\['small'\]"):
        build.build(source("other", SMALL))


def test_a_word_that_is_no_architecture_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"'volta'.*'sm_70'"):
        build.build(small(), "volta")


def test_a_second_build_comes_from_the_folder_named_by_the_environment(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build(small())
    assert len(list(own_cache.rglob("*.image"))) == 1
    monkeypatch.setattr(build, "_compile", None)
    assert build.build(small()) == first


def test_a_truncated_entry_is_built_again(own_cache: Path) -> None:
    first = build.build(small())
    (entry,) = own_cache.rglob("*.image")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert build.build(small()) == first
    (entry,) = own_cache.rglob("*.image")
    assert build.Image.from_bytes(entry.read_bytes()) == first


def test_one_changed_byte_of_source_is_another_image() -> None:
    assert build.build(small("a")).digest != build.build(small("b")).digest


def test_two_processes_that_build_the_same_source_at_once_both_get_it(own_cache: Path) -> None:
    script = (
        "import sys; from tuner import build; from tuner.render import Source; "
        "print(build.build(Source('small', 'w13', sys.argv[1])).digest)"
    )
    command = [sys.executable, "-c", script, small().text]
    pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    digests = [process.communicate(timeout=120)[0].strip() for process in pair]
    assert digests == [build.build(small()).digest] * 2


def test_one_bad_source_harms_no_other_of_a_parallel_build() -> None:
    outcomes = build.build_many([small("a"), source("broken", BROKEN), small("b")], workers=2)
    assert isinstance(outcomes[1], BuildFailed)
    assert "nowhere" in str(outcomes[1])
    assert [outcomes[0], outcomes[2]] == [build.build(small("a")), build.build(small("b"))]


def test_a_cache_that_cannot_be_used_is_no_sources_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", "/proc/nope")
    ahead = build.Ahead(workers=1)
    ahead.prefetch([small("a"), small("b")])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"/proc/nope.* cannot be used"):
            ahead.image(small("a"))
    with pytest.raises(RequestError, match=r"/proc/nope.* cannot be used"):
        build.build_many([small()], workers=1)


def test_a_parallel_build_starts_no_process_for_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [build.build(small("a")), build.build(small("b"))]
    monkeypatch.setattr("tuner.worker.Worker", None)
    assert build.build_many([small("a"), small("b")], workers=2) == images


@pytest.mark.usefixtures("only_nvrtc_13")
def test_with_nvrtc_13_alone_sm_70_is_a_missing_tool_with_the_command_that_mends_it() -> None:
    with pytest.raises(
        MissingTool, match=r"NVRTC 13\.5\.37.*sm_75 to sm_121.*sm_70.*pip install.*nvidia-cuda-nvrtc-cu12"
    ):
        build.build(small())
    with pytest.raises(MissingTool, match=r"NVRTC 13\.5\.37"):
        build.build_many([small()])


def test_with_nvrtc_13_alone_a_carried_image_serves_and_names_the_compiler_that_made_it(
    request: pytest.FixtureRequest,
) -> None:
    made = build.build(small())
    request.getfixturevalue("only_nvrtc_13")
    assert build.build(small()) == made
    assert build.build_many([small()]) == [made]
    assert made.compiler.startswith("NVRTC 12.")


@pytest.mark.usefixtures("only_nvrtc_13")
def test_a_damaged_carried_image_does_not_serve(own_cache: Path) -> None:
    folder = own_cache / "image"
    folder.mkdir(parents=True)
    (folder / f"{build._key(small(), 'sm_70')}-nvrtc-12.9.86.{'0' * 32}.image").write_bytes(b"cut off")
    assert build.find(small()) is None
    with pytest.raises(MissingTool, match="pip install"):
        build.build(small())


def test_of_two_compilers_images_the_newer_compilers_is_found(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVRTC 12.9.86", "NVRTC 12.10.1", "NVRTC 12.8.93"):
        monkeypatch.setattr(build, "compiler", lambda name=name: build.Compiler(name, (70,)))
        build.build(small())
    found = build.find(small())
    assert found is not None
    assert found.compiler == "NVRTC 12.10.1"
    older = build.find(small(), made_by="NVRTC 12.8.93")
    assert older is not None
    assert older.compiler == "NVRTC 12.8.93"


def test_importing_the_module_does_not_import_cupy() -> None:
    script = "import sys, tuner.build, tuner.worker; print([m for m in sys.modules if m.startswith('cupy')])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
