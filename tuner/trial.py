"""What the process that holds the CUDA context does: keeps weights on the GPU, runs plans, times them as CUDA graphs.

Its functions are a `worker.Worker`'s jobs: `ordinal` says which GPU, and the process keeps that one open. A graph is of
at least LAUNCHES calls, each on the next of several routings and the next of several copies of the weights.
"""

import functools
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.build import Image
from tuner.device import Array, Call, Code, Gpu, GpuInfo, Kernels, Operands, Replay, Resident, Step
from tuner.errors import LaunchFailed
from tuner.nvml import POWER_CAP, Clocks
from tuner.plan import Outputs, Plan, PlanName

LAUNCHES = 24
SCREEN_ROUNDS = 3
CLOCK_DROP = 0.03  # of the settled clock: a sample taken below is discarded
_MEMORY_SHARE = 0.8  # of free GPU memory, for copies of the weights
_KERNELS = 32  # plans kept loaded


@dataclass(frozen=True)
class Held:
    """Stands for an operand that the child holds in GPU memory."""

    key: int


@dataclass(frozen=True, eq=False)
class Request:
    """What to time: some stages (all when empty) of one or more plans, interleaved.

    pools: by plan name, the operands of each routing's steps; shares: how much each routing counts. layers: how many
    copies of the weights to use in turn. drop_us: after SCREEN_ROUNDS, a single plan above it is given up.
    """

    plans: Sequence[Plan]
    images: Sequence[Mapping[str, Image]]
    stages: tuple[str, ...]
    tokens: int
    pools: Mapping[PlanName, Sequence[Sequence[Mapping[str, Any]]]]
    shares: Sequence[float]
    layers: int
    rounds: int
    drop_us: float


@dataclass(frozen=True)
class Raw:
    """us [plan, round, routing], a call; layers: the copies of the weights that fitted."""

    us: Array
    layers: int
    details: Mapping[str, Any]


class _Session:
    """One GPU with what was uploaded to it."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        self.held: dict[int, list[Resident]] = {}  # the first is the upload, the others are copies of it
        self._kernels: OrderedDict[tuple[str, ...], Kernels] = OrderedDict()

    def kernels(self, plan: Plan, images: Mapping[str, Image], code: Code) -> Kernels:
        """Loaded once for as long as it is used; the driver takes a second to compile PTX."""
        key = (code, *(images[launch.stage].digest for launch in plan.launches))
        if key not in self._kernels:
            self._kernels[key] = self.gpu.load(plan, images, code)
        self._kernels.move_to_end(key)
        if len(self._kernels) > _KERNELS:
            self._kernels.popitem(last=False)
        return self._kernels[key]

    def operands(self, given: Mapping[str, Any]) -> Operands:
        return {name: self.held[value.key][0] if isinstance(value, Held) else value for name, value in given.items()}

    def layers(self, weights: Mapping[str, Held], wanted: int) -> list[dict[str, Resident]]:
        """`wanted` copies of these weights, or as many as fit."""
        if not weights:
            return [{}]
        size = sum(self.held[held.key][0].nbytes for held in weights.values())
        have = min(len(self.held[held.key]) for held in weights.values())
        count = min(wanted, have + int(_MEMORY_SHARE * self.gpu.free_bytes()) // size)
        for held in weights.values():
            copies = self.held[held.key]
            copies += [self.gpu.copy(copies[0]) for _ in range(count - len(copies))]
        return [{name: self.held[held.key][i] for name, held in weights.items()} for i in range(count)]


@functools.lru_cache(maxsize=1)
def _session(ordinal: int) -> _Session:
    return _Session(ordinal)


def open_gpu(ordinal: int) -> GpuInfo:
    return _session(ordinal).gpu.info


def hold(ordinal: int, key: int, path: str) -> None:
    session = _session(ordinal)
    session.held[key] = [session.gpu.upload(np.load(path, mmap_mode="r"))]


def run(
    ordinal: int, plan: Plan, images: Mapping[str, Image], code: Code, given: Mapping[str, Any], tokens: int
) -> Outputs:
    session = _session(ordinal)
    step = session.gpu.step(plan, session.operands(given), tokens)
    session.gpu.launch(Call(plan, session.kernels(plan, images, code), step))
    return session.gpu.outputs(step)


def measure(ordinal: int, request: Request, code: Code) -> Raw:
    session = _session(ordinal)
    gpu = session.gpu
    first = request.plans[0]
    timed = [launch for launch in first.launches if not request.stages or launch.stage in request.stages]
    names = {name for launch in timed for name in launch.arguments}
    given = request.pools[first.name][0][0]
    weights = {name: value for name, value in given.items() if name in names and isinstance(value, Held)}
    layers = session.layers(weights, request.layers)
    count = len(layers) * math.ceil(LAUNCHES / len(layers))
    steps: dict[PlanName, list[list[Step]]] = {}  # plans of a name share them
    graphs: list[list[Replay]] = []
    for plan, images in zip(request.plans, request.images, strict=True):
        if plan.name not in steps:
            steps[plan.name] = [
                [gpu.step(plan, session.operands(one), request.tokens) for one in pool]
                for pool in request.pools[plan.name]
            ]
        kernels = session.kernels(plan, images, code)
        for step in itertools.chain(*steps[plan.name]):  # fills the workspace that a stage alone reads
            gpu.launch(Call(plan, kernels, step))
        gpu.synchronize()
        graphs.append(
            [gpu.capture(_calls(plan, kernels, request.stages, pool, layers, count)) for pool in steps[plan.name]]
        )
    us, details = _sample(gpu, graphs, np.asarray(request.shares), request.rounds, request.drop_us)
    for pool in itertools.chain(*steps.values()):
        gpu.outputs(pool[0])  # its guards, after all that
    routings = len(request.pools[first.name][0])
    return Raw(us, len(layers), {**details, "launches": count, "routings": routings, "layers": len(layers)})


def _calls(
    plan: Plan,
    kernels: Kernels,
    stages: tuple[str, ...],
    steps: Sequence[Step],
    layers: Sequence[Mapping[str, Resident]],
    count: int,
) -> list[Call]:
    return [Call(plan, kernels, steps[i % len(steps)].over(layers[i % len(layers)]), stages) for i in range(count)]


def _sample(
    gpu: Gpu, graphs: Sequence[Sequence[Replay]], shares: Array, rounds: int, drop_us: float
) -> tuple[Array, dict[str, Any]]:
    """us [plan, round, routing]; each round another plan goes first. A round at a lowered clock is discarded whole."""
    for replay in itertools.chain(*graphs):
        _settle(replay)
    settled = gpu.clocks()
    kept: list[Array] = []
    slow: list[Clocks] = []
    dropped = False
    while not dropped and len(kept) < rounds and len(kept) + len(slow) < 3 * rounds:
        row = np.zeros((len(graphs), len(shares)))
        for place in range(len(graphs)):
            which = (place + len(kept) + len(slow)) % len(graphs)
            row[which] = [replay.time_us() for replay in graphs[which]]
        clocks = gpu.clocks()
        if set(clocks.limits) - {POWER_CAP} or clocks.sm_mhz < (1.0 - CLOCK_DROP) * settled.sm_mhz:
            slow.append(clocks)
            continue
        kept.append(row)
        if len(kept) == SCREEN_ROUNDS and len(graphs) == 1:
            dropped = bool(np.median(np.vstack(kept) @ shares / shares.sum()) > drop_us)
    if len(kept) < min(rounds, SCREEN_ROUNDS):
        raise LaunchFailed(
            f"{gpu.info.name} kept slowing down: {len(slow)} of {len(kept) + len(slow)} rounds, the last at "
            f"{slow[-1].sm_mhz} MHz ({', '.join(slow[-1].limits) or 'no reason given'}) after {settled.sm_mhz} MHz; "
            "let it cool and repeat"
        )
    details = {
        "sm_mhz": settled.sm_mhz,
        "memory_mhz": settled.memory_mhz,
        "limits": list(settled.limits),
        "discarded_rounds": len(slow),
        "screened_out": dropped,
    }
    return np.stack(kept, axis=1), details


def _settle(replay: Replay) -> None:
    """Replays until three batches in a row agree within 1 %: for 50 ms at least, a second at most."""
    start = time.monotonic()
    batches: list[float] = []
    while time.monotonic() - start < 1.0:
        batches.append(float(np.median([replay.time_us() for _ in range(5)])))
        last = batches[-3:]
        if time.monotonic() - start > 0.05 and len(last) == 3 and max(last) <= 1.01 * min(last):
            return
