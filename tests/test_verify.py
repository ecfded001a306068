"""Verdicts on fake executors that plant one fault each, and one run of the real kernels on the CPU."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tuner import awq, space
from tuner.cases import INPUTS, edge_cases, make_case, ramp
from tuner.contract import Contract, load
from tuner.errors import ContractError, LaunchFailed, RequestError, TrialTimeout
from tuner.gate import gate, gate_passes
from tuner.plan import Outputs, Plan
from tuner.reference import Layer, Reference
from tuner.verify import HostExecutor, Layers, Subject, Verdict, default_ranks, default_tokens, verify, verify_edges

QWEN = load("qwen38-tp4")
SMALL = replace(QWEN, name="small", experts=8, top_k=4, hidden=64, intermediate=128, levels=(1, 2, 4))
ENGINE = replace(SMALL, numerics="engine", tolerance=2e-3)
GATE = replace(SMALL, hidden=1024)  # one whole ramp
CONFIG = space.default(SMALL)
LAYERS = Layers(SMALL)

Fault = Callable[[Plan, int, np.ndarray, np.ndarray], None]


def no_fault(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
    pass


class Fake:
    """Answers with the reference itself, from nothing but the operands; then `fault` may alter the output and hidden.

    Hidden rows are zeros in the end where the plan clears them.

    It answers with the contract's own numerics; `weights` stand in for the operands' when given.
    """

    name = "fake"

    def __init__(self, fault: Fault = no_fault, weights: awq.LayerWeights | None = None, engine: bool = False) -> None:
        self.fault, self.weights, self.engine = fault, weights, engine
        self.runs: list[tuple[str, int]] = []

    def run(self, plan: Plan, operands, tokens: int, order: int) -> Outputs:
        self.runs.append((plan.name, order))
        contract = plan.contract
        own = awq.LayerWeights(
            *(
                awq.GemmWeights(*(operands[f"{which}_{part}"] for part in ("Q", "SCALES", "ZEROS")))
                for which in ("W13", "W2")
            )
        )
        layer = self.layer(Reference(contract, self.weights or own), operands, (tokens, contract.top_k))
        out = layer.output.astype(np.float16)
        hidden = layer.hidden.astype(np.float32)  # NaN, like poison, where no expert
        self.fault(plan, order, out, hidden)
        return Outputs({"OUT": out, "HIDDEN": hidden * 0 if plan.name == "fused" else hidden})

    def layer(self, reference: Reference, operands, shape: tuple[int, int]) -> Layer:
        live, expert_map = operands.get("LIVE_TOKENS"), operands.get("EXPERT_MAP")
        if "SORTED_ROWS" in operands:
            local = np.full(shape[0] * shape[1], -1, np.int32)
            offsets = operands["OFFSETS"]
            for expert in range(len(offsets) - 1):
                local[operands["SORTED_ROWS"][offsets[expert] : offsets[expert + 1]]] = expert
            ids = local.reshape(shape)
        else:
            ids = operands["TOPK_IDS"]
            assert operands["ID_BYTES"] == ids.itemsize
            assert operands["MAP_SIZE"] == (0 if expert_map is None else len(expert_map))
        answer = reference.engine if self.engine else reference.exact
        return answer(
            operands["X"],
            ids,
            operands["TOPK_WEIGHTS"],
            expert_map=expert_map,
            live_tokens=None if live is None else int(live[0]),
        )


def judged(
    executor: Fake,
    layers: Layers = LAYERS,
    tokens: int = 4,
    runs=(("fused", 0), ("fused", 1), ("fused", 2), ("staged", 0)),
) -> Verdict:
    case = make_case(layers.contract, tokens, "uniform", "gaussian")
    return Subject(CONFIG, executor, layers).judge(0, case, runs)


def repacked(contract: Contract, alter: Callable[[awq.Integers], awq.Integers], which: str) -> awq.LayerWeights:
    """LAYERS' weights of rank 0 with every expert's `which` altered."""
    weights = LAYERS.weights(0)
    altered = awq.pack(
        contract, which, [alter(awq.integers(contract, weights, which, e)) for e in range(contract.experts)]
    )
    return replace(weights, **{which: altered})


# --- right kernels pass


def test_the_reference_itself_passes_with_half_a_spacing_of_rounding() -> None:
    verdict = judged(Fake())
    assert verdict.ok and verdict.reasons == ()
    assert verdict.executor == "fake" and verdict.case == "rank 0, C4, uniform, gaussian"
    assert verdict.difference is not None and 0.4 < verdict.difference.max_scaled_ulp <= 0.5
    assert verdict.engine_distance is not None and verdict.engine_distance.relative_l2 > 2e-4
    assert len(verdict.digest) == 16


def test_verify_gives_a_verdict_for_each_rank_level_routing_and_input_each_run_in_three_orders_and_in_stages() -> None:
    fake = Fake()
    verdicts = list(verify(LAYERS, CONFIG, fake))
    assert [v.case for v in verdicts] == [
        f"rank {rank}, C{tokens}, {routed}, {given}"
        for rank in (0, 3)
        for tokens in (2, 4)
        for routed in ("round-robin", "single-hot", "uniform", "zipf")
        for given in ("ramp", "gaussian")
    ]
    assert all(v.ok for v in verdicts)
    assert fake.runs == [("fused", 0), ("fused", 1), ("fused", 2), ("staged", 0)] * len(verdicts)
    assert all(v.hidden is not None and v.hidden.relative_l2 < 1e-6 for v in verdicts)
    assert len({v.digest for v in verdicts}) == len(verdicts)


def test_the_default_ranks_and_levels_are_the_published_ones_where_the_contract_has_them() -> None:
    assert default_ranks(QWEN) == (0, 3) and default_tokens(QWEN) == (2, 4, 8)
    assert default_ranks(load("mixtral-8x7b-tp2")) == (0, 1)
    assert default_ranks(load("glm45-air-tp1")) == (0,)
    assert default_tokens(replace(SMALL, levels=(1, 3))) == (3,)


def test_an_engine_contract_takes_the_engines_roundings_and_refuses_their_absence() -> None:
    layers = Layers(ENGINE)
    assert judged(Fake(engine=True), layers).ok
    exact = judged(Fake(), layers)
    assert not exact.ok and any("output against engine numerics: relative L2" in reason for reason in exact.reasons)
    assert any("hidden" in reason for reason in exact.reasons)


def test_an_exact_contract_refuses_the_engines_roundings() -> None:
    assert not judged(Fake(engine=True)).ok


# --- planted faults


def zero_points_one_up(which: str) -> awq.LayerWeights:
    return repacked(SMALL, lambda one: replace(one, z=((one.z + 1) % 16).astype(np.uint8)), which)


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_a_wrong_zero_point_is_found(which: str) -> None:
    verdict = judged(Fake(weights=zero_points_one_up(which)))
    assert not verdict.ok
    assert any(reason.startswith("output: relative L2") for reason in verdict.reasons)
    assert any(reason.startswith("hidden") for reason in verdict.reasons) == (which == "w13")


@pytest.mark.parametrize("which", ["w13", "w2"])
def test_two_swapped_nibbles_of_every_word_are_found(which: str) -> None:
    weights = LAYERS.weights(0)
    held = getattr(weights, which)
    q = held.q
    swapped = (
        (q & np.uint32(0xFFFFFF00)) | ((q & np.uint32(0xF)) << np.uint32(4)) | ((q >> np.uint32(4)) & np.uint32(0xF))
    )
    verdict = judged(Fake(weights=replace(weights, **{which: replace(held, q=swapped)})))
    assert not verdict.ok and verdict.reasons[0].startswith("output: relative L2")


def test_a_row_left_out_is_found() -> None:
    def drop(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[2] = 0

    assert not judged(Fake(drop)).ok


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_element_not_finite_is_found_and_placed(poison: float) -> None:
    def spoil(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[3, 17] = poison

    verdict = judged(Fake(spoil))
    assert verdict.reasons == ("output: 1 elements not finite where the reference is, first at (3, 17)",)
    assert verdict.difference is not None and verdict.difference.nonfinite == 1


def test_one_element_a_single_f16_number_off_is_found_and_placed() -> None:
    case = make_case(SMALL, 4, "uniform", "gaussian")
    exact = LAYERS.expected(0, case).exact.output
    at = np.unravel_index(np.argmax(np.abs(exact)), exact.shape)

    def nudge(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        away = np.inf if out[at] > exact[at] else -np.inf  # further from the exact value than rounding took it
        out[at] = np.nextafter(out[at], np.float16(away))

    verdict = judged(Fake(nudge))
    assert not verdict.ok and verdict.difference is not None
    assert 1 < verdict.difference.max_scaled_ulp <= 1.5
    assert verdict.difference.where == tuple(int(i) for i in at)
    assert verdict.difference.relative_l2 < SMALL.tolerance  # the norm alone would have let it pass
    assert len(verdict.reasons) == 1 and "at most 0.6 allowed" in verdict.reasons[0]


def test_a_wrong_hidden_row_is_found_though_the_output_is_right() -> None:
    def spoil(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        hidden[5] *= np.float32(1.001)

    verdict = judged(Fake(spoil))
    assert not verdict.ok and all(reason.startswith("hidden of routed slots") for reason in verdict.reasons)


def test_one_hidden_element_a_fifth_of_an_f16_spacing_off_is_found_though_the_norm_would_let_it_pass() -> None:
    hidden64 = LAYERS.expected(0, make_case(SMALL, 4, "uniform", "gaussian")).exact.hidden
    at = np.unravel_index(np.argmin(np.abs(hidden64)), hidden64.shape)
    spacing = np.spacing(np.float16(np.abs(hidden64).max() / 64))  # of the smallest element's yardstick

    def nudge(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        hidden[at] += np.float32(0.2) * np.float32(spacing)

    verdict = judged(Fake(nudge))
    assert len(verdict.reasons) == 1 and verdict.reasons[0].startswith(
        "hidden of routed slots: off by 0.2 f16 spacings"
    )


def test_hidden_rows_of_slots_that_are_not_routed_may_hold_anything() -> None:
    values = iter(range(100))
    case = edge_cases(SMALL, 2)[0]
    unrouted = case.local(SMALL.experts).ravel() < 0
    assert unrouted.any()

    def scribble(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        hidden[unrouted] = next(values)

    assert Subject(CONFIG, Fake(scribble), LAYERS).judge(0, case, [("fused", 0), ("staged", 0), ("sorted", 1)]).ok


def test_a_tiny_value_in_the_row_of_a_token_without_experts_is_found() -> None:
    case = next(case for case in edge_cases(SMALL, 2) if "the others poison" in case.name)

    def leak(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[1, 0] = 2**-24

    verdict = Subject(CONFIG, Fake(leak), LAYERS).judge(0, case, [("fused", 0)])
    assert verdict.reasons == ("output: token 1 has no expert and its row is not zero",)


def test_a_bit_that_depends_on_the_order_is_found_though_each_run_alone_would_pass() -> None:
    exact = LAYERS.expected(0, make_case(SMALL, 4, "uniform", "gaussian")).exact.output
    at = np.unravel_index(np.argmin(np.abs(exact)), exact.shape)  # judged by the spacing of larger elements

    def sway(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        if order == 2:
            out[at] = np.nextafter(out[at], np.float16(np.inf))

    verdict = judged(Fake(sway))
    where = tuple(int(i) for i in at)
    assert verdict.reasons == (
        f"fused plan, order 2: output has other bits in 1 elements, first at {where}, than fused plan, order 0",
    )
    assert judged(Fake(sway), runs=(("fused", 2), ("staged", 2))).ok


def test_hidden_rows_are_compared_between_the_plans_that_keep_them() -> None:
    def sway(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        if plan.name == "sorted":
            hidden[6, 3] = np.nextafter(hidden[6, 3], np.float32(np.inf))

    runs = (("fused", 0), ("staged", 0), ("sorted", 1), ("all-experts", 0))
    verdict = judged(Fake(sway), runs=runs)
    assert verdict.reasons == (
        "sorted plan, order 1: hidden has other bits in 1 elements, first at (6, 3), than staged plan, order 0",
    )


def test_a_verdict_without_a_plan_that_keeps_hidden_rows_says_nothing_of_them() -> None:
    verdict = judged(Fake(), runs=(("fused", 0),))
    assert verdict.ok and verdict.hidden is None


def test_the_sign_of_a_zero_counts_as_a_bit() -> None:
    case = next(case for case in edge_cases(SMALL, 2) if case.name.endswith("no routed row at all"))

    def negate(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        if order == 1:
            out[0, 0] = -0.0

    assert not Subject(CONFIG, Fake(negate), LAYERS).judge(0, case, [("fused", 0), ("fused", 1)]).ok


def test_a_plan_that_gives_other_bits_than_fused_is_found_in_every_edge_case() -> None:
    def sway(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        if plan.name == "sorted":
            out[0, 0] += np.float16(1)

    verdicts = list(verify_edges(LAYERS, CONFIG, Fake(sway)))
    assert len(verdicts) == len(edge_cases(SMALL, 2))
    for i, verdict in enumerate(verdicts):
        assert [reason.split(":")[0] for reason in verdict.reasons] == [f"sorted plan, order {(i + 1) % 3}"]


@pytest.mark.parametrize(
    "error", [LaunchFailed("kernel voltune_w2 read outside X"), TrialTimeout("kernel voltune_w2 hung")]
)
def test_a_fault_and_a_hang_are_verdicts(error: Exception) -> None:
    def fail_at(failing: int) -> Fault:
        def fail(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
            if order == failing:
                raise error

        return fail

    at_once = judged(Fake(fail_at(0)))
    assert not at_once.ok and at_once.difference is None and at_once.reasons == (f"fused plan, order 0: {error}",)
    later = judged(Fake(fail_at(1)))
    assert not later.ok and later.difference is not None and later.reasons == (f"fused plan, order 1: {error}",)


# --- edge cases


def test_every_edge_case_passes_on_every_plan_with_the_reference() -> None:
    fake = Fake()
    verdicts = list(verify_edges(LAYERS, CONFIG, fake, rank=3, tokens=4))
    assert [v.reasons for v in verdicts] == [()] * len(verdicts)
    assert [name for name, _ in fake.runs] == ["fused", "staged", "sorted", "all-experts"] * len(verdicts)
    assert [order for _, order in fake.runs[:12]] == [0, 0, 1, 2, 0, 1, 2, 0, 0, 2, 0, 1]
    assert set(fake.runs) == {
        ("fused", 0),
        *((name, n) for name in ("staged", "sorted", "all-experts") for n in range(3)),
    }


@pytest.mark.parametrize("contract", [SMALL, QWEN, replace(SMALL, top_k=1, experts=1, levels=(1,))])
def test_edge_cases_hold_what_their_names_say(contract: Contract) -> None:
    tokens = min(2, contract.max_tokens)
    cases = {case.name.split(", ", 1)[1]: case for case in edge_cases(contract, tokens)}
    routed = {name: case.local(contract.experts) >= 0 for name, case in cases.items()}
    assert (cases["ids below 0"].ids < 0).any() and not routed["ids below 0"][cases["ids below 0"].ids < 0].any()
    past = cases["ids past the last expert"].ids
    assert (past >= contract.experts).any() and not routed["ids past the last expert"][past >= contract.experts].any()
    assert cases["int64 ids"].ids.dtype == np.int64 and routed["int64 ids"].all()
    wide = cases["int64 ids past 32 bits"].ids
    cut = wide.astype(np.int32)
    trap = (cut >= 0) & (cut < contract.experts) & (wide != cut)
    assert trap.any() and not routed["int64 ids past 32 bits"][trap].any()
    assert routed["expert map"].any()
    for name in ("no live token", "a negative count of live tokens", "no routed row at all"):
        assert not routed[name].any()
    assert routed["more live tokens than tokens"].all()
    zeros = cases["a token of zeros"]
    assert not zeros.x[0].any() and zeros.x[1:].any(axis=1).all() and routed["a token of zeros"].all()
    padded = cases[f"{tokens // 2} live tokens, the others poison"]
    assert np.isnan(padded.x[tokens // 2 :]).all() and np.isfinite(padded.x[: tokens // 2]).all()


def test_edge_cases_of_several_experts_repeat_some_in_a_token_and_mask_some_by_the_map() -> None:
    cases = {case.name.split(", ", 1)[1]: case for case in edge_cases(SMALL, 2)}
    assert all(len(set(row.tolist())) == 2 for row in cases["a token naming experts twice"].ids)
    mapped = cases["expert map"]
    assert mapped.expert_map is not None and len(mapped.expert_map) == 16 and (mapped.expert_map < 0).sum() == 8
    assert (mapped.local(8) < 0).any()
    short = cases["expert map shorter than the experts"]
    assert ((short.local(8) < 0) & (short.ids < 8)).any()


# --- inputs and requests


def test_the_ramp_runs_from_minus_1_over_the_flat_buffer_in_steps_of_a_512th() -> None:
    x = ramp(QWEN, 2)
    assert x.dtype == np.float16 and x.shape == (2, 2560)
    assert x[0, [0, 1, 512, 1023, 1024]].tolist() == [-1.0, -0.998046875, 0.0, 0.998046875, -1.0]
    assert x[1, 0] == 0.0  # 2560 % 1024 = 512


def test_gaussian_inputs_are_unit_normal_and_follow_the_seed() -> None:
    first, other = (INPUTS["gaussian"](QWEN, 4, seed) for seed in (0, 1))
    assert abs(float(first.std(dtype=np.float64)) - 1) < 0.03 and first.dtype == np.float16
    assert not np.array_equal(first, other)


def test_what_the_contract_does_not_have_is_refused() -> None:
    def first(**request: object) -> Verdict:
        return next(verify(LAYERS, CONFIG, Fake(), **request))  # type: ignore[arg-type]

    with pytest.raises(RequestError, match="5 tokens; contract small runs 1 to 4"):
        first(tokens=[5])
    with pytest.raises(RequestError, match="unknown input 'ones'; expected one of ramp, gaussian"):
        first(inputs=["ones"])
    with pytest.raises(RequestError, match="unknown routing 'roundrobin'"):
        first(routings=["roundrobin"])
    with pytest.raises(ContractError, match="rank 4"):
        first(ranks=[4])


def test_weights_are_made_once_a_rank_and_the_references_once_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real, exact = awq.synthetic, Reference.exact
    computed: list[str] = []

    def counting(contract: Contract, rank: int, seed: int) -> awq.LayerWeights:
        made.append(rank)
        return real(contract, rank, seed)

    def counted(self: Reference, *arguments, **options) -> Layer:
        computed.append("exact")
        return exact(self, *arguments, **options)

    monkeypatch.setattr(awq, "synthetic", counting)
    layers = Layers(SMALL)
    case, same = make_case(SMALL, 2, "zipf", "ramp"), make_case(SMALL, 2, "zipf", "ramp")
    monkeypatch.setattr(Reference, "exact", counted)
    for rank in (0, 1, 0):
        layers.expected(rank, case)
        layers.expected(rank, same)
        layers.expected(rank, replace(same, live_tokens=1))
    assert made == [0, 1] and len(computed) == 4
    assert layers.weights(0) is layers.weights(0)


# --- values


def test_a_verdict_survives_json() -> None:
    def leak(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[0, 0] = 1

    def fail(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        raise LaunchFailed("no")

    infinite = Subject(CONFIG, Fake(leak), LAYERS).judge(0, edge_cases(SMALL, 2)[-1], [("fused", 0)])
    assert infinite.difference is not None and infinite.difference.relative_l2 == float("inf")
    for verdict in (judged(Fake()), infinite, judged(Fake(fail))):
        assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict(), allow_nan=False))) == verdict


# --- the operator gate


def f16(*values: float) -> np.ndarray:
    return np.array(values, np.float16)


@pytest.mark.parametrize(
    ("actual", "reference", "passes"),
    [
        (f16(1.0), [1.0], True),
        (f16(1.0), [1.0019], True),
        (f16(1.0), [1.0021], False),  # past 2e-3
        (f16(2**-15), [2**-15 + 300 * 2**-24], False),  # 300 ULP, 1.8e-5
        (f16(2**-15), [2**-15 + 250 * 2**-24], True),
        (f16(-(2**-20)), [2**-21], True),  # signs differ, both below 2e-6
        (f16(-(2**-18)), [2**-21], False),  # 3.8e-6 on one side
        (f16(np.nan), [1.0], False),
        (f16(np.inf), [1.0], False),
        (f16(65504.0), [np.inf], False),
    ],
)
def test_the_gate_passes_and_fails_by_its_own_rule(actual: np.ndarray, reference: list[float], passes: bool) -> None:
    assert gate_passes(actual, np.array(reference)) is passes


def test_the_gate_compares_hidden_and_output_with_both_references_and_gates_the_contracts_own() -> None:
    rows = list(gate(Layers(GATE), space.default(GATE), Fake()))
    assert [(r.rank, r.tokens, r.routing) for r in rows[::4]] == [
        (rank, tokens, routed) for rank in (0, 3) for tokens in (2, 4) for routed in ("round-robin", "single-hot")
    ]
    assert [(r.against, r.stage) for r in rows[:4]] == [
        ("exact", "W13+SiLU"),
        ("exact", "output"),
        ("engine", "W13+SiLU"),
        ("engine", "output"),
    ]
    assert all(r.ok for r in rows if r.gated)
    assert not any(r.gated for r in rows if r.against == "engine")
    assert all(r.gated for r in rows if r.against == "exact" and r.stage == "W13+SiLU")
    outputs = [r for r in rows if r.against == "exact" and r.stage == "output"]
    # Outputs of these weights reach 8 in some rows, where half an f16 spacing is past the gate's absolute bound.
    assert {r.gated for r in outputs} == {True, False}
    assert all(r.difference.max_abs > 2e-3 for r in outputs if not r.gated)
    assert all(r.published is None for r in rows)  # another shape than the published run's
    json.dumps([r.to_dict() for r in rows], allow_nan=False)


def test_engine_rows_too_large_for_the_gates_absolute_bound_are_not_gated() -> None:
    engine = replace(GATE, numerics="engine", tolerance=2e-3)

    def next_f16(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[:] = np.nextafter(out, np.float16(np.inf))

    rows = [
        r for r in gate(Layers(engine), space.default(engine), Fake(next_f16, engine=True)) if r.against == "engine"
    ]
    # Outputs of these weights pass 4, where one f16 spacing is twice the gate's bound.
    assert not any(r.gated for r in rows if r.stage == "output")
    assert any(not r.ok for r in rows if r.stage == "output")


def test_a_fault_breaks_the_gates_row_of_its_stage_only() -> None:
    def spoil(plan: Plan, order: int, out: np.ndarray, hidden: np.ndarray) -> None:
        out[1, 5] += np.float16(0.25)

    rows = [r for r in gate(Layers(GATE), space.default(GATE), Fake(spoil), ranks=[0]) if r.gated]
    assert {r.stage for r in rows if not r.ok} == {"output"} and {r.stage for r in rows if r.ok} == {"W13+SiLU"}


class Empty:
    """Zeros, without computing anything: enough to see what a full-size gate row carries."""

    name = "empty"

    def run(self, plan: Plan, operands, tokens: int, order: int) -> Outputs:
        c = plan.contract
        hidden = np.zeros((tokens * c.top_k, c.local_intermediate), np.float32)
        return Outputs({"OUT": np.zeros((tokens, c.hidden), np.float16), "HIDDEN": hidden})


def test_the_published_results_stand_beside_the_published_shape() -> None:
    row = next(gate(Layers(QWEN), space.default(QWEN), Empty(), ranks=[3]))
    assert row.published == (1.220703125e-4, 2) and not row.ok


# --- the kernels themselves


@pytest.mark.parametrize("routed", ["uniform", "single-hot"])
def test_the_default_kernels_emulated_on_the_cpu_pass_in_three_orders(routed: str) -> None:
    (verdict,) = verify(LAYERS, CONFIG, HostExecutor(), ranks=[3], tokens=[4], routings=[routed], inputs=["gaussian"])
    assert verdict.ok, verdict.reasons
    assert verdict.executor == "emulated on CPU"
