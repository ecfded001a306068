"""A tuned set of the small contract without tuning, exports of it without a compiler of CUDA, and kernels that the CPU
executor runs where a driver would."""

import ctypes
import importlib.util
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small import SMALL, TENSOR

from tuner import export, host, plan, space, winners
from tuner.build import Image
from tuner.contract import Contract
from tuner.frozen import Kernel, Tables
from tuner.space import Config


def configs(small: Contract) -> dict[int, Config]:
    """The lower levels on ordinary cores, the upper ones on tensor cores where the layout has that family."""
    upper = TENSOR if "tensor" in space.families(small) else space.default(small)
    return {n: space.default(small) if n < 5 else upper for n in small.levels}


def made(small: Contract = SMALL, target: str = "v100-predicted", **options: Any) -> winners.Winners:
    """A set whose every level has a good verdict."""
    word = target.rsplit("-", 1)[1]
    timing = {"us": 9.0, "word": word, "device": "V100-PCIE-32GB"}
    verdicts = ({"case": "a case", "executor": "emulated on CPU", "ok": True, "reasons": []},)
    levels = {
        tokens: winners.LevelWinner(config, 9.0, 10.0, 5.0, 64, False, timing, verdicts)
        for tokens, config in configs(small).items()
    }
    values: dict[str, Any] = {"levels": levels, "toolchain": {"compiler": "NVRTC 12.9.86"}, "date": "2026-01-01"}
    values |= {"contract": small, "target": target, "word": word, "device": "V100-PCIE-32GB", "ledger": "a"} | options
    return winners.Winners(**values)


def stand_in(tables: Tables) -> list[Image]:
    """Images with headers of code and nothing after them: the stand-in driver looks at no more."""

    def image(kernel: Kernel) -> Image:
        digest = kernel.source.digest
        cubin, ptx = b"\x7fELF" + digest.encode(), f".target sm_70 // {digest}\n".encode()
        return Image(kernel.entry, "sm_70", cubin, ptx, 64, 0, 0, 0, (), "NVRTC 12.9.86", digest)

    return [image(kernel) for kernel in tables.kernels]


def write(folder: Path, small: Contract = SMALL, **options: Any) -> Path:
    """An exported folder of `made(small)`, with code that only the stand-in driver takes."""
    winners.write(made(small), folder / "set")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_images", stand_in)
        return export.export(folder / "set", folder / "folder", **options).folder


def conftest(folder: Path) -> ModuleType:
    """The folder's own conftest, which builds its package for CPU tensors."""
    spec = importlib.util.spec_from_file_location(f"conftest_{folder.parent.name}", folder / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Computing:
    """A stand-in driver whose launches the CPU executor runs, on tensors whose memory its processes share."""

    def __init__(self, folder: Path, small: Contract, place: Path) -> None:
        own = conftest(folder)
        for name in ("driver", "op"):
            (place / name).mkdir()
        library = own.build_driver(place / "driver")
        space = f"{own.FAKE}_{uuid.uuid4().hex}"  # several in one process
        self.op: Any = own.build_fake(place / "op", library, space)
        self.driver: Any = own.Driver(library)
        self.spec: Mapping[str, Any] = own.SPEC
        self.kernels = export.frozen.tables(small, configs(small)).kernels
        self.driver.reset()
        self.driver.run(self._run)
        self.small, self.weights, self.layer = small, {}, None  # which the test binds

    def _run(self, record: Any) -> None:
        """What host.execute does with one launch, on the addresses that the op passed."""
        source = self.kernels[record.kernel].source
        library = ctypes.CDLL(str(host.compile(source)))
        library.voltune_start.restype = ctypes.c_void_p
        library.voltune_report.restype = ctypes.POINTER(host._Report)
        chosen = host._Launch(
            *(record.grid[0], record.grid[1], record.block[0], record.shared),
            *(0, 2, ctypes.addressof(record.arguments)),
        )
        run = ctypes.c_void_p(library.voltune_start(ctypes.byref(chosen)))
        while not library.voltune_wait(run, 50):
            pass
        report = library.voltune_report(run).contents
        self.ended = report.fault, report.finished
        assert self.ended == (0, record.grid[0] * record.grid[1])
        library.voltune_free(run)


def plans(small: Contract, tokens: int, name: plan.PlanName = "fused") -> plan.Plan:
    """The plan of the level that serves `tokens`."""
    level = next(level for level in small.levels if tokens <= level)
    return plan.make(small, configs(small)[level], name)
