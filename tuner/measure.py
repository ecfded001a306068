"""Measures kernels on a GPU: every trial in a process that may be killed, and verified before it is timed.

A timing is of a CUDA graph of at least trial.LAUNCHES launches, each on the next of ROUTINGS routings and the next of
so many copies of the weights that COLD times the L2 lies between two uses of one, as in serving other layers' do.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from tuner import plan, render, routing, trial, verify
from tuner.build import Ahead, Image
from tuner.cases import Case, gaussian, make_case
from tuner.contract import Contract
from tuner.device import Array, Code, GpuInfo, Operands
from tuner.errors import LaunchFailed, TrialTimeout
from tuner.plan import Outputs, Plan, PlanName
from tuner.space import Config
from tuner.verify import Layers, Subject
from tuner.worker import Worker

Mode = Literal["cubin", "ptx", "native"]  # sm_70 machine code; its PTX, compiled by the driver; a build for this GPU

ROUTINGS, COLD = 24, 3
ROUNDS, FINAL_ROUNDS = 20, 30
DROP = 2.0  # times the best so far: not worth more rounds
RESAMPLES, CONFIDENCE = 2000, 0.95

_OPEN_S, _UPLOAD_S, _RUN_S, _TIME_S, _COMPARE_S = 180.0, 120.0, 60.0, 180.0, 600.0
_BIG = 1 << 20  # bytes: such operands are uploaded once and kept


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median, and the .05 and .95 quantiles, of the raw samples, one a round."""

    us: float
    low: float
    high: float
    samples: tuple[float, ...]
    device: str
    details: Mapping[str, Any] = field(default_factory=dict)
    word: str = "measured"

    @classmethod
    def of(cls, samples: Sequence[float], device: str, details: Mapping[str, Any]) -> "Timing":
        """The summary of samples."""
        low, middle, high = (float(value) for value in np.quantile(samples, (0.05, 0.5, 0.95)))
        return cls(middle, low, high, tuple(samples), device, details)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Compared:
    """A finalist's Timing, and the interval of the share of the first finalist's time that it saves."""

    timing: Timing
    low: float
    high: float


def saving(samples: Sequence[float], baseline: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The CONFIDENCE interval of the median share of the baseline's time that is saved, from samples paired by round.

    Percentile bootstrap over rounds; the same seed gives the same interval.
    """
    shares = 1.0 - np.asarray(samples) / np.asarray(baseline)
    draws = np.random.default_rng(seed).integers(len(shares), size=(RESAMPLES, len(shares)))
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(shares[draws], axis=1), (tail, 1.0 - tail))
    return float(low), float(high)


def layers_needed(l2_bytes: int, touched_bytes: float) -> int:
    """Copies of the weights such that, used in turn, COLD times the L2 is touched between two uses of one."""
    return 1 + math.ceil(COLD * l2_bytes / touched_bytes)


class DeviceExecutor:
    """Runs plans on a GPU through a process that is replaced when a kernel faults or hangs; a verify.Executor.

    mode: by default "cubin" on compute capability 7.0 and "ptx" elsewhere. Raises MissingTool where there is no GPU.
    """

    def __init__(self, mode: Mode | None = None, ordinal: int = 0) -> None:
        self._ordinal = ordinal
        self._worker = Worker(LaunchFailed)
        self._fresh = True
        self._arrays: dict[int, Array] = {}  # by id: held here too, so that an id stays its array's
        self._there: set[int] = set()
        self.info: GpuInfo = self._call(trial.open_gpu, timeout_s=_OPEN_S)
        self.mode: Mode = mode or ("cubin" if self.info.capability == (7, 0) else "ptx")
        self.code: Code = "ptx" if self.mode == "ptx" else "cubin"
        self.builds = Ahead(self.info.arch if self.mode == "native" else "sm_70")

    @property
    def name(self) -> str:
        """Where, in the word a verdict may use."""
        kind = {"cubin": "sm_70 code", "ptx": "PTX", "native": f"{self.info.arch} build"}[self.mode]
        return f"{kind} on {self.info.name}"

    def run(self, plan: Plan, operands: Operands, tokens: int, order: int) -> Outputs:
        """One run of the plan. A GPU chooses its own order: `order` only says that another run is wanted.

        Raises LaunchFailed, TrialTimeout, BuildFailed, MissingTool, and RequestError for operands that do not fit.
        """
        del order
        images = self.images(plan)
        done: Outputs = self._call(trial.run, plan, images, self.code, self.held(operands), tokens, timeout_s=_RUN_S)
        return done

    def images(self, plan: Plan) -> dict[str, Image]:
        """The plan's kernels, built."""
        return {stage: self.builds.image(source) for stage, source in render.render(plan).items()}

    def time(self, request: trial.Request) -> trial.Raw:
        """Raises as `run` does."""
        raw: trial.Raw = self._call(trial.measure, request, self.code, timeout_s=_TIME_S)
        return raw

    def compare(self, request: trial.Comparison, timeout_s: float = _COMPARE_S) -> trial.Raw:
        """Arms in interleaved rounds. Raises as `run` does."""
        raw: trial.Raw = self._call(trial.compare, request, self.code, timeout_s=timeout_s)
        return raw

    def held(self, operands: Operands) -> dict[str, Any]:
        """The operands with each big array replaced by what stands for it in the child, where it is uploaded once."""
        return {name: self._hold(value) if _is_big(value) else value for name, value in operands.items()}

    def _hold(self, array: Any) -> trial.Held:
        key = id(array)
        self._arrays[key] = array
        return trial.Held(key)

    def close(self) -> None:
        """Ends the process."""
        self._worker.kill()

    def __enter__(self) -> "DeviceExecutor":
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def _call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """A job in a child that holds every big array named so far."""
        try:
            if self._fresh and function is not trial.open_gpu:
                self._worker.call(trial.open_gpu, self._ordinal, timeout_s=_OPEN_S)
            self._fresh = False
            for key in self._arrays.keys() - self._there:
                self._send(key)
            return self._worker.call(function, self._ordinal, *arguments, timeout_s=timeout_s)
        except (LaunchFailed, TrialTimeout):
            # The context may be beyond use, and what is in its memory beyond trust.
            self._worker.kill()
            self._fresh = True
            self._there.clear()
            raise

    def _send(self, key: int) -> None:
        # By a file: hundreds of megabytes through the pipe would be copied several times.
        handle, path = tempfile.mkstemp(suffix=".npy")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, self._arrays[key])
            self._worker.call(trial.hold, self._ordinal, key, path, timeout_s=_UPLOAD_S)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._there.add(key)


def _is_big(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes >= _BIG


class DeviceEvaluator:
    """Times a contract's op on a GPU, each config verified first. The contract's routings count by their weights.

    warm: the same weights and routing in each launch, instead of cold ones.
    """

    word = "measured"

    def __init__(
        self,
        contract: Contract,
        executor: DeviceExecutor,
        layers: Layers,
        *,
        rank: int = 0,
        seed: int = 0,
        warm: bool = False,
    ) -> None:
        self.contract = contract
        self.device = executor.name
        self._executor, self._layers = executor, layers
        self._rank, self._seed, self._warm = rank, seed, warm
        self._best: dict[int, float] = {}
        self._verified: set[tuple[str, int, str]] = set()

    def prefetch(self, configs: Sequence[Config]) -> None:
        """Starts building the op's kernels in other processes."""
        self._executor.builds.prefetch([render.render_op(self.contract, config) for config in configs])

    def evaluate(self, config: Config, tokens: int) -> Timing:
        """Verifies the config at `tokens`, then times it; SCREEN_ROUNDS only where it takes DROP times the best.

        Raises BuildFailed, WrongResult, LaunchFailed, TrialTimeout, InvalidConfig, MissingTool.
        """
        self._verify(config, tokens)
        best = self._best.get(tokens, math.inf)
        (timing,) = self._time([plan.make(self.contract, config)], tokens, ROUNDS, DROP * best)
        self._best[tokens] = min(best, timing.us)
        return timing

    def compare(self, configs: Sequence[Config], tokens: int) -> list[Compared]:
        """Finalists timed in interleaved rounds, the others against the first. Raises like `evaluate`."""
        for config in configs:
            self._verify(config, tokens)
        made = [plan.make(self.contract, config) for config in configs]
        timings = self._time(made, tokens, FINAL_ROUNDS, math.inf)
        first = timings[0].samples
        return [Compared(timing, *saving(timing.samples, first, self._seed)) for timing in timings]

    def all_experts(self, config: Config, tokens: int) -> Timing:
        """The same tiles walking every expert, without compaction: a baseline. Raises like `evaluate`."""
        self._verify(config, tokens, "all-experts")
        (timing,) = self._time([plan.make(self.contract, config, "all-experts")], tokens, ROUNDS, math.inf)
        return timing

    def image(self, config: Config) -> Image:
        """The op's built kernel. Raises BuildFailed, MissingTool."""
        return self._executor.builds.image(render.render_op(self.contract, config))

    def _verify(self, config: Config, tokens: int, name: PlanName = "fused") -> None:
        """Raises WrongResult unless the plan is right for each of the contract's routings."""
        if (config.key(), tokens, name) in self._verified:
            return
        subject = Subject(config, self._executor, self._layers)
        for routed, _ in self.contract.routings:
            case = make_case(self.contract, tokens, routed, "gaussian", self._seed)
            subject.require(self._rank, case, name)
        self._verified.add((config.key(), tokens, name))

    def _time(self, made: Sequence[Plan], tokens: int, rounds: int, drop_us: float) -> list[Timing]:
        weights, info = self._layers.weights(self._rank), self._executor.info
        drawn = {routed: self._cases(routed, tokens) for routed, _ in self.contract.routings}
        pools = {
            one.name: [
                [self._executor.held(verify.operands(one, weights, case)) for case in cases] for cases in drawn.values()
            ]
            for one in made
        }
        active = [len(np.unique(case.ids)) for cases in drawn.values() for case in cases]
        touched = min(active) * weights.nbytes / self.contract.experts
        wanted = 1 if self._warm or not touched else layers_needed(info.l2_bytes, touched)
        images = [self._executor.images(one) for one in made]
        names, shares = zip(*self.contract.routings, strict=True)
        raw = self._executor.time(trial.Request(made, images, tokens, pools, shares, wanted, rounds, drop_us))
        details = {
            **raw.details,
            "code": self._executor.mode,
            "compiler": next(iter(images[0].values())).compiler,
            "gpu": info.to_dict(),
            "cold_bytes": int((raw.layers - 1) * touched),  # touched between two uses of a weight
            "cold_wanted_bytes": 0 if self._warm else COLD * info.l2_bytes,
        }
        timings = []
        for us in raw.us:  # [round, routing]
            samples = [float(value) for value in us @ np.asarray(shares) / sum(shares)]
            routed = dict(zip(names, np.median(us, axis=0).tolist(), strict=True))
            timings.append(Timing.of(samples, self.device, {**details, "us_by_routing": routed}))
        return timings

    def _cases(self, routed: str, tokens: int) -> list[Case]:
        x = gaussian(self.contract, tokens, self._seed)
        seeds = range(self._seed * ROUTINGS, self._seed * ROUTINGS + (1 if self._warm else ROUTINGS))
        made = [routing.make(routed, self.contract, tokens, seed) for seed in seeds]
        return [Case(routed, x, each.ids, each.weights) for each in made]
