"""The arithmetic of the template headers, emulated: f16 conversions and weights against exact results, SiLU against
float64. On a GPU, test_device_numerics.py holds the PTX of the same functions to the bits of these."""

from fractions import Fraction

import numpy as np
import pytest
from numerics import (
    ALL_HALVES,
    DEQUANTISED,
    DIFFERENCES,
    EXP_NEGATIVE,
    FLOAT_TO_HALF,
    HALF_DEQUANTISE,
    HALF_TO_FLOAT,
    LOAD_ONCE,
    PUBLISHED_BITS,
    PUBLISHED_VALUE,
    RECIPROCAL,
    RELAXED,
    ROUND_TO_HALF,
    SILU,
    dequantisations,
    engine_words,
    floats,
    nibbles,
    on_cpu,
)

F16 = np.float16


def as_float(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def half_bits(*values: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.array(values, F16).view(np.uint16)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.max(np.abs(got.astype(np.float64) / want - 1)))


def silu64(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / (1 + np.exp(-wide))


# f16


def test_each_of_the_65536_halves_becomes_its_float_and_each_nan_a_nan() -> None:
    got, want = as_float(on_cpu(HALF_TO_FLOAT, ALL_HALVES)), ALL_HALVES.view(F16).astype(np.float32)
    nan = np.isnan(want)
    assert nan.sum() == 2 * 1023 and np.isnan(got[nan]).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))


def test_floats_round_to_the_nearest_half_and_ties_to_even() -> None:
    x = floats(1 << 21)
    got, nan = on_cpu(FLOAT_TO_HALF, x), np.isnan(x)
    with np.errstate(over="ignore"):
        want = x.astype(F16).view(np.uint16)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert nan.sum() > 1000 and (got[nan] == 0x7FFF).all()


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (65504.0, 0x7BFF),
        (65519.996, 0x7BFF),  # the last float below the middle of 65504 and what would follow
        (65520.0, 0x7C00),  # a tie, and 65504 is odd
        (float("inf"), 0x7C00),
        (1 + 2**-11, 0x3C00),  # halfway between 1 and its neighbour: 1 is even
        (1 + 3 * 2**-11, 0x3C02),
        (2.0**-14, 0x0400),  # the smallest normal
        (2.0**-14 - 2.0**-25, 0x0400),  # halfway to it from the largest subnormal, which is odd
        (2.0**-24, 0x0001),
        (1.5 * 2.0**-24, 0x0002),
        (2.0**-25, 0x0000),  # halfway to the smallest subnormal
        (2.0**-25 + 2.0**-48, 0x0001),
        (1e-45, 0x0000),
        (0.0, 0x0000),
    ],
)
def test_a_float_rounds_as_worked_out_by_hand(value: float, bits: int) -> None:
    both = np.array([value, -value], np.float32)
    assert on_cpu(FLOAT_TO_HALF, both).tolist() == [bits, bits | 0x8000]


def test_a_value_rounded_to_half_is_that_half() -> None:
    x = floats(1 << 20)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(as_float(on_cpu(ROUND_TO_HALF, x)), x.astype(F16).astype(np.float32))


# An engine's weight: round_f16(nibble * scale + bias), rounded once


def test_a_dequantised_weight_is_the_exact_one_rounded_once() -> None:
    nibble, scale, bias = dequantisations(1 << 20)
    got = on_cpu(HALF_DEQUANTISE, nibble, scale, bias)
    # 45 bits at most: exact in float64, which numpy rounds to f16 in one step.
    exact = nibble * scale.view(F16).astype(np.float64) + bias.view(F16).astype(np.float64)
    with np.errstate(over="ignore"):
        want = exact.astype(F16).astype(np.float32)
        twice = exact.astype(np.float32).astype(F16).astype(np.float32)
    assert (want != twice).any()  # the sample tells one rounding from two
    np.testing.assert_array_equal(got, want.view(np.uint32))


def rounded(exact: Fraction) -> float:
    """The f16 number nearest to `exact`, ties to even, by rational arithmetic alone."""
    if exact == 0:
        return 0.0
    exponent = -24  # spacing 2^exponent: subnormals' at first
    while abs(exact) / Fraction(2) ** exponent >= 2048:
        exponent += 1
    # round() of a Fraction takes ties to even.
    value = round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent
    return float(value) if abs(value) < 65536 else float("inf") * (1 if value > 0 else -1)


def test_a_dequantised_weight_is_the_rational_one_rounded_once() -> None:
    nibble, scale, bias = (values[::409] for values in dequantisations(1 << 20, seed=1))
    got = as_float(on_cpu(HALF_DEQUANTISE, nibble, scale, bias))
    scales, biases = scale.view(F16).astype(float), bias.view(F16).astype(float)
    want = [rounded(int(n) * Fraction(s) + Fraction(b)) for n, s, b in zip(nibble, scales, biases, strict=True)]
    assert len(set(nibble.tolist())) == 16
    np.testing.assert_array_equal(got, np.array(want, np.float32))


@pytest.mark.parametrize(
    ("nibble", "scale", "bias", "weight"),
    [
        (15, 0.01, -0.15, 15 * float(F16(0.01)) + float(F16(-0.15))),  # cancels to a difference that f16 holds
        (0, 0.01, -0.0, 0.0),
        (1, 65504.0, 16.0, float("inf")),  # 65520
        (1, 65504.0, 15.0, 65504.0),
        (15, -65504.0, -65504.0, -float("inf")),
        (1, 1.0, float("inf"), float("inf")),
        (1, 1.0, float("nan"), float("nan")),
    ],
)
def test_a_dequantised_weight_is_as_worked_out_by_hand(nibble: int, scale: float, bias: float, weight: float) -> None:
    got = as_float(on_cpu(HALF_DEQUANTISE, np.array([nibble], np.uint16), half_bits(scale), half_bits(bias)))
    np.testing.assert_array_equal(got, np.array([weight], np.float32))


def test_an_infinite_bias_below_zero_makes_an_infinite_weight() -> None:
    got = as_float(on_cpu(HALF_DEQUANTISE, np.array([1], np.uint16), half_bits(1.0), half_bits(-np.inf)))
    assert got.tolist() == [-np.inf]


def test_reciprocals_are_the_nearest_floats() -> None:
    x = floats(1 << 20)
    x = x[~np.isnan(x)]
    with np.errstate(divide="ignore", over="ignore"):
        np.testing.assert_array_equal(as_float(on_cpu(RECIPROCAL, x)), np.float32(1) / x)


# SiLU

CLAMP = float(np.float32(126 * np.log(2)))  # where the exponential's argument is held
RANGE = np.concatenate(
    [
        np.linspace(-CLAMP, CLAMP, 400_001, dtype=np.float32)[1:-1],
        np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32),
    ]
)


def test_the_exponential_is_right_to_1e_7_up_to_its_clamp() -> None:
    got, want = as_float(on_cpu(EXP_NEGATIVE, RANGE)), np.exp(-RANGE.astype(np.float64))
    assert relative_error(got, want) < 1e-7  # a float's own rounding: 6e-8


def test_the_exponential_grows_with_x_by_no_more_than_rounding() -> None:
    x = np.sort(np.concatenate([RANGE, np.float32(0.34657359) * np.arange(-252, 253, dtype=np.float32)]))
    got = as_float(on_cpu(EXP_NEGATIVE, x))
    assert (got[1:] <= np.nextafter(got[:-1], np.float32(np.inf))).all()  # 2^f wraps from 2^-1/2 to 2^1/2 where n steps


@pytest.mark.parametrize("x", [88.0, 1000.0, 3e38, float("inf"), -88.0, -1000.0, -3e38, -float("inf"), float("nan")])
def test_past_its_clamp_the_exponential_stays_next_to_2_to_the_126_or_its_inverse(x: float) -> None:
    want = 2.0**126 if x < 0 else 2.0**-126
    assert relative_error(as_float(on_cpu(EXP_NEGATIVE, np.array([x], np.float32))), np.array([want])) < 1e-5


def test_silu_is_right_to_2e_7_and_to_2_and_a_half_float_spacings_up_to_the_clamp() -> None:
    x = RANGE[RANGE != 0]
    got, want = as_float(on_cpu(SILU, x)), silu64(x)
    assert relative_error(got, want) < 2e-7
    spacing = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got.astype(np.float64) - want) / spacing) < 2.5


def test_silu_keeps_zeros_subnormals_infinity_and_nan() -> None:
    x = np.array([0.0, -0.0, 2.8e-45, -2.8e-45, 1e-38, np.inf, np.nan], np.float32)
    want = np.array([0.0, -0.0, 1.4e-45, -1.4e-45, 5e-39, np.inf, np.nan], np.float32)
    got = as_float(on_cpu(SILU, x))
    np.testing.assert_array_equal(got, want)
    assert np.signbit(got).tolist()[:2] == [False, True]


@pytest.mark.parametrize("x", [87.4, 88.0, 89.0, 1000.0, 65504.0, 1e15])
def test_far_out_silu_is_x_above_and_next_to_nothing_below(x: float) -> None:
    above, below = as_float(on_cpu(SILU, np.array([x, -x], np.float32))).tolist()
    assert above == np.float32(x)
    assert -x * 2.0**-125 < below <= 0


# Weights of the tensor cores, and values on their way from stage to stage


def test_every_nibble_less_every_zero_point_is_an_exact_half_at_every_place() -> None:
    words, lows, pairs = nibbles()
    z, place = (lows & 15).astype(np.int64), pairs.astype(np.uint32)
    halves = [((words >> 4 * at & 15).astype(np.int64) - z).astype(F16).view(np.uint16) for at in (place, place + 4)]
    want = halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << 16
    np.testing.assert_array_equal(on_cpu(DIFFERENCES, words, lows, pairs), want)


def test_an_engines_weights_of_a_word_are_the_exact_ones_rounded_once() -> None:
    words, scale, bias, pair = engine_words(1 << 18)
    halves = []
    for place in (pair, pair + 4):
        exact = (words >> 4 * place.astype(np.uint32) & 15) * scale.view(F16).astype(np.float64)
        with np.errstate(over="ignore"):
            halves.append((exact + bias.view(F16).astype(np.float64)).astype(F16).view(np.uint16).astype(np.uint32))
    np.testing.assert_array_equal(on_cpu(DEQUANTISED, words, scale, bias, pair), halves[0] | halves[1] << 16)


def test_a_published_value_is_never_zero_and_comes_back_as_it_was() -> None:
    all_set = np.array([0xFFFFFFFF, 0, 0x80000000, 0x7FFFFFFF], np.uint32).view(np.float32)
    x = np.concatenate([all_set, floats(1 << 20)])
    assert (~on_cpu(PUBLISHED_BITS, x) != 0).all()
    back, nan = on_cpu(PUBLISHED_VALUE, x), np.isnan(x)
    np.testing.assert_array_equal(back[~nan], x[~nan].view(np.uint32))
    assert nan.sum() > 500 and np.isnan(as_float(back[nan])).all()


def test_accesses_past_the_first_cache_carry_every_bit() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    for primitive in (LOAD_ONCE, RELAXED):
        np.testing.assert_array_equal(on_cpu(primitive, words), words)
