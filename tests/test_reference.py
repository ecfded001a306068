"""References against values worked by hand and against Fraction arithmetic; Difference on hand-made cases."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import awq
from tuner.contract import load
from tuner.reference import (
    Difference,
    Reference,
    _engine_weights,
    _exact_weights,
    compare,
    scaled_ulp,
    ulp16,
    ulp_distance,
)

QWEN = load("qwen38-tp4")
# 4 experts of 64 x 64 gate and up columns, a rank's 32 features, one group of 32 more than W2 has.
SMALL = replace(
    QWEN, name="small", tensor_parallel=1, experts=4, top_k=2, hidden=64, intermediate=32, levels=(1, 2, 4, 8)
)
ONE = replace(SMALL, name="one", experts=1, top_k=1, hidden=32)

H, FEATURES = SMALL.hidden, SMALL.local_intermediate


def half(values: object) -> np.ndarray:
    return np.array(values, np.float16)


def constant(contract, q13: int, z13: int, s13: float, q2: int, z2: int, s2: float) -> awq.LayerWeights:
    """Every expert the same, every weight of a matrix (q - z) * s."""

    def matrix(which: str, q: int, z: int, s: float) -> awq.GemmWeights:
        shape = awq.gemm(contract, which)
        one = awq.Integers(
            np.full((shape.k, shape.n), q, np.uint8),
            np.full((shape.groups, shape.n), z, np.uint8),
            np.full((shape.groups, shape.n), s, np.float16),
        )
        return awq.pack(contract, which, [one] * contract.experts)

    return awq.LayerWeights(matrix("w13", q13, z13, s13), matrix("w2", q2, z2, s2))


@pytest.fixture(scope="module")
def small() -> Reference:
    return Reference(SMALL, awq.synthetic(SMALL, rank=0, seed=1))


def call(seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, H)).astype(np.float16)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, 2)).astype(np.float32)
    return x, ids, weights / weights.sum(axis=1, keepdims=True)


# --- exact


def test_one_expert_with_constant_weights_gives_the_value_worked_by_hand() -> None:
    # gate = up = sum over 32 rows of 1 * (11 - 3) * 2**-7 = 2; hidden = 4 / (1 + e**-2) = 3.5231883119115293;
    # output = 0.5 * sum over 32 features of hidden * (4 - 6) * 2**-5 = -0.5 * 2 * hidden.
    reference = Reference(ONE, constant(ONE, 11, 3, 2**-7, 4, 6, 2**-5))
    got = reference.exact(np.ones((1, 32), np.float16), np.zeros((1, 1), np.int32), np.full((1, 1), 0.5, np.float32))
    assert got.hidden.shape == (1, 32) and got.output.shape == (1, 32)
    np.testing.assert_allclose(got.hidden, 3.5231883119115293, rtol=1e-15)
    np.testing.assert_allclose(got.output, -3.5231883119115293, rtol=1e-15)


def test_gate_and_up_columns_groups_and_rows_each_take_their_own_place() -> None:
    """x picks one row of W13; gate j and up j differ; W2 is zero but for one weight."""
    contract = replace(ONE, hidden=64)
    rows, columns = np.indices((64, 64))
    w13 = awq.Integers(
        q=((3 * rows + 5 * columns) % 16).astype(np.uint8),
        z=np.array([[2] * 64, [9] * 64], np.uint8),
        s=np.stack([np.full(64, 2**-3), np.where(np.arange(64) < 32, 2**-2, 2**-1)]).astype(np.float16),
    )
    q2 = np.full((32, 64), 7, np.uint8)
    q2[5, 40] = 15
    w2 = awq.Integers(q=q2, z=np.full((1, 64), 7, np.uint8), s=np.full((1, 64), 0.25, np.float16))
    weights = awq.LayerWeights(awq.pack(contract, "w13", [w13]), awq.pack(contract, "w2", [w2]))
    x = np.zeros((1, 64), np.float16)
    x[0, 33] = 2
    got = Reference(contract, weights).exact(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    # Row 33 is in group 1 (z = 9). Gate 5: q = (99 + 25) % 16 = 12, (12 - 9) * 0.25 * 2 = 1.5.
    # Up 5 is column 37: q = (99 + 185) % 16 = 12, (12 - 9) * 0.5 * 2 = 3.
    hidden = 1.5 / (1 + math.exp(-1.5)) * 3
    assert got.hidden[0, 5] == pytest.approx(hidden, rel=1e-15)
    expected = np.zeros(64)
    expected[40] = hidden * (15 - 7) * 0.25
    np.testing.assert_allclose(got.output[0], expected, rtol=1e-15)


@pytest.mark.parametrize(
    "contract",
    [
        SMALL,
        replace(SMALL, stats_bytes=4, interleaved=False),
        replace(SMALL, layout="awq", stats_bytes=0, interleaved=False),
    ],
)
def test_every_layout_of_the_same_integers_gives_the_same_output(contract, small: Reference) -> None:
    packed = awq.LayerWeights(
        *(
            awq.pack(contract, which, [awq.integers(SMALL, small.weights, which, expert) for expert in range(4)])
            for which in ("w13", "w2")
        )
    )
    if contract.layout == "awq" or contract.stats_bytes == 4:  # else the test would compare a thing with itself
        assert packed.w13.scales.dtype != small.weights.w13.scales.dtype
    x, ids, weights = call(3, 4)
    np.testing.assert_array_equal(
        Reference(contract, packed).exact(x, ids, weights).output, small.exact(x, ids, weights).output
    )


def test_an_extreme_gate_gives_its_limit_without_a_warning() -> None:
    # Gate = up = -32 * 15 * 8 = -3840: silu underflows to -0, the product to 0.
    reference = Reference(ONE, constant(ONE, 0, 15, 8.0, 8, 0, 1.0))
    with np.errstate(all="raise", under="ignore"):
        got = reference.exact(np.ones((1, 32), np.float16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(got.output, 0)


def test_slots_with_no_expert_have_nan_hidden_rows_and_add_nothing(small: Reference) -> None:
    x, ids, weights = call(4, 2)
    partly = ids.copy()
    partly[0, 1] = -1
    partly[1, 0] = 4
    got = small.exact(x, partly, weights)
    assert np.isnan(got.hidden[[1, 2]]).all() and np.isfinite(got.hidden[[0, 3]]).all()
    silenced = weights.copy()
    silenced[0, 1] = silenced[1, 0] = 0
    np.testing.assert_allclose(got.output, small.exact(x, ids, silenced).output, rtol=1e-12, atol=1e-15)


def test_an_expert_named_twice_by_a_token_counts_twice(small: Reference) -> None:
    x, _, _ = call(5, 1)
    twice = small.exact(x, np.array([[2, 2]], np.int32), np.array([[0.75, 0.5]], np.float32)).output
    once = small.exact(x, np.array([[2, -1]], np.int32), np.array([[1.25, 9]], np.float32)).output
    np.testing.assert_allclose(twice, once, rtol=1e-12, atol=1e-15)


def test_a_map_and_the_local_ids_it_leads_to_give_the_same_output(small: Reference) -> None:
    x, _, weights = call(6, 2)
    expert_map = np.array([-1, 3, -1, 0, 1, -1], np.int32)
    mapped = small.exact(x, np.array([[1, 3], [4, 5]], np.int64), weights, expert_map=expert_map)
    direct = small.exact(x, np.array([[3, 0], [1, -1]], np.int32), weights)
    np.testing.assert_array_equal(mapped.output, direct.output)


@pytest.mark.parametrize(("live", "rows"), [(-2, 0), (0, 0), (1, 1), (3, 3), (8, 3)])
def test_tokens_past_the_live_ones_are_not_read_and_give_zero_rows(small: Reference, live: int, rows: int) -> None:
    x, ids, weights = call(7, 3)
    full = small.exact(x, ids, weights).output
    x[rows:], weights[rows:] = np.nan, np.nan
    for got in (small.exact(x, ids, weights, live_tokens=live), small.engine(x, ids, weights, live_tokens=live)):
        np.testing.assert_array_equal(got.output[rows:], 0)
        assert np.isfinite(got.output).all()
    np.testing.assert_allclose(
        small.exact(x, ids, weights, live_tokens=live).output[:rows], full[:rows], rtol=1e-12, atol=1e-15
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_a_token_depends_on_no_other_token(seed: int, tokens: int) -> None:
    reference = Reference(SMALL, WEIGHTS)
    x, ids, weights = call(seed, tokens)
    whole = reference.exact(x, ids, weights)
    for token in range(tokens):
        one = slice(token, token + 1)
        alone = reference.exact(x[one], ids[one], weights[one])
        np.testing.assert_allclose(alone.output, whole.output[one], rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(alone.hidden, whole.hidden[2 * token : 2 * token + 2], rtol=1e-10, atol=1e-14)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_a_tokens_columns_changes_nothing_beyond_rounding(seed: int) -> None:
    reference = Reference(SMALL, WEIGHTS)
    x, ids, weights = call(seed, 3)
    turned = reference.exact(x, ids[:, ::-1], weights[:, ::-1]).output
    np.testing.assert_allclose(turned, reference.exact(x, ids, weights).output, rtol=1e-10, atol=1e-14)


WEIGHTS = awq.synthetic(SMALL, rank=0, seed=1)


def test_a_cache_too_small_for_one_expert_changes_no_value(small: Reference) -> None:
    x, ids, weights = call(8, 4)
    tiny = Reference(SMALL, small.weights, cache_bytes=1)
    np.testing.assert_array_equal(tiny.exact(x, ids, weights).output, small.exact(x, ids, weights).output)


def test_an_expert_in_the_cache_is_not_unpacked_again_and_a_full_cache_drops_the_one_unused_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[int] = []
    real = awq.integers

    def counting(contract, weights, which, expert):
        if which == "w13":
            unpacked.append(expert)
        return real(contract, weights, which, expert)

    monkeypatch.setattr(awq, "integers", counting)
    one_expert = 2 * FEATURES * (H + H // 32 * 3) + H * (FEATURES + FEATURES // 32 * 3)
    reference = Reference(SMALL, WEIGHTS, cache_bytes=2 * one_expert)
    x, _, weights = call(9, 1)
    for first, second in [(0, 1), (0, 0), (2, 2), (0, 0), (1, 1)]:
        reference.exact(x, np.array([[first, second]], np.int32), weights)
    assert unpacked == [0, 1, 2, 1]


# --- engine


def to_half(value: Fraction) -> Fraction:
    """Nearest f16, ties to even, of a value in its normal or subnormal range: written apart from numpy."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = -14
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    place = Fraction(2) ** (exponent - 10)
    return round(value / place) * place  # Fraction's round is half to even


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 15), st.integers(0, 15), st.integers(1, 0x5FFF))
def test_engine_weights_round_the_fused_sum_once(q: int, z: int, bits: int) -> None:
    scale = np.array([[bits]], np.uint16).view(np.float16)
    s = Fraction(float(scale[0, 0]))
    expected = to_half(q * s + to_half(-z * s))
    one = awq.Integers(np.full((32, 1), q, np.uint8), np.full((1, 1), z, np.uint8), scale)
    got = _engine_weights(one, 32)
    assert got.dtype == np.float16
    assert {Fraction(float(w)) for w in got.ravel()} == {expected}


def test_engine_weights_are_not_zero_where_q_is_z_and_the_bias_was_rounded() -> None:
    # s = 1 + 2**-10, z = q = 3: 3 + 3 * 2**-10 lies half way between f16 numbers 2**-9 apart and goes to the even
    # 3 + 4 * 2**-10, so the weight is -2**-10: the engine's own error, absent from the exact reference.
    one = awq.Integers(np.full((32, 1), 3, np.uint8), np.full((1, 1), 3, np.uint8), half([[1 + 2**-10]]))
    assert set(_engine_weights(one, 32).ravel()) == {np.float16(-(2**-10))}
    assert set(_exact_weights(one, 32).ravel()) == {0}


def test_engine_rounds_at_each_stage_as_worked_by_hand() -> None:
    # Weights 2**-7 * 8 = 0.0625 exactly. x = 1 + 2**-10 in one place, 1 in the other 31: gate = up =
    # 0.0625 * (32 + 2**-10) = 2 + 2**-14, which f16 (spacing 2**-9) rounds to 2. silu(2) = 1.7615941559557649, spacing
    # 2**-10: 1803.87 -> 1804 / 1024 = 1.76171875, times up 2 = 3.5234375. W2 row: 32 * 3.5234375 * (4 - 6) * 2**-5 =
    # -7.046875 (spacing 2**-8: exact).
    # Output: 0.3 in fp32 * -7.046875 = -2.1140625...; spacing 2**-9: 1082.4 -> 1082 / 512 = -2.11328125.
    reference = Reference(ONE, constant(ONE, 11, 3, 2**-7, 4, 6, 2**-5))
    x = np.ones((1, 32), np.float16)
    x[0, 0] = 1 + 2**-10
    got = reference.engine(x, np.zeros((1, 1), np.int32), np.full((1, 1), 0.3, np.float32))
    assert got.hidden.dtype == got.output.dtype == np.float16
    assert set(got.hidden.ravel()) == {np.float16(3.5234375)}
    assert set(got.output.ravel()) == {np.float16(-2.11328125)}


def test_engine_rounds_gate_and_up_then_silu_then_their_product() -> None:
    reference = Reference(ONE, constant(ONE, 11, 3, 2**-7, 4, 6, 2**-5))
    wanted, unrounded_gate_up, unrounded_silu, got = [], [], [], []

    def silu(v: Fraction) -> Fraction:
        return v / (1 + Fraction(math.exp(-v)))

    for step in range(200):
        x = np.ones((1, 32), np.float16)
        x[0, 0] = 1 + step * 2**-10
        exact = Fraction(31 + Fraction(float(x[0, 0]))) / 16  # gate = up, by weights of 2**-4
        gate = to_half(exact)
        wanted.append(to_half(to_half(silu(gate)) * gate))
        unrounded_gate_up.append(to_half(to_half(silu(exact)) * exact))
        unrounded_silu.append(to_half(silu(gate) * gate))
        hidden = reference.engine(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)).hidden
        got.append(Fraction(float(hidden[0, 0])))
    assert got == wanted
    assert wanted != unrounded_gate_up and wanted != unrounded_silu  # else the roundings would not have been seen


def test_engine_rounds_each_route_before_the_weighted_sum() -> None:
    # As above with hidden 3.5234375 and W2 weights 11 * 2**-7: a route is 32 * 3.5234375 * 0.0859375 = 9.689453125,
    # spacing 2**-7: 1240.25 -> 1240 / 128 = 9.6875. With weights 100 and -1: 99 * 9.6875 = 959.0625 -> 959, where
    # unrounded routes would give 959.2558 -> 959.5 (spacing 0.5).
    contract = replace(ONE, top_k=2, experts=2)
    reference = Reference(contract, constant(contract, 11, 3, 2**-7, 11, 0, 2**-7))
    got = reference.engine(
        np.ones((1, 32), np.float16), np.array([[0, 1]], np.int32), np.array([[100, -1]], np.float32)
    )
    assert set(got.output.ravel()) == {np.float16(959.0)}


def test_engine_stays_within_its_roundings_of_the_exact_reference(small: Reference) -> None:
    x, ids, weights = call(10, 8)
    exact, engine = small.exact(x, ids, weights), small.engine(x, ids, weights)
    apart = compare(engine.output, exact.output)
    assert 1e-4 < apart.relative_l2 < 2e-3  # seven f16 roundings, each of relative size 2**-12 or so
    assert apart.nonfinite == apart.missing_inf == 0


def test_engine_overflow_gives_the_engines_infinity_without_a_warning() -> None:
    # gate = up = 32 * 15 * 256 = 122880, past 65504: infinity from there on.
    reference = Reference(ONE, constant(ONE, 15, 0, 256.0, 8, 0, 1.0))
    with np.errstate(all="raise", under="ignore"):
        got = reference.engine(np.ones((1, 32), np.float16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    assert np.isposinf(got.output).all()


# --- Difference


def test_equal_outputs_differ_by_nothing() -> None:
    values = half([[1.5, -2.25], [0, np.inf]])
    assert compare(values, values.astype(np.float64)) == Difference(0.0, 0.0, 0, 0.0, 0, 0.0, 0, 0, (0, 0))


def test_measures_of_one_wrong_element_are_those_worked_by_hand() -> None:
    # 1.0 against 1 + 3 * 2**-10: three f16 steps above 1; |reference| = sqrt(1 + 4).
    got = compare(half([1 + 3 * 2**-10, 2]), np.array([1.0, 2.0]))
    assert got.max_abs == 3 * 2**-10
    assert got.relative_l2 == pytest.approx(3 * 2**-10 / math.sqrt(5), rel=1e-12)
    assert got.max_ulp == 3 and got.max_scaled_ulp == 3.0
    assert got.where == (0,)


def test_scaled_ulp_measures_against_the_unrounded_reference() -> None:
    # 1 + 0.4 * 2**-10 rounds to 1: no distance in f16 numbers, 0.4 of a spacing in truth.
    got = compare(half([1]), np.array([1 + 0.4 * 2**-10]))
    assert got.max_ulp == 0
    assert got.max_scaled_ulp == pytest.approx(0.4, rel=1e-12)


def test_scaled_ulp_of_a_small_element_is_taken_at_a_64th_of_the_largest() -> None:
    # Largest 64: floor 1, spacing 2**-10. 2**-20 in place of 0 is 2**-10 of a spacing, and 16 subnormal f16 numbers.
    got = compare(half([64, 2**-20]), np.array([64.0, 0.0]))
    assert got.max_scaled_ulp == 2**-10
    assert got.max_ulp == 16
    assert scaled_ulp(np.array([64.0, 0.5 + 2**-10]), np.array([64.0, 0.5])).tolist() == [0.0, 1.0]


def test_subnormals_are_2_to_the_minus_24_apart() -> None:
    assert ulp16(
        np.array([0.0, 2**-24, 2**-14 - 2**-24, 2**-14, -(2**-13), 1.0, 1.999, 2.0, 65504.0, 1e9])
    ).tolist() == [
        2**-24,
        2**-24,
        2**-24,
        2**-24,
        2**-23,
        2**-10,
        2**-10,
        2**-9,
        32.0,
        32.0,
    ]
    assert compare(half([3 * 2**-24]), np.array([2**-24])).max_scaled_ulp == 2.0


def test_ulp_distance_counts_through_zero_and_ignores_its_sign() -> None:
    assert ulp_distance(half([-(2**-24), -0.0, 1]), half([2**-24, 0.0, -1])).tolist() == [2, 0, 2 * 0x3C00]


def test_sign_flips_are_counted_with_the_largest_magnitude_at_which_one_occurs() -> None:
    got = compare(half([-(2**-20), 1, -0.0, 0.5]), np.array([2**-18, 1.0, 1e-9, -(2**-12)]))
    assert got.sign_flips == 2
    assert got.largest_flip == 0.5


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_element_not_finite_where_the_reference_is_counts_and_is_found(wrong: float) -> None:
    got = compare(half([[1, 2], [wrong, 4]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert got.nonfinite == 1 and got.missing_inf == 0
    assert got.where == (1, 0)
    assert got.max_abs == 0.0  # measured over the finite pairs


@pytest.mark.parametrize("wrong", [65504.0, -np.inf, np.nan])
def test_anything_but_the_references_infinity_counts_as_missing(wrong: float) -> None:
    got = compare(half([1, wrong]), np.array([1.0, 70000.0]))  # 70000 rounds to infinity in f16
    assert got.missing_inf == 1 and got.nonfinite == 0
    assert got.where == (1,)


def test_a_float32_output_may_be_finite_where_f16_is_not() -> None:
    got = compare(np.array([70000.0], np.float32), np.array([70000.0]))
    assert got.missing_inf == 0 and got.nonfinite == 0 and got.max_abs == 0.0


def test_poison_everywhere_is_all_counted_and_nothing_measured() -> None:
    got = compare(np.full((3, 4), np.nan, np.float16), np.ones((3, 4)))
    assert got.nonfinite == 12 and got.relative_l2 == 0.0


def test_anything_against_an_all_zero_reference_is_infinitely_far() -> None:
    assert compare(half([2**-24]), np.zeros(1)).relative_l2 == math.inf
    assert compare(half([0]), np.zeros(1)).relative_l2 == 0.0


def test_nothing_to_compare_is_no_difference() -> None:
    assert compare(np.zeros((0, 4), np.float32), np.zeros((0, 4))) == Difference(0.0, 0.0, 0, 0.0, 0, 0.0, 0, 0, ())


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) against reference \(2, 1\)"):
        compare(half([1, 2]), np.ones((2, 1)))


def test_a_difference_survives_json_with_its_infinity() -> None:
    difference = compare(half([[2**-24, 0]]), np.zeros((1, 2)))
    text = json.dumps(difference.to_dict(), allow_nan=False)
    assert Difference.from_dict(json.loads(text)) == difference
