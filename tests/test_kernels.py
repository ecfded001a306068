"""The kernels themselves, emulated: every layout, plan, numerics and shape of routing against float64."""

from dataclasses import replace

import numpy as np
import pytest
from small import LAYOUTS, SMALL, TENSOR, inputs, references, run, work_counts

from tuner import contract, plan, reference, routing, space

IDS = np.array([[0, 1, 2], [2, 2, 5], [5, 0, -1], [3, 6, 2], [2, 1, 0]], np.int32)  # -1 and 6 name no expert


CONFIGS = {"simt": space.default(SMALL), "tensor": TENSOR}
FAMILIES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def route_weights(ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng(3).uniform(0.1, 1.0, ids.shape).astype(np.float32)


def check(small: contract.Contract, out: np.ndarray, exact: np.ndarray) -> None:
    difference = reference.compare(out, exact)
    assert difference.nonfinite == difference.missing_inf == 0
    assert difference.relative_l2 < 2.4e-4
    assert difference.max_scaled_ulp < 0.6


# All of a layout in one test, so that one process compiles its kernels.
@pytest.mark.parametrize(
    ("layout", "family"), [(layout, family) for layout, small in LAYOUTS.items() for family in space.families(small)]
)
def test_every_layout_gives_the_float64_result_rounded_once_and_in_every_plan_the_same_bits(
    layout: str, family: space.Family
) -> None:
    small = LAYOUTS[layout]
    config = TENSOR if family == "tensor" else space.default(small)
    x = inputs(small, len(IDS))
    got = run(small, x, IDS, route_weights(IDS), config=config)
    want = references(small).exact(x, IDS, route_weights(IDS))
    check(small, got.out, want.output)
    routed = ~np.isnan(want.hidden[:, 0])
    np.testing.assert_allclose(got.hidden[routed], want.hidden[routed], rtol=3e-5, atol=1e-6)
    for name in plan.PLANS:
        for order in range(3):
            other = run(small, x, IDS, route_weights(IDS), config=config, name=name, order=order)
            assert got.out.tobytes() == other.out.tobytes(), (name, order)
            assert got.hidden[routed].tobytes() == other.hidden[routed].tobytes(), (name, order)


@pytest.mark.parametrize("name", plan.PLANS)
def test_more_experts_than_a_word_has_bits_and_than_the_step_has_slots_are_told_apart(name: plan.PlanName) -> None:
    many = replace(SMALL, experts=70)
    ids = np.array([[0, 69, 31], [32, 31, 63], [64, 5, 33], [1, 69, -1], [64, 62, 70]], np.int32)
    x = inputs(many, len(ids))
    want = references(many).exact(x, ids, route_weights(ids)).output
    for order in range(3):
        check(many, run(many, x, ids, route_weights(ids), name=name, order=order).out, want)


@pytest.mark.parametrize(
    "config",
    [
        space.Config(space.W13Config("simt", 2, 2, 2, 1), space.W2Config("simt", 4, 2, 1, 1)),
        space.Config(space.W13Config("simt", 2, 2, 2, 4), space.W2Config("simt", 4, 2, 1, 4)),
        replace(TENSOR, w2=replace(TENSOR.w2, split_k=2)),
    ],
    ids=space.Config.key,
)
def test_each_routed_row_is_multiplied_once_and_no_other_is(config: space.Config) -> None:
    """Work done twice would leave the result right, and cost the time this project is about."""
    ids = routing.make("zipf", SMALL, 12, 4).ids
    ids[3, 1], ids[7] = -1, 6
    hidden, parts = work_counts(SMALL, ids, config, lambda source: source.text)
    routed = (ids >= 0) & (ids < SMALL.experts)
    assert (hidden == routed.reshape(-1, 1)).all()
    assert (parts == config.w2.split_k * routed.sum(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("stage", space.STAGES)
def test_configs_of_a_family_with_the_same_split_k_give_the_same_bits(stage: space.Stage) -> None:
    x = inputs(SMALL, len(IDS))
    default = space.default(SMALL)
    bits: dict[tuple[str, int], set[bytes]] = {}
    every = {"simt": 7, "tensor": 3 if stage == "w13" else 5}
    found = space.candidates(SMALL, stage)
    chosen = [c for family, step in every.items() for c in [c for c in found if c.family == family][::step]]
    assert {name: {c.to_dict()[name] for c in chosen} for name in chosen[0].to_dict()} == {
        name: set(values) for name, values in space.axes(SMALL, stage).items()
    }
    for config in chosen:
        out = run(SMALL, x, IDS, route_weights(IDS), config=replace(default, **{stage: config})).out
        check(SMALL, out, references(SMALL).exact(x, IDS, route_weights(IDS)).output)
        bits.setdefault((config.family, config.split_k), set()).add(out.tobytes())
    assert all(len({split for of, split in bits if of == family}) > 1 for family in space.FAMILIES)
    assert all(len(same) == 1 for same in bits.values())


@pytest.mark.parametrize("layout", ["sm70-u4 3-byte interleaved", "sm70-u4 4-byte concatenated", "awq"])
def test_engine_numerics_follow_the_engines_roundings(layout: str) -> None:
    small = replace(LAYOUTS[layout], numerics="engine", tolerance=2e-3)
    x = inputs(small, len(IDS))
    got = run(small, x, IDS, route_weights(IDS))
    engine = references(small).engine(x, IDS, route_weights(IDS))
    # fp32 accumulation orders differ, so a rounding to f16 may fall the other way: rarely, and by little.
    assert np.mean(got.out != engine.output) < 0.1
    assert reference.compare(got.out, engine.output.astype(np.float64)).relative_l2 < 2e-4
    exact = run(LAYOUTS[layout], x, IDS, route_weights(IDS))
    assert np.mean(exact.out != engine.output) > 0.3


@pytest.mark.parametrize("rows", [1, 2, 7, 36])
def test_any_number_of_rows_may_share_an_expert(rows: int) -> None:
    tokens = 12
    ids = np.full((tokens, 3), -1, np.int32)
    ids.ravel()[np.random.default_rng(rows).permutation(ids.size)[:rows]] = 4
    x = inputs(SMALL, tokens)
    simt = [space.Config(space.W13Config("simt", 1, 4, 2, r), space.W2Config("simt", 4, 1, 2, r)) for r in (1, 4)]
    for config in (*simt, TENSOR):
        out = run(SMALL, x, ids, route_weights(ids), config=config).out
        check(SMALL, out, references(SMALL).exact(x, ids, route_weights(ids)).output)


@FAMILIES
@pytest.mark.parametrize("name", ["fused", "staged", "all-experts"])
def test_no_valid_row_at_all_gives_zeros(name: plan.PlanName, config: space.Config) -> None:
    ids = np.array([[-1, 6, 99], [-5, -1, 2**31 - 1]], np.int32)
    out = run(SMALL, inputs(SMALL, 2), ids, route_weights(ids), config=config, name=name).out
    assert out.tobytes() == bytes(out.nbytes)


@pytest.mark.parametrize("name", ["fused", "staged", "all-experts"])
def test_int64_ids_are_read_whole(name: plan.PlanName) -> None:
    wide = IDS.astype(np.int64)
    wide[0, 0] = 2**32  # 0 in its low half, and no expert
    narrow = IDS.copy()
    narrow[0, 0] = -1
    x = inputs(SMALL, len(IDS))
    one = run(SMALL, x, wide, route_weights(IDS), name=name)
    two = run(SMALL, x, narrow, route_weights(IDS), name=name)
    assert one.out.tobytes() == two.out.tobytes()


@pytest.mark.parametrize("name", plan.PLANS)
def test_an_expert_map_leads_global_ids_to_local_experts(name: plan.PlanName) -> None:
    expert_map = np.array([-1, 3, -1, 0, 5, 1, 2, -1, 4, 17], np.int32)  # 17 is no local expert
    ids = np.array([[1, 3, 4], [5, 0, 9], [8, 10, -1]], np.int32)
    mapped = np.array([[3, 0, 5], [1, -1, -1], [4, -1, -1]], np.int32)
    x = inputs(SMALL, 3)
    one = run(SMALL, x, ids, route_weights(ids), name=name, expert_map=expert_map)
    two = run(SMALL, x, mapped, route_weights(ids), name=name)
    assert one.out.tobytes() == two.out.tobytes()
    assert one.out[1].any()


@FAMILIES
@pytest.mark.parametrize("name", plan.PLANS)
@pytest.mark.parametrize("live", [-3, 0, 2, 5, 9])
def test_padding_tokens_give_zeros_and_leave_the_live_ones_alone(
    name: plan.PlanName, live: int, config: space.Config
) -> None:
    x = inputs(SMALL, len(IDS))
    x[max(live, 0) :] = np.nan  # not read
    weights = route_weights(IDS)
    weights[max(live, 0) :] = np.nan
    out = run(SMALL, x, IDS, weights, config=config, name=name, live_tokens=live).out
    kept = min(max(live, 0), len(IDS))
    assert out[kept:].tobytes() == bytes(out[kept:].nbytes)
    if kept:
        alone = run(SMALL, x[:kept], IDS[:kept], weights[:kept], config=config, name=name).out
        assert out[:kept].tobytes() == alone.tobytes()


@FAMILIES
def test_three_orders_of_threads_and_blocks_give_the_same_bits(config: space.Config) -> None:
    ids = routing.make("uniform", SMALL, 12, 5).ids
    x = inputs(SMALL, 12)
    outs = {run(SMALL, x, ids, route_weights(ids), config=config, order=order).out.tobytes() for order in range(3)}
    assert len(outs) == 1


@FAMILIES
def test_large_activations_stay_finite_where_float64_rounds_to_finite_f16(config: space.Config) -> None:
    x = (inputs(SMALL, 5) * np.float16(500)).astype(np.float16)
    weights = route_weights(IDS) * np.float32(0.01)
    want = references(SMALL).exact(x, IDS, weights)
    assert np.nanmax(np.abs(want.hidden)) > 65504  # hidden values that no f16 holds
    difference = reference.compare(run(SMALL, x, IDS, weights, config=config).out, want.output)
    assert difference.nonfinite == difference.missing_inf == 0


@FAMILIES
def test_rows_of_very_different_magnitude_that_share_a_pass_do_not_disturb_each_other(config: space.Config) -> None:
    scale = np.array([1e-3, 1e3, 1.0, 0.0, 1e3, 1e-3, 1.0, 0.0])
    ids = np.array([[4, 1, -1]] * len(scale), np.int32)
    x = (inputs(SMALL, len(scale)) * scale[:, None]).astype(np.float16)
    # Weighted so that every output is of order 1, where f16 rounds alike; hidden is about as its row squared.
    weights = (route_weights(ids) * np.where(scale > 0, scale, 1.0)[:, None] ** -2).astype(np.float32)
    want = references(SMALL).exact(x, ids, weights)
    got = run(SMALL, x, ids, weights, config=config)
    for token in range(len(scale)):
        exact = want.output[token]
        assert 0.01 < np.abs(exact).max() < 1000 or not scale[token]
        assert np.linalg.norm(got.out[token] - exact) <= 2.4e-4 * np.linalg.norm(exact), token
        for slot in (3 * token, 3 * token + 1):
            hidden = want.hidden[slot]
            assert np.linalg.norm(got.hidden[slot] - hidden) <= 1e-6 * np.linalg.norm(hidden), slot
    magnitudes = np.abs(want.hidden[np.arange(len(ids)) * 3]).max(axis=1)
    assert magnitudes.max() > 1e5 and magnitudes[magnitudes > 0].min() < 1e-5
