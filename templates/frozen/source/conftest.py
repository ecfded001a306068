"""The folder's package, built with nvcc where its library is not there yet: `make ARCH=sm_70`, or of the GPU here."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent
(PACKAGE,) = (path.parent for path in FOLDER.glob("*/op.json"))
SPEC = json.loads((PACKAGE / "op.json").read_text())
CONTRACT = SPEC["contract"]
MAX_TOKENS, TOP_K, EXPERTS = SPEC["max_tokens"], CONTRACT["top_k"], CONTRACT["experts"]


def pytest_addoption(parser):
    parser.addoption("--allow-ptx", action="store_true", help="has no meaning here: the library is built for the GPU")


@pytest.fixture(scope="session")
def package():
    """The folder's package."""
    if not (PACKAGE / SPEC["library"]).exists():
        if shutil.which("nvcc") is None:
            pytest.skip("the library is not built, and there is no nvcc here")
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (7, 0)
        listed = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
        if f"compute_{major}{minor}" not in listed:
            known = ", ".join(listed)
            pytest.skip(f"the nvcc here builds for {known}, not for sm_{major}{minor}: sm_70 takes nvcc 12 or older")
        subprocess.run(["make", f"ARCH=sm_{major}{minor}", f"PYTHON={sys.executable}"], cwd=FOLDER, check=True)
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module(PACKAGE.name)
