import re
from dataclasses import dataclass, replace

import pytest

from tuner import contract, plan, render, space
from tuner.errors import InvalidConfig, RequestError
from tuner.space import Config, Tile

QWEN = contract.load("qwen38-tp4")
DEFAULT = space.default(QWEN)


@dataclass(frozen=True)
class Limits:
    name: str = "a GPU"
    shared_per_block: int = 98304
    registers_per_sm: int = 65536
    threads_per_block: int = 1024


TWO_TILES = Config(Tile("simt", 2, 8, 5, 2), Tile("simt", 16, 1, 5, 2), 512)


def test_the_fused_plan_is_one_launch_with_a_cta_for_each_item_at_most() -> None:
    (op,) = plan.make(QWEN, TWO_TILES).launches
    assert op.stage == "op" and op.by_ticket
    # 40 slots, each perhaps an expert's only one: 5 items of W13 (10 tiles in twos) and 5 of W2 (80 in sixteens).
    assert [op.grid[0].at(4), op.grid[1].at(4)] == [40 * (5 + 5), 1]
    assert op.block == 512
    # 40 tokens at most: experts and first slots of 400 segments, experts and next slots of 400 slots, first slots
    # of 512 experts and 16 words of bits, a count, two tickets; W13's rows, 2 of 2560 floats, 16 warps' sums and slots.
    assert op.shared.at(4) == 8528 + 2 * 2560 * 4 + 16 * 2 * 32 * 4 + 16 * 2 * 4
    assert -(-4 * (2 * 400 + 2 * 400 + 512 + 16 + 1 + 2) // 16) * 16 == 8528


def test_the_staged_plans_w2_takes_tickets_and_its_w13_does_not() -> None:
    compact, w13, w2 = plan.make(QWEN, TWO_TILES, "staged").launches
    assert [launch.by_ticket for launch in (compact, w13, w2)] == [False, False, True]
    assert [w13.grid[0].at(4), w13.grid[1].at(4)] == [5, 40]
    assert [w2.grid[0].at(4), w2.grid[1].at(4)] == [5 * 40, 1]
    assert w13.shared.at(4) == 2 * 2560 * 4 + 16 * 2 * 32 * 4 + 16 * 2 * 4
    # Whether a slot is routed, and two tickets, besides what W2 takes.
    assert w2.shared.at(4) == 4 * 400 + 16 + 2 * 160 * 4 + 16 * 2 * 32 * 4 + 16 * 2 * 4


def test_rows_on_tensor_cores_are_two_halves_a_column_and_a_scale_or_none_at_all() -> None:
    config = space.parse("tensor-t1-k8-u10-r8+tensor-t8-k1-u5-r4+m512")
    _, w13, w2 = plan.make(QWEN, config, "staged").launches
    sums, slots = 8 * 8 * 32 * 4, 8 * 8 * 4
    assert w13.shared.at(1) == sums + 16 + slots  # an empty struct, aligned
    assert w2.shared.at(1) == sums // 2 + 8 * (160 + 16) * 2 + 4 * 4 + slots // 2 + 4 * 400 + 16


def test_the_all_experts_plan_walks_every_expert() -> None:
    made = plan.make(QWEN, DEFAULT, "all-experts")
    assert made.launch("w13").grid[1].at(1) == made.launch("w13").grid[1].at(8) == 512
    assert made.launch("w2").grid[0].at(1) == made.launch("w2").grid[0].at(8) == 512 * 10


@pytest.mark.parametrize("name", plan.PLANS)
def test_every_launch_passes_what_its_kernel_declares(name: plan.PlanName) -> None:
    made = plan.make(QWEN, DEFAULT, name)
    known = {b.name for b in made.buffers} | set(plan.SCALARS) | {"EXPERT_MAP", "W13_ZEROS", "W2_ZEROS"}
    for launch in made.launches:
        text = render.render_launch(launch, "digest").text
        signature = re.search(rf"{launch.kernel}\((.*?)\)", text, re.DOTALL)
        assert signature is not None
        parameters = [p.strip() for p in signature[1].split(",")]
        assert len(parameters) == len(launch.arguments)
        for parameter, argument in zip(parameters, launch.arguments, strict=True):
            assert argument in known
            assert ("*" in parameter) == (argument not in plan.SCALARS)
            assert argument.endswith(parameter.split()[-1].upper())  # q is W13_Q or W2_Q


def test_what_one_launch_hands_on_within_itself_is_zero_before_and_after_it() -> None:
    def counters(name: plan.PlanName) -> set[str]:
        return {buffer.name for buffer in plan.make(QWEN, DEFAULT, name).buffers if buffer.role == "counters"}

    assert counters("fused") == {"HIDDEN", "ROUTES", "COUNTERS"}
    assert counters("staged") == counters("sorted") == counters("all-experts") == {"ROUTES", "COUNTERS"}


def test_an_unknown_plan_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'fast': expected one of fused, staged, sorted, all-experts"):
        plan.make(QWEN, DEFAULT, "fast")  # type: ignore[arg-type]


def test_a_config_beyond_a_devices_shared_memory_or_threads_says_how_much_it_needs() -> None:
    rows = replace(DEFAULT, w13=replace(DEFAULT.w13, rows=10))  # activations alone: 10 rows x 2560 floats
    reason = plan.why_invalid(QWEN, rows, Limits())
    assert reason is not None and "a GPU has 98304 a block" in reason and "simt-t1-k8-u5-r10" in reason
    assert plan.why_invalid(QWEN, DEFAULT, Limits()) is None
    reason = plan.why_invalid(QWEN, DEFAULT, Limits(threads_per_block=128))
    assert reason == f"{DEFAULT.key()} needs 256 threads; a GPU has 128 a block"


def test_a_plan_that_only_loads_differs_from_the_fused_one_in_nothing_but_that() -> None:
    fused, loads = (plan.make(QWEN, DEFAULT, load_only=load_only).launches[0] for load_only in (False, True))
    for struct, constants in fused.constants.items():
        changed = {name for name in constants if constants[name] != loads.constants[struct][name]}
        assert changed == {"kLoadOnly"}
    assert replace(fused, constants={}) == replace(loads, constants={})


def test_buffer_sizes_are_those_of_the_published_layer() -> None:
    made = plan.make(QWEN, DEFAULT)
    sizes = {b.name: b.nbytes(8) for b in made.buffers}
    assert sizes["W13_Q"] == 512 * 2560 * 320 // 2
    assert sizes["W13_SCALES"] == 512 * 80 * 320 * 3
    assert sizes["W2_Q"] + sizes["W2_SCALES"] == 512 * (160 * 2560 // 2 + 5 * 2560 * 3)
    assert sizes["HIDDEN"] == 80 * 160 * 4
    assert sizes["ROUTES"] == 80 * 2560 * 4
    assert sizes["COUNTERS"] == (1 + 80) * 4
    assert sizes["OUT"] == 8 * 2560 * 2


def test_what_only_loads_keeps_no_counters_but_the_tickets_and_is_a_fused_plan() -> None:
    def counters(load_only: bool) -> set[str]:
        made = plan.make(QWEN, DEFAULT, load_only=load_only)
        return {buffer.name for buffer in made.buffers if buffer.role == "counters"}

    assert counters(load_only=False) == {"HIDDEN", "ROUTES", "COUNTERS"}
    assert counters(load_only=True) == {"COUNTERS"}
    with pytest.raises(RequestError, match="plan staged: only the fused plan has a kernel that only loads"):
        plan.make(QWEN, DEFAULT, "staged", load_only=True)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("simt-t1-k8-u5-r9+simt-t8-k1-u5-r9+m512", "a simt pass takes 1 or 2 or 4 or 8 rows"),
        ("tensor-t1-k8-u5-r4+tensor-t8-k1-u5-r4+m512", "a tensor pass takes 8 rows"),
        ("simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m4096", "an SM holds at most 2048 threads"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(key: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        plan.make(contract.load("qwen38-tp4"), space.parse(key))
