"""What this machine has of what Voltune uses, what is missing, and the command that mends it."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tuner import build, cache
from tuner.device import available
from tuner.errors import VoltuneError
from tuner.measure import DeviceExecutor

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
        _guarded("GPU", _gpu, needed=False),
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


def _guarded(name: str, look: Callable[[], Finding], needed: bool = True) -> Finding:
    try:
        return look()
    except VoltuneError as error:
        return Finding(name, False, str(error), needed)


def _compiler() -> Finding:
    found = build.compiler()
    if 70 in found.architectures:
        return Finding("NVRTC", True, f"{found.name}, builds sm_70")
    return Finding("NVRTC", False, f"{found.name} does not build sm_70: {build.INSTALL}")


def _cxx() -> Finding:
    if shutil.which("g++") is None:
        return Finding("g++", False, "not found, and the CPU executor compiles with it: apt-get install g++")
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    version = re.search(r"(\d+)\.\d+\.\d+", said)
    if version is None or int(version[1]) < 12:
        return Finding("g++", False, f"{said or 'does not run'}; 12 or newer is needed: apt-get install g++-12")
    return Finding("g++", True, said)


def _cache() -> Finding:
    folder = cache.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error}): set VOLTUNE_CACHE_DIR to a folder that can"
        return Finding("cache", False, text)
    return Finding("cache", True, f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free")


def _gpu() -> Finding:
    ok, reason = available()
    if not ok:
        return Finding("GPU", False, f"{reason}; tune predicts, and verify emulates", needed=False)
    with DeviceExecutor() as device:
        text = f"{device.info.name}, driver {device.info.driver}; runs {device.mode}"
        return Finding("GPU", True, text, needed=False)
