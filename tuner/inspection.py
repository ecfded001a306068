"""What a contract means in numbers, and what each kernel of a configuration needs on a described GPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuner import build, evaluate, model, plan, render, routing
from tuner.contract import Contract
from tuner.model import Resources
from tuner.space import Config

HEADERS = (
    *("tokens", "stage", "config", "registers", "spill B", "shared B", "CTAs/SM", "warps/SM", "limit"),
    *("experts", "weight MB", "floor us"),
)


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
    """One stage's kernel at one level. `active_experts`, `weight_bytes` and `floor_us` are means over the contract's
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
    """Both stages of each level's configuration, built for the GPU's architecture.

    Raises BuildFailed, MissingTool, InvalidConfig where a kernel does not fit the GPU, RequestError for an unknown GPU.
    """
    described = model.device(gpu)
    found = []
    for tokens, config in configs.items():
        made = plan.make(contract, config)
        for stage, source in render.render(made).items():
            launch, image = made.launch(stage), build.build(source, described.arch)
            resources = Resources.of(image, launch, tokens)
            held = model.occupancy(described, launch.block, resources)
            active = evaluate.active_experts(contract, tokens)
            gemm = contract.w13 if stage == "w13" else contract.w2
            found.append(
                Kernel(
                    tokens=tokens,
                    stage=stage,
                    config=getattr(config, stage).key(),
                    registers=image.registers,
                    spill_bytes=image.spill_bytes,
                    shared_bytes=resources.shared,
                    blocks_per_sm=held.blocks,
                    warps_per_sm=held.warps,
                    limit=held.limit,
                    active_experts=active,
                    weight_bytes=active * model.expert_bytes(contract, gemm),
                    floor_us=model.floor(contract, stage, active, described),
                    warnings=image.warnings,
                )
            )
    return found
