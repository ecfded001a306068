"""What both executors take as a plan's operands."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from small import SMALL, inputs, weights

from tuner import plan, routing, space
from tuner.errors import RequestError

TOKENS = 5
MADE = plan.make(SMALL, space.default(SMALL))


def operands() -> dict[str, Any]:
    drawn, held = routing.make("uniform", SMALL, TOKENS, 3), weights(SMALL)
    return {
        "X": inputs(SMALL, TOKENS),
        "TOPK_IDS": drawn.ids,
        "TOPK_WEIGHTS": drawn.weights,
        "W13_Q": held.w13.q,
        "W13_SCALES": held.w13.scales,
        "W2_Q": held.w2.q,
        "W2_SCALES": held.w2.scales,
    }


IDS = np.zeros((TOKENS, 3), np.int32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"X": None}, "operand X is missing: expected float16 [5, 256]"),
        ({"X": np.zeros((5, 256), np.float32)}, "operand X is float32 [5, 256]: expected float16 [5, 256]"),
        ({"X": [[1.0]]}, "operand X is [[1.0]]: expected float16 [5, 256]"),
        ({"TOPK_IDS": IDS[:, :2]}, "operand TOPK_IDS is int32 [5, 2]: expected int32 or int64 [5, 3]"),
        ({"TOPK_IDS": IDS.astype(np.int16)}, "operand TOPK_IDS is int16 [5, 3]: expected int32 or int64 [5, 3]"),
        ({"TOPK_IDS": 5}, "operand TOPK_IDS is 5: expected int32 or int64 [5, 3]"),
        ({"LIVE_TOKENS": np.array([1])}, "operand LIVE_TOKENS is int64 [1]: expected int32 [1]"),
        (
            {"EXPERT_MAP": np.zeros(6, np.int64)},
            "operand EXPERT_MAP is int64 [6]: expected int32 [global experts], or None",
        ),
        (
            {"EXPERT_MAP": np.zeros((2, 3), np.int32)},
            "operand EXPERT_MAP is int32 [2, 3]: expected int32 [global experts], or None",
        ),
        ({"TOKENS": 4}, "operand TOKENS is 4: expected 5, as the other operands have it"),
        ({"ID_BYTES": 8}, "operand ID_BYTES is 8: expected 4, as the other operands have it"),
        ({"MAP_SIZE": IDS}, "operand MAP_SIZE is int32 [5, 3]: expected 0, as the other operands have it"),
    ],
)
def test_an_operand_that_does_not_fit_is_named_with_what_was_expected(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(told)}$"):
        plan.resolve(MADE, operands() | change, TOKENS)


@pytest.mark.parametrize("tokens", [0, 13])
def test_tokens_that_are_none_or_more_than_the_contracts_largest_level_are_refused(tokens: int) -> None:
    with pytest.raises(RequestError, match=f"^{tokens} tokens: expected 1 to 12, the top level of contract small$"):
        plan.resolve(MADE, operands(), tokens)


def test_the_scalars_follow_from_ids_and_map_and_may_be_given_as_well() -> None:
    wide = operands() | {"TOPK_IDS": IDS.astype(np.int64), "EXPERT_MAP": np.zeros(9, np.int32)}
    assert plan.resolve(MADE, operands(), TOKENS)[1] == {"TOKENS": 5, "ID_BYTES": 4, "MAP_SIZE": 0}
    scalars = {"TOKENS": 5, "ID_BYTES": 8, "MAP_SIZE": 9}
    assert plan.resolve(MADE, wide, TOKENS)[1] == plan.resolve(MADE, wide | scalars, TOKENS)[1] == scalars


def test_the_inputs_that_are_there_are_returned_as_they_were_given() -> None:
    given = operands() | {"LIVE_TOKENS": None, "W13_ZEROS": None, "EXPERT_MAP": np.zeros(9, np.int32)}
    found, _ = plan.resolve(MADE, given, TOKENS)
    assert found.keys() == given.keys() - {"LIVE_TOKENS", "W13_ZEROS"}
    assert all(found[name] is given[name] for name in found)


def test_anything_with_a_dtype_and_a_shape_can_stand_for_an_array() -> None:
    @dataclass(frozen=True)
    class Elsewhere:
        dtype: np.dtype[Any]
        shape: tuple[int, ...]

    there = Elsewhere(np.dtype(np.float16), (TOKENS, SMALL.hidden))
    assert plan.resolve(MADE, operands() | {"X": there}, TOKENS)[0]["X"] is there
    other = Elsewhere(np.dtype(np.float16), (TOKENS, 9))
    with pytest.raises(RequestError, match=r"operand X is float16 \[5, 9\]"):
        plan.resolve(MADE, operands() | {"X": other}, TOKENS)
