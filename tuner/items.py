"""What an item of a built op costs: single items of its sm_70 code, executed on the CPU and counted.

One CTA executes one item of W13, of W2 or of combine, as if others had done all before it: some 15,000 warp
instructions. The call's rows are of two experts, as many of each, so that an item is followed by its like; items over
one row, a whole pass of rows and more tell apart what an item costs once, a pass, and a row. Counts hang on no value,
but for the branches of SiLU's division, and these values take the usual ones.

Nothing waits here, so no poll is counted. A warp's figures are the mean over its CTA's warps. A step's instructions
are those of the code that works on weights (dataflow.Stretch.working).
"""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import lru_cache

import numpy as np

from tuner import awq, evidence, machine, memory, plan, sass, verify
from tuner.build import Image
from tuner.cases import Case, gaussian
from tuner.contract import Contract
from tuner.dataflow import Dataflow
from tuner.errors import CodeFault
from tuner.gpu import WARP
from tuner.machine import Item
from tuner.plan import Plan
from tuner.space import STAGES, STEP, Config, Stage
from tuner.verify import Operands
from tuner.work import Mix, StageWork, Work

SEGMENTS = 2
BASIS = "executed as sm_70 code on CPU"

# By NVIDIA's description of a GV100's pipes: FMA takes fp32 arithmetic and IMAD; ALU other integers, logic, and moves.
_FP32 = ["FADD", "FMUL", "FFMA", "IMAD"]
_INTEGER = ["IADD3", "IABS", "ISETP", "LOP3", "SHF", "LEA", "PRMT", "SEL", "MOV", "FMNMX", "FSEL", "FSETP"]
#: Files of this folder that the counts hang on.
SOURCES = ("items.py", "machine.py", "machine.cpp", "machine_step.h", "microcode.py", "sass.py", "dataflow.py")


def work(contract: Contract, config: Config, image: Image) -> Work:
    """The work of the op's kernel, built for sm_70.

    Raises MissingTool without g++, UnknownInstruction, LaunchFailed for a fault, and CodeFault where image and
    configuration differ.
    """
    return _Op(contract, config, image).work()


@lru_cache(maxsize=1)
def _weights(few: Contract) -> awq.LayerWeights:
    """Of a contract with few experts, between guard pages: the same for every kernel."""
    made = awq.synthetic(few, 0, 0)
    return awq.LayerWeights(*(_guarded(each) for each in (made.w13, made.w2)))


def _guarded(made: awq.GemmWeights) -> awq.GemmWeights:
    zeros = None if made.zeros is None else memory.guard(made.zeros)
    return awq.GemmWeights(memory.guard(made.q), memory.guard(made.scales), zeros)


class _Op:
    """The op's kernel, and steps of the stretches that read its weights."""

    def __init__(self, contract: Contract, config: Config, image: Image) -> None:
        self.contract, self.config, self.image = contract, config, image
        # The kernel is the contract's; of its experts only the first few are there.
        self.few = replace(contract, experts=max(SEGMENTS, contract.top_k))
        self.plan: Plan = replace(plan.make(contract, config), buffers=plan.make(self.few, config).buffers)
        (self.launch,) = self.plan.launches
        self.warps = self.launch.block // WARP
        self.slots = contract.max_tokens * contract.top_k
        pointers, _ = evidence.parameters(self.launch)
        flow = Dataflow(sass.instructions(image), pointers)
        self.steps = {stage: self._stepping(flow, stage) for stage in STAGES}

    def _stepping(self, flow: Dataflow, stage: Stage) -> frozenset[int]:
        """pc of every instruction that is a step's."""
        operand = f"{stage.upper()}_Q"
        found = frozenset(each.pc for stretch in flow.stretches(operand) for each in stretch.working)
        if not found:
            raise CodeFault(f"{self.image.kernel}: no load of {operand} was found, and so no step: does it spill?")
        return found

    def work(self) -> Work:
        w13, w2 = (self.stage(stage) for stage in STAGES)
        return Work(w13, w2, self.output(), BASIS)

    def output(self) -> Mix:
        """Of combine, the mean over all items of a call whose slots all have rows."""
        rows = min(self.contract.top_k, self.slots // SEGMENTS)
        tokens = math.ceil(SEGMENTS * rows / self.contract.top_k)
        done = self.item(SEGMENTS * sum(map(self.items, STAGES)), rows)
        return self.mix(done) * (1 / (tokens * math.ceil(self.contract.hidden / self.launch.block)))

    def items(self, stage: Stage) -> int:
        """Of one segment."""
        return plan.items(self.contract, stage, self.config.stage(stage))

    def stage(self, stage: Stage) -> StageWork:
        """A stage's work, told apart by how it grows with the rows of a segment."""
        tile = self.config.stage(stage)
        ticket = 0 if stage == "w13" else SEGMENTS * self.items("w13")
        steps = self.contract.gemm(stage).k // STEP // tile.split_k
        wanted = {1, 2, tile.rows, tile.rows + 1, 2 * tile.rows}
        rows = sorted(min(each, self.slots // SEGMENTS) for each in wanted)
        passes = [math.ceil(each / tile.rows) for each in rows]
        done = [self.item(ticket, each) for each in rows]
        inside = np.array([each.instruction.pc in self.steps[stage] for each in done[0].code])
        a_step = [self.mix(each, inside) * (1 / (steps * n)) for each, n in zip(done, passes, strict=True)]
        # Once an item, a pass, a further row of a pass, a row passed by: what these make of the counts best.
        terms = np.array([(1, n, each - n, (n - 1) * each) for each, n in zip(rows, passes, strict=True)], float)
        around = np.array([astuple(self.mix(each, ~inside)) for each in done])
        item, one, row, walk = (Mix(*found) for found in np.linalg.lstsq(terms, around, rcond=None)[0].tolist())
        full = a_step[rows.index(min(tile.rows, rows[-1]))]
        return StageWork(item, one, row, a_step[0], full, walk)

    def item(self, ticket: int, rows: int) -> Item:
        """One item of a call with so many rows of each segment, in the middle of its slots."""
        tokens = math.ceil(SEGMENTS * rows / self.contract.top_k)
        return machine.item(self.plan, self.image, self.operands(rows, tokens), tokens, ticket)

    def operands(self, rows: int, tokens: int) -> Operands:
        ids = np.full((tokens, self.contract.top_k), -1, np.int32)
        first = (ids.size - SEGMENTS * rows) // 2
        ids.flat[first : first + SEGMENTS * rows] = np.arange(SEGMENTS).repeat(rows)
        x, weights = gaussian(self.contract, tokens, 0), np.full(ids.shape, 1 / self.contract.top_k, np.float32)
        return verify.operands(self.plan, _weights(self.few), Case("an item", x, ids, weights))

    def mix(self, done: Item, some: np.ndarray | None = None) -> Mix:
        """A warp's, of all instructions or of some."""
        some = np.ones(len(done.code), bool) if some is None else some
        names = np.array([each.instruction.opcode for each in done.code])
        issued = done.tallies["issued"] * some
        return Mix(
            total=float(issued.sum()),
            fp32=float(issued[np.isin(names, _FP32)].sum()),
            integer=float(issued[np.isin(names, _INTEGER)].sum()),
            shared=float((done.tallies["wavefronts"] * some).sum()),
            sectors=float((done.tallies["sectors"] * some).sum()),
        ) * (1 / self.warps)
