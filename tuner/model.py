"""Predicts the time of a stage's kernel on a described GPU from its launch, its registers and the routing.

A first analytic model. It is not validated beyond what its tests show: it orders configurations sensibly, stays finite,
and lands in the neighbourhood of the public and simulated figures the tests name. Its output is called "predicted",
never measured.

One stage's time is

    launch + prologue + (data^1.5 + issue^1.5)^(1/1.5) + empty CTAs + finish

`data` is the slower of DRAM and L2 traffic plus one latency for each round of loads that must wait for the one before;
`issue` is the time of the busiest SM's instructions. A warp keeps `unroll` steps in flight and waits for the oldest, so
data and instructions hide behind one another only as far as other warps are elsewhere in that cycle: the exponent
stands between a plain sum (no overlap, 1) and the longer of the two (perfect overlap, infinity).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Protocol

from tuner.contract import Contract, Gemm
from tuner.errors import InvalidConfig, RequestError
from tuner.plan import Launch, Plan
from tuner.space import STEP, W2Config, W13Config, tile_columns

WARP = 32
SECTOR = 32  # bytes
DRAM_ATOM = 64  # bytes an HBM2 access moves
TRAFFIC_NORM = 3.0  # DRAM and L2 move the same bytes in step: nearly the longer of the two
OVERLAP_NORM = 1.5
ISSUE_SHARE = 0.8  # of its slots a scheduler with enough warps fills; the rest are dependences and pipe conflicts

# What no layout can do without, a group and column: f16 scale and 4-bit zero point. It is also what the awq layout has.
FLOOR_STATS_BYTES = 2.5

TERMS = ("memory", "l2", "latency", "issue", "launch", "prologue", "empty", "finish")  # of a Prediction's parts, in us

# Instructions, from the kernels' data flow: a weight costs one LOP3 and one FADD, and one FFMA a row.
STATS_INSTRUCTIONS = 30  # a lane, step and four columns: load, unpack, convert
ROW_INSTRUCTIONS = 16  # a lane, step and row: stage eight activations as floats, read them back, scale the sums
STEP_INSTRUCTIONS = 12  # a lane and step: addresses, loop, the load itself
VOLTA_MMA = 32 + 12  # eight m8n8k4 of four instructions, and shuffles and selections of scales
AMPERE_MMA = 4  # m16n8k16
LOOKUP_CLOCKS = 120  # finding a segment's rows: two dependent trips through shared memory and ballots
BARRIER_CLOCKS = 40
SINGLE_WARP_CLOCKS = 2.0  # clocks between two instructions of one warp alone on a scheduler


@dataclass(frozen=True)
class Device:
    """A GPU as the model and the plan's validity rules see it; units and sources stand in devices.toml."""

    name: str
    arch: str
    sms: int
    clock_mhz: float
    bandwidth_gbs: float
    stream_gbs: float
    l2_gbs: float
    l2_bytes: int
    latency_ns: float
    l2_latency_ns: float
    shared_per_sm: int
    shared_per_block: int
    shared_reserved: int
    registers_per_sm: int
    registers_per_thread: int
    warps_per_sm: int
    blocks_per_sm: int
    threads_per_block: int
    fp32_lanes: int
    int_lanes: int
    issue_per_clock: int
    launch_us: float


@cache
def devices() -> dict[str, Device]:
    """Every described GPU, by name. Raises RequestError for a table whose keys are not Device's."""
    tables = tomllib.loads((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8"))
    wanted = {field.name for field in fields(Device)} - {"name"}
    for name, table in tables.items():
        if table.keys() != wanted:
            raise RequestError(f"devices.toml [{name}]: keys differ from Device's: {sorted(table.keys() ^ wanted)}")
    return {name: Device(name=name, **table) for name, table in tables.items()}


def device(name: str) -> Device:
    """The GPU whose name stands in `name`, which may be a driver's: "Tesla V100-PCIE-32GB", "NVIDIA H200".

    Raises RequestError with the known names.
    """
    known = devices()
    found = [known[key] for key in known if key.lower() in name.lower()]
    if len(found) != 1:
        raise RequestError(
            f"no description of device {name!r}; described: {', '.join(known)}; add a table to tuner/devices.toml"
        )
    return found[0]


class BuiltKernel(Protocol):
    """What the model wants of a build.Image."""

    @property
    def registers(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...
    @property
    def static_shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class Resources:
    """Registers a thread, shared bytes a CTA (static and dynamic), spill stores and loads in bytes a thread."""

    registers: int
    shared: int
    spill_bytes: int = 0

    @classmethod
    def of(cls, image: BuiltKernel, launch: Launch, tokens: int) -> Resources:
        return cls(image.registers, image.static_shared_bytes + launch.shared.at(tokens), image.spill_bytes)


@dataclass(frozen=True)
class Occupancy:
    """CTAs and warps resident on one SM, and what stops another CTA."""

    blocks: int
    warps: int
    limit: str


@dataclass(frozen=True)
class Prediction:
    """One launch's predicted microseconds; `parts` holds the terms in us and, with their unit in the name, counts."""

    us: float
    parts: Mapping[str, float]
    bound: str


def occupancy(dev: Device, threads: int, resources: Resources) -> Occupancy:
    """Resident CTAs by the rules of NVIDIA's occupancy calculator (registers in units of 256 a warp, warps in fours).

    Raises InvalidConfig where not even one CTA fits.
    """
    warps = math.ceil(threads / WARP)
    a_warp = math.ceil(max(resources.registers, 16) * WARP / 256) * 256
    register_warps = dev.registers_per_sm // a_warp // 4 * 4
    shared = math.ceil((resources.shared + dev.shared_reserved) / 256) * 256
    limits = {
        "warps": dev.warps_per_sm // warps,
        "blocks": dev.blocks_per_sm,
        "registers": register_warps // warps,
        "shared memory": dev.shared_per_sm // max(shared, 1),
    }
    limit, blocks = min(limits.items(), key=lambda item: item[1])
    too_large = resources.registers > dev.registers_per_thread or resources.shared > dev.shared_per_block
    if blocks < 1 or too_large or threads > dev.threads_per_block:
        raise InvalidConfig(
            f"a CTA of {threads} threads, {resources.registers} registers a thread and {resources.shared} bytes of "
            f"shared memory does not fit an SM of {dev.name} ({limit}); fewer warps, rows or steps in flight would"
        )
    return Occupancy(blocks, blocks * warps, limit)


def expert_bytes(contract: Contract, gemm: Gemm) -> float:
    """Bytes of one expert's matrix in the contract's layout: weights, scales and zero points."""
    stats = contract.stats_bytes if contract.layout == "sm70-u4" else FLOOR_STATS_BYTES
    return gemm.k * gemm.n / 2 + gemm.groups * gemm.n * stats


def floor(contract: Contract, stage: str, active: float, dev: Device) -> float:
    """Least microseconds to read `active` experts' int4 weights, f16 scales and 4-bit zeros, whatever the layout."""
    gemm = _gemm(contract, stage)
    return active * (gemm.k * gemm.n / 2 + gemm.groups * gemm.n * FLOOR_STATS_BYTES) / (dev.bandwidth_gbs * 1e3)


def predict_stage(
    contract: Contract,
    plan: Plan,
    stage: str,
    resources: Resources,
    pool: Sequence[tuple[Sequence[int], float]],
    tokens: int,
    dev: Device,
) -> Prediction:
    """The mean prediction over a pool of (rows of each active expert, weight); raises as predict does."""
    total = math.fsum(weight for _, weight in pool)
    each = [(predict(contract, plan, stage, resources, rows, tokens, dev), weight / total) for rows, weight in pool]
    parts = {name: math.fsum(found.parts[name] * weight for found, weight in each) for name in each[0][0].parts}
    us = math.fsum(found.us * weight for found, weight in each)
    return Prediction(us, parts, max(TERMS, key=lambda term: parts[term]))


def predict(
    contract: Contract,
    plan: Plan,
    stage: str,
    resources: Resources,
    rows_per_segment: Sequence[int],
    tokens: int,
    dev: Device,
) -> Prediction:
    """Predicted time of one launch of `stage` with cold weights.

    `rows_per_segment` are the routed rows of each expert that has any, in the order of the experts' first slots.
    Raises InvalidConfig where no CTA fits the device, RequestError for a stage the plan does not launch.
    """
    launch = next((each for each in plan.launches if each.stage == stage), None)
    if launch is None:
        raise RequestError(
            f"plan {plan.name!r} launches no stage {stage!r}: {', '.join(each.stage for each in plan.launches)}"
        )
    held = occupancy(dev, launch.block, resources)
    segments = [rows for rows in rows_per_segment if rows > 0]
    work = _Work(contract, plan, stage, launch, segments, tokens, dev)
    return _join((_spread_w13 if stage == "w13" else _spread_w2)(work, held), work, resources, held)


@dataclass(frozen=True)
class _Spread:
    """How one launch's work falls on the GPU."""

    ctas: int  # that do work
    empty: int  # that look and exit
    busiest_clocks: float  # instruction clocks of the SM with most work
    chain_ns: float  # dependent load rounds of the longest CTA, and of those before it on the same SM
    weight_reads: float  # bytes of weights and statistics read, repeated passes included
    activation_reads: float  # bytes read through L2
    finish_clocks: float
    in_flight: float  # bytes of weights requested at once on the whole GPU


class _Work:
    """The geometry of one launch, and the cost of its parts."""

    def __init__(
        self, contract: Contract, plan: Plan, stage: str, launch: Launch, segments: list[int], tokens: int, dev: Device
    ) -> None:
        config: W13Config | W2Config = getattr(plan.config, stage)
        self.gemm = _gemm(contract, stage)
        self.config, self.launch, self.segments, self.tokens, self.dev = config, launch, segments, tokens, dev
        self.warps = launch.block // WARP
        self.slots = tokens * contract.top_k
        self.columns = tile_columns(contract)
        self.expert_bytes = expert_bytes(contract, self.gemm)
        self.steps = math.ceil(self.gemm.k / STEP / config.split_k)  # of one warp and segment
        self.load_rounds = math.ceil(self.steps / config.unroll)
        self.dram_factor = self._dram_factor(contract)
        self.pass_clocks = cache(self._pass_clocks)  # most segments of a step have the same few rows

    def _pass_clocks(self, rows: int, warps: int) -> float:
        """SM clocks of `warps` warps' pass over one segment: shared pipes, then lane sums and split-K partials."""
        split = self.config.split_k
        step, end = self._tensor_step() if self.config.family == "tensor" else self._simt_step(rows)
        partials = 0.0 if split == 1 else 2 * rows * self.columns / 32
        return warps * (self.steps * step + end + partials) + (0 if split == 1 else BARRIER_CLOCKS)

    def _simt_step(self, rows: int) -> tuple[float, float]:
        """SM clocks of a warp's step, and of adding up the lanes after the last."""
        dev = self.dev
        weights = STEP * self.columns / WARP  # of a lane
        stats = STATS_INSTRUCTIONS * self.columns / 32
        fp32 = weights * (1 + rows) + stats / 2 + rows * ROW_INSTRUCTIONS / 2
        integer = weights + stats / 2 + STEP_INSTRUCTIONS
        total = weights * (2 + rows) + stats + rows * ROW_INSTRUCTIONS + STEP_INSTRUCTIONS
        step = max(total / dev.issue_per_clock, fp32 * WARP / dev.fp32_lanes, integer * WARP / dev.int_lanes)
        # Two shuffles and two adds for each of a lane's sums.
        return step, 4 * rows * self.columns / 8 / dev.issue_per_clock

    def _tensor_step(self) -> tuple[float, float]:
        """The same on tensor cores, whatever the rows."""
        dev = self.dev
        volta = int(dev.arch.removeprefix("sm_")) < 80
        mma, sums = (VOLTA_MMA, 32) if volta else (AMPERE_MMA, 8)
        fp32 = 4 * 5 + sums  # of a column: four subtractions of pairs and a conversion; the scaling of the sums
        integer = 4 * 11 + STEP_INSTRUCTIONS
        total = fp32 + integer + mma
        step = max(total / dev.issue_per_clock, fp32 * WARP / dev.fp32_lanes, integer * WARP / dev.int_lanes)
        return step, (sums * 3 + 40) / dev.issue_per_clock

    def passes(self, rows: int) -> int:
        return math.ceil(rows / self.config.rows)

    def segment_clocks(self, rows: int, warps: int) -> float:
        """All passes over a segment; a last SIMT pass of a lone row computes one row, any other all that a pass has."""
        full, rest = divmod(rows, self.config.rows)
        last = self.pass_clocks(1 if rest == 1 else self.config.rows, warps) if rest else 0.0
        return (full * self.pass_clocks(self.config.rows, warps) if full else 0.0) + last

    def segment_ns(self, rows: int) -> float:
        """Load rounds of one warp on one segment: from DRAM once, from L2 in the later passes."""
        return self.load_rounds * (self.dev.latency_ns + (self.passes(rows) - 1) * self.dev.l2_latency_ns)

    def efficiency(self, warps: float) -> float:
        """Share of the issue slots that `warps` resident warps of an SM can fill."""
        return ISSUE_SHARE * min(1.0, warps / self.dev.issue_per_clock / SINGLE_WARP_CLOCKS)

    def ns(self, clocks: float) -> float:
        return clocks * 1e3 / self.dev.clock_mhz

    def in_flight(self, warps: float) -> float:
        """Bytes of weights and statistics that `warps` warps have requested at once."""
        stats = (self.expert_bytes - self.gemm.k * self.gemm.n / 2) / self.gemm.groups / self.gemm.n
        a_step = STEP * self.columns / 2 + self.columns * stats * STEP / self.gemm.group
        return warps * min(self.config.unroll, self.steps) * a_step

    def _dram_factor(self, contract: Contract) -> float:
        """DRAM bytes moved over bytes wanted; the neighbouring tile finds half of a short run's waste in L2."""
        tiles = self.config.tiles if isinstance(self.config, W13Config) else 1
        if contract.layout == "awq":
            weights, stats = tiles * self.columns / 2, tiles * self.columns * 2
        else:
            weights, stats = 512.0, tiles * self.columns * contract.stats_bytes
        share = self.gemm.k * self.gemm.n / 2 / self.expert_bytes
        return share * _half_waste(weights) + (1 - share) * _half_waste(stats)


def _spread_w13(work: _Work, held: Occupancy) -> _Spread:
    """A CTA for each (column tiles, slot); those whose slot is not the first of its expert exit at once."""
    dev, segments = work.dev, work.segments
    across, down = (each.at(work.tokens) for each in work.launch.grid)
    ctas = len(segments) * across
    on_gpu = dev.sms * held.blocks
    clocks = [work.segment_clocks(rows, work.warps) for rows in segments] or [0.0]
    chains = [work.segment_ns(rows) for rows in segments] or [0.0]
    on_busiest = math.ceil(ctas / dev.sms)
    resident = min(held.warps, on_busiest * work.warps)
    # The busiest SM has its fair share of the CTAs rounded up, or the one CTA with most rows.
    busiest = max(on_busiest * sum(clocks) / len(clocks), max(clocks)) / max(work.efficiency(resident), 1e-3)
    waves = max(1.0, ctas / on_gpu)
    reads = sum(work.passes(rows) for rows in segments)
    return _Spread(
        ctas=ctas,
        empty=across * down - ctas,
        busiest_clocks=busiest,
        chain_ns=max(chains) + (waves - 1) * sum(chains) / len(chains),
        weight_reads=reads * work.expert_bytes,
        activation_reads=sum(segments) * work.gemm.k * 2 * across,
        finish_clocks=BARRIER_CLOCKS + 60,
        in_flight=work.in_flight(min(ctas, on_gpu) * work.warps),
    )


def _spread_w2(work: _Work, held: Occupancy) -> _Spread:
    """A CTA for each column tile; its groups of warps take the segments in turn, then combine the routes."""
    dev, config = work.dev, work.config
    assert isinstance(config, W2Config)
    ctas = math.prod(each.at(work.tokens) for each in work.launch.grid)
    clocks, chains = [0.0] * config.segments, [0.0] * config.segments
    for index, rows in enumerate(work.segments):
        group = index % config.segments
        clocks[group] += work.segment_clocks(rows, config.split_k)
        chains[group] += work.segment_ns(rows) + work.ns(LOOKUP_CLOCKS)
    # An SM issues for all its groups at once; when the others are done, the one with most work goes on alone.
    busy_groups = sum(clocks) / max(clocks) if work.segments else 0.0
    on_busiest = math.ceil(ctas / dev.sms)
    resident = min(held.warps, on_busiest * busy_groups * config.split_k)
    lookups = work.slots * 15 * math.ceil(work.slots / WARP) * config.split_k / dev.issue_per_clock
    busiest = on_busiest * (sum(clocks) / max(work.efficiency(resident), 1e-3) + lookups / ISSUE_SHARE)
    reads = sum(work.passes(rows) for rows in work.segments)
    combine = math.ceil(work.tokens * work.columns / work.launch.block) * (work.slots / max(work.tokens, 1)) * 12
    return _Spread(
        ctas=ctas,
        empty=0,
        busiest_clocks=busiest if work.segments else 0.0,
        chain_ns=max(1.0, ctas / (dev.sms * held.blocks)) * max(chains),
        weight_reads=reads * work.expert_bytes,
        activation_reads=sum(work.segments) * work.gemm.k * 4 * ctas,
        finish_clocks=2 * BARRIER_CLOCKS + combine,
        in_flight=work.in_flight(min(ctas, dev.sms * held.blocks) * busy_groups * config.split_k),
    )


def _join(spread: _Spread, work: _Work, resources: Resources, held: Occupancy) -> Prediction:
    dev = work.dev
    once = len(work.segments) * work.expert_bytes
    moved = once * work.dram_factor + work.slots * work.gemm.k * 2
    # A spilled byte is stored and loaded once a step by every thread; it stays in L1 but takes issue slots.
    spill = 1 + resources.spill_bytes / 4 / (STEP * 3)
    look_ns = 2 * dev.l2_latency_ns + work.ns(
        30 * math.ceil(work.slots / WARP)
    )  # ids, then which slots share an expert
    us = {
        "memory": moved / (dev.stream_gbs * 1e3),
        "l2": (spread.weight_reads + spread.activation_reads) / (dev.l2_gbs * 1e3),
        "latency": spread.chain_ns / 1e3,
        "issue": spread.busiest_clocks * spill / dev.clock_mhz,
        "launch": dev.launch_us,
        "prologue": look_ns / 1e3,
        # An exiting CTA holds its place on an SM for one look at the ids.
        "empty": spread.empty / (dev.sms * held.blocks) * look_ns / 1e3,
        "finish": spread.finish_clocks / dev.clock_mhz + dev.l2_latency_ns / 1e3,
    }
    data = _joint(us["memory"], us["l2"], TRAFFIC_NORM) + us["latency"]
    total = _joint(data, us["issue"], OVERLAP_NORM) + us["launch"] + us["prologue"] + us["empty"] + us["finish"]
    counts = {
        "bytes": once,
        "sectors": math.ceil(moved / SECTOR),
        "active_ctas": spread.ctas,
        "waves": spread.ctas / (dev.sms * held.blocks),
        "warps_per_sm": held.warps,
        "bytes_in_flight": spread.in_flight,
    }
    return Prediction(total, {**us, **counts}, max(TERMS, key=lambda term: us[term]))


def _joint(one: float, other: float, norm: float) -> float:
    return float((one**norm + other**norm) ** (1 / norm))


def _half_waste(run: float) -> float:
    """Bytes moved over bytes wanted for runs of `run` bytes in DRAM accesses of 64, half of the waste shared."""
    return (1 + math.ceil(run / DRAM_ATOM) * DRAM_ATOM / run) / 2


def _gemm(contract: Contract, stage: str) -> Gemm:
    if stage not in ("w13", "w2"):
        raise RequestError(f"stage {stage!r} has no weights to read; expected w13 or w2")
    return contract.w13 if stage == "w13" else contract.w2
