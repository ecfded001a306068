"""Each operation of the machine against a statement of its meaning that shares nothing with it: Python's integers and
fractions, NumPy's IEEE arithmetic."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from assembly import RZ, instruction, lanes, predicate_to_register

from tuner import microcode

M32 = 0xFFFFFFFF
EDGES = [0, 1, 2, 3, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000]
EDGES += [0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0x89ABCDEF, 0x55555555, 0xAAAAAAAA]
REALS = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x4B000001]
REALS += [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA00001, 0x33800000, 0xB3800001, 0x3FC00000]


def words(*kinds: list[int], seed: int = 0, count: int = 1024) -> list[np.ndarray]:
    """u32 [count] an operand: random, with edges strewn in."""
    rng = np.random.default_rng(seed)
    found = []
    for edges in kinds:
        each = rng.integers(0, 1 << 32, count, dtype=np.uint64)
        at = rng.random(count) < 0.5
        each[at] = rng.choice(np.array(edges, np.uint64), int(at.sum()))
        found.append(each.astype(np.uint32))
    return found


def signed(x: int) -> int:
    return x - (x >> 31 << 32)


def one(expected: Callable[..., int], code: list[int], *inputs: np.ndarray) -> None:
    """The register that the code leaves is what is expected of each lane's inputs."""
    (found,) = lanes(code, *inputs)
    told = np.array([expected(*map(int, each)) & M32 for each in zip(*inputs, strict=True)], np.uint32)
    wrong = np.flatnonzero(found != told)
    assert not len(wrong), [[hex(int(i[wrong[0]])) for i in inputs], hex(found[wrong[0]]), hex(told[wrong[0]])]


# ---- integers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("minus", range(8))
def test_iadd3_adds_three_and_negates_what_it_is_told_to(minus: int) -> None:
    signs = {"a-": minus & 1, "x-": minus >> 1 & 1, "y-": minus >> 2}
    fold = [-1 if minus >> i & 1 else 1 for i in range(3)]
    code = [instruction(0x210, d=16, a=8, b=9, c=10, **signs)]
    one(lambda *terms: sum(s * t for s, t in zip(fold, terms, strict=True)), code, *words(EDGES, EDGES, EDGES))


def test_two_additions_and_two_subtractions_of_64_bits_carry() -> None:
    a, b, c, d = words(EDGES, EDGES, EDGES, EDGES, seed=3)
    for minus in (0, 1):
        code = [
            instruction(0x210, d=16, a=8, b=10, c=RZ, pd=0, **{"x-": minus}),
            instruction(0x210, d=17, a=9, b=11, c=RZ, extended=1, ps=0, **{"x-": minus}),
        ]
        low, high = lanes(code, a, b, c, d, results=2)
        first, second = (x.astype(object) + (y.astype(object) << 32) for x, y in ((a, b), (c, d)))
        told = (first - second if minus else first + second) % (1 << 64)
        assert (low.astype(object) + (high.astype(object) << 32) == told).all()


def test_two_carries_of_one_sum_go_to_two_predicates() -> None:
    inputs = words([M32, 0, 0x80000000], [M32, 0, 0x80000000], [M32, 0, 0x80000000])
    for p in (0, 1):
        code = [instruction(0x210, d=17, a=8, b=9, c=10, pd=0, pd2=1), predicate_to_register(p, 16)]
        one(lambda a, b, c, p=p: (a + b + c) >> 32 > p, code, *inputs)


@pytest.mark.parametrize("minus", (0, 1))
def test_imad_keeps_the_low_word_of_product_and_addend(minus: int) -> None:
    code = [instruction(0x224, d=16, a=8, b=9, c=10, **{"y-": minus})]
    one(lambda a, b, c: a * b + (-c if minus else c), code, *words(EDGES, EDGES, EDGES))


@pytest.mark.parametrize("sign", (0, 1))
def test_imad_wide_makes_64_bits(sign: int) -> None:
    a, b, low, high = words(EDGES, EDGES, EDGES, EDGES)
    of = signed if sign else int
    move = [instruction(0x202, d=12, b=10), instruction(0x202, d=13, b=11)]
    code = [*move, instruction(0x225, d=16, a=8, b=9, c=12, sign=sign)]
    found = lanes(code, a, b, low, high, results=2)
    for i in range(len(a)):
        told = (of(int(a[i])) * of(int(b[i])) + int(low[i]) + (int(high[i]) << 32)) % (1 << 64)
        assert int(found[0][i]) + (int(found[1][i]) << 32) == told


@pytest.mark.parametrize("lut", (0x00, 0x80, 0xC0, 0xFC, 0x3C, 0xEA, 0xF8, 0x96, 0xE8, 0x1B, 0xFF))
def test_lop3_looks_each_bit_up(lut: int) -> None:
    def told(a: int, b: int, c: int) -> int:
        return sum((lut >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    one(told, [instruction(0x212, d=16, a=8, b=9, c=10, lut=lut)], *words(EDGES, EDGES, EDGES))


def test_lop3s_predicate_says_whether_a_bit_is_set() -> None:
    code = [instruction(0x212, d=17, a=8, b=9, c=RZ, lut=0xC0, pd=2), predicate_to_register(2, 16)]
    one(lambda a, b: a & b != 0, code, *words(EDGES, EDGES))


@pytest.mark.parametrize("wrap", (0, 1))
@pytest.mark.parametrize("high", (0, 1))
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("right", (0, 1))
def test_shf_shifts_two_words_and_keeps_one(right: int, kind: int, high: int, wrap: int) -> None:
    width = 64 if kind < 2 else 32

    def told(a: int, by: int, c: int) -> int:
        amount = by % width if wrap else min(by, width)
        value = c << 32 | a
        if right and kind in (0, 2) and c >> 31:
            value -= 1 << 64
        shifted = value >> amount if right else value << amount
        return shifted >> 32 if high else shifted

    fields = {"right": right, "type": kind, "high": high, "wrap": wrap}
    one(told, [instruction(0x219, d=16, a=8, b=9, c=10, **fields)], *words(EDGES, EDGES, EDGES))


@pytest.mark.parametrize("shift", (0, 1, 5, 31))
def test_lea_adds_what_it_shifted_and_carries_to_the_high_word(shift: int) -> None:
    def whole(a: int, upper: int, b: int, high: int) -> int:
        return ((upper << 32 | a) << shift) + (high << 32 | b)

    a, upper, b, high = words(EDGES, EDGES, EDGES, EDGES)
    code = [
        instruction(0x211, d=16, a=8, b=10, c=RZ, shift=shift, pd=3),
        instruction(0x211, d=17, a=8, b=11, c=9, shift=shift, high=1, extended=1, ps=3),
    ]
    found = lanes(code, a, upper, b, high, results=2)
    for i in range(len(a)):
        told = whole(*(int(each[i]) for each in (a, upper, b, high)))
        assert int(found[0][i]) == told & M32
        assert int(found[1][i]) == told >> 32 & M32


def test_lea_takes_the_sign_for_the_high_word() -> None:
    code = [instruction(0x211, d=16, a=8, b=9, c=RZ, shift=30, high=1, sign=1)]
    one(lambda a, b: (signed(a) << 30 >> 32) + b, code, *words(EDGES, EDGES))


def test_prmt_picks_bytes_or_spreads_their_signs() -> None:
    def told(a: int, pick: int, c: int) -> int:
        pool = (a | c << 32).to_bytes(8, "little")
        chosen = [pool[pick >> 4 * n & 7] for n in range(4)]
        return int.from_bytes(
            bytes((255 if b > 127 else 0) if pick >> 4 * n & 8 else b for n, b in enumerate(chosen)), "little"
        )

    one(told, [instruction(0x216, d=16, a=8, b=9, c=10)], *words(EDGES, EDGES, EDGES))


def test_popc_brev_flo_and_iabs_agree_with_python() -> None:
    (x,) = words(EDGES)
    one(lambda a: a.bit_count(), [instruction(0x309, d=16, b=8)], x)
    one(lambda a: 32 - a.bit_count(), [instruction(0x309, d=16, b=8, **{"x-": 1})], x)
    one(lambda a: int(f"{a:032b}"[::-1], 2), [instruction(0x301, d=16, b=8)], x)
    one(lambda a: a.bit_length() - 1, [instruction(0x300, d=16, b=8)], x)
    one(lambda a: 32 - a.bit_length() if a else -1, [instruction(0x300, d=16, b=8, kind=1)], x)
    one(lambda a: (a ^ M32 if a >> 31 else a).bit_length() - 1, [instruction(0x300, d=16, b=8, sign=1)], x)
    one(lambda a: abs(signed(a)), [instruction(0x213, d=16, b=8)], x)


COMPARE = {1: "<", 2: "==", 3: "<=", 4: ">", 5: "!=", 6: ">="}


def compared(how: int, a: float, b: float) -> bool:
    return {1: a < b, 2: a == b, 3: a <= b, 4: a > b, 5: a != b, 6: a >= b}[how]


@pytest.mark.parametrize("sign", (0, 1))
@pytest.mark.parametrize("how", COMPARE, ids=list(COMPARE.values()))
def test_isetp_compares_words_and_pairs_of_words(how: int, sign: int) -> None:
    of = signed if sign else int
    code = [instruction(0x20C, a=8, b=9, compare=how, sign=sign, pd=0), predicate_to_register(0, 16)]
    one(lambda a, b: compared(how, of(a), of(b)), code, *words(EDGES, EDGES))
    wide = [
        instruction(0x20C, a=8, b=10, compare=how, sign=0, pd=0),
        instruction(0x20C, a=9, b=11, compare=how, sign=sign, extended=1, ps3=0, pd=1),
        predicate_to_register(1, 16),
    ]
    few = [0, 1, 0x80000000, M32]
    one(
        lambda a, b, c, d: compared(how, (of(b) << 32) + a, (of(d) << 32) + c),
        wide,
        *words(few, few, few, few, seed=how),
    )


@pytest.mark.parametrize("combine", range(3))
def test_a_comparison_is_combined_with_a_predicate_and_its_opposite_too(combine: int) -> None:
    join = (lambda p, q: p & q, lambda p, q: p | q, lambda p, q: p ^ q)[combine]
    for written, flip in ((1, 0), (2, 1)):
        code = [
            instruction(0x80C, a=9, imm=7, compare=1, sign=0, pd=0),
            instruction(0x20C, a=8, b=10, compare=1, sign=0, combine=combine, pd=1, pd2=2, ps=0),
            predicate_to_register(written, 16),
        ]
        one(lambda a, b, c, flip=flip: join((a < c) ^ flip, int(b < 7)), code, *words(EDGES, [3, 9], EDGES))


def test_plop3_looks_predicates_up_twice() -> None:
    first, second = 0b11010110, 0b00111001
    make = [instruction(0x80C, a=8 + i, imm=7, compare=1, sign=0, pd=i) for i in range(3)]
    for written, lut in ((3, first), (4, second)):
        fields = {"lut": first >> 3, "lut_low": first & 7, "lut2": second, "pd": 3, "pd2": 4}
        code = [*make, instruction(0x81C, ps=0, ps2=1, ps3=2, **fields), predicate_to_register(written, 16)]
        one(
            lambda a, b, c, lut=lut: lut >> ((a < 7) << 2 | (b < 7) << 1 | (c < 7)) & 1,
            code,
            *words([3, 9], [3, 9], [3, 9]),
        )


def test_predicates_go_to_a_register_and_back_under_a_mask() -> None:
    code = [
        instruction(0x804, a=8, imm=0x7F),
        instruction(0x804, a=9, imm=0x2C),
        instruction(0x803, d=16, a=10, imm=0x6D),
    ]
    one(lambda a, b, c: (c & ~0x6D) | ((a & ~0x2C | b & 0x2C) & 0x6D), code, *words(EDGES, EDGES, EDGES))


def test_sel_and_mov_choose_and_copy_and_a_guard_leaves_the_rest() -> None:
    ask = instruction(0x80C, a=8, imm=100, compare=1, sign=0, pd=5)
    one(
        lambda a, b, c: b if a < 100 else c,
        [ask, instruction(0x207, d=16, a=9, b=10, ps=5)],
        *words(EDGES, EDGES, EDGES),
    )
    moves = [ask, instruction(0x202, d=16, b=9), instruction(0x202, d=16, b=10, guard=5)]
    one(lambda a, b, c: c if a < 100 else b, moves, *words(EDGES, EDGES, EDGES))


# ---- f32 ------------------------------------------------------------------------------------------------------------
def real(bits: int) -> np.float32:
    return np.array(bits, np.uint32).view(np.float32)[()]


def bits_of(x: np.floating) -> int:
    return 0x7FFFFFFF if np.isnan(x) else int(np.array(x, np.float32).view(np.uint32))


def rounded(exact: Fraction, mode: int = 0, mantissa: int = 24, least: int = -149, top: int = 128) -> Fraction | None:
    """The value of a binary format next to `exact`: nearest even, down, up, to zero. None for what overflows it."""
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - mantissa + 1, least)
    floor = exact // unit
    rest = exact / unit - floor
    up = {0: rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1), 1: False, 2: rest > 0}.get(mode)
    if up is None:
        up = rest > 0 and exact < 0
    value = (floor + up) * unit
    return None if abs(value) >= Fraction(2) ** top else value


def sign_of_zero(mode: int, signs: list[bool]) -> bool:
    """Whether a sum of these signs that comes to zero is -0."""
    return all(signs) or (mode == 1 and any(signs))


def fused(a: int, b: int, c: int, mode: int = 0) -> int:
    """a * b + c of f32 bits, rounded once, by fractions."""
    x, y, z = map(real, (a, b, c))
    if not all(map(np.isfinite, (x, y, z))):
        with np.errstate(all="ignore"):
            return bits_of(np.float32(np.float64(x) * np.float64(y) + np.float64(z)))
    product_sign, sum_sign = np.signbit(x) != np.signbit(y), bool(np.signbit(z))
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    value = rounded(exact, mode)
    if value is None:
        away = mode == 0 or (mode == 2 and exact > 0) or (mode == 1 and exact < 0)
        return (0x7F800000 if away else 0x7F7FFFFF) | (0x80000000 if exact < 0 else 0)
    if value == 0:
        minus = exact < 0 or (exact == 0 and sign_of_zero(mode, [bool(product_sign), sum_sign]))
        return 0x80000000 if minus else 0
    return bits_of(np.float32(float(value)))


def flushed(bits: int) -> int:
    return bits if bits & 0x7F800000 else bits & 0x80000000


@pytest.mark.parametrize("mode", range(4))
def test_ffma_rounds_once_in_each_mode(mode: int) -> None:
    code = [instruction(0x223, d=16, a=8, b=9, c=10, round=mode)]
    one(lambda a, b, c: fused(a, b, c, mode), code, *words(REALS, REALS, REALS, seed=mode))
    near = [0x3F800001, 0x3F7FFFFF, 0xBF800000, 0x3F800000, 0x33800000, 0xB3000000]
    one(lambda a, b, c: fused(a, b, c, mode), code, *words(near, near, near, seed=9, count=256))


@pytest.mark.parametrize("mode", range(4))
def test_fadd_and_fmul_round_in_each_mode(mode: int) -> None:
    inputs = words(REALS, REALS, seed=10 + mode)
    one(lambda a, b: fused(a, 0x3F800000, b, mode), [instruction(0x221, d=16, a=8, b=9, round=mode)], *inputs)
    zero = lambda a, b: 0x80000000 if (a ^ b) >> 31 else 0  # noqa: E731 (a zero of the product's own sign)
    one(lambda a, b: fused(a, b, zero(a, b), mode), [instruction(0x220, d=16, a=8, b=9, round=mode)], *inputs)


def test_signs_magnitudes_flushing_and_saturation_of_f32_operands() -> None:
    a, b, c = words(REALS, REALS, REALS, seed=20)
    code = [instruction(0x223, d=16, a=8, b=9, c=10, **{"a-": 1, "x|": 1, "y-": 1, "y|": 1})]
    one(lambda x, y, z: fused(x ^ 0x80000000, y & 0x7FFFFFFF, z | 0x80000000), code, a, b, c)
    code = [instruction(0x221, d=16, a=8, b=9, ftz=1, **{"a|": 1, "x-": 1})]
    one(lambda x, y: flushed(fused(flushed(x & 0x7FFFFFFF), 0x3F800000, flushed(y ^ 0x80000000))), code, a, b)
    code = [instruction(0x221, d=16, a=8, b=9, sat=1)]

    def saturated(x: int, y: int) -> int:
        total = real(fused(x, 0x3F800000, y))
        return bits_of(np.float32(0)) if np.isnan(total) or total <= 0 else bits_of(min(total, np.float32(1)))

    one(saturated, code, a, b)


def test_fmnmx_prefers_numbers_and_tells_zeros_apart() -> None:
    def told(a: int, b: int, least: bool) -> int:
        x, y = real(a), real(b)
        if np.isnan(x) or np.isnan(y):
            return 0x7FFFFFFF if np.isnan(x) and np.isnan(y) else b if np.isnan(x) else a
        if x == y:
            return (a | b) if least else (a & b)
        return a if (x < y) == least else b

    for ps in (7, 15):
        one(lambda a, b, ps=ps: told(a, b, ps == 7), [instruction(0x209, d=16, a=8, b=9, ps=ps)], *words(REALS, REALS))


@pytest.mark.parametrize("how", range(16))
def test_fsetp_compares_ordered_and_unordered(how: int) -> None:
    def told(a: int, b: int) -> bool:
        x, y = real(a), real(b)
        return bool(how & (1 if x < y else 2 if x == y else 4 if x > y else 8))

    code = [instruction(0x20B, a=8, b=9, compare=how, pd=0), predicate_to_register(0, 16)]
    one(told, code, *words(REALS, REALS))


def test_fsel_takes_operands_with_their_signs() -> None:
    ask = instruction(0x80C, a=10, imm=7, compare=1, sign=0, pd=0)
    code = [ask, instruction(0x208, d=16, a=8, b=9, ps=0, **{"a-": 1, "x|": 1})]
    one(lambda a, b, c: a ^ 0x80000000 if c < 7 else b & 0x7FFFFFFF, code, *words(REALS, REALS, [3, 9]))


@pytest.mark.parametrize(
    ("kind", "function", "ulps"),
    [(2, np.exp2, 2), (3, np.log2, 2), (4, lambda x: 1 / x, 1), (5, lambda x: 1 / np.sqrt(x), 1), (8, np.sqrt, 2)],
    ids=["ex2", "lg2", "rcp", "rsq", "sqrt"],
)
def test_mufu_is_within_its_documented_error(kind: int, function: Callable[[float], float], ulps: int) -> None:
    rng = np.random.default_rng(kind)
    x = (rng.uniform(0.02, 60, 1024) * rng.choice([1, 1 if kind in (3, 5, 8) else -1], 1024)).astype(np.float32)
    (found,) = lanes([instruction(0x308, d=16, b=8, kind=kind)], x.view(np.uint32))
    told = function(x.astype(np.float64))
    error = np.abs(found.view(np.float32) - told) / np.spacing(np.abs(told).astype(np.float32))
    assert error.max() <= ulps


def test_mufu_takes_a_subnormal_for_zero_and_turns_for_sine_and_cosine() -> None:
    code = [instruction(0x308, d=16, b=8, kind=4)]
    one(
        lambda a: {0: 0x7F800000, 1: 0xFF800000}[a >> 31], code, np.array([1, 0x80000001, 0, 0x807FFFFF] * 8, np.uint32)
    )
    x = np.random.default_rng(1).uniform(-1, 1, 1024).astype(np.float32)
    for kind, function in ((0, np.cos), (1, np.sin)):
        (found,) = lanes([instruction(0x308, d=16, b=8, kind=kind)], x.view(np.uint32))
        assert np.abs(found.view(np.float32) - function(2 * np.pi * x.astype(np.float64))).max() < 2**-20


def test_fchk_sends_extreme_quotients_the_long_way() -> None:
    """Where it is false, a * (1 / b) can be mended to the quotient within f32's normal range."""
    a, b = words(REALS, REALS, seed=5)
    code = [instruction(0x302, a=8, b=9, pd=0), predicate_to_register(0, 16)]
    (hard,) = lanes(code, a, b)
    with np.errstate(all="ignore"):
        x, y = (each.view(np.float32).astype(np.float64) for each in (a, b))
        q = np.abs(x / y)
    easy = hard == 0
    assert easy.any()
    assert (np.isfinite(x) & np.isfinite(y) & (y != 0) & (x != 0))[easy].all()
    assert ((q > 2.0**-100) & (q < 2.0**125) & (np.abs(y) > 2.0**-126) & (np.abs(y) < 2.0**126))[easy].all()


# ---- conversions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sign", (0, 1))
@pytest.mark.parametrize("mode", range(4))
def test_i2f_rounds_an_integer(mode: int, sign: int) -> None:
    def told(a: int) -> int:
        value = rounded(Fraction(signed(a) if sign else a), mode)
        return bits_of(np.float32(float(value or 0)))

    one(told, [instruction(0x306, d=16, b=8, kind=2, type=2, sign=sign, round=mode)], *words(EDGES))


def test_i2f_to_f16_rounds_once_and_overflows_to_infinity() -> None:
    inputs = words([65519, 65520, 2049, 2051, 4097, 0xFFFF0010, 65504, 1 << 31])
    code = [instruction(0x306, d=16, b=8, kind=1, type=2, sign=1)]

    def told(a: int) -> int:
        value = rounded(Fraction(signed(a)), 0, 11, -24, 16)
        if value is None:
            return 0xFC00 if a >> 31 else 0x7C00
        return int(np.array(float(value), np.float16).view(np.uint16))

    one(told, code, *inputs)


@pytest.mark.parametrize("sign", (0, 1))
@pytest.mark.parametrize("mode", range(4))
def test_f2i_rounds_saturates_and_takes_nan_for_zero(mode: int, sign: int) -> None:
    near = [bits_of(np.float32(x)) for x in (0.5, 1.5, 2.5, -0.5, -1.5, 2147483520.0, 2147483648.0, 4294967040.0, -3e9)]

    def told(a: int) -> int:
        x = real(a)
        if np.isnan(x):
            return 0
        whole = float(x) if np.isinf(x) else (np.rint, np.floor, np.ceil, np.trunc)[mode](np.float64(x))
        lowest, highest = (-(2**31), 2**31 - 1) if sign else (0, 2**32 - 1)
        return lowest if whole < lowest else highest if whole > highest else int(whole)

    one(told, [instruction(0x305, d=16, b=8, sign=sign, round=mode, kind=1)], *words([*REALS, *near]))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_f2f_rounds_to_f16_and_frnd_to_whole_numbers() -> None:
    near = [0x33000000, 0x33000001, 0x33800000, 0x387FE000, 0x387FF000, 0x477FEFFF, 0x477FF000, 0x3F801000, 0x3F803000]

    def half(a: int) -> int:
        with np.errstate(all="ignore"):
            return 0x7FFF if np.isnan(real(a)) else int(np.array(real(a)).astype(np.float16).view(np.uint16))

    one(half, [instruction(0x304, d=16, b=8, kind=1, type=2)], *words([*REALS, *near]))
    for mode, function in enumerate((np.rint, np.floor, np.ceil, np.trunc)):
        code = [instruction(0x307, d=16, b=8, round=mode)]
        one(
            lambda a, function=function: bits_of(function(real(a))),
            code,
            *words([*REALS, *near, 0x3F000000, 0xBFC00000]),
        )


# ---- f16 ------------------------------------------------------------------------------------------------------------
HALVES = [
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0xBC00,
    0x3BFF,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0x6400,
]
PAIRS = [low | high << 16 for low in HALVES for high in HALVES]


def half_fused(a: int, b: int, c: int) -> int:
    x, y, z = (np.array(each, np.uint16).view(np.float16)[()] for each in (a, b, c))
    if not all(map(np.isfinite, (x, y, z))):
        with np.errstate(all="ignore"):
            total = np.float64(x) * np.float64(y) + np.float64(z)
        return 0x7FFF if np.isnan(total) else int(np.array(total).astype(np.float16).view(np.uint16))
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    value = rounded(exact, 0, 11, -24, 16)
    if value is None:
        return 0xFC00 if exact < 0 else 0x7C00
    if value == 0:
        minus = exact < 0 or (exact == 0 and (np.signbit(x) != np.signbit(y)) and np.signbit(z))
        return 0x8000 if minus else 0
    return int(np.array(float(value)).astype(np.float16).view(np.uint16))


def pairwise(function: Callable[..., int], *pairs: int) -> int:
    low, high = (function(*(each >> shift & 0xFFFF for each in pairs)) for shift in (0, 16))
    return low | high << 16


def test_hfma2_hmul2_and_hadd2_round_each_half_once() -> None:
    a, b, c = words(PAIRS, PAIRS, PAIRS)
    one(lambda *x: pairwise(half_fused, *x), [instruction(0x231, d=16, a=8, b=9, c=10)], a, b, c)
    one(lambda x, y: pairwise(lambda p, q: half_fused(p, 0x3C00, q), x, y), [instruction(0x230, d=16, a=8, b=9)], a, b)

    def product(p: int, q: int) -> int:
        return half_fused(p, q, 0x8000 if (p ^ q) >> 15 else 0)

    one(lambda x, y: pairwise(product, x, y), [instruction(0x232, d=16, a=8, b=9)], a, b)


def test_halves_are_swizzled_and_negated_before_they_are_used() -> None:
    a, b, c = words(PAIRS, PAIRS, PAIRS, seed=2)
    fields = {"swizzle_a": 2, "swizzle_x": 3, "swizzle_y": 0, "a-": 1, "y|": 1}

    def told(x: int, y: int, z: int) -> int:
        first, second = (x & 0xFFFF) ^ 0x8000, y >> 16
        low, high = (half_fused(first, second, z >> shift & 0x7FFF) for shift in (0, 16))
        return low | high << 16

    one(told, [instruction(0x231, d=16, a=8, b=9, c=10, **fields)], a, b, c)


def test_hadd2_f32_widens_a_half() -> None:
    (a,) = words(PAIRS)
    for swizzle, shift in ((2, 0), (3, 16)):
        code = [instruction(0x230, d=16, a=8, b=RZ, swizzle_a=swizzle, swizzle_x=2, high=1, **{"x-": 1})]

        def told(x: int, shift: int = shift) -> int:
            return bits_of(np.float32(np.array(x >> shift & 0xFFFF, np.uint16).view(np.float16)))

        one(told, code, a)


def test_hmma_steps_are_within_2_to_minus_20_of_exact_products_with_the_ptx_fragments() -> None:
    """PTX ISA, mma.m8n8k4 with .f16 A (row) and B (col) and .f32 accumulators: fragments of a quadpair's lanes."""
    rng = np.random.default_rng(4)
    halves = rng.standard_normal((4, 4, 32)).astype(np.float16)  # register pairs: A, B of two halves each
    a = halves[0:2].transpose(2, 0, 1)[:, :, :2].reshape(32, 4)
    b = halves[2:4].transpose(2, 0, 1)[:, :, :2].reshape(32, 4)
    c = rng.standard_normal((32, 8)).astype(np.float32)
    # Registers 24-25: A; 26-27: B; 32-39: accumulators.
    given = [*np.ascontiguousarray(a).view(np.uint32).T, *np.ascontiguousarray(b).view(np.uint32).T]
    given += list(c.view(np.uint32).T)
    places = [24, 25, 26, 27, *range(32, 40)]
    code = [instruction(0x202, d=40 + i, b=8 + i) for i in range(12)]
    code += [instruction(0x202, d=place, b=40 + i) for i, place in enumerate(places)]
    code += [instruction(0x236, d=16 + 2 * s, a=24, b=26, c=32 + 2 * s, kind=s) for s in range(4)]
    found = np.stack([each.view(np.float32) for each in lanes(code, *given, results=8)], axis=1)
    for quadpair in range(4):
        members = [quadpair * 4 + p % 4 + p // 4 * 16 for p in range(8)]
        rows, columns = a[members].astype(np.float64), b[members].astype(np.float64)
        for p, lane in enumerate(members):
            for i in range(8):
                row = (p & 1) + (i & 2) + (p & 4)
                column = (i & 4) + (p & 2) + (i & 1)
                products = rows[row] * columns[column]
                bound = 2.0**-20 * (np.abs(products).sum() + abs(c[lane, i]))
                assert abs(found[lane, i] - (products.sum() + c[lane, i])) <= bound


def test_every_operation_of_the_machine_is_in_a_test() -> None:
    """Those of memory, of lanes and of control are in test_machine.py."""
    here = "FADD FMUL FFMA FMNMX FSEL FSETP FCHK MUFU HADD2 HMUL2 HFMA2 HMMA IADD3 IMAD IMAD_WIDE IABS ISETP LOP3 PLOP3"
    here += " SEL MOV SHF LEA PRMT POPC FLO BREV I2F F2I F2F FRND P2R R2P"
    there = "S2R CS2R VOTE SHFL MATCH LDG LD LDS LDL LDC STG ST STS STL ATOMG ATOMG_CAS ATOM RED ATOMS ATOMS_CAS MEMBAR"
    there += " ERRBAR CCTL BAR BMOV BMOV_SET BSSY BSYNC BREAK BRA CALL RET EXIT YIELD WARPSYNC NOP NANOSLEEP"
    assert sorted(here.split() + there.split()) == sorted(microcode.OPERATIONS)
