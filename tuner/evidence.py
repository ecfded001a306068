"""What a kernel's sm_70 machine code shows without a V100, what is demanded of it, and the record of it in a set.

Instructions are counted for each eight weights: all those of a stretch of code that reads weights (`dataflow.Stretch`),
of whatever kind, over the 32-bit words that one lane reads of them there. An instruction takes a scheduler's slot
for all 32 lanes of its warp, working or not, so that these are lane-instructions for a lane's eight weights.

`budget` is how many the GPU has time for while its memory brings eight weights and their share of statistics:

    SMs * schedulers * 32 lanes * clock  /  (bytes a second / bytes of eight weights and their statistics)

A V100 PCIe: 80 * 4 * 32 * 1.38e9 / (900e9 / 4) = 62.8 for the weights' 4 bytes alone, and 74.6 with the 0.75 bytes that
3-byte statistics of a group of 32 add. That is every slot filled; pipes that take an instruction every other clock,
waits, and what stands around the stretch leave less.

Where weights are read in no loop of their own, an instruction of the stretch counts once, one of a loop within it (the
staging of activations) too: there the figure is a lower bound. Bytes requested are not claimed: how often a loop turns,
and which lanes ask for the same bytes, does not stand in the instructions.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import model, plan, sass
from tuner.build import Image
from tuner.contract import Contract
from tuner.dataflow import TENSOR, Dataflow, Load
from tuner.errors import CodeFault, RequestError
from tuner.gpu import WARP, Device, Resources
from tuner.plan import Launch, Plan
from tuner.sass import Instruction
from tuner.space import STAGES, Stage

FILE = "evidence.json"
COMMAND = "python cli.py inspect --contract NAME --set FOLDER --record"
SCHEMA = 1
EIGHT_BYTES = 4  # of eight weights
# What a lane asks for at once of packed weights: four columns' octets, or one word of eight columns.
WEIGHT_BYTES = {"sm70-u4": 16, "awq": 4}


@dataclass(frozen=True)
class Stream:
    """A stretch that reads an operand's weights. loop: whether it is one; nbytes: what a lane reads of them in it."""

    operand: str
    loop: bool
    instructions: int
    nbytes: int
    budget: float
    opcodes: Mapping[str, int]

    @property
    def per_eight(self) -> float:
        """Lane-instructions for each eight weights."""
        return self.instructions * EIGHT_BYTES / self.nbytes


@dataclass(frozen=True)
class Evidence:
    """One launch of a plan, built for sm_70.

    Shared memory in bytes a CTA. opcodes: of the whole kernel, most first, memory accesses with their width in bits.
    weight_loads: operand -> width in bits -> loads. faults: demands that are not met.
    """

    tokens: int
    stage: str
    kernel: str
    compiler: str
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    blocks_per_sm: int
    warps_per_sm: int
    code_bytes: int
    opcodes: Mapping[str, int]
    weight_loads: Mapping[str, Mapping[str, int]]
    streams: tuple[Stream, ...]
    faults: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with each stream's `per_eight` to a tenth."""
        streams = [
            {**asdict(s), "budget": round(s.budget, 1), "per_eight": round(s.per_eight, 1)} for s in self.streams
        ]
        return {**asdict(self), "streams": streams}


def parameters(launch: Launch) -> tuple[dict[int, str], int]:
    """Operand of each pointer by its byte offset among the kernel's parameters, and the bytes of them all."""
    pointers, end = {}, 0
    for name in launch.arguments:
        size = 4 if name in plan.SCALARS else 8
        offset = -(-end // size) * size
        if name not in plan.SCALARS:
            pointers[offset] = name
        end = offset + size
    return pointers, end


def examine(made: Plan, launch: Launch, image: Image, tokens: int, dev: Device) -> Evidence:
    """The evidence of one launch of `made` at a token count; `dev` has architecture sm_70.

    Raises UnknownInstruction, InvalidConfig where no CTA fits, CodeFault where image and launch differ in parameters.
    """
    code = sass.instructions(image)
    pointers, size = parameters(launch)
    there = len(sass.section(image, f".nv.constant0.{image.kernel}")) - sass.PARAMETERS
    if there != size:
        raise CodeFault(f"{image.kernel} takes {there} bytes of parameters, its launch passes {size}: build it again")
    flow = Dataflow(code, pointers)
    stages = _stages(launch)
    streams = tuple(
        Stream(
            operand=operand,
            loop=stretch.loop,
            instructions=len(stretch.code),
            nbytes=stretch.nbytes,
            budget=budget(made.contract, stage, dev),
            opcodes=_mix(stretch.code),
        )
        for operand, stage in stages.items()
        for stretch in flow.stretches(operand)
    )
    widths: dict[str, Counter[str]] = {operand: Counter() for operand in stages}
    for load in flow.loads:
        for operand in load.operands & stages.keys():
            widths[operand][str(8 * (load.instruction.width_bytes or 0))] += 1
    resources = Resources.of(image, launch, tokens)
    held = model.occupancy(dev, launch.block, resources)
    return Evidence(
        tokens=tokens,
        stage=launch.stage,
        kernel=image.kernel,
        compiler=image.compiler,
        registers=image.registers,
        spill_bytes=image.spill_bytes,
        static_shared_bytes=image.static_shared_bytes,
        dynamic_shared_bytes=launch.shared.at(tokens),
        blocks_per_sm=held.blocks,
        warps_per_sm=held.warps,
        code_bytes=len(code) * sass.SIZE,
        opcodes=_mix(code),
        weight_loads={operand: dict(sorted(found.items())) for operand, found in widths.items()},
        streams=streams,
        faults=tuple(_faults(made, image, stages, flow.loads, streams)),
    )


def _faults(
    made: Plan, image: Image, stages: Mapping[str, Stage], loads: Iterable[Load], streams: Sequence[Stream]
) -> Iterator[str]:
    """Demands that are not met."""
    if image.spill_bytes:
        yield f"spills {image.spill_bytes} bytes a thread"
    wanted = WEIGHT_BYTES[made.contract.layout]
    for load in loads:
        where, weights = f"{load.instruction.opcode} at pc {load.instruction.pc:#x}", load.operands & stages.keys()
        if not load.operands or (weights and len(load.operands) > 1):
            yield f"{where}: whose bytes it reads is not clear: {sorted(load.operands)}"
        elif weights and load.instruction.width_bytes != wanted:
            yield f"{where} reads {8 * (load.instruction.width_bytes or 0)} bits of {min(weights)}, not {8 * wanted}"
    for operand, stage in stages.items():
        used = [TENSOR in stream.opcodes for stream in streams if stream.operand == operand]
        family = made.config.stage(stage).family
        if not used:
            yield f"no load of {operand} was found"
        elif family == "tensor" and not all(used):
            yield f"{operand}: no {TENSOR} where its weights are used, of family {family}"
        elif family != "tensor" and any(used):
            yield f"{operand}: {TENSOR} where its weights are used, of family {family}"


def budget(contract: Contract, stage: Stage, dev: Device) -> float:
    """Lane-instructions the GPU can issue while it reads eight weights of the stage and their share of statistics."""
    gemm = contract.gemm(stage)
    nbytes = 8 * model.expert_bytes(contract, gemm) / (gemm.k * gemm.n)
    return dev.sms * dev.issue_per_clock * WARP * dev.clock_mhz * 1e6 / (dev.bandwidth_gbs * 1e9 / nbytes)


def record(folder: Path, found: Sequence[Evidence], gpu: str) -> str:
    """The text of the set's record, for `folder`/FILE.

    Raises CodeFault where a demand is not met, or a figure is worse than the one recorded there: delete the record to
    accept that.
    """
    faults = [f"{each.stage} at {each.tokens} tokens: {fault}" for each in found for fault in each.faults]
    if faults:
        raise CodeFault(f"not recorded: {'; '.join(faults)}")
    new = report(found, gpu)
    path = folder / FILE
    lost = worse(read(folder), new) if path.exists() else []
    if lost:
        raise CodeFault(f"not recorded: {'; '.join(lost)}. Delete {path} to accept that")
    return json.dumps(new, indent=1, sort_keys=True) + "\n"


def report(found: Iterable[Evidence], gpu: str) -> dict[str, Any]:
    """A record's content: level -> stage -> evidence."""
    levels: dict[str, dict[str, Any]] = {}
    for each in found:
        content = each.to_dict()
        levels.setdefault(str(content.pop("tokens")), {})[content.pop("stage")] = content
    return {"schema": SCHEMA, "arch": sass.ARCH, "gpu": gpu, "levels": levels}


def read(folder: Path) -> dict[str, Any]:
    """The record in `folder`. Raises RequestError where there is none that this version reads."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"no {FILE} in {folder}: make it with `{COMMAND}`") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long, nested too deeply
        raise RequestError(f"{path} is not JSON ({error}): delete it, and make it with `{COMMAND}`") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise RequestError(f"{path} is no record of schema {SCHEMA}: delete it, and make it with `{COMMAND}`")
    return content


def worse(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where two records have the same level and stage: what takes more instructions for eight weights than recorded.

    Streams of an operand are compared each with its like, from the shortest on; if their number changed, the longest.
    """
    lost = []
    for level, stages in found["levels"].items():
        for stage, new in stages.items():
            old = recorded["levels"].get(level, {}).get(stage)
            for operand in [] if old is None else sorted(new["weight_loads"]):
                before, now = (sorted(_ratios(each, operand)) for each in (old, new))
                if len(before) != len(now):
                    before, now = before[-1:], now[-1:]
                lost += [
                    f"{stage} at {level} tokens: {y:.1f} instructions for 8 weights of {operand}, recorded {x:.1f}"
                    for x, y in zip(before, now, strict=False)
                    if y > x
                ]
    return lost


def _ratios(content: Mapping[str, Any], operand: str) -> list[float]:
    return [s["instructions"] * EIGHT_BYTES / s["nbytes"] for s in content["streams"] if s["operand"] == operand]


def _stages(launch: Launch) -> dict[str, Stage]:
    """Operands of packed weights that the launch takes, and the stage each is for."""
    return {f"{stage.upper()}_Q": stage for stage in STAGES if f"{stage.upper()}_Q" in launch.arguments}


def _mix(code: Iterable[Instruction]) -> dict[str, int]:
    """How many of each opcode, most first; of memory accesses each width apart."""
    names = (each.opcode + (f".{8 * each.width_bytes}" if each.width_bytes else "") for each in code)
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
