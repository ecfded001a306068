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
        assert not any(mark in text for mark in ("{% ", "{{ ", "{# "))


def test_rendering_twice_gives_the_same_bytes_and_a_new_name_changes_none() -> None:
    made = plan.make(QWEN, space.default(QWEN))
    renamed = plan.make(replace(QWEN, name="other", model="Other"), space.default(QWEN))
    assert render.render(made) == render.render(made) == render.render(renamed)


def test_only_the_constants_differ_between_two_configs() -> None:
    default = space.default(QWEN)
    other = replace(default, w13=space.Tile("simt", 2, 4, 5, 4))
    one, two = (render.render(plan.make(QWEN, config))["op"].text.splitlines() for config in (default, other))
    differing = [a for a, b in zip(one, two, strict=True) if a != b]
    assert all("static constexpr int k" in line or line.startswith("// voltune_op") for line in differing)
    # The header; tiles, split-K and rows of W13; and the one arena of both stages.
    assert sorted(line.split()[3] for line in differing[1:]) == ["kArenaBytes"] * 2 + ["kRows", "kSplitK", "kTiles"]


def test_a_kernel_holds_the_families_of_its_stages_each_once() -> None:
    def families(key: str) -> tuple[int, int]:
        text = render.render(plan.make(QWEN, space.parse(key)))["op"].text
        return text.count("struct Simt {"), text.count("struct Tensor {")

    assert families("simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512") == (1, 0)
    assert families("tensor-t1-k8-u5-r8+tensor-t8-k1-u5-r4+m512") == (0, 1)
    assert families("tensor-t1-k8-u5-r8+simt-t8-k1-u5-r2+m512") == (1, 1)
