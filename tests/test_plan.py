import re
from dataclasses import dataclass, replace

import pytest

from tuner import contract, plan, render, space
from tuner.errors import RequestError

QWEN = contract.load("qwen38-tp4")
DEFAULT = space.default(QWEN)


@dataclass(frozen=True)
class Limits:
    name: str = "a GPU"
    shared_per_block: int = 98304
    registers_per_sm: int = 65536
    threads_per_block: int = 1024


def test_the_fused_plan_is_two_launches_sized_by_the_step() -> None:
    made = plan.make(
        QWEN, replace(DEFAULT, w13=space.W13Config("simt", 2, 8, 5, 2), w2=space.W2Config("simt", 16, 1, 5, 2))
    )
    w13, w2 = made.launches
    assert [w13.grid[0].at(4), w13.grid[1].at(4)] == [5, 40]  # 10 column tiles in twos; 4 tokens x 10 slots
    assert w13.block == 512
    assert [w2.grid[0].at(4), w2.grid[1].at(4)] == [80, 1]
    # Experts and weights of 80 slots; 16 warps' slots and rows, 2 of 160 floats; then a float for each slot and column.
    assert w2.shared.at(4) == 2 * 320 + 16 * 2 * 4 + 16 * 2 * 160 * 4 + 40 * 32 * 4


def test_the_all_experts_plan_walks_every_expert() -> None:
    made = plan.make(QWEN, DEFAULT, "all-experts")
    assert made.launch("w13").grid[1].at(1) == made.launch("w13").grid[1].at(8) == 512


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


def test_an_unknown_plan_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'fast': expected one of fused, staged, sorted, all-experts"):
        plan.make(QWEN, DEFAULT, "fast")  # type: ignore[arg-type]


def test_a_config_beyond_a_devices_shared_memory_says_how_much_it_needs() -> None:
    config = space.W13Config("simt", 5, 2, 8, 8)  # activations alone: 5 tiles x 8 rows x 2560 floats
    reason = plan.why_invalid(QWEN, "w13", config, Limits())
    assert reason is not None and "98304" in reason and "simt-t5-k2-u8-r8" in reason
    assert plan.why_invalid(QWEN, "w13", DEFAULT.w13, Limits()) is None


def test_buffer_sizes_are_those_of_the_published_layer() -> None:
    made = plan.make(QWEN, DEFAULT)
    sizes = {b.name: b.nbytes(8) for b in made.buffers}
    assert sizes["W13_Q"] == 512 * 2560 * 320 // 2
    assert sizes["W13_SCALES"] == 512 * 80 * 320 * 3
    assert sizes["W2_Q"] + sizes["W2_SCALES"] == 512 * (160 * 2560 // 2 + 5 * 2560 * 3)
    assert sizes["HIDDEN"] == 80 * 160 * 4
    assert sizes["OUT"] == 8 * 2560 * 2
