"""What a warp does in an item of the op, in numbers that the model puts into time: instructions, sectors, passes.

`assumed` has them from the kernels' data flow, for kernels whose code is not executed: those of a GPU newer than a
V100, and those not built yet. Its constants for sm_70 rest on what tuner/items.py counts in qwen38-tp4's kernels, those
from sm_80 on on reading code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from tuner.contract import Contract, Gemm
from tuner.gpu import WARP, Device
from tuner.space import STAGES, STEP, Config, Stage, Tile, tile_columns

SECTOR = 32  # bytes
DATA_FLOW = "counted from the data flow"

# What no layout can do without, a group and column: f16 scale and 4-bit zero point. It is also what the awq layout has.
FLOOR_STATS_BYTES = 2.5

# A warp's instructions, from that compute capability on. On tensor cores a step, by the bytes of its statistics:
TENSOR_STEP = {3: {70: 147.0, 80: 65.0}, 4: {70: 202.0, 80: 65.0}}
# On the ordinary cores a weight costs one FADD, one FFMA a row, and LOP3s: sm_70's compiler makes two of a mask and an
# exponent, and one more a weight goes into the zero points of sm70-u4.
WEIGHT_LOGIC = {"sm70-u4": {70: 3, 80: 1}, "awq": {70: 2, 80: 1}}
ROW_INSTRUCTIONS = {70: 6, 80: 16}  # a step and row: read eight activations, scale the sums
STATS_INSTRUCTIONS = 30  # a step and four columns of a lane: load, unpack, convert
STEP_INSTRUCTIONS = 12  # a step: addresses, loop, the load itself
STAGE_INSTRUCTIONS = 40  # eight f16 activations into shared memory as floats
COMBINE_INSTRUCTIONS = {70: 190, 80: 150}  # ten routes of a column

Number = TypeVar("Number", int, float)


def expert_bytes(contract: Contract, gemm: Gemm) -> float:
    """Bytes of one expert's matrix in the contract's layout: weights, scales and zero points."""
    stats = contract.stats_bytes if contract.layout == "sm70-u4" else FLOOR_STATS_BYTES
    return gemm.k * gemm.n / 2 + gemm.groups * gemm.n * stats


@dataclass(frozen=True)
class Mix:
    """What one warp does: its instructions, those of them for the fp32 and for the integer lanes, its passes through
    shared memory, and the 32-byte sectors it asks of the L2."""

    total: float = 0.0
    fp32: float = 0.0
    integer: float = 0.0
    shared: float = 0.0
    sectors: float = 0.0

    def __add__(self, other: Mix) -> Mix:
        return Mix(
            self.total + other.total,
            self.fp32 + other.fp32,
            self.integer + other.integer,
            self.shared + other.shared,
            self.sectors + other.sectors,
        )

    def __mul__(self, times: float) -> Mix:
        return Mix(
            self.total * times, self.fp32 * times, self.integer * times, self.shared * times, self.sectors * times
        )

    def __sub__(self, other: Mix) -> Mix:
        return self + other * -1.0

    def clocks(self, dev: Device) -> float:
        """Of an SM that does only this: by its issue slots, its lanes, or shared memory's one pass a clock."""
        lanes = self.fp32 * WARP / dev.fp32_lanes, self.integer * WARP / dev.int_lanes
        return max(self.total / dev.issue_per_clock, *lanes, self.shared)


@dataclass(frozen=True)
class StageWork:
    """A warp's work at one stage. `item`: once an item. Of a pass, outside of its steps: `one` over one row, `row` for
    each further one, `walk` for each of the segment's rows that it passes by. A step: `lone` in a pass over one row,
    `full` in one over more."""

    item: Mix
    one: Mix
    row: Mix
    lone: Mix
    full: Mix
    walk: Mix = Mix()

    def step(self, rows: int) -> Mix:
        """A step in a pass over so many rows."""
        return self.lone if rows == 1 else self.full

    def around(self, rows: int, segment: int) -> Mix:
        """A pass over so many of a segment's rows, outside of its steps."""
        return self.one + self.row * (rows - 1) + self.walk * (segment - rows)


@dataclass(frozen=True)
class Work:
    """A warp's work in a kernel's items, of which combine's are all alike. `basis`: how it was counted."""

    w13: StageWork
    w2: StageWork
    combine: Mix
    basis: str

    def stage(self, stage: Stage) -> StageWork:
        """W13's or W2's."""
        return self.w13 if stage == "w13" else self.w2


def assumed(contract: Contract, config: Config, dev: Device, besides: float) -> Work:
    """The work of kernels that are not executed; `besides`: a warp's instructions in a pass, besides its steps."""
    w13, w2 = (_assumed(contract, stage, config.stage(stage), dev, besides) for stage in STAGES)
    return Work(w13, w2, Mix(_since(COMBINE_INSTRUCTIONS, dev)), DATA_FLOW)


def _assumed(contract: Contract, stage: Stage, tile: Tile, dev: Device, besides: float) -> StageWork:
    gemm, warps = contract.gemm(stage), tile.threads // WARP
    columns = tile_columns(contract)
    sectors = expert_bytes(contract, gemm) / gemm.n / gemm.k * STEP * columns / SECTOR
    staged = STAGE_INSTRUCTIONS * gemm.k / 8 / tile.threads if tile.family == "simt" else 0.0
    row = Mix(staged, sectors=gemm.k * (2 if stage == "w13" else 4) / warps / SECTOR)
    if tile.family == "tensor":
        lone = full = Mix(_since(TENSOR_STEP[contract.stats_bytes], dev), sectors=sectors)
    else:
        lone, full = (_simt_step(contract, rows, sectors, dev) for rows in (1, tile.rows))
    return StageWork(item=Mix(), one=row + Mix(besides), row=row, lone=lone, full=full)


def _simt_step(contract: Contract, rows: int, sectors: float, dev: Device) -> Mix:
    columns = tile_columns(contract)
    weights = STEP * columns / WARP  # of a lane
    stats, row = STATS_INSTRUCTIONS * columns / 32, _since(ROW_INSTRUCTIONS, dev)
    fp32 = weights * (1 + rows) + stats / 2 + rows * row / 2
    integer = weights * _since(WEIGHT_LOGIC[contract.layout], dev) + stats / 2 + STEP_INSTRUCTIONS
    return Mix(fp32 + integer + rows * row / 2, fp32, integer, sectors=sectors)


def _since(known: Mapping[int, Number], dev: Device) -> Number:
    """The entry of the highest compute capability that is at most the device's."""
    return known[max(each for each in known if each <= int(dev.arch.removeprefix("sm_")))]
