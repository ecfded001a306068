"""What a plan's launches did when their sm_70 code was executed: instructions by class, memory traffic, barriers.

Exact for the order that was executed, in which CTAs take turns; a GPU's own order polls more or less often and shares
its L2 otherwise. `missed` is by a simple model of the L2, empty at the launch's begin, behind no L1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tuner.gpu import WARP, Device
from tuner.machine import Executed

SECTOR = 32
_CLASSES = {
    "f32": "FADD FMUL FFMA FMNMX FSEL FSETP FCHK",
    "f16": "HADD2 HMUL2 HFMA2",
    "tensor": "HMMA.884",
    "integer": "IADD3 IMAD IABS ISETP LOP3 SHF LEA PRMT POPC FLO BREV SEL",
    "convert": "I2F F2I F2F FRND MUFU",
    "move": "MOV CS2R S2R P2R R2P PLOP3 BMOV LDC",
    "lanes": "SHFL VOTE MATCH",
    "global": "LDG LD STG ST",
    "atomic": "ATOMG ATOM RED ATOMS",
    "shared": "LDS STS",
    "local": "LDL STL",
    "barrier": "BAR MEMBAR ERRBAR CCTL WARPSYNC BSSY BSYNC BREAK",
    "control": "BRA CALL RET EXIT YIELD NOP NANOSLEEP",
}
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
_GLOBAL = {"global", "atomic"}


@dataclass(frozen=True)
class Counts:
    """One launch, executed. classes: warp instructions of each class. In a global request a warp asks at once.

    conflicts: passes through shared memory beyond those that the accesses' widths take. chain: the most loads each of
    which waits for the one before. per_eight: lane-instructions for each eight weights of the active experts, or None
    where the launch reads none; budget: how many lane-instructions the GPU has time for while its memory brings those.
    """

    stage: str
    grid: tuple[int, int]
    resident: int
    instructions: int
    lanes: float  # that took part, of 32
    classes: Mapping[str, int]
    requests: int
    sectors: float  # a request
    bytes: int  # that lanes asked for
    touched: int  # bytes of the sectors
    missed: int
    conflicts: int
    barriers: int
    chain: int
    per_eight: float | None
    budget: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def count(done: Executed, weights: int, weight_bytes: float, device: Device) -> Counts:
    """The counts of a launch that reads `weights` weights, in `weight_bytes` bytes with their statistics, or none."""
    names = np.array([_CLASS_OF[each.instruction.opcode] for each in done.code])
    spaces = np.array([each.mnemonic.startswith("ATOMS") for each in done.code])
    issued = done.tallies["issued"]
    reach = np.isin(names, list(_GLOBAL)) & ~spaces
    classes = Counter({kind: int(issued[names == kind].sum()) for kind in _CLASSES})
    of_global = {name: int(done.tallies[name][reach].sum()) for name in ("requests", "sectors", "bytes", "misses")}
    slots = device.sms * device.issue_per_clock * WARP * device.clock_mhz * 1e6 / (device.bandwidth_gbs * 1e9)
    return Counts(
        stage=done.launch.stage,
        grid=done.grid,
        resident=min(done.resident, done.grid[0] * done.grid[1]),
        instructions=done.instructions,
        lanes=float(done.tallies["lanes"].sum() / max(done.instructions, 1)),
        classes={kind: number for kind, number in classes.most_common() if number},
        requests=of_global["requests"],
        sectors=of_global["sectors"] / max(of_global["requests"], 1),
        bytes=of_global["bytes"],
        touched=of_global["sectors"] * SECTOR,
        missed=of_global["misses"] * SECTOR,
        conflicts=int((done.tallies["wavefronts"] - done.tallies["least_wavefronts"]).sum()),
        barriers=done.barriers,
        chain=done.chain,
        per_eight=done.instructions * WARP * 8 / weights if weights else None,
        budget=slots * weight_bytes * 8 / weights if weights else None,
    )


HEADERS = (
    *("tokens", "stage", "CTAs", "warp instr", "lanes", "instr/8 w", "budget", "requests", "sectors/req", "MB asked"),
    *("MB touched", "MB missed L2", "conflicts", "barriers", "chain", "classes"),
)


def row(tokens: int, found: Counts) -> Sequence[object]:
    """The row under HEADERS."""
    share = {kind: number / found.instructions for kind, number in found.classes.items()}
    return (
        *(tokens, found.stage, found.grid[0] * found.grid[1], found.instructions, found.lanes, found.per_eight),
        *(found.budget, found.requests, found.sectors, found.bytes / 1e6, found.touched / 1e6, found.missed / 1e6),
        *(found.conflicts, found.barriers, found.chain),
        " ".join(f"{kind} {part:.0%}" for kind, part in share.items() if part >= 0.005),
    )
