"""What a benchmark found: its figures, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.contract import Contract
from tuner.device import Array, GpuInfo
from tuner.space import Config

OP, COMPACT, W13, W2 = "op", "compact", "W13", "W2 + combine"
ALL_EXPERTS, DENSE, LOADS = "all experts", "dequantise + matmul", "loads alone"
HEADERS = (
    *("arm", "set", "configuration", "us", "p10", "p90", "x ceiling", "x floor"),
    *("warm us", "warm p10", "warm p90", "note"),
)


@dataclass(frozen=True)
class Subject:
    """Configurations by level, under the name of the set they come from or another."""

    name: str
    configs: Mapping[int, Config]
    origin: str = ""
    device: str = ""  # that a set was tuned for, in the set's words
    word: str = ""
    defaults: tuple[int, ...] = ()  # levels the set lacks, and has the default at

    def made_for(self, gpu: str) -> bool:
        """Whether a set was tuned for the GPU of that name; "V100-PCIE-32GB" is one of "Tesla V100-PCIE-32GB"."""
        return not self.device or gpu in self.device or self.device in gpu

    def line(self, gpu: str) -> str:
        """Name and origin in words."""
        if not self.origin:
            return f"{self.name}: no set is there; the untuned default configuration"
        if not self.device:
            return f"{self.name}: {self.origin}"
        other = "" if self.made_for(gpu) else ", which is ANOTHER DEVICE than this"
        lacking = f"; without {', '.join(f'C{n}' for n in self.defaults)}: the default there" if self.defaults else ""
        return f"{self.name}: winners of {self.origin}, {self.word} for {self.device}{other}{lacking}"


@dataclass(frozen=True)
class Quantiles:
    """Microseconds a call: the median, and the .1 and .9 quantiles, of the samples, one a round."""

    us: float
    p10: float
    p90: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float] | Array) -> Quantiles:
        """The summary of samples."""
        low, middle, high = (float(value) for value in np.quantile(samples, (0.1, 0.5, 0.9)))
        return cls(middle, low, high, tuple(round(float(us), 4) for us in samples))

    @property
    def cells(self) -> tuple[float, float, float]:
        """Of a table."""
        return self.us, self.p10, self.p90


@dataclass(frozen=True)
class Row:
    """One arm. of: the subjects whose configuration it has; missing: why there is no timing."""

    arm: str
    of: tuple[str, ...] = ()
    config: str = ""
    cold: Quantiles | None = None
    warm: Quantiles | None = None
    missing: str = ""


@dataclass(frozen=True, eq=False)
class Measured:
    """A level and routing. active: experts with a row, mean, least and most of the calls; bytes: theirs, on average."""

    tokens: int
    routing: str
    active: tuple[float, int, int]
    bytes: float
    rows: tuple[Row, ...]
    copy_us: tuple[float, ...]  # a round
    details: Mapping[str, Any]

    @property
    def ceiling_us(self) -> float:
        """What the loads alone take."""
        return next(row.cold.us for row in self.rows if row.arm == LOADS and row.cold is not None)


@dataclass(frozen=True, eq=False)
class Report:
    """One run's figures, and what they depend on. code: cubin, ptx or native; ceiling: counts of configurations."""

    contract: Contract
    subjects: tuple[Subject, ...]
    rounds: int
    seed: int
    executor: str
    gpu: GpuInfo
    code: str
    compiler: str
    copy_bytes: int
    ceiling: Mapping[str, int]  # tried, feasible, failed
    cells: tuple[Measured, ...]

    @property
    def copy(self) -> Quantiles:
        """Of the copy, over all rounds of the run."""
        return Quantiles.of([us for cell in self.cells for us in cell.copy_us])

    @property
    def copy_rate(self) -> float:
        """Bytes read plus bytes written of the copy a microsecond."""
        return 2 * self.copy_bytes / self.copy.us

    def floor_us(self, cell: Measured) -> float:
        """What the active experts' bytes, as the layout holds them, take to read at the copy rate.

        The rate counts bytes read and bytes written: reading alone is held to be as fast as both together.
        """
        return cell.bytes / self.copy_rate

    def heading(self) -> Iterator[str]:
        """What stands above the tables."""
        gpu, copy = self.gpu, self.copy
        mhz = [sorted({cell.details[name] for cell in self.cells}) for name in ("sm_mhz", "memory_mhz")]
        sm, memory = (" to ".join(map(str, dict.fromkeys((each[0], each[-1])))) for each in mhz)
        yield (
            f"{self.contract.name}: MEASURED on {gpu.name} (driver {gpu.driver or 'unknown'}, SM {sm} MHz, memory "
            f"{memory} MHz), {self.executor}, compiled by {self.compiler}"
        )
        yield f"CUDA graphs, cold weights, medians of {self.rounds} interleaved rounds; verified before it was timed"
        yield from (subject.line(gpu.name) for subject in self.subjects)
        yield (
            f"copy: {self.copy_rate / 1e6:.3f} TB/s, bytes read plus bytes written, of {self.copy_bytes / 1e6:.0f} MB "
            f"from place to place on the GPU in {copy.us:.1f} us ({copy.p10:.1f} to {copy.p90:.1f})"
        )
        yield "floor: the active experts' bytes in the layout, read at the copy rate (reading as fast as both together)"
        failed = f", {self.ceiling['failed']} failed" if self.ceiling["failed"] else ""
        yield (
            f"ceiling: the fused plan's loads alone, the fastest of {self.ceiling['tried']} configurations tried; "
            f"this GPU can launch {self.ceiling['feasible']}{failed}"
        )

    def sections(self) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
        """A heading and the rows under HEADERS of each level and routing."""
        for cell in self.cells:
            mean, least, most = cell.active
            details = cell.details
            discarded = details["discarded_rounds"]
            warmer = details["cold_bytes"] < details["cold_wanted_bytes"]
            notes = [
                f"C{cell.tokens} {cell.routing}: {mean:.1f} active experts ({least} to {most})",
                f"{cell.bytes / 1e6:.2f} MB",
                f"floor {self.floor_us(cell):.2f} us, ceiling {cell.ceiling_us:.2f} us",
                *([f"{discarded} rounds discarded: the clock fell"] if discarded else []),
                *([f"NOT COLD: only {details['layers']} copies of the weights fit"] if warmer else []),
            ]
            yield "; ".join(notes), [self._cells(cell, row) for row in cell.rows]

    def _cells(self, cell: Measured, row: Row) -> tuple[object, ...]:
        cold, warm = (("", "", "") if each is None else each.cells for each in (row.cold, row.warm))
        return (row.arm, ", ".join(row.of), row.config, *cold, *self._ratios(cell, row), *warm, row.missing)

    def _ratios(self, cell: Measured, row: Row) -> tuple[float | None, float | None]:
        """Cold time over ceiling and over floor; of what is a part of the op, neither."""
        if row.cold is None or row.arm in (COMPACT, W13, W2):
            return None, None
        return row.cold.us / cell.ceiling_us, row.cold.us / self.floor_us(cell)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "contract": self.contract.name,
            "contract_digest": self.contract.digest(),
            "word": "measured",
            "executor": self.executor,
            "gpu": self.gpu.to_dict(),
            "code": self.code,
            "compiler": self.compiler,
            "rounds": self.rounds,
            "seed": self.seed,
            "sets": [
                {
                    "name": subject.name,
                    "origin": subject.origin,
                    "device": subject.device,
                    "word": subject.word,
                    "made_for_this_gpu": subject.made_for(self.gpu.name),
                    "default_levels": list(subject.defaults),
                    "configs": {str(tokens): config.key() for tokens, config in subject.configs.items()},
                }
                for subject in self.subjects
            ],
            "copy": {
                **vars(self.copy),
                "bytes": self.copy_bytes,
                "tb_per_s": self.copy_rate / 1e6,
                "counts": "bytes read plus bytes written",
            },
            "ceiling": dict(self.ceiling),
            "cells": [self._cell_dict(cell) for cell in self.cells],
        }

    def _cell_dict(self, cell: Measured) -> dict[str, Any]:
        arms = []
        for row in cell.rows:
            over_ceiling, over_floor = self._ratios(cell, row)
            timed = {
                name: None if each is None else vars(each) for name, each in (("cold", row.cold), ("warm", row.warm))
            }
            arms.append(
                {
                    **{"arm": row.arm, "sets": list(row.of), "config": row.config, "missing": row.missing},
                    **{"over_ceiling": over_ceiling, "over_floor": over_floor},
                    **timed,
                }
            )
        return {
            "tokens": cell.tokens,
            "routing": cell.routing,
            "active_experts": dict(zip(("mean", "least", "most"), cell.active, strict=True)),
            "bytes": cell.bytes,
            "floor_us": self.floor_us(cell),
            "ceiling_us": cell.ceiling_us,
            "details": dict(cell.details),
            "arms": arms,
        }
