"""The evaluator for a machine without the GPU that is tuned for: builds for real, counts, then predicts.

For a GPU that runs sm_70 code, single items of each kernel are executed on the CPU, and the model uses what they count.
Code for another GPU is not executed here: its predictions rest on the data flow's counts, as do guesses, which build
nothing. A timing's `instructions from` says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tuner import items, model, plan, render, routing, sass, space
from tuner.build import Ahead, Image
from tuner.contract import Contract
from tuner.errors import InvalidConfig
from tuner.measure import Timing
from tuner.model import Device, Resources, Work
from tuner.space import STAGES, Config, Stage, Tile
from tuner.work import DATA_FLOW

SEEDS = (0, 1, 2, 3)  # of the routings a prediction is averaged over
GUESSES = 16  # that a search tries first


@cache
def pool(contract: Contract, tokens: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """(rows of each active expert, weight) of the contract's routings, for each of SEEDS; weights sum to 1."""
    return tuple(
        (tuple(routing.make(name, contract, tokens, seed).rows_per_segment), weight / len(SEEDS))
        for name, weight in contract.routings
        for seed in SEEDS
    )


def active_experts(contract: Contract, tokens: int) -> float:
    """Experts with a row, mean over the pool."""
    return sum(len(rows) * weight for rows, weight in pool(contract, tokens))


def floor(contract: Contract, tokens: int, dev: Device) -> float:
    """Microseconds the op's bytes take at full bandwidth, mean over the pool."""
    return sum(model.floor(contract, stage, active_experts(contract, tokens), dev) for stage in STAGES)


def _registers(stage: Stage, tile: Tile, dev: Device) -> int:
    """About how many registers a thread of a stage needs before any spill: accumulators and addresses, seven a step of
    weights and statistics in flight, and rows, which tensor cores read from shared memory in W2."""
    if tile.family == "simt":
        return 60 + 7 * tile.unroll + 12 * tile.rows
    ahead = 2 if tile.unroll > 5 and tile.unroll % 2 == 0 else tile.unroll  # Tensor::kRowSteps
    rows = 4 * ahead if stage == "w13" else 0
    if dev.arch.startswith("sm_7"):
        return (105 if stage == "w13" else 85) + 7 * tile.unroll + rows
    return 40 + 7 * tile.unroll + rows


def guesses(contract: Contract, tokens: int, dev: Device, count: int = GUESSES) -> tuple[Config, ...]:
    """What the model thinks fastest at a token count before anything is built: as if each kernel took all registers
    that its resident threads leave, and no more than the hardware has. Those that would spill are left out."""
    found: list[tuple[float, Config]] = []
    routings = pool(contract, tokens)[:: len(SEEDS)]  # one of each kind
    for config in space.candidates(contract):
        if plan.why_invalid(contract, config, dev) is not None:
            continue
        made = plan.make(contract, config)
        launch = made.launch("op")
        threads = -(-max(config.resident, launch.block) // 128) * 128  # registers are given to four warps at a time
        registers = min(dev.registers_per_thread, dev.registers_per_sm // threads // 8 * 8)
        if max(_registers(stage, config.stage(stage), dev) for stage in STAGES) > registers:
            continue
        resources = Resources(registers, launch.shared.at(tokens))
        found.append((model.predict_op(contract, made, resources, routings, tokens, dev).us, config))
    return tuple(config for _, config in sorted(found, key=lambda each: (each[0], each[1].key()))[:count])


class ModelEvaluator:
    """Predicts on a described GPU, from images built for its architecture and the contract's routings."""

    word = "predicted"

    def __init__(self, contract: Contract, dev: Device) -> None:
        self.contract = contract
        self.gpu = dev
        self.device = dev.name
        self._builds = Ahead(dev.arch)
        self._works: dict[str, Work] = {}

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when the model, what counts for it, a GPU's figures or the routings' seeds do."""
        folder = Path(model.__file__).parent
        names = ("model.py", "work.py", *items.SOURCES, "gpu.py", "devices.toml", "routing.py")
        content = b"".join((folder / name).read_bytes() for name in names)
        return hashlib.sha256(content + repr(SEEDS).encode()).hexdigest()[:16]

    def prefetch(self, configs: Sequence[Config]) -> None:
        """Starts building the op's kernels in other processes."""
        self._builds.prefetch([render.render_op(self.contract, config) for config in configs])

    def image(self, config: Config) -> Image:
        """The op's built kernel. Raises BuildFailed, MissingTool, InvalidConfig."""
        return self._builds.image(render.render_op(self.contract, config))

    def work(self, config: Config) -> Work | None:
        """What the kernel's code does in its items, executed once; None for a GPU whose code is not executed here.

        Raises as items.work and `image` do: a kernel that faults, or has an instruction that is not known, cannot win.
        """
        if self.gpu.arch != sass.ARCH:
            return None
        image = self.image(config)
        if image.digest not in self._works:
            self._works[image.digest] = items.work(self.contract, config, image)
        return self._works[image.digest]

    def evaluate(self, config: Config, tokens: int) -> Timing:
        """The mean over the contract's routings, by their weights.

        Raises as `work` does, and InvalidConfig for what does not fit, or spills registers: no winner shall.
        """
        image = self.image(config)
        if image.spill_bytes:
            raise InvalidConfig(
                f"{config.key()} spills {image.spill_bytes} bytes of registers a thread: fewer steps in flight, or "
                "fewer resident threads, would not"
            )
        made = plan.make(self.contract, config)
        resources = Resources.of(image, made.launch("op"), tokens)
        work = self.work(config)
        found = model.predict_op(
            self.contract, made, resources, pool(self.contract, tokens), tokens, self.gpu, work=work
        )
        us = round(found.us, 3)
        terms = {name: round(value, 3) for name, value in found.parts.items()}
        said = {"bound": found.bound, "instructions from": work.basis if work else DATA_FLOW}
        return Timing(us, us, us, (), self.device, {**said, **terms}, self.word)
