"""What executing a configuration's sm_70 code on one step shows: its counts, and its trace for a simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner import build, cases, counts, host, machine, model, plan, render, trace, verify
from tuner.build import Image
from tuner.cases import Case
from tuner.contract import Contract
from tuner.counts import Counts
from tuner.errors import RequestError
from tuner.gpu import Device
from tuner.machine import Executed
from tuner.plan import Plan, PlanName
from tuner.reference import Difference
from tuner.sass import ARCH
from tuner.space import STAGES, Config
from tuner.verify import Layers, Operands

INPUT = "gaussian"


@dataclass(frozen=True)
class Step:
    """One call of the op, and the plan that serves it."""

    made: Plan
    images: Mapping[str, Image]
    operands: Operands
    case: Case

    @property
    def active(self) -> int:
        """Experts that some slot is routed to."""
        local = self.case.local(self.made.contract.experts)
        return len(np.unique(local[local >= 0]))


def step(layers: Layers, config: Config, tokens: int, name: PlanName, routed: str, seed: int = 0) -> Step:
    """Rank 0's step of `tokens` tokens. Raises RequestError, and what building raises."""
    made = plan.make(layers.contract, config, name)
    case = cases.make_case(layers.contract, tokens, routed, INPUT, seed)
    images = {stage: build.build(source) for stage, source in render.render(made).items()}
    return Step(made, images, verify.operands(made, layers.weights(0), case), case)


@dataclass(frozen=True)
class Shown:
    """A level's fused launch: what it did, how far its output is from float64, whether its bits are the source's."""

    tokens: int
    counts: Counts
    difference: Difference
    ok: bool
    source_bits: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"tokens": self.tokens, "ok": self.ok, "source_bits": self.source_bits}
        return told | {"difference": self.difference.to_dict(), **self.counts.to_dict()}

    def cells(self) -> tuple[object, ...]:
        """The row under HEADERS."""
        first, *rest = counts.row(self.tokens, self.counts)
        bits = "source's bits" if self.source_bits else "other bits than its source"
        return (first, f"{self.difference.relative_l2:.2e}", f"{'ok' if self.ok else 'WRONG'}, {bits}", *rest)


HEADERS = (counts.HEADERS[0], "rel. L2", "verdict", *counts.HEADERS[1:])


def count(contract: Contract, configs: Mapping[int, Config], gpu: str, routed: str) -> Iterator[Shown]:
    """Each level's fused launch, executed once, and its source emulated. Raises as `step` and machine.execute do.

    Raises RequestError for a GPU that does not run sm_70 code.
    """
    described = model.device(gpu)
    if described.arch != ARCH:
        raise RequestError(f"--executed runs {ARCH} code, and {gpu} runs other: give a V100 as --gpu")
    layers = Layers(contract)
    for tokens, config in configs.items():
        chosen = step(layers, config, tokens, "fused", routed)
        done: list[Executed] = []
        found = machine.execute(chosen.made, chosen.images, chosen.operands, tokens, device=described, counted=done)
        source = host.execute(chosen.made, render.render(chosen.made), chosen.operands, tokens)
        expected, local = layers.expected(0, chosen.case), chosen.case.local(contract.experts)
        difference, _, wrong = verify.check_output(contract, expected, local, found.out)
        same = found.out.tobytes() == source.out.tobytes()
        yield Shown(tokens, _counted(chosen, done[0], described), difference, not wrong, same)


def _counted(chosen: Step, done: Executed, device: Device) -> Counts:
    contract = chosen.made.contract
    gemms = [contract.gemm(stage) for stage in STAGES if f"{stage.upper()}_Q" in done.launch.arguments]
    weights = chosen.active * sum(gemm.k * gemm.n for gemm in gemms)
    return counts.count(
        done, weights, chosen.active * sum(model.expert_bytes(contract, gemm) for gemm in gemms), device
    )


@dataclass(frozen=True)
class TraceReport:
    """A written trace as the command line tells it."""

    traced: trace.Traced
    rows: tuple[tuple[str, Counts, int], ...]  # file, counts, bytes before packing
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        files = [{"file": file, "bytes": size, **found.to_dict()} for file, found, size in self.rows]
        return {"folder": str(self.traced.folder), "launches": files, "checked": self.checked}


TRACE_HEADERS = ("file", "stage", "CTAs", "warp instr", "MB of text", "bytes/line", "MB packed")


def write_trace(
    contract: Contract, config: Config, tokens: int, name: PlanName, routed: str, output: Path, check: bool
) -> TraceReport:
    """Executes one step and writes its trace to `output`; with `check`, reads it back. Raises as trace.write does."""
    chosen = step(Layers(contract), config, tokens, name, routed)
    traced = trace.write(chosen.made, chosen.images, chosen.operands, tokens, output)
    if check:
        trace.check(traced)
    device = model.device(machine.DEVICE)
    rows = tuple(
        (trace.file_name(i), _counted(chosen, done, device), size)
        for i, (done, size) in enumerate(zip(traced.launches, traced.sizes, strict=True))
    )
    return TraceReport(traced, rows, check)


def trace_rows(report: TraceReport) -> Iterator[tuple[object, ...]]:
    """Rows under TRACE_HEADERS."""
    for file, found, size in report.rows:
        packed = (report.traced.folder / f"{file}.gz").stat().st_size
        yield (
            *(f"{file}.gz", found.stage, found.grid[0] * found.grid[1], found.instructions),
            *(size / 1e6, size / found.instructions, packed / 1e6),
        )
