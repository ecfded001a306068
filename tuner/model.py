"""Predicts the time of a kernel on a described GPU from its launch, its registers and the routing.

Its output is called "predicted", never measured. The op is a stream of items (W13, W2, combine) that resident CTAs take
in turn. Of each launch:

    us       = launch + prologue + body + finish + waiting
    body     = sqrt(stream^2 + chain^2)
    stream   = sum over items of service / SMs
    service  = sqrt((alone / CTAs an SM)^2 + issue^2 + memory^2) + spills
    chain    = alone(W13) + alone(W2): one item after the other on an empty GPU, and at least so long

`alone` is how long a CTA by itself takes for an item: fixed steps, one trip to DRAM, its steps' dependent
instructions, and for each further round of loads what of the trip those do not cover. Divided by the CTAs of an SM it
is Little's law: resident warps x steps in flight x bytes a step, over the latency. `issue` is an SM's instructions for
the item, `memory` its bytes at an SM's share of the bandwidth (DRAM's, or L2's where slower). A CTA takes the next item
when it is free, so of waves only the last item's time is left over. Roots of sums of squares stand between terms that
do not overlap and the longest of terms that do.

`waiting` is what warps that poll for another CTA's values take from those that work: it grows with the root of their
number, with tight registers and with spills.

The numbers of Fit were fitted to an H200 by tuner/calibrate.py, which also says how good they are; those a device has
come from devices.toml. No figure is from a V100.

Instructions, passes through shared memory and sectors of an item are its kernel's `Work`. Where a kernel's sm_70 code
can be executed, tuner/items.py counts them. For all others, an H200's kernels and those not built yet, work.assumed has
them from the data flow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.contract import Contract
from tuner.errors import RequestError
from tuner.gpu import WARP, Device, Occupancy, Resources, device, devices, occupancy
from tuner.plan import Launch, Plan, items
from tuner.space import STAGES, STEP, Stage, Tile, tile_columns
from tuner.work import FLOOR_STATS_BYTES, SECTOR, Work, assumed, expert_bytes

# Names of the GPUs and of work too: who predicts needs them.
__all__ = [
    "FITTED",
    "TERMS",
    "Device",
    "Fit",
    "Occupancy",
    "Prediction",
    "Resources",
    "Work",
    "device",
    "devices",
    "expert_bytes",
    "floor",
    "occupancy",
    "predict",
    "predict_op",
]

DRAM_ATOM = 64  # bytes an HBM2 access moves

# Of a Prediction's parts, in us.
TERMS = ("memory", "latency", "issue", "spill", "waiting", "launch", "prologue", "finish")

# Trips to L2. From the first CTA's start to the segments known, and from the last W2 item to the output, stamps in the
# op on an H200 gave 1.3 and 0.5 us.
START_TRIPS, FINISH_TRIPS = 7, 3
LOOSE_REGISTERS, TIGHT_REGISTERS = 128, 64  # a thread; from no cost of waiting to all of Fit.wait_registers


@dataclass(frozen=True)
class Fit:
    """What only measurements can say. Fitted by tuner/calibrate.py; ratios carry over to other GPUs."""

    dram: float = 0.409  # of the device's latency that an item waits for
    again: float = 0.2506  # of that, in each further round of loads however far ahead they were asked for
    dependent: float = 2.524  # clocks between two instructions of one warp alone
    shared: float = 1.333  # of its CTA's other warps' issue clocks that a warp's step takes longer
    issue: float = 0.8532  # of its slots that an SM fills
    instructions: float = 494.6  # of a warp and pass, besides its steps, where they are assumed
    w13_clocks: float = 2683  # fixed, of a W13 item alone: ticket, rows, barriers, sums
    w2_trips: float = 5.363  # fixed, of a W2 item alone, in L2 trips: hidden rows and their two f16 halves
    spill_free: float = 186.3  # bytes of spills outside the loop over K
    spill_clocks: float = 2.445  # of an SM for a warp's access of 4 bytes a thread
    wait: float = 5.002  # L2 trips, for one polling warp an SM
    wait_spill: float = 0.007988  # the same, a byte of spills
    wait_registers: float = 10.56  # the same at TIGHT_REGISTERS


FITTED = Fit()


@dataclass(frozen=True)
class Prediction:
    """One launch's predicted microseconds; `parts` holds the terms in us and, with their unit in the name, counts."""

    us: float
    parts: Mapping[str, float]
    bound: str


def floor(contract: Contract, stage: Stage, active: float, dev: Device) -> float:
    """Least microseconds to read `active` experts' int4 weights, f16 scales and 4-bit zeros, whatever the layout."""
    gemm = contract.gemm(stage)
    nbytes = gemm.k * gemm.n / 2 + gemm.groups * gemm.n * FLOOR_STATS_BYTES
    return active * nbytes / (dev.bandwidth_gbs * 1e3)


def predict_op(
    contract: Contract,
    plan: Plan,
    resources: Resources,
    pool: Sequence[tuple[Sequence[int], float]],
    tokens: int,
    dev: Device,
    stage: str = "op",
    fit: Fit = FITTED,
    work: Work | None = None,
) -> Prediction:
    """The mean prediction over a pool of (rows of each active expert, weight); raises as predict does."""
    total = math.fsum(weight for _, weight in pool)
    each = [
        (predict(contract, plan, resources, rows, tokens, dev, stage, fit, work), weight / total)
        for rows, weight in pool
    ]
    parts = {name: math.fsum(found.parts[name] * weight for found, weight in each) for name in each[0][0].parts}
    us = math.fsum(found.us * weight for found, weight in each)
    return Prediction(us, parts, max(TERMS, key=lambda term: parts[term]))


def predict(
    contract: Contract,
    plan: Plan,
    resources: Resources,
    rows_per_segment: Sequence[int],
    tokens: int,
    dev: Device,
    stage: str = "op",
    fit: Fit = FITTED,
    work: Work | None = None,
) -> Prediction:
    """Predicted time of one launch of the plan, cold: `op` of the fused plan, or compact, w13, w2 of the others.

    `rows_per_segment` are the routed rows of each expert that has any; `work` is what its kernel does, by default what
    is assumed of it. Raises InvalidConfig where no CTA fits the device, RequestError for a stage the plan does not
    launch.
    """
    launch = next((each for each in plan.launches if each.stage == stage), None)
    if launch is None:
        raise RequestError(
            f"plan {plan.name!r} launches no stage {stage!r}: {', '.join(each.stage for each in plan.launches)}"
        )
    held = occupancy(dev, launch.block, resources)
    rows = Counter(each for each in rows_per_segment if each > 0)
    work = work or assumed(contract, plan.config, dev, fit.instructions)
    return _Launch(contract, plan, launch, resources, held, rows, tokens, dev, fit, work).prediction()


@dataclass(frozen=True)
class _Pass:
    """One item's one pass over its segment's weights."""

    items: float  # of the launch that are such
    alone_ns: float
    issue_ns: float
    memory_ns: float
    spill_ns: float
    instructions: float  # of all its warps


@dataclass(frozen=True)
class _Launch:
    """One launch and the cost of its parts. `rows`: how many segments have so many rows."""

    contract: Contract
    plan: Plan
    launch: Launch
    resources: Resources
    held: Occupancy
    rows: Mapping[int, int]
    tokens: int
    dev: Device
    fit: Fit
    work: Work

    def prediction(self) -> Prediction:
        dev, ctas = self.dev, self.held.blocks
        stages = [stage for stage in STAGES if stage in self.launch.families]
        latency = issue = memory = spill = stream = chain = instructions = 0.0
        for stage in stages:
            longest = 0.0
            for rows, count in self.rows.items():
                passes = list(self.passes(stage, rows))
                longest = max(longest, sum(each.alone_ns + each.spill_ns for each in passes))
                for each in passes:
                    share = each.items * count / dev.sms
                    terms = (each.alone_ns / ctas, each.issue_ns, each.memory_ns)
                    latency, issue, memory = (
                        total + share * term for total, term in zip((latency, issue, memory), terms, strict=True)
                    )
                    spill += share * each.spill_ns
                    instructions += each.items * count * each.instructions
                    stream += share * (math.hypot(*terms) + each.spill_ns)
            chain += longest
        combine = self.combine_items * self.warps * self.ns(self.work.combine.clocks(dev)) / dev.sms
        instructions += self.combine_items * self.warps * self.work.combine.total
        body = math.hypot(stream + combine, chain)
        trips = dev.l2_latency_ns
        us = {
            "memory": memory,
            "latency": max(latency, chain),
            "issue": issue + combine,
            "spill": spill,
            "waiting": self.waiting_trips() * trips,
            "launch": dev.launch_us * 1e3,
            "prologue": START_TRIPS * trips + self.empty_ns(),
            "finish": FINISH_TRIPS * trips,
        }
        us = {name: ns / 1e3 for name, ns in us.items()}
        total = body / 1e3 + us["waiting"] + us["launch"] + us["prologue"] + us["finish"]
        return Prediction(
            total, {**us, "instructions": instructions, **self.counts(stages)}, max(TERMS, key=lambda term: us[term])
        )

    @property
    def segments(self) -> int:
        return sum(self.rows.values())

    @property
    def warps(self) -> int:
        return self.launch.block // WARP

    @property
    def resident(self) -> int:
        """CTAs on the whole GPU at once."""
        return min(
            self.dev.sms * self.held.blocks, max(1, math.prod(size.at(self.tokens) for size in self.launch.grid))
        )

    @property
    def combine_items(self) -> int:
        if self.launch.stage not in ("op", "w2"):
            return 0
        return self.tokens * math.ceil(self.contract.hidden / self.launch.block)

    def ns(self, clocks: float) -> float:
        return clocks * 1e3 / self.dev.clock_mhz

    def items(self, stage: Stage) -> int:
        """Of one segment."""
        return items(self.contract, stage, self.plan.config.stage(stage))

    def passes(self, stage: Stage, rows: int) -> Iterator[_Pass]:
        """The passes over a segment of so many rows: its weights come from DRAM once, from L2 after that."""
        dev, fit, tile, gemm = self.dev, self.fit, self.plan.config.stage(stage), self.contract.gemm(stage)
        work = self.work.stage(stage)
        steps = gemm.k // STEP // tile.split_k  # of a warp
        rounds = steps / tile.unroll
        weights = tile.tiles * tile_columns(self.contract) / gemm.n * expert_bytes(self.contract, gemm)
        # Spills that a round of loads repeats are in W13's loop, which is the longer.
        spilled = max(0.0, self.resources.spill_bytes - fit.spill_free) / 4 if stage == "w13" else 0.0
        for first in range(0, rows, tile.rows):
            count = min(rows - first, tile.rows)
            step, around = work.step(count), work.around(count, rows)
            if first == 0:
                around += work.item
            # While its CTA is alone, a warp's instructions wait for one another and for its siblings'; those of a
            # further row do not wait for the first one's.
            siblings = fit.shared * math.ceil(self.warps / 4) * 4 * step.clocks(dev)
            step_ns = self.ns(work.lone.total * fit.dependent + siblings)
            trip_ns = fit.dram * (dev.latency_ns if first == 0 else dev.l2_latency_ns)
            # A step asks for its successor when it is done; and the slowest of a round's loads hold up the round.
            waits = (rounds - 1) * max(fit.again * trip_ns, trip_ns - (tile.unroll - 1) * step_ns)
            fixed = self.ns(fit.w13_clocks) if stage == "w13" else fit.w2_trips * dev.l2_latency_ns
            fixed += self.ns(count * work.row.total * fit.dependent)
            clocks = self.warps * (steps * step.clocks(dev) + around.clocks(dev))
            asked = self.warps * (steps * step.sectors + around.sectors) * SECTOR
            yield _Pass(
                items=self.items(stage),
                alone_ns=fixed + trip_ns + steps * step_ns + waits,
                issue_ns=self.ns(clocks / fit.issue),
                memory_ns=dev.sms
                * max(weights * self.waste(tile) / dev.stream_gbs if first == 0 else 0.0, asked / dev.l2_gbs),
                spill_ns=self.ns(spilled * rounds * self.warps * fit.spill_clocks),
                instructions=self.warps * (steps * step.total + around.total),
            )

    def waste(self, tile: Tile) -> float:
        """DRAM bytes moved over bytes wanted; the neighbouring tile finds half of a short run's waste in L2."""
        columns = tile.tiles * tile_columns(self.contract)
        if self.contract.layout == "awq":
            return _half_waste(columns / 2)
        gemm = self.contract.w13
        share = gemm.k * gemm.n / 2 / expert_bytes(self.contract, gemm)
        return share + (1 - share) * _half_waste(columns * self.contract.stats_bytes)

    def waiting_trips(self) -> float:
        """What polling warps cost. CTAs that come too early for W13 hold W2 items, and after those combine's."""
        fit, regs = self.fit, self.resources.registers
        if not self.combine_items or not self.rows:
            return 0.0
        working = self.segments * self.items("w13" if self.launch.stage == "op" else "w2")
        free = max(0, self.resident - working)
        rows = sum(count * min(rows, self.warps, 4) for rows, count in self.rows.items()) / self.segments
        early = min(free, self.segments * self.items("w2")) if self.launch.stage == "op" else 0
        polling = early * rows + min(free - early, self.combine_items) * self.warps
        tight = max(0.0, (LOOSE_REGISTERS - regs) / (LOOSE_REGISTERS - TIGHT_REGISTERS))
        cost = fit.wait + fit.wait_registers * tight + fit.wait_spill * self.resources.spill_bytes
        return math.sqrt(polling / self.dev.sms) * cost

    def empty_ns(self) -> float:
        """CTAs beyond those with work hold their place for one look; a launch by ticket has none."""
        if self.launch.by_ticket or self.launch.stage not in STAGES:
            return 0.0
        grid = math.prod(size.at(self.tokens) for size in self.launch.grid)
        empty = grid - self.segments * self.items("w13")
        return max(0, empty) / (self.dev.sms * self.held.blocks) * self.dev.l2_latency_ns

    def counts(self, stages: Sequence[Stage]) -> dict[str, float]:
        of = {stage: self.segments * self.items(stage) for stage in stages}
        once = sum(self.segments * expert_bytes(self.contract, self.contract.gemm(stage)) for stage in stages)
        moved = sum(
            self.segments
            * expert_bytes(self.contract, self.contract.gemm(stage))
            * self.waste(self.plan.config.stage(stage))
            for stage in stages
        )
        return {
            "bytes": once,
            "sectors": math.ceil(moved / SECTOR),
            "items": sum(of.values()) + self.combine_items,
            "waves": (sum(of.values()) + self.combine_items) / (self.dev.sms * self.held.blocks),
            "warps_per_sm": self.held.warps,
            "bytes_in_flight": max((self.in_flight(stage) for stage in stages), default=0.0),
        }

    def in_flight(self, stage: Stage) -> float:
        """Bytes of weights and statistics that the resident CTAs can have asked for at once."""
        tile, gemm = self.plan.config.stage(stage), self.contract.gemm(stage)
        a_step = expert_bytes(self.contract, gemm) / gemm.n / gemm.k * STEP * tile_columns(self.contract)
        return min(self.resident, self.segments * self.items(stage)) * self.warps * tile.unroll * a_step


def _half_waste(run: float) -> float:
    """Bytes moved over bytes wanted for runs of `run` bytes in DRAM accesses of 64, half of the waste shared."""
    return (1 + math.ceil(run / DRAM_ATOM) * DRAM_ATOM / run) / 2
