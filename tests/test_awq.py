"""Weight layouts, against words and bytes worked out by hand from the published orders."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import awq
from tuner.awq import GemmWeights, Integers, LayerWeights
from tuner.contract import Contract, load
from tuner.errors import CheckpointError, ContractError

LAYOUTS: list[dict[str, Any]] = [
    {"layout": "sm70-u4", "stats_bytes": 3, "interleaved": True},
    {"layout": "sm70-u4", "stats_bytes": 3, "interleaved": False},
    {"layout": "sm70-u4", "stats_bytes": 4, "interleaved": True},
    {"layout": "sm70-u4", "stats_bytes": 4, "interleaved": False},
    {"layout": "awq", "stats_bytes": 0, "interleaved": False},
]
layouts = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda v: f"{v['layout']}-{v['stats_bytes']}-{v['interleaved']:d}"
)


def small(layout: dict[str, Any] | None = None, **changes: Any) -> Contract:
    """Two experts of W13 [64, 128] and W2 [64, 64] at group 32, 3-byte statistics, interleaved."""
    shape = {"tensor_parallel": 1, "experts": 2, "top_k": 1, "hidden": 64, "intermediate": 64}
    return replace(load("qwen38-tp4"), **shape | (layout or {}) | changes)


def blank(contract: Contract, which: str) -> Integers:
    gemm = awq.gemm(contract, which)
    groups = (gemm.groups, gemm.n)
    return Integers(np.zeros((gemm.k, gemm.n), np.uint8), np.zeros(groups, np.uint8), np.ones(groups, np.float16))


def random_experts(contract: Contract, which: str, seed: int) -> list[Integers]:
    """Zeros from 0 to 15 and scales of many magnitudes, different in every column and group."""
    rng = np.random.default_rng(seed)
    gemm = awq.gemm(contract, which)
    groups = (gemm.groups, gemm.n)
    return [
        Integers(
            rng.integers(0, 16, (gemm.k, gemm.n), np.uint8),
            rng.integers(0, 16, groups, np.uint8),
            np.exp(rng.uniform(-12, 6, groups)).astype(np.float16),
        )
        for _ in range(contract.experts)
    ]


def same(a: Integers, b: Integers) -> bool:
    return all(np.array_equal(getattr(a, part).view(np.uint8), getattr(b, part).view(np.uint8)) for part in "qzs")


def layer(contract: Contract, **packed: GemmWeights) -> LayerWeights:
    empty = GemmWeights(np.empty((0, 0, 0), np.uint32), np.empty((0, 0, 0), np.float16), None)
    return LayerWeights(packed.get("w13", empty), packed.get("w2", empty))


def test_awq_puts_columns_0_to_7_at_nibbles_0_4_1_5_2_6_3_7() -> None:
    columns = np.array([range(16), [15] * 8 + [0] * 8], np.uint8)
    words = np.array([[0x75316420, 0xFDB9ECA8], [0xFFFFFFFF, 0]], np.uint32)
    assert np.array_equal(awq.pack_columns(columns), words)
    assert np.array_equal(awq.unpack_columns(words), columns)


def test_awq_keeps_one_columns_weight_in_its_own_nibble() -> None:
    for column, word in enumerate((0xF, 0xF0000, 0xF0, 0xF00000, 0xF00, 0xF000000, 0xF000, 0xF0000000)):
        columns = np.zeros((1, 16), np.uint8)
        columns[0, 8 + column] = 15
        assert awq.pack_columns(columns).tolist() == [[0, word]]


@pytest.mark.parametrize(
    ("k", "n", "word", "value"),
    [  # K/8 = 8 octets of rows, 32 words each, before the next 32 columns begin at word 256
        (0, 0, 0, 0x0000000F),
        (1, 0, 0, 0x000F0000),
        (2, 0, 0, 0x000000F0),
        (3, 0, 0, 0x00F00000),
        (6, 0, 0, 0x0000F000),
        (7, 0, 0, 0xF0000000),
        (0, 1, 1, 0x0000000F),
        (8, 0, 32, 0x0000000F),
        (0, 32, 256, 0x0000000F),
        (13, 37, 293, 0x0F000000),
        (63, 63, 511, 0xF0000000),
    ],
)
def test_sm70_u4_puts_a_weight_in_this_word_and_nibble(k: int, n: int, word: int, value: int) -> None:
    contract = small()
    second = blank(contract, "w2")
    second.q[k, n] = 15
    held = awq.pack(contract, "w2", [blank(contract, "w2"), second])
    expected = np.zeros(1024, np.uint32)
    expected[512 + word] = value  # the second expert begins after 64 * 64 / 8 words
    assert np.array_equal(held.q.reshape(-1), expected)
    assert same(awq.integers(contract, layer(contract, w2=held), "w2", 1), second)


def test_sm70_u4_runs_eight_rows_of_a_column_through_one_word() -> None:
    contract = small()
    numbers = blank(contract, "w2")
    numbers.q[8:16, 33] = range(8)
    held = awq.pack(contract, "w2", [numbers, numbers])
    assert held.q.reshape(2, -1)[:, 256 + 32 + 1].tolist() == [0x75316420, 0x75316420]


STATISTICS = [  # scale, its f16 bits, z, f16(-z * scale)'s bits
    (1.0, 0x3C00, 15, 0xCB80),
    (0.5, 0x3800, 3, 0xBE00),
    (1.0, 0x3C00, 0, 0x8000),
    (0.01, 0x211F, 7, 0xAC7B),  # 7 * 1311 = 9177 = 1147.125 * 8: rounds down to 1147 = 1024 + 0x7B
    (-2.0, 0xC000, 5, 0x4900),
    (2.0**-24, 0x0001, 15, 0x800F),  # subnormal products are exact
]


@pytest.mark.parametrize(("scale", "bits", "z", "bias"), STATISTICS)
def test_statistics_have_these_bytes(scale: float, bits: int, z: int, bias: int) -> None:
    contract = small()
    numbers = blank(contract, "w2")
    numbers.s[1, 40], numbers.z[1, 40] = scale, z
    three = awq.pack(contract, "w2", [numbers, numbers])
    assert three.scales.shape == (2, 2, 64, 3)
    assert three.scales[1, 1, 40].tolist() == [bits & 0xFF, bits >> 8, z]
    assert three.scales[1, 1, 41].tolist() == [0x00, 0x3C, 0]
    four = awq.pack(replace(contract, stats_bytes=4), "w2", [numbers, numbers])
    assert (four.scales.shape, four.scales.dtype) == ((2, 2, 64), np.uint32)
    assert four.scales[1, 1, 40] == bias << 16 | bits
    for changed, held in ((contract, three), (replace(contract, stats_bytes=4), four)):
        assert held.zeros is None
        assert same(awq.integers(changed, layer(changed, w2=held), "w2", 1), numbers)


def gate_and_up(contract: Contract) -> Integers:
    """In the first row gate columns 0, 1 and up columns 0, 1 are 1, 2, 9, 10; so are zeros, and scales in 1/16."""
    numbers = blank(contract, "w13")
    for column, value in ((0, 1), (1, 2), (64, 9), (65, 10)):
        numbers.q[0, column] = numbers.z[0, column] = value
        numbers.s[0, column] = value / 16
    return numbers


def test_interleaved_w13_alternates_gate_and_up_columns() -> None:
    contract = small(experts=1)
    numbers = gate_and_up(contract)
    held = awq.pack(contract, "w13", [numbers])
    assert held.q.reshape(-1)[:5].tolist() == [1, 9, 2, 10, 0]
    assert held.scales[0, 0, :4].tolist() == [[0, 0x2C, 1], [0x80, 0x38, 9], [0, 0x30, 2], [0, 0x39, 10]]
    assert same(awq.integers(contract, layer(contract, w13=held), "w13", 0), numbers)


def test_concatenated_w13_holds_all_gate_columns_before_the_up_columns() -> None:
    contract = small(experts=1, interleaved=False)
    numbers = gate_and_up(contract)
    held = awq.pack(contract, "w13", [numbers])
    # Up column 0 is column 64: two blocks of 32 columns and 8 octets of rows on.
    assert held.q.reshape(-1)[[0, 1, 512, 513]].tolist() == [1, 2, 9, 10]
    assert np.count_nonzero(held.q) == 4
    assert held.scales[0, 0, [0, 1, 64, 65], 2].tolist() == [1, 2, 9, 10]
    assert same(awq.integers(contract, layer(contract, w13=held), "w13", 0), numbers)


def test_awq_w13_is_the_checkpoints_words_gate_before_up() -> None:
    contract = small(LAYOUTS[-1], experts=1)
    numbers = gate_and_up(contract)
    held = awq.pack(contract, "w13", [numbers])
    assert held.zeros is not None
    assert held.q[0, 0].tolist() == [0x00020001, *[0] * 7, 0x000A0009, *[0] * 7]
    assert held.zeros[0, 0].tolist() == held.q[0, 0].tolist()
    assert held.scales[0, 0, [0, 1, 2, 64, 65]].tolist() == [1 / 16, 2 / 16, 1, 9 / 16, 10 / 16]
    assert same(awq.integers(contract, layer(contract, w13=held), "w13", 0), numbers)


def test_interleaving_leaves_w2_alone() -> None:
    apart, together = small(interleaved=False), small(interleaved=True)
    experts = random_experts(apart, "w2", 1)
    one, other = awq.pack(apart, "w2", experts), awq.pack(together, "w2", experts)
    assert np.array_equal(one.q, other.q)
    assert np.array_equal(one.scales, other.scales)


@layouts
@pytest.mark.parametrize("zero", [0, 15])
def test_zeros_all_alike_come_back(layout: dict[str, Any], zero: int) -> None:
    contract = small(layout)
    experts = [replace(e, z=np.full_like(e.z, zero)) for e in random_experts(contract, "w13", 3)]
    weights = layer(contract, w13=awq.pack(contract, "w13", experts))
    assert all(same(awq.integers(contract, weights, "w13", e), experts[e]) for e in range(2))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    hidden=st.sampled_from([64, 128, 192]),
    local=st.sampled_from([32, 64, 160]),
    which=st.sampled_from(["w13", "w2"]),
    held_as=st.sampled_from(LAYOUTS[:4]),
)
def test_awq_to_sm70_u4_and_back_is_exact(
    seed: int, hidden: int, local: int, which: str, held_as: dict[str, Any]
) -> None:
    checkpoint = small(LAYOUTS[-1], hidden=hidden, intermediate=local)
    engine = replace(checkpoint, **held_as)
    first = awq.pack(checkpoint, which, random_experts(checkpoint, which, seed))

    def unpacked(contract: Contract, held: GemmWeights) -> Iterator[Integers]:
        return (awq.integers(contract, layer(contract, **{which: held}), which, e) for e in range(contract.experts))

    there = awq.pack(engine, which, unpacked(checkpoint, first))
    back = awq.pack(checkpoint, which, unpacked(engine, there))
    assert first.zeros is not None and back.zeros is not None
    assert np.array_equal(first.q, back.q)
    assert np.array_equal(first.zeros, back.zeros)
    assert np.array_equal(first.scales.view(np.uint16), back.scales.view(np.uint16))


@settings(max_examples=50, deadline=None)
@given(e=st.integers(0, 2), k=st.integers(0, 95), n=st.integers(0, 319))
def test_any_weight_is_where_the_layouts_flat_formula_says(e: int, k: int, n: int) -> None:
    contract = small(experts=3, hidden=96, intermediate=160, interleaved=False)
    experts = random_experts(contract, "w13", 5)
    flat = awq.pack(contract, "w13", experts).q.reshape(-1)
    word = e * 96 * 320 // 8 + ((n // 32) * (96 // 8) + k // 8) * 32 + n % 32
    assert int(flat[word]) >> (4 * (4 * (k & 1) + ((k % 8) >> 1))) & 15 == experts[e].q[k, n]


def test_four_byte_statistics_give_back_every_zero_for_every_f16_scale_unless_it_is_0_or_overflows() -> None:
    contract = small(experts=1, hidden=63488, intermediate=512, stats_bytes=4)
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00]
    assert finite.size == 63488
    numbers = blank(contract, "w2")
    numbers.s[:] = finite.view(np.float16)
    numbers.z[:] = np.arange(16, dtype=np.uint8)[:, None]
    wide = numbers.s.astype(np.float64) * numbers.z
    numbers.s[np.abs(wide) >= 65520] = 1.0  # 65520 and more round to infinity
    found = awq.integers(contract, layer(contract, w2=awq.pack(contract, "w2", [numbers])), "w2", 0)
    nonzero = numbers.s != 0
    assert np.array_equal(found.s.view(np.uint16), numbers.s.view(np.uint16))
    assert np.array_equal(found.z[nonzero], numbers.z[nonzero])
    assert not found.z[~nonzero].any()


def test_what_four_byte_statistics_cannot_hold_is_refused_and_three_byte_ones_hold_it() -> None:
    contract = small(stats_bytes=4)
    numbers = blank(contract, "w2")
    numbers.s[1, 7], numbers.z[1, 7] = 6000, 11
    with pytest.raises(CheckpointError, match=r"w2, expert 0, row or group 1, column 7: s = 6000.0, z = 11: .*3-byte"):
        awq.pack(contract, "w2", [numbers, numbers])
    three = small()
    held = awq.pack(three, "w2", [numbers, numbers])
    assert same(awq.integers(three, layer(three, w2=held), "w2", 0), numbers)


@pytest.mark.parametrize(
    "word",
    [
        0xB8003C00,  # s = 1, b = -0.5: between two zero points
        0xCC003C00,  # s = 1, b = -16: z would be 16
        0x3C003C00,  # s = 1, b = 1: z would be -1
        0xBC000000,  # s = 0, b = -1: the weight would be -1 whatever q is
        0xFC003C00,  # b infinite
        0x80007C00,  # s infinite
        0x80007E00,  # s not a number
        0xAC7C211F,  # one f16 step from f16(-7 * 0.01)
    ],
)
def test_four_byte_statistics_no_zero_point_explains_are_refused(word: int) -> None:
    contract = small(stats_bytes=4)
    held = awq.pack(contract, "w2", [blank(contract, "w2")] * 2)
    held.scales[1, 1, 9] = word
    assert same(awq.integers(contract, layer(contract, w2=held), "w2", 0), blank(contract, "w2"))
    with pytest.raises(CheckpointError, match=r"w2, expert 1, row or group 1, column 9: .*not AWQ statistics"):
        awq.integers(contract, layer(contract, w2=held), "w2", 1)


@pytest.mark.parametrize(
    ("bytes_", "message"),
    [([0, 0x3C, 16], "z = 16: a zero point takes 0..15"), ([0, 0x7C, 3], "s = inf: a scale has to be finite")],
)
def test_three_byte_statistics_outside_awq_are_refused(bytes_: list[int], message: str) -> None:
    contract = small()
    held = awq.pack(contract, "w2", [blank(contract, "w2")] * 2)
    held.scales[0, 1, 9] = bytes_
    with pytest.raises(CheckpointError, match=f"w2, expert 0, row or group 1, column 9: {message}"):
        awq.integers(contract, layer(contract, w2=held), "w2", 0)


def test_pack_refuses_what_the_contract_does_not_have() -> None:
    contract = small()
    good = blank(contract, "w2")
    with pytest.raises(CheckpointError, match=r"w2: expected 2 experts.*got 1"):
        awq.pack(contract, "w2", [good])
    with pytest.raises(CheckpointError, match=r"w2: expected 2 experts.*got more"):
        awq.pack(contract, "w2", [good] * 3)
    with pytest.raises(CheckpointError, match=r"w13, expert 0: q is uint8 \[64, 64\]; .* uint8 \[64, 128\]"):
        awq.pack(contract, "w13", [good] * 2)
    with pytest.raises(CheckpointError, match=r"s is float32 \[2, 64\]; .* float16 \[2, 64\]"):
        awq.pack(contract, "w2", [replace(good, s=good.s.astype(np.float32))] * 2)
    too_much = np.full_like(good.q, 16)
    with pytest.raises(CheckpointError, match=r"column 0: q = 16: a weight takes 0..15 \(4096 such\)"):
        awq.pack(contract, "w2", [replace(good, q=too_much)] * 2)


def test_pack_holds_one_expert_beside_its_result() -> None:
    contract = small(experts=64, hidden=256, intermediate=256)

    def experts() -> Iterator[Integers]:
        for _ in range(64):
            yield blank(contract, "w2")

    tracemalloc.start()
    held = awq.pack(contract, "w2", experts())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    result = held.q.nbytes + held.scales.nbytes
    assert peak - result < 8 * 256 * 256  # an expert unpacked is 65,536 bytes, all 64 would be 4 MB


@layouts
def test_synthetic_weights_are_the_contracts_tensors(layout: dict[str, Any]) -> None:
    contract = small(layout, tensor_parallel=2, intermediate=192)  # 96 a rank
    weights = awq.synthetic(contract, 1, 7)
    for which, k, n in (("w13", 64, 192), ("w2", 96, 64)):
        held = getattr(weights, which)
        groups = k // 32
        assert (held.q.dtype, held.q.shape) == (np.uint32, (2, k, n // 8))
        if contract.layout == "awq":
            assert (held.scales.dtype, held.scales.shape) == (np.float16, (2, groups, n))
            assert (held.zeros.dtype, held.zeros.shape) == (np.uint32, (2, groups, n // 8))
        else:
            assert held.zeros is None
            tail, dtype = ((3,), np.uint8) if contract.stats_bytes == 3 else ((), np.uint32)
            assert (held.scales.dtype, held.scales.shape) == (dtype, (2, groups, n, *tail))
        numbers = awq.integers(contract, weights, which, 1)
        assert set(numbers.q.flat) == set(numbers.z.flat) == set(range(16))
        assert min(len(set(row)) for row in numbers.s) > n // 2
        assert not np.array_equal(numbers.s[0], numbers.s[1])


def test_synthetic_weights_follow_from_seed_and_rank() -> None:
    contract = small(tensor_parallel=2, intermediate=128)
    base = awq.synthetic(contract, 0, 7)
    assert np.array_equal(base.w13.q, awq.synthetic(contract, 0, 7).w13.q)
    assert np.array_equal(base.w2.scales, awq.synthetic(contract, 0, 7).w2.scales)
    for rank, seed in ((1, 7), (0, 8)):
        assert not np.array_equal(base.w13.q, awq.synthetic(contract, rank, seed).w13.q)
    with pytest.raises(ContractError, match="rank 2: expected 0 to 1"):
        awq.synthetic(contract, 2, 7)


@pytest.mark.parametrize("name", ["qwen38-tp4", "qwen36-35b-tp2"])
def test_unit_normal_inputs_give_outputs_of_ordinary_size(name: str) -> None:
    contract = replace(load(name), experts=10)
    weights = awq.synthetic(contract, 0, 1)

    def dense(which: str, expert: int) -> np.ndarray[Any, Any]:
        numbers, group = awq.integers(contract, weights, which, expert), contract.group
        z, s = (np.repeat(part.astype(np.float32), group, axis=0) for part in (numbers.z, numbers.s))
        return (numbers.q - z) * s

    x = np.random.default_rng(2).normal(size=(4, contract.hidden)).astype(np.float32)
    out = np.zeros_like(x)
    for expert in range(contract.top_k):
        gate, up = np.split(x @ dense("w13", expert), 2, axis=1)
        out += (gate / (1 + np.exp(-gate)) * up) @ dense("w2", expert) / contract.top_k
    assert 0.05 < float(np.sqrt(np.mean(out**2))) < 1
