"""Verdicts: a config's kernels against the references, in several orders of threads and CTAs, and in several plans.

The fused plan clears its hidden rows as it goes; so those are looked at where W13 is a launch of its own.

Every executor runs the same rendered source; a verdict carries its executor's word ("emulated on CPU", "executed as
sm_70 code on CPU", "PTX on <GPU>").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tuner import awq, build, host, machine, memory, plan, render, routing
from tuner.cases import INPUTS, Case, edge_cases, make_case
from tuner.contract import Contract
from tuner.errors import LaunchFailed, TrialTimeout, WrongResult
from tuner.plan import PLANS, Outputs, Plan, PlanName
from tuner.reference import Array, Difference, Layer, Reference, compare
from tuner.space import Config

Operands = Mapping[str, Array | int | None]

#: Exact numerics: rounding to f16 alone costs 0.5 of a spacing; 0.1 is left for fp32 sums.
OUTPUT_ULPS = 0.6
#: Hidden is fp32, so it may spend none of the output's f16 rounding: a tenth of a spacing, a tenth of the tolerance.
HIDDEN_ULPS = 0.1
HIDDEN_SHARE = 0.1
#: Engine numerics against the engine reference, which accumulates better than fp32: where a sum lies near a rounding
#: boundary the two fall on either side, and later stages carry that on. numpy sums in fp32, eight rows at a time, on
#: qwen38-tp4, qwen36-35b-tp2 and mixtral-8x7b-tp4 at C2 and C8, uniform and single-hot, both inputs, gave at most
#: 16.1 spacings and 1.2e-4 (hidden 2 and 3.5e-5). Leaving the engine's roundings out gives 7e-4 and more.
ENGINE_ULPS, ENGINE_L2 = 32.0, 2e-4
ENGINE_HIDDEN_ULPS, ENGINE_HIDDEN_L2 = 4.0, 1e-4

ROUTINGS = ("round-robin", "single-hot", "uniform", "zipf")

#: Plans that leave HIDDEN as W13 wrote it.
KEEP_HIDDEN: tuple[PlanName, ...] = tuple(name for name in PLANS if name != "fused")


class Executor(Protocol):
    """Runs a plan's kernels somewhere. `name` says where, in the word a verdict may use."""

    @property
    def name(self) -> str: ...

    def run(self, plan: Plan, operands: Operands, tokens: int, order: int) -> Outputs:
        """`order` picks an order of fibers and CTAs where there is a choice; elsewhere it is one more run.

        Raises LaunchFailed, TrialTimeout, and what building raises.
        """
        ...


class _Guarded:
    """Weights between guard pages. They are hundreds of megabytes and the same from run to run: copied once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Array, Array]] = {}  # by operand name: as given, and between guard pages

    def operands(self, given: Operands) -> Operands:
        return {name: self._guarded(name, value) for name, value in given.items()}

    def _guarded(self, name: str, value: Array | int | None) -> Array | int | None:
        if not isinstance(value, np.ndarray) or not name.endswith(("_Q", "_SCALES", "_ZEROS")):
            return value
        if name not in self._kept or self._kept[name][0] is not value:
            self._kept[name] = value, memory.guard(value)
        return self._kept[name][1]


class HostExecutor:
    """The rendered source compiled for the CPU."""

    name = "emulated on CPU"

    def __init__(self) -> None:
        self._weights = _Guarded()

    def run(self, plan: Plan, operands: Operands, tokens: int, order: int) -> Outputs:
        """As Executor.run; raises MissingTool without a C++ compiler."""
        return host.execute(plan, render.render(plan), self._weights.operands(operands), tokens, order=order)


class MachineExecutor:
    """The sm_70 machine code of the rendered source, its instructions executed on the CPU."""

    name = "executed as sm_70 code on CPU"

    def __init__(self) -> None:
        self._weights = _Guarded()

    def run(self, plan: Plan, operands: Operands, tokens: int, order: int) -> Outputs:
        """As Executor.run; raises MissingTool without a C++ compiler, UnknownInstruction."""
        images = {stage: build.build(source) for stage, source in render.render(plan).items()}
        return machine.execute(plan, images, self._weights.operands(operands), tokens, order=order)


@dataclass(frozen=True, eq=False)
class Expected:
    """Both references of one case."""

    exact: Layer
    engine: Layer


class Layers:
    """Synthetic weights of a contract's ranks, and what cases give under them: made once, then shared by configs."""

    def __init__(self, contract: Contract, seed: int = 0) -> None:
        self.contract = contract
        self._seed = seed
        self._references: dict[int, Reference] = {}
        self._expected: dict[tuple[int, str], Expected] = {}

    def weights(self, rank: int) -> awq.LayerWeights:
        """The same objects at each call, so that an executor may keep what it made of them."""
        return self._reference(rank).weights

    def expected(self, rank: int, case: Case) -> Expected:
        """What the op should give."""
        key = rank, case.digest()
        if key not in self._expected:
            reference = self._reference(rank)
            arguments = case.x, case.ids, case.topk_weights
            options: dict[str, Any] = {"expert_map": case.expert_map, "live_tokens": case.live_tokens}
            self._expected[key] = Expected(
                reference.exact(*arguments, **options), reference.engine(*arguments, **options)
            )
        return self._expected[key]

    def _reference(self, rank: int) -> Reference:
        if rank not in self._references:
            self._references[rank] = Reference(self.contract, awq.synthetic(self.contract, rank, self._seed))
        return self._references[rank]


def operands(plan: Plan, weights: awq.LayerWeights, case: Case) -> dict[str, Array | int | None]:
    """The inputs and scalars of a plan's launches, by operand name."""
    live, mapped = case.live_tokens, case.expert_map
    found: dict[str, Array | int | None] = {
        "X": case.x,
        "TOPK_IDS": case.ids,
        "TOPK_WEIGHTS": case.topk_weights,
        "EXPERT_MAP": mapped,
        "LIVE_TOKENS": None if live is None else np.array([live], np.int32),
        "TOKENS": case.tokens,
        "ID_BYTES": case.ids.dtype.itemsize,
        "MAP_SIZE": 0 if mapped is None else len(mapped),
    }
    for prefix, held in (("W13", weights.w13), ("W2", weights.w2)):
        found |= {f"{prefix}_Q": held.q, f"{prefix}_SCALES": held.scales, f"{prefix}_ZEROS": held.zeros}
    if plan.name == "sorted":
        done = routing.sort(case.ids, plan.contract.experts, expert_map=mapped, live_tokens=live)
        found |= {"SORTED_ROWS": done.rows, "OFFSETS": done.offsets}
    used = {name for launch in plan.launches for name in launch.arguments}
    return {name: value for name, value in found.items() if name in used}


@dataclass(frozen=True)
class Verdict:
    """Whether one case came out right on one executor."""

    ok: bool
    executor: str
    case: str
    difference: Difference | None  # output against float64; None when nothing came back
    engine_distance: (
        Difference | None
    )  # output against the engine-numerics reference; gated only where the contract says engine
    reasons: tuple[str, ...] = ()  # why not ok
    digest: str = ""  # 16 hex digits of sha256 of the output's bytes
    hidden: Difference | None = None  # of the routed slots against the contract's own reference; None where not kept

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = dict(vars(self)) | {"reasons": list(self.reasons)}
        return content | {key: None if content[key] is None else content[key].to_dict() for key in _DIFFERENCES}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Verdict:
        """What to_dict wrote."""
        read = {key: None if content[key] is None else Difference.from_dict(content[key]) for key in _DIFFERENCES}
        return cls(**{**content, **read, "reasons": tuple(content["reasons"])})


_DIFFERENCES = ("difference", "engine_distance", "hidden")


def _over(what: str, difference: Difference, ulps: float, l2: float) -> Iterator[str]:
    """What breaks a limit, in words."""
    at = f"at {difference.where}"
    if difference.nonfinite:
        yield f"{what}: {difference.nonfinite} elements not finite where the reference is, first {at}"
    if difference.missing_inf:
        yield f"{what}: {difference.missing_inf} elements are not the reference's infinity, first {at}"
    if not difference.relative_l2 <= l2:
        yield f"{what}: relative L2 {difference.relative_l2:.3g}, at most {l2:.3g} allowed"
    if not difference.max_scaled_ulp <= ulps:
        yield f"{what}: off by {difference.max_scaled_ulp:.3g} f16 spacings, at most {ulps} allowed; worst {at}"


def check_output(
    contract: Contract, expected: Expected, local: Array, out: Array
) -> tuple[Difference, Difference, list[str]]:
    """(against float64, against engine numerics, what is wrong) of an output f16 [M, H]; `local` is Case.local's.

    Relative L2 to float64 at most contract.tolerance. Elements: exact numerics within OUTPUT_ULPS of float64; engine
    numerics within ENGINE_ULPS and ENGINE_L2 of the engine reference. A token with no routed slot gives zeros exactly.
    """
    exact, engine = compare(out, expected.exact.output), compare(out, expected.engine.output)
    if contract.numerics == "exact":
        reasons = list(_over("output", exact, OUTPUT_ULPS, contract.tolerance))
    else:
        reasons = list(_over("output against engine numerics", engine, ENGINE_ULPS, ENGINE_L2))
        if not exact.relative_l2 <= contract.tolerance:
            reasons.append(f"output: relative L2 {exact.relative_l2:.3g}, at most {contract.tolerance:.3g} allowed")
    unrouted = np.flatnonzero((local < 0).all(axis=1) & (out != 0).any(axis=1))
    reasons += [f"output: token {token} has no expert and its row is not zero" for token in unrouted[:1]]
    return exact, engine, reasons


def check_hidden(contract: Contract, expected: Expected, local: Array, hidden: Array) -> tuple[Difference, list[str]]:
    """(difference, what is wrong) of W13 alone: f32 [S, I], routed slots only; limits HIDDEN_* or ENGINE_HIDDEN_*."""
    rows = np.flatnonzero(local.ravel() >= 0)
    if contract.numerics == "exact":
        difference = compare(hidden[rows], expected.exact.hidden[rows])
        limits = HIDDEN_ULPS, HIDDEN_SHARE * contract.tolerance
    else:
        difference = compare(hidden[rows], expected.engine.hidden[rows])
        limits = ENGINE_HIDDEN_ULPS, ENGINE_HIDDEN_L2
    return difference, list(_over("hidden of routed slots", difference, *limits))


@dataclass(frozen=True, eq=False)
class Subject:
    """What is verified, where, against what."""

    config: Config
    executor: Executor
    layers: Layers

    def run(self, rank: int, case: Case, name: PlanName = "fused", order: int = 0) -> Outputs:
        """One run of a plan on a case. Raises what the executor raises."""
        made = plan.make(self.layers.contract, self.config, name)
        return self.executor.run(made, operands(made, self.layers.weights(rank), case), case.tokens, order)

    def require(self, rank: int, case: Case, name: PlanName = "fused") -> None:
        """One run of a plan against the references, its hidden rows too where it keeps them; bits are not compared.

        Raises WrongResult, and what the executor raises.
        """
        contract, outputs = self.layers.contract, self.run(rank, case, name)
        local, expected = case.local(contract.experts), self.layers.expected(rank, case)
        *_, reasons = check_output(contract, expected, local, outputs.out)
        if name in KEEP_HIDDEN:
            reasons += check_hidden(contract, expected, local, outputs.hidden)[1]
        if reasons:
            where = f"{self.config.key()}, {name} plan, {case.name}, {self.executor.name}"
            raise WrongResult(f"{where}: {'; '.join(reasons)}")

    def judge(self, rank: int, case: Case, runs: Sequence[tuple[PlanName, int]]) -> Verdict:
        """The first of `runs`, (plan, order) each, against the references; the others must give its bits.

        The same goes for the hidden rows of those runs that keep them.
        """
        contract = self.layers.contract
        local, title = case.local(contract.experts), f"rank {rank}, {case.name}"
        outs: list[tuple[str, Array]] = []  # by run
        hiddens: list[tuple[str, Array]] = []
        faults: list[str] = []
        for name, order in runs:
            label = f"{name} plan, order {order}"
            try:
                outputs = self.run(rank, case, name, order)
            except (LaunchFailed, TrialTimeout) as error:
                faults.append(f"{label}: {error}")
                if not outs:
                    return Verdict(False, self.executor.name, title, None, None, tuple(faults))
                continue
            outs.append((label, outputs.out))
            if name in KEEP_HIDDEN:
                hiddens.append((label, outputs.hidden))
        expected, out = self.layers.expected(rank, case), outs[0][1]
        hidden: Difference | None = None
        exact, engine, reasons = check_output(contract, expected, local, out)
        if hiddens:
            hidden, more = check_hidden(contract, expected, local, hiddens[0][1])
            reasons += more
        routed = np.flatnonzero(local.ravel() >= 0)
        reasons += [*faults, *_unlike("output", outs), *_unlike("hidden", [(of, rows[routed]) for of, rows in hiddens])]
        digest = hashlib.sha256(out.tobytes()).hexdigest()[:16]
        return Verdict(not reasons, self.executor.name, title, exact, engine, tuple(reasons), digest, hidden)


def _unlike(what: str, runs: Sequence[tuple[str, Array]]) -> Iterator[str]:
    """Which of the runs, (label, values) each, have other bits than the first, in words."""
    for label, values in runs[1:]:
        first, given = runs[0]
        bits = f"u{values.dtype.itemsize}"
        different = np.argwhere(given.view(bits) != values.view(bits))
        if len(different):
            at = tuple(different[0].tolist())
            yield f"{label}: {what} has other bits in {len(different)} elements, first at {at}, than {first}"


def default_ranks(contract: Contract) -> tuple[int, ...]:
    """The published ranks 0 and 3, or 0 and the last where there are fewer."""
    return tuple(sorted({0, min(3, contract.tensor_parallel - 1)}))


def default_tokens(contract: Contract) -> tuple[int, ...]:
    """The published levels 2, 4 and 8 where the contract has them, else its largest."""
    return tuple(level for level in (2, 4, 8) if level in contract.levels) or (contract.max_tokens,)


def verify(
    layers: Layers,
    config: Config,
    executor: Executor,
    *,
    ranks: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    routings: Sequence[str] = ROUTINGS,
    inputs: Sequence[str] = tuple(INPUTS),
    orders: Sequence[int] = (0, 1, 2),
    seed: int = 0,
) -> Iterator[Verdict]:
    """A verdict for each rank, token count, routing and input, as each is done.

    The fused plan must give the same bits in all orders, and the staged one in the natural order too, which also
    shows the hidden rows.

    Raises RequestError or ContractError for a request outside the contract, and what the executor's building raises;
    a kernel that faults or hangs is a verdict.
    """
    contract, subject = layers.contract, Subject(config, executor, layers)
    for rank in default_ranks(contract) if ranks is None else ranks:
        for level in default_tokens(contract) if tokens is None else tokens:
            for routed in routings:
                for given in inputs:
                    case = make_case(contract, level, routed, given, seed)
                    yield subject.judge(rank, case, [*(("fused", order) for order in orders), ("staged", 0)])


def verify_edges(
    layers: Layers,
    config: Config,
    executor: Executor,
    *,
    rank: int = 0,
    tokens: int | None = None,
    plans: Sequence[PlanName] = PLANS,
) -> Iterator[Verdict]:
    """A verdict for each of edge_cases, on all `plans`: the first against the references, the others by its bits.

    The first runs in order 0. The others take the three orders in turn from case to case, so that each plan is seen in
    all of them. `tokens` is 2 by default, or 1 where the contract has no more. Raises like `verify`.
    """
    contract, subject = layers.contract, Subject(config, executor, layers)
    level = min(2, contract.max_tokens) if tokens is None else tokens
    for i, case in enumerate(edge_cases(contract, level)):
        others = [(name, (i + n) % 3) for n, name in enumerate(plans[1:])]
        yield subject.judge(rank, case, [(plans[0], 0), *others])
