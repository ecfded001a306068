"""What a contract means in numbers, and what each kernel of a configuration needs on a described GPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import build, evaluate, evidence, model, plan, render, routing, sass, winners
from tuner.contract import Contract
from tuner.errors import RequestError
from tuner.evidence import Evidence
from tuner.model import Resources
from tuner.options import Configs
from tuner.space import Config

HEADERS = (
    *("tokens", "stage", "config", "registers", "spill B", "shared B", "CTAs/SM", "warps/SM", "limit"),
    *("experts", "weight MB", "floor us"),
)

CODE_HEADERS = ("tokens", "stage", "weights", "loads", "in a", "instr/8 w", "budget", "code B", "opcodes there")
SHOWN_OPCODES = 8


def describe(contract: Contract) -> Iterator[tuple[str, str]]:
    """(what, value) lines about a contract."""
    yield "name", contract.name
    yield "model", contract.model
    yield "digest", contract.digest()
    yield "experts, top-k", f"{contract.experts}, {contract.top_k}"
    yield (
        "tensor parallel",
        f"{contract.tensor_parallel}: {contract.local_intermediate} of {contract.intermediate} intermediate a rank",
    )
    for name, gemm in (("W13 [K, N]", contract.w13), ("W2 [K, N]", contract.w2)):
        yield name, f"[{gemm.k}, {gemm.n}], {model.expert_bytes(contract, gemm):,.0f} bytes an expert"
    yield "group", f"{contract.group}, in the checkpoint {contract.checkpoint_group}"
    order = "gate and up interleaved" if contract.interleaved else "gate, then up"
    stats = f", {contract.stats_bytes}-byte statistics" if contract.stats_bytes else ""
    yield "weight layout", f"{contract.layout}{stats}, {order}"
    yield "levels", ", ".join(map(str, contract.levels))
    expected = (routing.expected_active(contract.experts, contract.top_k, level) for level in contract.levels)
    yield "active experts", ", ".join(f"{count:.1f}" for count in expected) + " expected under uniform routing"
    yield "numerics", f"{contract.numerics}, relative L2 to float64 at most {contract.tolerance:g}"
    yield "tuned on", ", ".join(f"{name} {weight:.0%}" for name, weight in contract.routings)


@dataclass(frozen=True)
class Kernel:
    """The op's kernel at one level. `active_experts`, `weight_bytes` and `floor_us` are means over the contract's
    tuning routings; registers, spills and shared memory are what the compiler and the plan say."""

    tokens: int
    stage: str
    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    warps_per_sm: int
    limit: str
    active_experts: float
    weight_bytes: float
    floor_us: float
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def cells(self) -> Sequence[object]:
        """The row under HEADERS."""
        fixed = (self.tokens, self.stage, self.config, self.registers, self.spill_bytes, self.shared_bytes)
        held = (self.blocks_per_sm, self.warps_per_sm, self.limit)
        return (*fixed, *held, self.active_experts, self.weight_bytes / 1e6, self.floor_us)


def inspect(contract: Contract, configs: Mapping[int, Config], gpu: str) -> list[Kernel]:
    """The kernel of each level's configuration, built for the GPU's architecture.

    Raises BuildFailed, MissingTool, InvalidConfig where a kernel does not fit the GPU, RequestError for an unknown GPU.
    """
    described = model.device(gpu)
    an_expert = model.expert_bytes(contract, contract.w13) + model.expert_bytes(contract, contract.w2)
    found = []
    for tokens, config in configs.items():
        made = plan.make(contract, config)
        for stage, source in render.render(made).items():
            launch, image = made.launch(stage), build.build(source, described.arch)
            resources = Resources.of(image, launch, tokens)
            held = model.occupancy(described, launch.block, resources)
            active = evaluate.active_experts(contract, tokens)
            found.append(
                Kernel(
                    tokens=tokens,
                    stage=stage,
                    config=config.key(),
                    registers=image.registers,
                    spill_bytes=image.spill_bytes,
                    shared_bytes=resources.shared,
                    blocks_per_sm=held.blocks,
                    warps_per_sm=held.warps,
                    limit=held.limit,
                    active_experts=active,
                    weight_bytes=active * an_expert,
                    floor_us=evaluate.floor(contract, tokens, described),
                    warnings=image.warnings,
                )
            )
    return found


def machine_code(contract: Contract, configs: Mapping[int, Config], gpu: str) -> list[Evidence]:
    """The evidence of each level's launches where the GPU runs sm_70 code; nothing for another.

    Raises as `inspect` does, and UnknownInstruction.
    """
    described = model.device(gpu)
    if described.arch != sass.ARCH:
        return []
    return [
        evidence.examine(made, launch, build.build(source, described.arch), tokens, described)
        for tokens, config in configs.items()
        for made in [plan.make(contract, config)]
        for launch in made.launches
        for source in [render.render_launch(launch, contract.digest())]
    ]


def code_rows(found: Iterable[Evidence]) -> Iterator[Sequence[object]]:
    """Rows under CODE_HEADERS: one for each stretch of code that reads weights."""
    for each in found:
        for stream in each.streams:
            loads = ", ".join(f"{count}x{width}" for width, count in each.weight_loads[stream.operand].items())
            most = ", ".join(f"{name} {count}" for name, count in list(stream.opcodes.items())[:SHOWN_OPCODES])
            place = "loop" if stream.loop else "stretch"
            yield (
                *(each.tokens, each.stage, stream.operand, loads, place),
                *(stream.per_eight, stream.budget, each.code_bytes, most),
            )


def record(configs: Configs, found: Sequence[Evidence], gpu: str) -> Path:
    """Writes the evidence of a set's winners into its folder. Raises RequestError; CodeFault as `evidence.record`."""
    if configs.folder is None:
        raise RequestError(f"--record writes into a tuned set; the configurations are {configs.origin}: give --set")
    if not found:
        raise RequestError(f"--record reads {sass.ARCH} code, and {gpu} runs other: give a V100 as --gpu")
    path = configs.folder / evidence.FILE
    winners.write_file(path, evidence.record(configs.folder, found, gpu))
    return path
