"""Reading a layer from Hugging Face checkpoint folders made here, tensor by tensor, with literal words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tuner import awq
from tuner.checkpoint import Fit, check, read_layer
from tuner.contract import Contract, load
from tuner.errors import CheckpointError, ContractError

# I = 256 over four ranks: 64 columns, 8 words and 2 groups a rank.
TP4 = replace(load("qwen38-tp4"), name="small-tp4", experts=3, top_k=2, hidden=64, intermediate=256, interleaved=False)
LOW, HIGH = 0x75316420, 0xFDB9ECA8  # columns holding 0..7, and 8..15
QUANTIZATION = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head", "gate", "mlp.gate", "visual"],
}
CONFIG: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 256,
    "intermediate_size": 5120,
    "quantization_config": QUANTIZATION,
}
Tensors = dict[str, np.ndarray[Any, Any]]


def zeros(groups: int, n: int) -> np.ndarray[Any, Any]:
    """Words whose zero points are column % 16, or (column + 8) % 16 in odd groups."""
    words = np.empty((groups, n // 8), np.uint32)
    words[0::2, 0::2] = words[1::2, 1::2] = LOW
    words[0::2, 1::2] = words[1::2, 0::2] = HIGH
    return words.view(np.int32)


def layer_tensors(path: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
    """Three experts whose weights name their rank: gate rank, up 8 + rank, down 4 + rank; expert 1 has 15 - those.

    Scales tell group and column apart: gate 256 * group + column, up 1000 more, down 64 * group + column.
    """
    made: Tensors = {}
    for expert in range(3):
        for index, (name, base) in enumerate(zip(names, (0, 8, 4), strict=True)):
            k, n = (64, 256) if index < 2 else (256, 64)
            rank = np.arange(n // 8) // 8 if index < 2 else np.arange(k)[:, None] // 64
            value = (15 - (base + rank)) if expert == 1 else base + rank
            words = np.broadcast_to(value.astype(np.uint32) * np.uint32(0x11111111), (k, n // 8))
            column = np.arange(n)[None, :]
            group = np.arange(k // 32)[:, None]
            scales = 256 * group + column + (1000 if index == 1 else 0) if index < 2 else 64 * group + column
            made[f"{path}.{expert}.{name}.qweight"] = np.ascontiguousarray(words).view(np.int32)
            made[f"{path}.{expert}.{name}.qzeros"] = zeros(k // 32, n)
            made[f"{path}.{expert}.{name}.scales"] = scales.astype(np.float16)
    return made


def write(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG, shards: int = 3) -> Path:
    """A checkpoint folder; several shards share the tensors out in turn, so that an expert's lie in different files."""
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, layer_tensors("model.layers.2.mlp.experts"))


def refusal(folder: Path, contract: Contract = TP4, layer: int = 2) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_layer(folder, contract, layer, 0)
    assert caught.value.exit_status == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "gate_scales", "up_scales", "down_scales"),
    [
        # first and last column of the rank's first and second group
        (0, [[0, 63], [256, 319]], [[1000, 1063], [1256, 1319]], [[0, 63], [64, 127]]),
        (3, [[192, 255], [448, 511]], [[1192, 1255], [1448, 1511]], [[384, 447], [448, 511]]),
    ],
)
@pytest.mark.parametrize("layout", [{}, {"interleaved": True}, {"layout": "awq", "stats_bytes": 0}])
def test_a_rank_gets_its_columns_of_gate_and_up_and_its_rows_of_down(
    folder: Path,
    layout: dict[str, Any],
    rank: int,
    gate_scales: list[list[int]],
    up_scales: list[list[int]],
    down_scales: list[list[int]],
) -> None:
    contract = replace(TP4, **layout)
    weights = read_layer(folder, contract, 2, rank)
    for expert in range(3):
        w13 = awq.integers(contract, weights, "w13", expert)
        w2 = awq.integers(contract, weights, "w2", expert)
        values = [rank, 8 + rank, 4 + rank]
        if expert == 1:
            values = [15 - value for value in values]
        assert [set(w13.q[:, :64].flat), set(w13.q[:, 64:].flat), set(w2.q.flat)] == [{value} for value in values]
        assert w13.s[:, [0, 63]].tolist() == gate_scales
        assert w13.s[:, [64, 127]].tolist() == up_scales
        assert w2.s[:, [0, 63]].tolist() == down_scales
        ascending, shifted = [*range(16)] * 4, [*range(8, 16), *range(8)] * 4
        assert w13.z.tolist() == [ascending * 2, shifted * 2]
        assert w2.z.tolist() == [ascending, shifted]


def test_the_awq_layout_holds_the_checkpoints_own_words(folder: Path) -> None:
    contract = replace(TP4, layout="awq", stats_bytes=0)
    weights = read_layer(folder, contract, 2, 3)
    assert weights.w13.zeros is not None and weights.w2.zeros is not None
    assert weights.w13.q[0].tolist() == [[0x33333333] * 8 + [0xBBBBBBBB] * 8] * 64
    assert weights.w2.q[0].tolist() == [[0x77777777] * 8] * 64
    assert weights.w13.zeros[0].tolist() == [[LOW, HIGH] * 8, [HIGH, LOW] * 8]
    assert weights.w2.zeros[0].tolist() == [[LOW, HIGH] * 4, [HIGH, LOW] * 4]


@pytest.mark.parametrize(("rank", "down_groups"), [(0, [0, 0, 1]), (1, [1, 2, 2]), (3, [4, 5, 5])])
def test_a_smaller_runtime_group_repeats_the_checkpoints_scales_and_zeros(
    tmp_path: Path, rank: int, down_groups: list[int]
) -> None:
    # 768 over four ranks is 192 rows: ranks 1 and 3 begin in the middle of a checkpoint group of 128.
    contract = replace(
        TP4, experts=1, top_k=1, hidden=128, intermediate=768, checkpoint_group=128, group=64, stats_bytes=4
    )
    tensors: Tensors = {}
    for name, k, n in (("gate_proj", 128, 768), ("up_proj", 128, 768), ("down_proj", 768, 128)):
        groups = np.arange(k // 128)[:, None]
        tensors[f"model.layers.0.mlp.experts.0.{name}.qweight"] = np.zeros((k, n // 8), np.int32)
        tensors[f"model.layers.0.mlp.experts.0.{name}.qzeros"] = np.repeat(groups * 0x11111111, n // 8, 1).astype(
            np.int32
        )
        tensors[f"model.layers.0.mlp.experts.0.{name}.scales"] = np.repeat(groups + 1, n, 1).astype(np.float16)
    config = {"quantization_config": QUANTIZATION | {"group_size": 128}}
    weights = read_layer(write(tmp_path, tensors, config), contract, 0, rank)
    w13, w2 = (awq.integers(contract, weights, which, 0) for which in ("w13", "w2"))
    assert w2.z.tolist() == [[group] * 128 for group in down_groups]
    assert w2.s.tolist() == [[group + 1] * 128 for group in down_groups]
    assert w13.z.tolist() == [[0] * 384] * 2
    assert w13.s.tolist() == [[1] * 384] * 2


def test_a_checkpoint_of_one_file_and_another_prefix_is_read(tmp_path: Path) -> None:
    config: dict[str, Any] = {"text_config": {key: CONFIG[key] for key in CONFIG if key != "quantization_config"}}
    config |= {"hidden_size": 999, "quantization_config": QUANTIZATION | {"version": "GEMM"}}
    write(tmp_path, layer_tensors("model.language_model.layers.0.mlp.experts"), config, shards=1)
    weights = read_layer(tmp_path, TP4, 0, 2)
    assert set(awq.integers(TP4, weights, "w2", 0).q.flat) == {6}


def test_w1_w3_w2_are_gate_up_and_down(tmp_path: Path) -> None:
    config = {"num_local_experts": 3, "intermediate_size": 256, "quantization_config": QUANTIZATION}
    names = ("w1", "w3", "w2")
    write(tmp_path, layer_tensors("model.layers.0.block_sparse_moe.experts", names=names), config)
    weights = read_layer(tmp_path, TP4, 0, 2)
    w13 = awq.integers(TP4, weights, "w13", 0)
    assert (set(w13.q[:, :64].flat), set(w13.q[:, 64:].flat)) == ({2}, {10})
    assert set(awq.integers(TP4, weights, "w2", 0).q.flat) == {6}


def test_the_draft_heads_layer_is_not_taken_for_the_models(tmp_path: Path) -> None:
    head = layer_tensors("mtp.layers.0.mlp.experts")
    head = {name: np.zeros_like(tensor) for name, tensor in head.items()}
    model = layer_tensors("model.layers.0.mlp.experts") | layer_tensors("model.layers.1.mlp.experts")
    weights = read_layer(write(tmp_path, head | model), TP4, 0, 2)
    assert set(awq.integers(TP4, weights, "w2", 0).q.flat) == {6}


def test_two_stacks_of_layers_alike_are_refused(tmp_path: Path) -> None:
    write(tmp_path, layer_tensors("a.layers.2.mlp.experts") | layer_tensors("b.layers.2.mlp.experts"))
    assert "a.layers and b.layers hold experts of 1 layers each" in refusal(tmp_path)


def test_other_layers_files_are_not_opened(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in layer_tensors("model.layers.3.mlp.experts"):
        index["weight_map"][name] = "not-downloaded.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read_layer(folder, TP4, 2, 0)
    assert "not-downloaded.safetensors" in refusal(folder, layer=3)


def with_scales(folder: Path, value: float) -> Path:
    tensors = layer_tensors("model.layers.2.mlp.experts")
    for name, tensor in tensors.items():
        if name.endswith("scales"):
            tensors[name] = np.full(tensor.shape, 3.140625, ml_dtypes.bfloat16)
    tensors["model.layers.2.mlp.experts.1.up_proj.scales"][1, 5] = value
    return write(folder, tensors)


def test_bf16_scales_become_the_same_f16_numbers(tmp_path: Path) -> None:
    weights = read_layer(with_scales(tmp_path, 0.0078125), TP4, 2, 0)
    s = awq.integers(TP4, weights, "w13", 1).s.view(np.uint16)
    assert s[1, 64 + 5] == 0x2000
    assert set(np.delete(s.reshape(-1), 128 + 69)) == {0x4248}


@pytest.mark.parametrize("value", [1e5, -7e4, 1e-9, float("inf"), float("nan")])
def test_bf16_scales_beyond_f16_are_refused(tmp_path: Path, value: float) -> None:
    message = refusal(with_scales(tmp_path, value))
    assert "model.layers.2.mlp.experts.1.up_proj.scales has " in message
    assert "(1 such), which f16 cannot hold" in message


def quantized(**changes: Any) -> dict[str, Any]:
    merged = QUANTIZATION | changes
    return CONFIG | {"quantization_config": {key: value for key, value in merged.items() if value is not ...}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            quantized(quant_method="compressed-tensors", format="pack-quantized"),
            'quantization_config.quant_method = "compressed-tensors": expected "awq"',
        ),
        (quantized(quant_method="gptq"), 'quant_method = "gptq": expected "awq"'),
        (quantized(quant_method=...), 'quant_method = null: expected "awq"'),
        (quantized(version="gemv"), 'version = "gemv", expected "gemm"'),
        (quantized(version="marlin"), 'version = "marlin", expected "gemm"'),
        (quantized(version=..., format="gemv_fast"), 'version = "gemv_fast", expected "gemm"'),
        (quantized(version=4), 'version = 4, expected "gemm"'),
        (quantized(bits=8), "bits = 8, expected 4"),
        (quantized(bits=...), "bits = null, expected 4"),
        (quantized(zero_point=False), "zero_point = false, expected true"),
        (quantized(zero_point=1), "zero_point = 1, expected true"),
        (quantized(group_size=128), "group_size = 128, expected 32; contract 'small-tp4' has checkpoint_group = 32"),
        (quantized(modules_to_not_convert=["mlp.experts"]), "modules_to_not_convert has 'mlp.experts', which leaves"),
        (quantized(modules_to_not_convert=5), "modules_to_not_convert = 5: expected a list of module names"),
        (
            quantized(modules_to_not_convert="layers.0"),
            'modules_to_not_convert = "layers.0": expected a list of module',
        ),
        (quantized(modules_to_not_convert=["visual", 0]), "expected a list of module names"),
        (quantized(modules_to_not_convert=["model.layers.2."]), "leaves model.layers.2.mlp.experts unquantised"),
        ({key: CONFIG[key] for key in CONFIG if key != "quantization_config"}, "no quantization_config"),
        (CONFIG | {"num_experts": 128}, "num_experts = 128, the contract's experts = 3"),
        (CONFIG | {"num_experts_per_tok": 8}, "num_experts_per_tok = 8, the contract's top_k = 2"),
        (CONFIG | {"hidden_size": 2048}, "hidden_size = 2048, the contract's hidden = 64"),
        (CONFIG | {"moe_intermediate_size": 512}, "moe_intermediate_size = 512, the contract's intermediate = 256"),
    ],
)
def test_a_config_that_is_not_awq_gemm_4_bit_or_not_the_contracts_is_refused(
    folder: Path, config: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert message in refusal(folder)


@pytest.mark.parametrize("modules", [None, [], ["model.layers.20.mlp"], ["experts.0.gate"]])
def test_modules_not_converted_elsewhere_do_not_matter(folder: Path, modules: list[str] | None) -> None:
    (folder / "config.json").write_text(json.dumps(quantized(modules_to_not_convert=modules)))
    assert read_layer(folder, TP4, 2, 0).w13.q.shape == (3, 64, 16)


def test_a_version_left_out_means_gemm(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(quantized(version=...)))
    assert read_layer(folder, TP4, 2, 0).w13.q.shape == (3, 64, 16)


GATE = "model.layers.2.mlp.experts.1.gate_proj."


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (GATE + "qzeros", None, f"tensor {GATE}qzeros is missing; expected I32 [2, 32]"),
        (
            GATE + "qweight",
            None,
            "model.layers.2.mlp.experts lacks expert 1 (no tensor 1.gate_proj.qweight): it has 2, "
            "contract 'small-tp4' has 3",
        ),
        (GATE + "qweight", np.zeros((256, 8), np.int32), f"{GATE}qweight is I32 [256, 8]; "),
        (GATE + "qweight", np.zeros((64, 32), np.uint32), f"{GATE}qweight is U32 [64, 32]; "),
        (GATE + "scales", np.zeros((2, 256), np.float32), f"{GATE}scales is F32 [2, 256]; "),
        (GATE + "scales", np.zeros((1, 256), np.float16), "makes it F16 or BF16 [2, 256]"),
        (GATE + "scales", np.full((2, 256), np.inf, np.float16), f"{GATE}scales has inf (128 such)"),
        (
            "model.layers.2.mlp.experts.3.gate_proj.qweight",
            np.zeros((64, 32), np.int32),
            "model.layers.2.mlp.experts has 4 experts, contract 'small-tp4' has 3",
        ),
    ],
)
def test_a_tensor_missing_or_of_another_shape_or_dtype_is_named(
    tmp_path: Path, name: str, tensor: np.ndarray[Any, Any] | None, message: str
) -> None:
    tensors = layer_tensors("model.layers.2.mlp.experts")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    assert message in refusal(write(tmp_path, tensors))


def test_a_layer_without_experts_is_refused_with_those_that_have_them(folder: Path) -> None:
    assert "layer 0 has no experts; model.layers has them in 1 layers from 2 to 2" in refusal(folder, layer=0)


def test_a_checkpoint_without_separate_experts_is_refused_with_what_it_has(tmp_path: Path) -> None:
    write(tmp_path, {"model.layers.2.mlp.experts.gate_up_proj": np.zeros((3, 64, 512), np.float16)})
    assert "speaks of experts: model.layers.2.mlp.experts.gate_up_proj" in refusal(tmp_path)


def test_a_rank_the_contract_does_not_have_is_refused(folder: Path) -> None:
    for rank in (-1, 4):
        with pytest.raises(ContractError, match=f"rank {rank}: expected 0 to 3"):
            read_layer(folder, TP4, 2, rank)


def test_a_folder_that_is_no_whole_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "config.json: No such file or directory; expected a Hugging Face checkpoint" in refusal(tmp_path / "gone")
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert "model-00002-of-00003.safetensors: not a whole safetensors file" in refusal(folder)
    shard.unlink()
    assert "model-00002-of-00003.safetensors" in refusal(folder)
    shard.write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    assert "though the index says so" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    for text, message in (("{", "not JSON"), ("[]", "expected a JSON object, found a list"), ("{}", "weight_map")):
        index.write_text(text)
        assert f"model.safetensors.index.json: {message}" in refusal(folder).replace(
            "expected weight_map", "weight_map"
        )
    index.unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors: is a folder; expected a safetensors file" in refusal(folder)
    (folder / "model.safetensors").rmdir()
    assert "expected model.safetensors.index.json or model.safetensors beside config.json" in refusal(folder)


@pytest.mark.parametrize("key", ["quant_method", "bits"])
@pytest.mark.parametrize("depth", [100, 2000, 10**5, 10**6])
def test_deeply_nested_json_is_refused(folder: Path, key: str, depth: int) -> None:
    config = json.dumps(quantized(**{key: "HERE"})).replace('"HERE"', "[" * depth + "]" * depth)
    (folder / "config.json").write_text(config)
    assert "config.json: " in refusal(folder)


def test_the_last_expert_missing_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANTIZATION}))
    message = refusal(folder, replace(TP4, experts=4))
    assert "lacks expert 3 (no tensor 3.gate_proj.qweight): it has 3, contract 'small-tp4' has 4" in message


def test_a_checkpoint_that_fits_is_found_to_fit_with_its_layers(tmp_path: Path) -> None:
    tensors = layer_tensors("model.layers.3.mlp.experts") | layer_tensors("model.layers.2.mlp.experts")
    assert check(write(tmp_path, tensors), TP4) == Fit("model.layers.2.mlp.experts", (2, 3))


def checked(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder, TP4)
    return str(caught.value)


def test_the_check_refuses_another_format_before_it_asks_for_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantized(quant_method="compressed-tensors")))
    assert 'quant_method = "compressed-tensors": expected "awq"' in checked(tmp_path)


def test_the_check_looks_at_the_last_experts_last_tensor(tmp_path: Path) -> None:
    tensors = layer_tensors("model.layers.2.mlp.experts")
    tensors["model.layers.2.mlp.experts.2.down_proj.scales"] = np.ones((4, 64), np.float16)
    assert "experts.2.down_proj.scales is F16 [4, 64]; " in checked(write(tmp_path, tensors))


def test_the_check_misses_an_expert_of_a_later_layer(tmp_path: Path) -> None:
    tensors = layer_tensors("model.layers.2.mlp.experts") | layer_tensors("model.layers.3.mlp.experts")
    del tensors["model.layers.3.mlp.experts.1.gate_proj.qweight"]
    assert "model.layers.3.mlp.experts lacks expert 1 " in checked(write(tmp_path, tensors))


def test_the_check_looks_at_every_tensor_of_a_later_layer(tmp_path: Path) -> None:
    tensors = layer_tensors("model.layers.2.mlp.experts") | layer_tensors("model.layers.3.mlp.experts")
    name = "model.layers.3.mlp.experts.2.down_proj.scales"
    scales = tensors.pop(name)
    assert f"tensor {name} is missing" in checked(write(tmp_path, tensors))
    tensors[name] = scales[:4].copy()
    assert f"{name} is F16 [4, 64]; " in checked(write(tmp_path, tensors))
