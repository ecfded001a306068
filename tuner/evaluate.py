"""The evaluator for a machine without the GPU that is tuned for: builds for real, then predicts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tuner import model, plan, render, routing, space
from tuner.build import Ahead, Image
from tuner.contract import Contract
from tuner.measure import Timing
from tuner.model import Device, Resources
from tuner.plan import Plan
from tuner.space import Stage, StageConfig

SEEDS = (0, 1, 2, 3)  # of the routings a prediction is averaged over


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


def floor(contract: Contract, stage: Stage, tokens: int, dev: Device) -> float:
    """Microseconds the stage's bytes take at full bandwidth, mean over the pool."""
    return model.floor(contract, stage, active_experts(contract, tokens), dev)


class ModelEvaluator:
    """Predicts on a described GPU, from images built for its architecture and the contract's routings."""

    word = "predicted"

    def __init__(self, contract: Contract, dev: Device) -> None:
        self.contract = contract
        self.gpu = dev
        self.device = dev.name
        self._default = space.default(contract)
        self._builds = Ahead(dev.arch)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when the model, a device's figures or the routings' seeds do."""
        folder = Path(model.__file__).parent
        content = b"".join((folder / name).read_bytes() for name in ("model.py", "devices.toml", "routing.py"))
        return hashlib.sha256(content + repr(SEEDS).encode()).hexdigest()[:16]

    def prefetch(self, stage: Stage, configs: Sequence[StageConfig]) -> None:
        """Starts building the stage's kernels in other processes."""
        self._builds.prefetch([render.render(self._plan(config))[stage] for config in configs])

    def image(self, stage: Stage, config: StageConfig) -> Image:
        """The stage's built kernel. Raises BuildFailed, MissingTool."""
        return self._builds.image(render.render(self._plan(config))[stage])

    def evaluate(self, stage: Stage, config: StageConfig, tokens: int) -> Timing:
        """The mean over the contract's routings, by their weights. Raises BuildFailed, and InvalidConfig for no fit."""
        made = self._plan(config)
        resources = Resources.of(self.image(stage, config), made.launch(stage), tokens)
        found = model.predict_stage(
            self.contract, made, stage, resources, pool(self.contract, tokens), tokens, self.gpu
        )
        us = round(found.us, 3)
        terms = {f"{name}_us": round(found.parts[name], 3) for name in model.TERMS}
        return Timing(us, us, us, (), self.device, {"bound": found.bound, **terms}, self.word)

    def _plan(self, config: StageConfig) -> Plan:
        return plan.make(self.contract, self._default.with_stage(config))
