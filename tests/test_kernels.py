"""The kernels themselves, emulated: every layout, plan, numerics and shape of routing against float64."""

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small import LAYOUTS, SMALL, TENSOR, execute, inputs, references, run, work_counts

from tuner import contract, plan, reference, render, routing, space

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
    got = run(small, x, IDS, route_weights(IDS), config=config, name="staged")
    want = references(small).exact(x, IDS, route_weights(IDS))
    check(small, got.out, want.output)
    routed = ~np.isnan(want.hidden[:, 0])
    np.testing.assert_allclose(got.hidden[routed], want.hidden[routed], rtol=3e-5, atol=1e-6)
    for name in plan.PLANS:
        for order in range(3):
            other = run(small, x, IDS, route_weights(IDS), config=config, name=name, order=order)
            assert got.out.tobytes() == other.out.tobytes(), (name, order)
            if name != "fused":  # which clears hidden rows that all have read
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
        space.parse("simt-t2-k2-u2-r1+simt-t2-k2-u1-r1+m512"),
        space.parse("simt-t2-k2-u2-r4+simt-t4-k1-u1-r4+m512"),
        space.parse("tensor-t2-k2-u2-r8+tensor-t2-k2-u1-r4+m512"),
    ],
    ids=space.Config.key,
)
def test_each_routed_row_is_multiplied_once_and_no_other_is(config: space.Config) -> None:
    """Work done twice could leave the result right, and would cost the time this project is about."""
    ids = routing.make("zipf", SMALL, 12, 4).ids
    ids[3, 1], ids[7] = -1, 6
    counts = work_counts(SMALL, ids, config, lambda source: source.text)
    routed = (ids >= 0) & (ids < SMALL.experts)
    assert all((count == routed.reshape(-1, 1)).all() for count in counts)


@pytest.mark.parametrize("name", ["fused", "staged"])
@pytest.mark.parametrize("ctas", [1, 3])
def test_however_few_ctas_take_the_tickets_the_bits_are_the_same(name: plan.PlanName, ctas: int) -> None:
    x = inputs(SMALL, len(IDS))
    want = run(SMALL, x, IDS, route_weights(IDS), name=name)
    made = plan.make(SMALL, space.default(SMALL), name)
    one = plan.Linear(1)
    fewer = [replace(launch, grid=(plan.Linear(ctas), one)) if launch.by_ticket else launch for launch in made.launches]
    assert any(launch.by_ticket for launch in fewer)
    made = replace(made, launches=tuple(fewer))
    assert execute(made, render.render(made), x, IDS, route_weights(IDS)).out.tobytes() == want.out.tobytes()


def test_configs_of_a_family_with_the_same_split_k_give_the_same_bits() -> None:
    x = inputs(SMALL, len(IDS))
    found = [config for config in space.candidates(SMALL) if config.resident == space.RESIDENT[-1]]
    # A sample that has every tile, share, unroll and row count of each family.
    chosen = [config for family in space.FAMILIES for config in random.Random(2).sample(_of(found, family), 9)]
    for family in space.FAMILIES:
        for stage in space.STAGES:
            for size in ("tiles", "split_k", "unroll", "rows"):
                every, some = ({getattr(c.stage(stage), size) for c in _of(of, family)} for of in (found, chosen))
                assert some == every, (family, stage, size)
    bits: dict[tuple[str, int, int], set[bytes]] = {}
    want = references(SMALL).exact(x, IDS, route_weights(IDS)).output
    for config in chosen:
        out = run(SMALL, x, IDS, route_weights(IDS), config=config).out
        check(SMALL, out, want)
        bits.setdefault((config.w13.family, config.w13.split_k, config.w2.split_k), set()).add(out.tobytes())
    assert all(len({key for key in bits if key[0] == family}) > 1 for family in space.FAMILIES)
    assert all(len(same) == 1 for same in bits.values())


def _of(configs: list[space.Config], family: space.Family) -> list[space.Config]:
    return [config for config in configs if config.w13.family == family]


def test_the_stages_may_be_of_different_families() -> None:
    x = inputs(SMALL, len(IDS))
    want = references(SMALL).exact(x, IDS, route_weights(IDS)).output
    for key in ("tensor-t2-k2-u2-r8+simt-t4-k1-u1-r2+m512", "simt-t2-k2-u2-r2+tensor-t4-k1-u1-r4+m512"):
        check(SMALL, run(SMALL, x, IDS, route_weights(IDS), config=space.parse(key)).out, want)


# Steps of K that a lane's batch of eight does not divide; columns that a CTA's threads do not; more routes of a token
# than a warp has lanes, and than are loaded together.
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (
            {"hidden": 352, "intermediate": 288},
            ("simt-t1-k1-u1-r2+simt-t1-k1-u3-r2+m512", "tensor-t1-k1-u1-r8+tensor-t1-k1-u3-r4+m512"),
        ),
        ({"hidden": 320, "intermediate": 416, "experts": 50, "top_k": 40, "levels": (1, 5)}, ("default",)),
        ({"hidden": 640, "intermediate": 128, "checkpoint_group": 128, "group": 128}, ("default",)),
        (
            {"hidden": 320, "intermediate": 288, "layout": "awq", "stats_bytes": 0, "interleaved": False},
            ("simt-t1-k1-u2-r2+simt-t1-k1-u3-r2+m512",),
        ),
    ],
    ids=["K of 11 and 9 steps", "40 routes a token", "group 128", "awq with K of 10 and 9 steps"],
)
def test_odd_sizes_give_the_float64_result(shape: dict[str, Any], keys: tuple[str, ...]) -> None:
    odd = replace(SMALL, **shape)
    rng = np.random.default_rng(8)
    ids = np.array([rng.permutation(odd.experts + 1)[: odd.top_k] for _ in range(5)], np.int32)
    x = inputs(odd, len(ids))
    want = references(odd).exact(x, ids, route_weights(ids)).output
    for key in keys:
        config = space.default(odd) if key == "default" else space.parse(key)
        for order in range(3):
            check(odd, run(odd, x, ids, route_weights(ids), config=config, order=order).out, want)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (layout, family)
        for layout in ("sm70-u4 3-byte interleaved", "sm70-u4 4-byte concatenated", "awq")
        for family in space.families(LAYOUTS[layout])
    ],
)
def test_engine_numerics_follow_the_engines_roundings(layout: str, family: space.Family) -> None:
    small = replace(LAYOUTS[layout], numerics="engine", tolerance=2e-3)
    x = inputs(small, len(IDS))
    tensor = replace(TENSOR, w2=replace(TENSOR.w2, rows=8))
    config = tensor if family == "tensor" else space.default(small)
    got = run(small, x, IDS, route_weights(IDS), config=config)
    assert run(small, x, IDS, route_weights(IDS), config=config, name="staged").out.tobytes() == got.out.tobytes()
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
    simt = [space.parse(f"simt-t1-k4-u2-r{r}+simt-t4-k1-u2-r{r}+m512") for r in (1, 4)]
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
    got = run(SMALL, x, ids, weights, config=config, name="staged")
    assert run(SMALL, x, ids, weights, config=config).out.tobytes() == got.out.tobytes()
    for token in range(len(scale)):
        exact = want.output[token]
        assert 0.01 < np.abs(exact).max() < 1000 or not scale[token]
        assert np.linalg.norm(got.out[token] - exact) <= 2.4e-4 * np.linalg.norm(exact), token
        for slot in (3 * token, 3 * token + 1):
            hidden = want.hidden[slot]
            assert np.linalg.norm(got.hidden[slot] - hidden) <= 1e-6 * np.linalg.norm(hidden), slot
    magnitudes = np.abs(want.hidden[np.arange(len(ids)) * 3]).max(axis=1)
    assert magnitudes.max() > 1e5 and magnitudes[magnitudes > 0].min() < 1e-5


# One launch: values that are their own flags, tickets, what is left behind


@FAMILIES
@pytest.mark.parametrize("workers", [1, 2])
def test_one_worker_and_two_give_the_same_bits_in_random_orders(
    workers: int, config: space.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker runs CTA after CTA, so none may wait for one that has not begun; two wait for each other's values."""
    ids = routing.make("zipf", SMALL, 12, 6).ids
    x = inputs(SMALL, 12)
    want = run(SMALL, x, ids, route_weights(ids), config=config, name="staged").out.tobytes()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(workers)))
    for order in range(2, 8):
        out = run(SMALL, x, ids, route_weights(ids), config=config, order=order).out
        assert out.tobytes() == want, order


@FAMILIES
def test_values_of_zero_either_sign_of_it_and_not_finite_ones_pass_from_stage_to_stage(config: space.Config) -> None:
    """A place that holds zero waits for its value: the value itself may be any."""
    x = inputs(SMALL, len(IDS))
    x[0], x[1] = 0, -0.0
    x[2, 5], x[3, 7], x[4] = np.nan, np.inf, 65504
    out = run(SMALL, x, IDS, route_weights(IDS), config=config, timeout_s=20).out
    assert (out[:2] == 0).all()
    assert np.isnan(out[2]).all() and not np.isfinite(out[3]).any()
    staged = run(SMALL, x, IDS, route_weights(IDS), config=config, name="staged").out
    assert out.tobytes() == staged.tobytes()


def test_a_kernel_that_only_loads_ends_and_takes_the_steps_counters_along() -> None:
    """It awaits nothing; what it leaves in HIDDEN means nothing, and neither does OUT."""
    for config in CONFIGS.values():
        made = plan.make(SMALL, config, load_only=True)
        buffers = tuple(replace(b, role="workspace") if b.name in LOADED else b for b in made.buffers)
        made = replace(made, buffers=buffers)
        out = execute(made, render.render(made), inputs(SMALL, len(IDS)), IDS, route_weights(IDS), timeout_s=20)
        assert not out.buffers["COUNTERS"].any()


LOADED = ("HIDDEN", "ROUTES")  # what it writes without clearing it
