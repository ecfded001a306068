"""The doctor finds what is missing, says the command that mends it, and needs nothing of what it looks for."""

import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from tuner import build, doctor
from tuner.build import Compiler
from tuner.device import GpuInfo
from tuner.doctor import Finding
from tuner.errors import LaunchFailed, MissingTool


def found(name: str) -> Finding:
    return {each.name: each for each in doctor.examine()}[name]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda: (False, "no GPU: none here"))


def status() -> int:
    return CliRunner().invoke(cli.main, ["doctor"]).exit_code


def test_this_machine_has_what_the_tests_need() -> None:
    for name in ("Python", "numpy", "NVRTC", "g++", "cache"):
        assert found(name).ok, found(name)
    assert "builds sm_70" in found("NVRTC").text
    assert status() == 0


def test_no_gpu_is_said_and_is_no_fault() -> None:
    gpu = found("GPU")
    assert (gpu.ok, gpu.needed) == (False, False)
    assert gpu.text == "no GPU: none here; tune predicts, and verify emulates"
    shown = CliRunner().invoke(cli.main, ["doctor"])
    assert (shown.exit_code, shown.stdout.splitlines()[-1].split()[:2]) == (0, ["none", "GPU"])


class FakeDevice:
    info = GpuInfo("Tesla V100-PCIE-32GB", (7, 0), 80, 6 << 20, 98304, 1 << 35, "GPU-0", "535.1")
    mode = "cubin"

    def __enter__(self) -> "FakeDevice":
        return self

    def __exit__(self, *ended: object) -> None:
        pass


def test_a_gpu_is_named_with_its_driver_and_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda: (True, ""))
    monkeypatch.setattr(doctor, "DeviceExecutor", FakeDevice)
    assert found("GPU") == Finding("GPU", True, "Tesla V100-PCIE-32GB, driver 535.1; runs cubin", False)


def test_a_gpu_that_cannot_be_opened_is_told_and_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> FakeDevice:
        raise LaunchFailed("the driver hangs")

    monkeypatch.setattr(doctor, "available", lambda: (True, ""))
    monkeypatch.setattr(doctor, "DeviceExecutor", broken)
    assert found("GPU") == Finding("GPU", False, "the driver hangs", False)


def test_no_c_compiler_is_missing_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not found("g++").ok
    assert found("g++").text.endswith("apt-get install g++")
    assert status() == 1


@pytest.mark.parametrize(
    ("said", "ok"),
    [("g++ (Debian 11.4.0-1) 11.4.0", False), ("g++ (Ubuntu 13.2.0-4) 13.2.0\nmore", True), ("", False)],
)
def test_a_c_compiler_older_than_12_is_missing(monkeypatch: pytest.MonkeyPatch, said: str, ok: bool) -> None:
    def version(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=said)

    monkeypatch.setattr(subprocess, "run", version)
    assert doctor._cxx().ok is ok
    assert ("12 or newer is needed" in doctor._cxx().text) is not ok


def test_a_missing_or_too_new_cuda_compiler_is_told_with_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: Compiler("NVRTC 13.0.88", (75, 80, 90)))
    assert found("NVRTC") == Finding("NVRTC", False, f"NVRTC 13.0.88 does not build sm_70: {build.INSTALL}")

    def absent() -> Compiler:
        raise MissingTool("CuPy cannot be imported")

    monkeypatch.setattr(build, "compiler", absent)
    assert found("NVRTC") == Finding("NVRTC", False, "CuPy cannot be imported")
    assert status() == 1


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "optuna":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not found("optuna").ok
    assert "-m pip install -e ." in found("optuna").text
    assert found("numpy").ok


def test_a_cache_that_cannot_be_written_is_told_with_the_variable_that_moves_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VOLTUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not found("cache").ok
    assert "Not a directory" in found("cache").text
    assert "set VOLTUNE_CACHE_DIR" in found("cache").text


def test_the_json_has_a_finding_a_name() -> None:
    content = json.loads(CliRunner().invoke(cli.main, ["doctor", "--json"]).stdout)
    assert content["GPU"] == {
        "name": "GPU",
        "ok": False,
        "needed": False,
        "text": "no GPU: none here; tune predicts, and verify emulates",
    }
    assert list(content) == sorted(each.name for each in doctor.examine())
