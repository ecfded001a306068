"""The folder as it is: what it needs of a machine, what it refuses to load, what it says where it cannot run."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import CONTRACT, FOLDER, HIDDEN, MAX_TOKENS, PACKAGE, SPEC, TOP_K, build, load, sign, tensors_of

LIBRARY = PACKAGE / SPEC["library"]
NO_GPU = not torch.cuda.is_available()
readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here")
gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")


def elf(option):
    return subprocess.run(
        ["readelf", "--wide", option, str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout


# ---- what it needs -------------------------------------------------------------------------------------------------
@readelf
def test_the_library_needs_libtorch_and_libc_alone():
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", elf("--dynamic"))) == {"libtorch.so", "libc.so.6"}


@readelf
def test_the_library_needs_no_newer_glibc_than_2_17():
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", elf("--version-info"))}
    assert versions
    assert max(versions) <= (2, 17)


@readelf
def test_the_library_offers_four_functions_and_wants_of_torch_only_its_stable_ones():
    symbols = [line.split()[6:8] for line in elf("--dyn-syms").splitlines() if len(line.split()) >= 8]
    wanted = {name.split("@")[0] for place, name in symbols if place == "UND"}
    offered = {name for place, name in symbols if place.isdigit()}
    assert offered == {"voltune_register", "voltune_prepare", "voltune_stream", "voltune_capturing"}
    assert {name for name in wanted if not name.startswith("aoti_torch_")} <= {
        *("_ZdlPv", "dlopen", "dlsym", "dlerror", "memcpy", "memset", "strlen", "snprintf", "vsnprintf"),
        *("pthread_mutex_lock", "pthread_mutex_unlock", "__stack_chk_fail"),
        *("__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"),
    }


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_what_the_library_declares_of_torch_is_what_torch_declares(tmp_path):
    headers = Path(torch.__path__[0]) / "include"
    if not (headers / "torch/csrc/inductor/aoti_torch/c/shim.h").exists():
        pytest.skip("this torch has no headers")
    lines = ("#define USE_CUDA", "#include <torch/csrc/inductor/aoti_torch/c/shim.h>")
    lines += ('extern "C" {', '#include "torch_shim.h"', "}", "")
    (tmp_path / "both.cpp").write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{headers}", f"-I{FOLDER / 'src'}", str(tmp_path / "both.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_machine_code_of_all_levels_is_at_most_two_and_a_half_megabytes_and_the_ptx_is_beside_it():
    assert sum(path.stat().st_size for path in (FOLDER / "src").glob("*.cubin")) <= 2_500_000
    assert b".target sm_" not in LIBRARY.read_bytes()
    assert sorted(path.stem for path in (PACKAGE / "ptx").iterdir()) == sorted(SPEC["kernels"])


@gcc
def test_built_again_from_its_own_sources_the_library_has_the_same_bytes(tmp_path):
    here = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if here not in (FOLDER / "src" / "Makefile").read_text():
        pytest.skip(f"built by another compiler than {here}")
    build(tmp_path / SPEC["library"], tmp_path)
    assert (tmp_path / SPEC["library"]).read_bytes() == LIBRARY.read_bytes()


def test_the_abi_checker_of_kernels_finds_nothing():
    checker = pytest.importorskip("kernel_abi_check", reason="kernel-abi-check is not installed")
    found = checker.ObjectFile(LIBRARY)
    assert found.check_manylinux("manylinux_2_28") == []
    assert found.check_python_abi("3.9") == []


def test_kernels_loads_the_folder():
    pytest.importorskip("kernels", reason="kernels is not installed")
    # It chooses a variant by the CUDA that torch is built with: 12 in those that have V100 code.
    start = "import pathlib, torch; torch.version.cuda = '12.6'; import kernels; "
    done = python(f"{start}print(kernels.get_local_kernel(pathlib.Path({str(FOLDER)!r})).NAMESPACE)")
    assert done.stdout.strip() == SPEC["namespace"], done.stderr


# ---- what it refuses to load ---------------------------------------------------------------------------------------
def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(PACKAGE, tmp_path / "package")


@pytest.mark.parametrize("name", ["op.json", *SPEC["files"]])
def test_a_flipped_byte_in_any_file_is_refused(copy, name):
    path = copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if name == "__init__.py":
        content = bytearray(path.read_bytes() + b" ")  # what still is Python, so that it can tell
    path.write_bytes(content)
    with pytest.raises((ImportError, SyntaxError)) as caught:
        load(copy, "voltune_flipped")
    if isinstance(caught.value, ImportError):
        assert name in str(caught.value)


def test_a_missing_file_is_refused(copy):
    (copy / SPEC["library"]).unlink()
    with pytest.raises(ImportError, match="cannot be read"):
        load(copy, "voltune_missing")


def test_an_old_torch_is_refused(copy, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    with pytest.raises(ImportError, match=r"torch 2\.7\.1\+cu126: the op needs 2\.8 or newer"):
        load(copy, "voltune_old_torch")


def test_the_same_export_from_another_folder_is_refused_and_does_no_harm(package, copy):
    with pytest.raises(ImportError, match="the same export was loaded from another folder"):
        load(copy, "voltune_twice")
    assert package.ops.moe_out


def test_the_same_folder_may_be_imported_twice(package):
    again = load(PACKAGE, "voltune_again")
    assert again.ops is package.ops


@gcc
def test_an_export_of_another_namespace_loads_beside_it(package, copy, tmp_path):
    other = f"{SPEC['namespace']}_other"
    build(copy / SPEC["library"], tmp_path, f'-DNAMESPACE="{other}"')
    sign(copy, namespace=other)
    beside = load(copy, "voltune_beside")
    assert other in str(beside.ops.moe_out)
    assert beside.ops.moe_out is not package.ops.moe_out


# ---- rolling back --------------------------------------------------------------------------------------------------
def told(setting, code):
    """What a fresh Python says with the variable set so."""
    start = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import torch, {PACKAGE.name} as op; "
        "weights = {'w13_q': torch.zeros(1)}; "
        f"bind = lambda: op.bind(weights, interleaved={CONTRACT['weights']['interleaved']}, top_k={TOP_K}); "
    )
    return python(start + code, **{SPEC["variable"]: setting})


def test_0_rolls_back_in_silence():
    maps = "print(open('/proc/self/maps').read().count(op._ops.SPEC['library']))"
    done = told("0", f"print(op.available(), bind()); {maps}")
    assert done.stdout.count(f"{SPEC['variable']}=0: rolled back") == 2, done.stderr
    assert done.stdout.endswith("\n0\n")  # the library is not even loaded
    assert "Warning" not in done.stderr
    for call in ("op.prepare('cpu')", "op.ops.moe", "op.moe(torch.zeros(1), None, None)"):
        assert "RuntimeError: " + SPEC["variable"] + "=0: rolled back" in told("0", call).stderr, call


def test_weights_that_are_none_or_on_the_cpu_are_a_reason(package, weights):
    facts = {"interleaved": CONTRACT["weights"]["interleaved"], "top_k": CONTRACT["top_k"]}
    for given in (None, [], {}, dict.fromkeys(weights), dict.fromkeys(weights, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer, reason = package.bind(given, **facts)
        assert layer is None
        assert "expected" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "is on cpu: expected a CUDA device" in package.bind({n: w.cpu() for n, w in weights.items()}, **facts)[1]


def test_unset_warns_once_with_the_reason_and_goes_on():
    done = told("", "print(bind()[0], bind()[0])")
    assert done.stdout == "None None\n", done.stderr
    assert done.stderr.count("is not used: weights ['w13_q']: expected a tensor for each of [") == 1


def test_1_makes_what_is_missing_an_error():
    done = told("1", "bind()")
    assert done.returncode == 1
    assert f"RuntimeError: {SPEC['variable']}=1, and the op cannot be used: weights ['w13_q']" in done.stderr


def test_another_setting_is_refused():
    assert f"{SPEC['variable']}='yes': expected 0 (roll back), 1" in told("yes", "").stderr


# ---- where there is no GPU -----------------------------------------------------------------------------------------
def test_a_cpu_tensor_is_refused(package):
    with pytest.raises(RuntimeError, match="x is on the wrong kind of device: expected a CUDA tensor"):
        package.ops.moe_out(*tensors_of("moe_out", 1).values())


@pytest.mark.parametrize("name", ["ops.moe", "moe"])
def test_a_cpu_tensor_is_refused_by_what_finds_its_own_workspace_too(package, capfd, name):
    given = tensors_of("moe_out", 1)
    del given["workspace"], given["out"]
    x, ids, shares, expert_map, live, *weights = given.values()
    with pytest.raises(RuntimeError, match="x is on the wrong kind of device, cpu: expected a CUDA tensor"):
        if name == "moe":
            package.moe(x, ids, shares, *weights)
        else:
            package.ops.moe(x, ids, shares, expert_map, live, *weights)
    assert "Exception in aoti_torch" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arches", "works"),
    [
        (["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"], False),
        (["sm_70", "sm_75"], True),
        (["compute_60"], True),
        (["compute_75"], False),
        ([], False),
    ],
)
def test_a_torch_without_code_for_a_v100_is_told(package, monkeypatch, arches, works):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arches)
    told = package.available("cuda:0")
    assert told[0] is works
    assert works or "has no code of its own for a V100" in told[1]


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
def test_without_a_gpu_it_says_so(package, weights):
    assert package.available() == (False, f"torch {torch.__version__} sees no GPU: install the NVIDIA driver and a "
                                   "torch built with CUDA")  # fmt: skip
    package._said.clear()  # a reason is warned of once
    with pytest.warns(UserWarning, match="is not used"):
        bound, reason = package.bind(weights, interleaved=CONTRACT["weights"]["interleaved"], top_k=TOP_K)
    assert bound is None
    assert "w13_q is on cpu: expected a CUDA device" in reason
    with pytest.raises(RuntimeError, match="driver"):
        package.prepare("cuda:0")


@pytest.mark.parametrize(
    ("capability", "works", "why"),
    [((7, 0), True, SPEC["timings"]), ((7, 5), False, "7.5: the kernels are code of 7.0"), ((9, 0), False, "9.0")],
)
def test_available_tells_a_v100_and_where_its_timings_come_from(package, monkeypatch, capability, works, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_75"])
    told = package.available("cuda:0")
    assert told[0] is works
    assert why in told[1]


def test_the_manifest_says_what_its_timings_are_worth():
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    assert manifest["timings"] == SPEC["timings"]
    assert {level["word"] for level in manifest["levels"]} == {manifest["set"]["word"]}
    assert manifest["set"]["word"] in manifest["timings"]
    assert manifest["timings"] in (FOLDER / "README.md").read_text()


def test_every_file_of_the_folder_has_its_digest_in_the_manifest():
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    ours = {name for name in found if "__pycache__" not in name and ".pytest_cache" not in name}
    assert ours == {*manifest["files"], "manifest.json"}


def test_levels_and_sizes_are_the_contracts(package):
    assert CONTRACT["tuning"]["levels"][-1] == MAX_TOKENS == package.MAX_TOKENS
    assert CONTRACT["hidden"] == HIDDEN
