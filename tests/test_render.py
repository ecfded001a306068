import re
from dataclasses import replace

import pytest

from tuner import contract, plan, render, space

QWEN = contract.load("qwen38-tp4")


@pytest.mark.parametrize("name", plan.PLANS)
def test_a_source_is_one_self_contained_file_with_one_kernel(name: plan.PlanName) -> None:
    made = plan.make(QWEN, space.default(QWEN), name)
    for launch in made.launches:
        text = render.render(made)[launch.stage].text
        assert "#include" not in text
        assert re.findall(r'extern "C" __global__', text) == ['extern "C" __global__']
        assert "{%" not in text and "{#" not in text


def test_rendering_twice_gives_the_same_bytes_and_a_new_name_changes_none() -> None:
    made = plan.make(QWEN, space.default(QWEN))
    renamed = plan.make(replace(QWEN, name="other", model="Other"), space.default(QWEN))
    assert render.render(made) == render.render(made) == render.render(renamed)


def test_only_the_constants_differ_between_two_configs() -> None:
    default = space.default(QWEN)
    one = render.render(plan.make(QWEN, default))["w13"].text.splitlines()
    two = render.render(plan.make(QWEN, replace(default, w13=space.W13Config("simt", 1, 4, 5, 4))))[
        "w13"
    ].text.splitlines()
    differing = [a for a, b in zip(one, two, strict=True) if a != b]
    assert all("static constexpr int k" in line or line.startswith("// voltune_w13") for line in differing)
    assert len(differing) == 5  # the header, threads, arena, split-K and rows
