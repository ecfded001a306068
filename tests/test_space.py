from dataclasses import replace

import pytest

from tuner import contract, model, plan, space
from tuner.errors import InvalidConfig

QWEN = contract.load("qwen38-tp4")


@pytest.mark.parametrize("name", sorted(contract.builtin()))
@pytest.mark.parametrize("stage", space.STAGES)
def test_every_built_in_contract_has_a_space_holding_its_default(name: str, stage: space.Stage) -> None:
    built_in = contract.load(name)
    found = space.candidates(built_in, stage)
    assert len(found) == len(set(found)) >= 8
    assert space.default(built_in).stage(stage) in found


@pytest.mark.parametrize("hidden", [32, 352, 928])
def test_sizes_with_few_divisors_have_a_space_too(hidden: int) -> None:
    odd = replace(QWEN, tensor_parallel=1, experts=3, top_k=3, hidden=hidden, intermediate=32)
    for stage in space.STAGES:
        assert space.default(odd).stage(stage) in space.candidates(odd, stage)
    plan.make(odd, space.default(odd))


@pytest.mark.parametrize("name", sorted(contract.builtin()))
def test_the_default_of_every_built_in_contract_fits_a_v100(name: str) -> None:
    built_in = contract.load(name)
    for stage in space.STAGES:
        default = space.default(built_in).stage(stage)
        assert plan.why_invalid(built_in, stage, default, model.device("V100-PCIE-32GB")) is None


def test_candidates_of_qwen_divide_its_steps_and_tiles() -> None:
    for config in space.candidates(QWEN, "w13"):
        assert isinstance(config, space.W13Config)
        assert 80 % config.split_k == 0 and (80 // config.split_k) % config.unroll == 0  # 2560 / 32 steps
        assert 10 % config.tiles == 0  # 320 / 32 column tiles
        assert 4 <= config.tiles * config.split_k <= 32
    for config in space.candidates(QWEN, "w2"):
        assert isinstance(config, space.W2Config)
        assert 5 % config.split_k == 0 and (5 // config.split_k) % config.unroll == 0  # 160 / 32 steps


def test_a_config_survives_its_own_dictionary() -> None:
    config = space.default(QWEN)
    assert space.from_dict(config.to_dict()) == config
    assert (
        space.stage_from_dict("w13", {"family": "simt", "tiles": 2, "split_k": 4, "unroll": 5, "rows": 8}).key()
        == "simt-t2-k4-u5-r8"
    )


def test_a_config_survives_its_own_key() -> None:
    config = space.default(QWEN)
    assert space.parse(config.key()) == config
    assert space.parse("simt-t5-k4-u10-r1+tensor-s32-k1-u5-r4") == space.Config(
        space.W13Config("simt", 5, 4, 10, 1), space.W2Config("tensor", 32, 1, 5, 4)
    )


@pytest.mark.parametrize(
    "key",
    [
        "",
        "simt-t1-k8-u5-r2",
        "simt-t0-k8-u5-r2+simt-s16-k1-u5-r2",
        "simt-t1-k8-u5-r2+simt-t1-k8-u5-r2",
        "t1-k8-u5-r2+s16-k1-u5-r2",
    ],
)
def test_a_key_that_is_no_config_is_refused(key: str) -> None:
    with pytest.raises(InvalidConfig, match="expected W13's and W2's keys"):
        space.parse(key)


WHOLE = {"family": "simt", "tiles": 1, "split_k": 1, "unroll": 1, "rows": 1}


@pytest.mark.parametrize(
    "values",
    [{}, {"tiles": 1}, WHOLE | {"rows": 0}, WHOLE | {"rows": True}, WHOLE | {"family": "fp8"}, WHOLE | {"warps": 1}],
)
def test_a_dictionary_that_is_no_config_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(
        InvalidConfig, match="family simt or tensor, and positive integers for rows, split_k, tiles, unroll"
    ):
        space.stage_from_dict("w13", values)


def test_the_space_digest_changes_with_the_candidates_and_not_with_the_name() -> None:
    renamed = replace(QWEN, name="other", model="Other")
    wider = replace(QWEN, hidden=5120)
    assert space.space_digest(renamed, "w13") == space.space_digest(QWEN, "w13")
    assert space.space_digest(wider, "w13") != space.space_digest(QWEN, "w13")


def test_the_tensor_family_is_for_sm70_u4_with_exact_numerics() -> None:
    awq = replace(QWEN, layout="awq", stats_bytes=0, interleaved=False)
    engine = replace(QWEN, numerics="engine", tolerance=2e-3)
    for stage in space.STAGES:
        assert {c.family for c in space.candidates(QWEN, stage)} == {"simt", "tensor"}
        assert {c.rows for c in space.candidates(QWEN, stage) if c.family == "tensor"} == {8 if stage == "w13" else 4}
        for other in (awq, engine):
            assert {c.family for c in space.candidates(other, stage)} == {"simt"}
    with pytest.raises(InvalidConfig, match="reads sm70-u4 with exact numerics; contract qwen38-tp4 is awq, exact"):
        plan.make(awq, replace(space.default(awq), w13=space.W13Config("tensor", 1, 8, 5, 8)))


@pytest.mark.parametrize(
    ("w13", "rule"),
    [
        (space.W13Config("simt", 1, 3, 1, 1), "split-K must divide the 80 steps of K=2560"),
        (space.W13Config("simt", 1, 8, 4, 1), "unroll what is left"),
        (space.W13Config("simt", 3, 8, 5, 1), "tiles must divide the 10 column tiles"),
        (space.W13Config("tensor", 1, 8, 5, 4), "a tensor pass takes 8 rows"),
    ],
)
def test_a_config_that_does_not_divide_is_refused_with_the_rule(w13: space.W13Config, rule: str) -> None:
    with pytest.raises(InvalidConfig, match=rule):
        plan.make(QWEN, replace(space.default(QWEN), w13=w13))
