"""What this machine has of what Voltune uses, what is missing, and the command that mends it."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tuner import build, cache
from tuner.device import available
from tuner.errors import VoltuneError

PACKAGES = ("numpy", "jinja2", "click", "optuna", "safetensors", "ml-dtypes")


@dataclass(frozen=True)
class Finding:
    """One thing looked for; `needed` where the main job cannot do without it."""

    name: str
    ok: bool
    text: str
    needed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """Everything looked for, in the order of the pipeline."""
    return [
        _python(),
        *(_package(name) for name in PACKAGES),
        _guarded("NVRTC", _compiler),
        _cxx(),
        _guarded("cache", _cache),
        _gpu(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return Finding("Python", ok, version if ok else f"{version}; 3.11 or newer is needed: apt-get install python3.11")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed: {sys.executable} -m pip install -e .")


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except VoltuneError as error:
        return Finding(name, False, str(error))


def _compiler() -> Finding:
    found = build.compiler()
    if 70 in found.architectures:
        return Finding("NVRTC", True, f"{found.name}, builds sm_70")
    return Finding("NVRTC", False, f"{found.name} does not build sm_70: {build.INSTALL}")


def _cxx() -> Finding:
    if shutil.which("g++") is None:
        return Finding("g++", False, "not found, and the CPU executor compiles with it: apt-get install g++")
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"(\d+)\.\d+\.\d+", said)
    if version is None or int(version[1]) < 12:
        return Finding("g++", False, f"{said.splitlines()[0]}; 12 or newer is needed: apt-get install g++-12")
    return Finding("g++", True, said.splitlines()[0])


def _cache() -> Finding:
    folder = cache.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return Finding("cache", False, f"{folder} is not writable: set VOLTUNE_CACHE_DIR to a folder that is")
    return Finding("cache", True, f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free")


def _gpu() -> Finding:
    ok, reason = available()
    return Finding("GPU", ok, reason if ok else f"{reason}; tune predicts, and verify emulates", needed=False)
