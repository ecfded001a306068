import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import routing
from tuner.contract import ROUTINGS, load
from tuner.errors import RequestError

QWEN = load("qwen38-tp4")
DISTINCT = ("uniform", "zipf", "round-robin", "hot")


def ids(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int32)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_a_contract_may_name_is_made_with_ids_in_range_and_positive_weights_summing_to_one(
    name: str,
) -> None:
    made = routing.make(name, QWEN, 8, seed=3)
    assert made.name == name and made.tokens == 8
    assert made.ids.dtype == np.int32 and made.ids.shape == (8, 10)
    assert made.weights.dtype == np.float32 and made.weights.shape == (8, 10)
    assert made.ids.min() >= 0 and made.ids.max() < 512
    assert (made.weights > 0).all()
    np.testing.assert_allclose(made.weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("name", DISTINCT)
def test_a_token_never_names_an_expert_twice_except_under_single_hot(name: str) -> None:
    for row in routing.make(name, QWEN, 8, seed=5).ids:
        assert len(set(row.tolist())) == 10


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_same_arguments_give_the_same_routing(name: str) -> None:
    first, again = (routing.make(name, QWEN, 4, seed=9) for _ in range(2))
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.weights, again.weights)


@pytest.mark.parametrize("name", sorted(set(ROUTINGS) - {"round-robin"}))
def test_another_seed_gives_other_experts(name: str) -> None:
    assert not np.array_equal(routing.make(name, QWEN, 4, seed=1).ids, routing.make(name, QWEN, 4, seed=2).ids)


def test_round_robin_deals_slots_to_experts_in_turn_and_wraps_round() -> None:
    mixtral = load("mixtral-8x7b-tp4")  # 8 experts, top-2
    assert routing.make("round-robin", mixtral, 5, seed=0).ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]


def test_single_hot_sends_every_slot_to_one_expert() -> None:
    made = routing.make("single-hot", QWEN, 8, seed=4)
    assert made.active == 1 and made.rows_per_segment == [80]


def test_hot_shares_the_same_top_k_experts_among_all_tokens() -> None:
    made = routing.make("hot", QWEN, 8, seed=4)
    assert made.rows_per_segment == [8] * 10


@pytest.mark.parametrize(("tokens", "expected"), [(1, 10.0), (2, 19.8), (4, 38.8), (8, 74.7)])
def test_active_experts_under_uniform_routing_average_the_closed_form(tokens: int, expected: float) -> None:
    seeds = 300
    mean = np.mean([routing.make("uniform", QWEN, tokens, seed).active for seed in range(seeds)])
    assert round(routing.expected_active(512, 10, tokens), 1) == expected
    assert abs(mean - expected) < 0.4  # 4 standard errors at 8 tokens, where the deviation of one draw is 1.7


def test_zipf_draws_the_first_rank_twice_as_often_as_the_second() -> None:
    contract = load("mixtral-8x7b-tp4")
    # First column only: later draws are without replacement. Popularity follows the seed, so one seed and many tokens.
    first = routing.make("zipf", contract, 40_000, seed=7).ids[:, 0]
    shares = np.sort(np.bincount(first, minlength=8))[::-1] / len(first)
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6 + 1 / 7 + 1 / 8
    np.testing.assert_allclose(shares, [1 / (rank * harmonic) for rank in range(1, 9)], atol=0.01)


def test_which_expert_is_popular_under_zipf_depends_on_the_seed() -> None:
    tops = {np.bincount(routing.make("zipf", QWEN, 64, seed).ids.ravel()).argmax() for seed in range(6)}
    assert len(tops) > 3


def test_ids_that_name_no_expert_are_not_counted() -> None:
    made = routing.Routing("by hand", ids([[0, 3, -1], [3, 4, 9]]), np.ones((2, 3), np.float32), experts=4)
    assert made.active == 2
    assert made.rows_per_segment == [1, 2]


def test_a_routing_that_does_not_know_its_experts_counts_every_id_from_0_up() -> None:
    assert routing.Routing("by hand", ids([[7, -1]]), np.ones((1, 2), np.float32)).rows_per_segment == [1]


def recorded(tmp_path: Path, document: object) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    return str(path)


MIXTRAL = load("mixtral-8x7b-tp4")  # 8 experts, top-2
TRACE = [[0, 1], [2, 3], [4, 5], [6, 7], [1, 0]]


def test_a_recorded_file_gives_consecutive_tokens_with_their_normalised_weights(tmp_path: Path) -> None:
    name = recorded(tmp_path, {"ids": TRACE, "weights": [[1, 3], [1, 1], [3, 1], [1, 4], [4, 1]]})
    shares = [[0.25, 0.75], [0.5, 0.5], [0.75, 0.25], [0.2, 0.8], [0.8, 0.2]]
    starts = set()
    for seed in range(20):
        made = routing.make(name, MIXTRAL, 3, seed)
        start = TRACE.index(made.ids[0].tolist())
        starts.add(start)
        assert made.ids.tolist() == TRACE[start : start + 3]
        np.testing.assert_array_equal(made.weights, np.array(shares[start : start + 3], np.float32))
    assert starts == {0, 1, 2}


def test_a_recorded_routing_is_called_by_its_file_without_the_folder(tmp_path: Path) -> None:
    assert routing.make(recorded(tmp_path, {"ids": TRACE}), MIXTRAL, 2, seed=0).name == "trace.json"


def test_recorded_ids_may_be_an_npy_file_and_get_drawn_weights(tmp_path: Path) -> None:
    path = tmp_path / "trace.npy"
    np.save(path, np.array(TRACE, np.int64))
    made = routing.make(str(path), MIXTRAL, 5, seed=0)
    assert made.ids.tolist() == TRACE and made.ids.dtype == np.int32
    np.testing.assert_allclose(made.weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"ids": [[0, 8]]}, r"expert 8 at token 0, column 1; expected 0\.\.7"),
        ({"ids": [[0, 1], [-1, 1]]}, "expert -1 at token 1, column 0"),
        ({"ids": [[0, 1, 2]]}, "3 experts a token; contract mixtral-8x7b-tp4 has top-k 2"),
        ({"ids": [[0.5, 1.0]]}, "float64"),
        ({"ids": [[0, 1], [2]]}, "not a recorded routing"),
        ({"ids": []}, "expected integers"),
        ({"ids": [[0, 1]], "weights": [[1.0]]}, r"expected numbers \[1, 2\]"),
        ({"ids": [[0, 1]], "weights": [[1.0, -1.0]]}, "not a positive finite number"),
        ({"ids": [[0, 1]], "weight": [[1.0, 1.0]]}, "nothing else"),
        ([[0, 1]], "expected an object"),
        ({"ids": [[0, 1]]}, "1 recorded tokens, 2 needed"),
    ],
)
def test_a_recorded_file_that_does_not_fit_is_refused_with_what_is_wrong(
    tmp_path: Path, document: object, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        routing.make(recorded(tmp_path, document), MIXTRAL, 2, seed=0)


def npy(header: str) -> bytes:
    """A .npy file of version 1.0 with that header and no data."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_a_recorded_file_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[" * 200_000)
    with pytest.raises(RequestError, match="not a recorded routing"):
        routing.make(str(path), MIXTRAL, 2, seed=0)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"PK\x03\x04 a zip archive", b"\x93NUMPY"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2"),
        npy(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({10**14}, 2), }}"),
        npy(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({10**35}, 2), }}"),
    ],
)
def test_a_file_that_only_calls_itself_npy_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.npy"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="not a recorded routing"):
        routing.make(str(path), MIXTRAL, 1, seed=0)


def test_a_missing_file_and_a_misspelt_name_are_refused_with_what_would_do() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        routing.make("no-such-trace.json", MIXTRAL, 1, seed=0)
    with pytest.raises(RequestError, match="'unifrom'; expected one of uniform, zipf"):
        routing.make("unifrom", MIXTRAL, 1, seed=0)
    with pytest.raises(RequestError, match="0 tokens"):
        routing.make("uniform", MIXTRAL, 0, seed=0)


def test_without_a_map_ids_outside_the_experts_resolve_to_none() -> None:
    assert routing.resolve(ids([[0, 3, 4], [-1, 2, 99]]), 4).tolist() == [[0, 3, -1], [-1, 2, -1]]


def test_64_bit_ids_are_not_cut_to_32_bits() -> None:
    wide = np.array([[2**32 + 1, 1, -(2**32) + 1]], np.int64)
    assert routing.resolve(wide, 4).tolist() == [[-1, 1, -1]]


def test_a_map_leads_global_ids_to_local_experts_and_bounds_them_by_its_own_length() -> None:
    expert_map = np.array([-1, 1, 0, -1, 5], np.int32)  # 5 is no expert of 2
    assert routing.resolve(ids([[0, 1, 2], [3, 4, 5]]), 2, expert_map=expert_map).tolist() == [[-1, 1, 0], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("live", "expected"),
    [(-1, [[-1], [-1]]), (0, [[-1], [-1]]), (1, [[1], [-1]]), (2, [[1], [0]]), (7, [[1], [0]])],
)
def test_tokens_past_the_live_ones_resolve_to_no_expert(live: int, expected: list[list[int]]) -> None:
    assert routing.resolve(ids([[1], [0]]), 2, live_tokens=live).tolist() == expected


def test_sorting_is_stable_by_expert_with_slots_of_no_expert_last() -> None:
    done = routing.sort(ids([[2, 0, -1], [0, 7, 2]]), 4)
    assert done.rows.tolist() == [1, 3, 0, 5, 2, 4]
    assert done.offsets.tolist() == [0, 2, 2, 4, 4]
    assert done.rows.dtype == done.offsets.dtype == np.int32


@given(st.lists(st.lists(st.integers(-2, 6), min_size=3, max_size=3), min_size=1, max_size=6), st.integers(-1, 7))
def test_every_expert_owns_exactly_the_slots_that_resolve_to_it(rows: list[list[int]], live: int) -> None:
    local = routing.resolve(ids(rows), 5, live_tokens=live).ravel()
    done = routing.sort(ids(rows), 5, live_tokens=live)
    for expert in range(5):
        owned = done.rows[done.offsets[expert] : done.offsets[expert + 1]]
        assert owned.tolist() == [slot for slot, e in enumerate(local) if e == expert]
    assert sorted(done.rows.tolist()) == list(range(local.size))
