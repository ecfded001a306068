from dataclasses import replace

import pytest

from tuner import contract, model, plan, space
from tuner.errors import InvalidConfig
from tuner.space import Config, Tile

QWEN = contract.load("qwen38-tp4")
AWQ = replace(QWEN, layout="awq", stats_bytes=0, interleaved=False)


@pytest.mark.parametrize("name", sorted(contract.builtin()))
def test_every_built_in_contract_has_a_space_holding_its_default(name: str) -> None:
    built_in = contract.load(name)
    found = space.candidates(built_in)
    assert len(found) == len(set(found)) >= 100
    assert space.default(built_in) in found


@pytest.mark.parametrize("hidden", [32, 352, 928])
def test_sizes_with_few_divisors_have_a_space_too(hidden: int) -> None:
    odd = replace(QWEN, tensor_parallel=1, experts=3, top_k=3, hidden=hidden, intermediate=32)
    assert space.default(odd) in space.candidates(odd)
    plan.make(odd, space.default(odd))


@pytest.mark.parametrize("name", sorted(contract.builtin()))
def test_the_default_of_every_built_in_contract_fits_a_v100(name: str) -> None:
    built_in = contract.load(name)
    assert plan.why_invalid(built_in, space.default(built_in), model.device("V100-PCIE-32GB")) is None


def test_candidates_of_qwen_divide_its_steps_and_tiles_and_share_a_ctas_threads() -> None:
    found = space.candidates(QWEN)
    for config in found:
        w13, w2 = config.w13, config.w2
        assert 80 % w13.split_k == 0 and (80 // w13.split_k) % w13.unroll == 0  # 2560 / 32 steps
        assert 10 % w13.tiles == 0 and w13.tiles <= 4  # 320 / 32 column tiles
        assert 5 % w2.split_k == 0 and (5 // w2.split_k) % w2.unroll == 0  # 160 / 32 steps
        assert 80 % w2.tiles == 0  # 2560 / 32 column tiles
        assert w13.threads == w2.threads <= config.resident
        assert w13.family == w2.family
        assert w13.rows == w2.rows or w13.family == "tensor"
    # 8 warps of W13: a tile of eight parts, or two of four; of W2 only eight whole tiles.
    pairs = {(c.w13.tiles, c.w13.split_k, c.w2.tiles, c.w2.split_k) for c in found if c.w13.threads == 256}
    assert pairs == {(1, 8, 8, 1), (2, 4, 8, 1)}
    # Every plan of them can be made.
    for config in found[::37]:
        plan.make(QWEN, config)


def test_every_candidate_differs_from_the_others_in_a_samplers_parameters() -> None:
    found = space.candidates(QWEN)
    assert len({tuple(sorted(space.parameters(config).items())) for config in found}) == len(found)


@pytest.mark.parametrize("held", [QWEN, AWQ, contract.load("mixtral-8x7b-tp2")], ids=lambda held: held.name)
def test_a_defaults_rows_take_no_more_than_half_of_a_v100s_shared_memory(held: contract.Contract) -> None:
    """Two CTAs fit an SM of 96 KB. One row of mixtral's W13 is 16 KB, of its W2 28 KB."""
    default = space.default(held)
    assert default.portable_bits
    assert 4 * default.w13.rows * held.w13.k <= 48 << 10
    assert 4 * default.w2.rows * held.w2.k <= 48 << 10


def test_a_config_survives_its_own_dictionary() -> None:
    config = space.default(QWEN)
    assert space.from_dict(config.to_dict()) == config
    assert config.to_dict()["w13"] == {"family": "simt", "tiles": 1, "split_k": 8, "unroll": 5, "rows": 2}


def test_a_config_survives_its_own_key() -> None:
    config = space.default(QWEN)
    assert space.parse(config.key()) == config
    assert space.parse("simt-t5-k4-u10-r1+tensor-t20-k1-u5-r4+m768") == Config(
        Tile("simt", 5, 4, 10, 1), Tile("tensor", 20, 1, 5, 4), 768
    )


@pytest.mark.parametrize(
    "key",
    [
        "",
        "simt-t1-k8-u5-r2",
        "simt-t1-k8-u5-r2+simt-t8-k1-u5-r2",
        "simt-t0-k8-u5-r2+simt-t8-k1-u5-r2+m512",
        "simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m0",
        "simt-t1-k8-u5-r2+simt-s16-k1-u5-r2+m512",
        "t1-k8-u5-r2+t8-k1-u5-r2+m512",
        "simt-t1-k8-u5-r2+simt-t8-k1-u5-r2+m512 ",
    ],
)
def test_a_key_that_is_no_config_is_refused(key: str) -> None:
    with pytest.raises(InvalidConfig, match="expected W13's and W2's tiles and the resident threads, such as simt-t1"):
        space.parse(key)


WHOLE = {"family": "simt", "tiles": 1, "split_k": 1, "unroll": 1, "rows": 1}


@pytest.mark.parametrize(
    "values",
    [{}, {"tiles": 1}, WHOLE | {"rows": 0}, WHOLE | {"rows": True}, WHOLE | {"family": "fp8"}, WHOLE | {"warps": 1}],
)
def test_a_dictionary_with_a_stage_that_is_no_tile_is_refused(values: dict[str, object]) -> None:
    told = "w2 config .* family simt or tensor, and positive integers for rows, split_k, tiles, unroll"
    with pytest.raises(InvalidConfig, match=told):
        space.from_dict({"w13": WHOLE, "w2": values, "resident": 512})


@pytest.mark.parametrize(
    "values",
    [{}, {"w13": WHOLE, "w2": WHOLE}, *({"w13": WHOLE, "w2": WHOLE, "resident": n} for n in (0, True, "512"))],
)
def test_a_dictionary_that_is_no_config_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="expected the keys w13, w2, and resident, a positive integer"):
        space.from_dict(values)


def test_the_space_digest_changes_with_the_candidates_and_not_with_the_name() -> None:
    renamed = replace(QWEN, name="other", model="Other")
    wider = replace(QWEN, hidden=5120)
    assert space.space_digest(renamed) == space.space_digest(QWEN)
    assert space.space_digest(wider) != space.space_digest(QWEN)


def test_the_tensor_family_is_for_sm70_u4() -> None:
    engine = space.candidates(replace(QWEN, numerics="engine", tolerance=2e-3))
    found = space.candidates(QWEN)
    assert {(c.w13.family, c.w2.family) for c in found} == {("simt", "simt"), ("tensor", "tensor")}
    assert {(c.w13.rows, c.w2.rows) for c in found if not c.portable_bits} == {(8, 4)}
    assert {(c.w13.rows, c.w2.rows) for c in engine if not c.portable_bits} == {(8, 8)}  # its rows are f16 values
    assert all(config.portable_bits for config in space.candidates(AWQ))
    with pytest.raises(InvalidConfig, match="the tensor family reads sm70-u4; contract qwen38-tp4 is awq"):
        plan.make(AWQ, replace(space.default(AWQ), w13=Tile("tensor", 1, 8, 5, 8)))


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"w13": Tile("simt", 1, 3, 1, 1)}, "w13 config .* split-K must divide the 80 steps of K=2560"),
        ({"w13": Tile("simt", 1, 8, 4, 1)}, "unroll what is left"),
        ({"w13": Tile("simt", 3, 8, 5, 1)}, "tiles must divide the 10 column tiles"),
        ({"w13": Tile("tensor", 1, 8, 5, 4)}, "a tensor pass takes 8 rows"),
        ({"w2": Tile("tensor", 8, 1, 5, 8)}, "w2 config .* a tensor pass takes 4 rows"),
        ({"w2": Tile("simt", 3, 1, 5, 2)}, "tiles must divide the 80 column tiles"),
        ({"w2": Tile("simt", 16, 1, 5, 2)}, "W13 and W2 share one launch, but take 256 and 512 threads"),
    ],
)
def test_a_config_that_does_not_divide_is_refused_with_the_rule(changed: dict[str, Tile], rule: str) -> None:
    with pytest.raises(InvalidConfig, match=rule):
        plan.make(QWEN, replace(space.default(QWEN), **changed))
