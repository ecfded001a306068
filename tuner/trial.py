"""What the process that holds the CUDA context does: keeps weights on the GPU, runs plans, times them as CUDA graphs.

Its functions are a `worker.Worker`'s jobs: `ordinal` says which GPU, and the process keeps that one open. A graph is of
at least LAUNCHES calls, each on the next of several routings and the next of several copies of the weights.
"""

import functools
import hashlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tuner import dense, engine, tensors
from tuner.build import Image
from tuner.contract import Contract
from tuner.device import Array, Call, Code, Gpu, GpuInfo, Kernels, Operands, Replay, Resident, Step
from tuner.errors import LaunchFailed
from tuner.nvml import POWER_CAP, Board, Clocks
from tuner.plan import Buffer, Outputs, Plan, PlanName

LAUNCHES = 24
SCREEN_ROUNDS = 3
COPY_L2S = 32  # times the L2: so large is the buffer that is copied
CLOCK_DROP = 0.03  # of the settled clock: a sample taken below is discarded
_MEMORY_SHARE = 0.8  # of free GPU memory, for copies of the weights
_KERNELS = 64  # plans kept loaded


@dataclass(frozen=True)
class Held:
    """Stands for an operand that the child holds in GPU memory."""

    key: int


@dataclass(frozen=True, eq=False)
class Request:
    """What to time: one or more plans, interleaved.

    pools: by plan name, the operands of each routing's steps; shares: how much each routing counts. layers: how many
    copies of the weights to use in turn. drop_us: after SCREEN_ROUNDS, a single plan above it is given up.
    """

    plans: Sequence[Plan]
    images: Sequence[Mapping[str, Image]]
    tokens: int
    pools: Mapping[PlanName, Sequence[Sequence[Mapping[str, Any]]]]
    shares: Sequence[float]
    layers: int
    rounds: int
    drop_us: float


@dataclass(frozen=True, eq=False)
class Arm:
    """Some stages of a plan (all when empty)."""

    plan: Plan
    images: Mapping[str, Image]
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Cell:
    """One token count and routing: by plan name, the operands of each step; layers: copies of the weights wanted."""

    tokens: int
    pools: Mapping[PlanName, Sequence[Mapping[str, Any]]]
    layers: int


@dataclass(frozen=True, eq=False)
class DenseSteps:
    """What the dense arm computes: the weights' operands, and x, ids and route weights of each step."""

    contract: Contract
    weights: Mapping[str, Any]
    steps: Sequence[tensors.Step]


@dataclass(frozen=True, eq=False)
class EngineSteps:
    """What an engine's ops compute, by `routes` of engine.ROUTES: as DenseSteps, and an expert for its converter."""

    contract: Contract
    weights: Mapping[str, Any]
    steps: Sequence[tensors.Step]
    sample: engine.Sample
    routes: Sequence[str]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms on one cell, cold and, where wanted, warm."""

    cell: Cell
    arms: Sequence[Arm]
    dense: DenseSteps | None
    warm: bool
    rounds: int
    engine: EngineSteps | None = None


class Timed(Protocol):
    """Something captured that can be run again and again."""

    def time_us(self) -> float: ...


@dataclass(frozen=True)
class Raw:
    """us [plan or arm, round, routing], a call; layers: the copies of the weights that fitted."""

    us: Array
    layers: int
    details: Mapping[str, Any]


class _Session:
    """One GPU with what was uploaded to it."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        self.held: dict[int, list[Resident]] = {}  # the first is the upload, the others are copies of it
        self._kernels: OrderedDict[tuple[str, ...], Kernels] = OrderedDict()
        self._copying: Replay | None = None

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

    def copying(self) -> Replay:
        """A copy of COPY_L2S times the L2, random bytes, from one place on the GPU to another."""
        if self._copying is None:
            size = COPY_L2S * self.gpu.info.l2_bytes
            source = self.gpu.upload(np.random.default_rng(0).integers(1 << 64, size=size // 8, dtype=np.uint64))
            self._copying = self.gpu.capture_copy(self.gpu.copy(source), source)
        return self._copying


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
    first = request.plans[0]
    layers = session.layers(_held(request.pools[first.name][0][0]), request.layers)
    beds = [
        _Bed(session, request.tokens, {name: pools[i] for name, pools in request.pools.items()}, layers, code)
        for i in range(len(request.shares))
    ]
    arms = [Arm(*each) for each in zip(request.plans, request.images, strict=True)]
    graphs = [[bed.graph(arm) for bed in beds] for arm in arms]
    us, details = _sample(session.gpu, graphs, np.asarray(request.shares), request.rounds, request.drop_us)
    for bed in beds:
        bed.check()
    routings = len(request.pools[first.name][0])
    return Raw(us, len(layers), {**details, "launches": beds[0].count, "routings": routings, "layers": len(layers)})


def _held(given: Mapping[str, Any]) -> dict[str, Held]:
    """What is held on the GPU of a step's operands: its weights."""
    return {name: value for name, value in given.items() if isinstance(value, Held)}


class _Bed:
    """The steps of one routing in place on the GPU, and the copies of the weights they take in turn.

    Plans with the same buffers share steps.
    """

    def __init__(
        self,
        session: _Session,
        tokens: int,
        pools: Mapping[PlanName, Sequence[Mapping[str, Any]]],
        layers: Sequence[Mapping[str, Resident]],
        code: Code,
    ) -> None:
        self._session, self._tokens, self._pools, self._code = session, tokens, pools, code
        self.layers = layers
        self._steps: dict[tuple[Buffer, ...], list[Step]] = {}
        self.count = len(layers) * math.ceil(LAUNCHES / len(layers))

    def graph(self, arm: Arm, warm: bool = False) -> Replay:
        """The arm's calls, each on the next step and the next copy; all of the first step and copy where warm."""
        gpu, kernels = self._session.gpu, self._session.kernels(arm.plan, arm.images, self._code)
        steps = self._of(arm.plan)
        for step in steps:  # fills the workspace that a stage alone reads
            gpu.launch(Call(arm.plan, kernels, step))
        gpu.synchronize()
        places = [0] * LAUNCHES if warm else range(self.count)
        turns = [(steps[i % len(steps)], self.layers[i % len(self.layers)]) for i in places]
        return gpu.capture([Call(arm.plan, kernels, step.over(layer), arm.stages) for step, layer in turns])

    def check(self) -> None:
        """What the kernels left in every step. Raises LaunchFailed as Gpu.outputs does."""
        for step in itertools.chain(*self._steps.values()):
            self._session.gpu.outputs(step)

    def _of(self, plan: Plan) -> list[Step]:
        if plan.buffers not in self._steps:
            self._steps[plan.buffers] = [
                self._session.gpu.step(plan, self._session.operands(one), self._tokens)
                for one in self._pools[plan.name]
            ]
        return self._steps[plan.buffers]


def screen(ordinal: int, arms: Sequence[Arm], cells: Sequence[Cell], code: Code) -> Array:
    """us [arm, cell]: medians of SCREEN_ROUNDS cold passes, whatever the clocks: enough to say what is worth more."""
    session = _session(ordinal)
    beds = [_bed(session, cell, code) for cell in cells]
    us = np.zeros((len(arms), len(cells)))
    for i, arm in enumerate(arms):
        for j, bed in enumerate(beds):
            replay = bed.graph(arm)
            us[i, j] = np.median([replay.time_us() for _ in range(SCREEN_ROUNDS)])
    for bed in beds:
        bed.check()
    return us


def compare(ordinal: int, request: Comparison, code: Code) -> Raw:
    """us [column, round, 0] in interleaved rounds.

    Columns: the arms and, where asked for, the dense arm and the engine's routes, cold; the copy; then all but that
    again, warm.
    """
    session = _session(ordinal)
    copying = session.copying()  # before the copies of the weights take the memory
    bed = _bed(session, request.cell, code)

    def columns(warm: bool) -> list[Timed]:
        made: list[Timed] = [bed.graph(arm, warm) for arm in request.arms]
        count = LAUNCHES if warm else bed.count
        if request.dense is not None:
            made.append(dense.capture(request.dense.contract, *places(request.dense, warm), count))
        if request.engine is not None:
            held = engine.Engine(request.engine.contract, request.engine.sample)
            layers, steps = places(request.engine, warm)
            made += [held.capture(route, layers, steps, count) for route in request.engine.routes]
        return made

    def places(of: DenseSteps | EngineSteps, warm: bool) -> tuple[list[dict[str, Resident]], Sequence[tensors.Step]]:
        layers = [_resident(session, {**of.weights, **layer}) for layer in bed.layers]
        return (layers[:1], of.steps[:1]) if warm else (layers, of.steps)

    graphs = [*columns(warm=False), copying, *(columns(warm=True) if request.warm else ())]
    us, details = _sample(session.gpu, [[each] for each in graphs], np.ones(1), request.rounds, math.inf)
    bed.check()
    return Raw(us, len(bed.layers), {**details, "launches": bed.count, "layers": len(bed.layers)})


@dataclass(frozen=True, eq=False)
class Bare:
    """A kernel of (SOURCE, COUNT, SINK), `calls` times in a graph: SOURCE has nbytes, COUNT units of 16 bytes."""

    plan: Plan
    images: Mapping[str, Image]
    nbytes: int
    calls: int


def bare(ordinal: int, arms: Sequence[Bare], rounds: int, code: Code) -> Raw:
    """us [arm, round, 0] a call, in interleaved rounds; all arms read the same memory, from its begin."""
    session = _session(ordinal)
    source = session.gpu.allocate(np.dtype(np.uint8), (max(arm.nbytes for arm in arms),))
    sink = session.gpu.allocate(np.dtype(np.uint32), (1,))
    graphs = []
    for arm in arms:
        addresses, scalars = {"SOURCE": source.address, "SINK": sink.address}, {"COUNT": arm.nbytes // 16}
        step = Step(1, addresses, scalars, sink, {}, (source, sink))
        call = Call(arm.plan, session.kernels(arm.plan, arm.images, code), step)
        session.gpu.launch(call)
        session.gpu.synchronize()
        graphs.append([session.gpu.capture([call] * arm.calls)])
    us, details = _sample(session.gpu, graphs, np.ones(1), rounds, math.inf)
    return Raw(us, 1, details)


def repeat(
    ordinal: int, plan: Plan, images: Mapping[str, Image], code: Code, given: Mapping[str, Any], tokens: int, times: int
) -> list[str]:
    """16 hex digits of sha256 of the output's bytes, as each of `times` replays of one graph leaves it."""
    session = _session(ordinal)
    gpu, step = session.gpu, session.gpu.step(plan, session.operands(given), tokens)
    call = Call(plan, session.kernels(plan, images, code), step)
    gpu.launch(call)
    gpu.outputs(step)
    replay, found = gpu.capture([call]), []
    for _ in range(times):
        gpu.poison(step)
        replay.run()
        found.append(hashlib.sha256(gpu.outputs(step).out.tobytes()).hexdigest()[:16])
    return found


def board(ordinal: int) -> Board:
    """The GPU's present state."""
    return _session(ordinal).gpu.board()


def run_dense(ordinal: int, request: DenseSteps) -> Array:
    """The dense arm's output of its first step, f16 [M, H]. Raises MissingTool without torch, LaunchFailed."""
    return dense.run(request.contract, _resident(_session(ordinal), request.weights), request.steps[0])


def run_engine(ordinal: int, request: EngineSteps) -> Array:
    """The output of the first route at the first step, f16 [M, H]. Raises as engine.Engine does."""
    held = engine.Engine(request.contract, request.sample)
    return held.run(request.routes[0], _resident(_session(ordinal), request.weights), request.steps[0])


def _resident(session: _Session, given: Mapping[str, Any]) -> dict[str, Resident]:
    """Tensors on the GPU, uploaded where they are not there yet."""
    there = session.operands(given)
    return {
        name: session.gpu.upload(value) if isinstance(value, np.ndarray) else value
        for name, value in there.items()
        if isinstance(value, np.ndarray | Resident)
    }


def _bed(session: _Session, cell: Cell, code: Code) -> _Bed:
    layers = session.layers(_held(cell.pools["fused"][0]), cell.layers)
    return _Bed(session, cell.tokens, cell.pools, layers, code)


def _sample(
    gpu: Gpu, graphs: Sequence[Sequence[Timed]], shares: Array, rounds: int, drop_us: float
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


def _settle(replay: Timed) -> None:
    """Replays until three batches in a row agree within 1 %: for 50 ms at least, a second at most."""
    start = time.monotonic()
    batches: list[float] = []
    while time.monotonic() - start < 1.0:
        batches.append(float(np.median([replay.time_us() for _ in range(5)])))
        last = batches[-3:]
        if time.monotonic() - start > 0.05 and len(last) == 3 and max(last) <= 1.01 * min(last):
            return
