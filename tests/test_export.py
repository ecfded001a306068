"""Exported folders: their own tests pass, the frozen op computes the tuner's bits, and what is not fit for export is
refused."""

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from frozen_set import Computing, conftest, made, plans, stand_in, write
from safetensors.numpy import save_file
from small import LAYOUTS, SMALL, inputs, weights

import cli
from tuner import contract, export, frozen, golden, host, plan, render, routing, space, winners
from tuner.checkpoint import read_layer
from tuner.contract import Contract
from tuner.errors import BuildFailed, MissingTool, RequestError
from tuner.reference import Reference

torch = pytest.importorskip("torch")

# I = 256 over four ranks.
TP4: dict[str, Any] = {
    "name": "small-tp4",
    "tensor_parallel": 4,
    "hidden": 128,
    "intermediate": 256,
    "interleaved": False,
}
BUILTIN = contract.builtin()
COMPUTED = ("sm70-u4 3-byte interleaved", "sm70-u4 4-byte concatenated", "awq")


def shared(array: np.ndarray) -> Any:
    """A tensor whose memory the CPU executor's processes share."""
    words = array.view(np.int32) if array.dtype == np.uint32 else array
    return torch.from_numpy(words.copy()).share_memory_()


@pytest.fixture(scope="module", params=COMPUTED)
def computing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computing]:
    place = tmp_path_factory.mktemp("computing")
    small = LAYOUTS[request.param]
    found = Computing(write(place, small), small, place)
    found.small = small
    held = weights(small)
    found.weights = {
        f"{name}_{part}": shared(getattr(gemm, part))
        for name, gemm in (("w13", held.w13), ("w2", held.w2))
        for part in ("q", "scales", "zeros")
        if getattr(gemm, part) is not None
    }
    found.layer, reason = found.op.bind(found.weights, interleaved=small.interleaved, top_k=small.top_k)
    assert found.layer is not None, reason
    yield found


def step(small: Contract, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, small.experts, (tokens, small.top_k), dtype=np.int32)
    return inputs(small, tokens, seed), ids, rng.random((tokens, small.top_k), dtype=np.float32)


def tuners(small: Contract, given: tuple[np.ndarray, ...], name: Any = "fused", **options: Any) -> np.ndarray:
    """The bits of the tuner's own launch on the CPU executor."""
    x, ids, shares = given
    held, made_plan = weights(small), plans(small, len(x), name)
    operands = {"X": x, "TOPK_IDS": ids, "TOPK_WEIGHTS": shares, **options}
    for prefix, gemm in (("W13", held.w13), ("W2", held.w2)):
        operands |= {f"{prefix}_Q": gemm.q, f"{prefix}_SCALES": gemm.scales, f"{prefix}_ZEROS": gemm.zeros}
    return host.execute(made_plan, render.render(made_plan), operands, len(x)).out.view(np.uint16)


def bits(out: Any) -> np.ndarray:
    found: np.ndarray = out.numpy().view(np.uint16)
    return found


def called(computing: Computing, given: tuple[np.ndarray, ...], **options: Any) -> np.ndarray:
    out = shared(np.full(given[0].shape, np.nan, np.float16))
    workspace = torch.zeros(computing.spec["workspace_bytes"], dtype=torch.uint8).share_memory_()
    computing.layer(*map(shared, given), out=out, workspace=workspace, **options)
    assert not workspace.any()
    return bits(out)


# ---- the frozen op, computed on the CPU ----------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 2, 4, 12])
def test_the_frozen_op_has_the_bits_of_the_tuners_own_launch(computing: Computing, tokens: int) -> None:
    given = step(computing.small, tokens)
    assert np.array_equal(called(computing, given), tuners(computing.small, given))


def test_it_has_them_with_wide_ids_a_map_and_live_tokens(computing: Computing) -> None:
    small = computing.small
    x, ids, shares = step(small, 5)
    expert_map = np.array([2, -1, 0, 5, 1, 3, 4, 99], np.int32)
    given = x, (ids + 1).astype(np.int64), shares
    live = np.array([3], np.int32)
    found = called(computing, given, expert_map=shared(expert_map), live_tokens=shared(live))
    assert np.array_equal(found, tuners(small, given, EXPERT_MAP=expert_map, LIVE_TOKENS=live))
    assert not found[3:].any()


def test_a_graph_replays_with_what_its_memory_then_holds(computing: Computing) -> None:
    small, stream = computing.small, 0x100
    held = [shared(each) for each in step(small, 5)]
    live, out = shared(np.array([5], np.int32)), shared(np.zeros((5, small.hidden), np.float16))
    workspace = torch.zeros(computing.spec["workspace_bytes"], dtype=torch.uint8).share_memory_()
    computing.driver.capture(stream)
    computing.layer(*held, live_tokens=live, out=out, workspace=workspace)
    computing.driver.end_capture(stream)
    for seed in range(4):
        given = step(small, 5, seed)
        for tensor, new in zip(held, given, strict=True):
            tensor.copy_(torch.from_numpy(new))
        live.fill_(5 - seed)
        computing.driver.replay(stream)
        expected = tuners(small, given, LIVE_TOKENS=np.array([5 - seed], np.int32))
        assert np.array_equal(bits(out), expected)
    computing.driver.stream(None)


@pytest.mark.parametrize("tokens", [2, 12])
def test_the_stages_have_the_bits_of_the_tuners_stages(computing: Computing, tokens: int) -> None:
    small, op = computing.small, computing.op
    x, ids, shares = step(small, tokens)
    given = [shared(each) for each in (x, ids, shares)]
    expected = tuners(small, (x, ids, shares), "staged")
    own = {half: [each for name, each in computing.weights.items() if name.startswith(half)] for half in ("w13", "w2")}
    slots = ids.size
    order = routing.sort(ids, small.experts)

    def blank(shape: Any, kind: Any = np.int32) -> Any:
        return shared(np.full(shape, -1, kind))

    for rows in (blank(slots), shared(order.rows)):
        segments = blank(1), blank(slots), blank(slots + 1)
        if rows[0] < 0:
            op.ops.compact(given[1], None, None, *segments, rows)
        else:
            op.ops.compact_sorted(shared(order.offsets), *segments)
        hidden = blank((slots, small.local_intermediate), np.float32)
        op.ops.w13(given[0], *segments, rows, *own["w13"], hidden)
        workspace = torch.zeros(computing.spec["workspace_bytes"], dtype=torch.uint8).share_memory_()
        out = blank(x.shape, np.float16)
        op.w2(hidden, given[2], segments, rows, *own["w2"], out=out, workspace=workspace)
        assert np.array_equal(bits(out), expected)
        assert not workspace.any()


# ---- the folder's own tests ----------------------------------------------------------------------------------------
def test_the_folders_own_tests_pass_with_pytest_numpy_and_torch_alone(tmp_path: Path) -> None:
    folder = write(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(folder / "tests")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


# ---- weights -------------------------------------------------------------------------------------------------------
CONVERTED = {
    "3-byte interleaved": TP4 | {"interleaved": True},
    "3-byte concatenated": TP4,
    "4-byte": TP4 | {"stats_bytes": 4, "interleaved": True},
    "awq": TP4 | {"layout": "awq", "stats_bytes": 0},
    "a smaller group at run time": TP4 | {"checkpoint_group": 128},
}


def checkpoint(folder: Path, small: Contract) -> dict[str, np.ndarray]:
    """A checkpoint of one layer of random words, and its tensors."""
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    wide, tall = (small.hidden, small.intermediate), (small.intermediate, small.hidden)
    for expert in range(small.experts):
        for projection, (k, n) in (("gate", wide), ("up", wide), ("down", tall)):
            path, groups = f"model.layers.0.mlp.experts.{expert}.{projection}_proj", k // small.checkpoint_group
            tensors[f"{path}.qweight"] = rng.integers(-(2**31), 2**31, (k, n // 8), dtype=np.int32)
            tensors[f"{path}.qzeros"] = rng.integers(-(2**31), 2**31, (groups, n // 8), dtype=np.int32)
            tensors[f"{path}.scales"] = (rng.standard_normal((groups, n)) / 64).astype(np.float16)
    folder.mkdir()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": small.checkpoint_group, "zero_point": True}
    config = {"num_experts": small.experts, "num_experts_per_tok": small.top_k, "hidden_size": small.hidden}
    config |= {"moe_intermediate_size": small.intermediate, "quantization_config": quantization | {"version": "gemm"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_weights_are_the_tuners_of_every_rank(name: str, tmp_path: Path) -> None:
    small = replace(SMALL, **CONVERTED[name])
    tensors = checkpoint(tmp_path / "checkpoint", small)
    (tmp_path / "op").mkdir()
    own = conftest(write(tmp_path / "op", small))
    op = own.load(own.PACKAGE, own.SPEC["namespace"])

    def experts() -> Iterator[dict[str, Any]]:
        for expert in range(small.experts):
            yield {
                f"{projection}_proj": tuple(
                    torch.from_numpy(tensors[f"model.layers.0.mlp.experts.{expert}.{projection}_proj.{part}"])
                    for part in ("qweight", "qzeros", "scales")
                )
                for projection in ("gate", "up", "down")
            }

    for rank in range(small.tensor_parallel):
        found, expected = op.convert_weights(experts(), rank), read_layer(tmp_path / "checkpoint", small, 0, rank)
        for half, gemm in (("w13", expected.w13), ("w2", expected.w2)):
            for part in ("q", "scales", "zeros"):
                array = getattr(gemm, part)
                assert (array is None) == (f"{half}_{part}" not in found)
                if array is not None:
                    assert np.array_equal(found[f"{half}_{part}"].numpy().view(array.dtype), array)

    with pytest.raises(ValueError, match=r"5 experts: the contract has 6"):
        op.convert_weights(itertools.islice(experts(), 5))
    with pytest.raises(ValueError, match=r"rank 4: expected 0 to 3"):
        op.convert_weights(experts(), 4)
    first = next(experts())
    with pytest.raises(ValueError, match=r"expert 0, up_proj: qweight is torch.int32 \[64, 32\]"):
        op.convert_weights([first | {"up_proj": (first["up_proj"][0][:64], *first["up_proj"][1:])}])
    tiny = first["down_proj"][2].to(torch.bfloat16) * 1e-12
    with pytest.raises(ValueError, match="float16 cannot hold it"):
        op.convert_weights([first | {"down_proj": (*first["down_proj"][:2], tiny)}])


def test_the_readmes_way_from_a_checkpoint_to_the_output_is_under_30_lines_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"From a checkpoint's folder to the op's output:\n\n```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) < 30
    for name in ("op", "computing"):
        (tmp_path / name).mkdir()
    found = Computing(write(tmp_path / "op"), SMALL, tmp_path / "computing")
    checkpoint(tmp_path / "checkpoint", SMALL)
    for name in ("empty_like", "empty", "zeros"):  # what kernels write, where the CPU executor's processes see it
        made_by = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, m=made_by, **more: m(*given, **more).share_memory_())
    monkeypatch.setitem(sys.modules, "voltune_qwen38_tp4", found.op)
    monkeypatch.chdir(tmp_path)
    for there, here in {"512": "6", "2560": "256", "top_k=10": "top_k=3", "topk(10)": "topk(3)", "cuda": "cpu"}.items():
        assert there in code
        code = code.replace(there, here)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    layer = Reference(SMALL, read_layer(tmp_path / "checkpoint", SMALL, 0, 0))
    expected = layer.exact(*(names[name].numpy() for name in ("x", "topk_ids", "topk_weights"))).output
    assert np.linalg.norm(names["out"].numpy() - expected) <= SMALL.tolerance * np.linalg.norm(expected)


# ---- what is exported ----------------------------------------------------------------------------------------------
def exported(tmp_path: Path, found: winners.Winners, monkeypatch: pytest.MonkeyPatch) -> export.Exported:
    monkeypatch.setattr(export, "_images", stand_in)
    if not (tmp_path / "set").exists():
        winners.write(found, tmp_path / "set")
    return export.export(tmp_path / "set", tmp_path / "folder")


def test_two_exports_of_one_set_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    first = content(exported(tmp_path, made(), monkeypatch).folder)
    (tmp_path / "folder" / "left.txt").write_text("of the earlier export")
    assert content(exported(tmp_path, made(), monkeypatch).folder) == first
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_identical_kernels_are_stored_once_and_every_level_has_its_own() -> None:
    found = frozen.tables(SMALL, {tokens: level.config for tokens, level in made().levels.items()})
    assert len({kernel.file for kernel in found.kernels}) == len(found.kernels)
    ops = {op.name: [level.kernel for level in op.levels] for op in found.ops}
    assert ops["moe_out"][0] == ops["moe_out"][1] != ops["moe_out"][2] == ops["moe_out"][3]
    assert len(set(ops["compact"])) == 1
    assert found.level_of == (0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_contract_has_ops_whose_every_argument_is_known(name: str) -> None:
    whole_contract = BUILTIN[name]
    found = frozen.tables(whole_contract, dict.fromkeys(whole_contract.levels, space.default(whole_contract)))
    fused, staged = (plan.make(whole_contract, space.default(whole_contract), each) for each in plan.PLANS[:2])
    held = sum(each.nbytes(whole_contract.max_tokens) for each in fused.buffers if each.role == "counters")
    assert held <= found.workspace_bytes < held + 3 * 256
    launches = {"moe_out": fused.launches[0], "compact": staged.launches[0], "w13": staged.launches[1]}
    for op in found.ops:
        launch = launches.get(op.name)
        assert launch is None or len(op.arguments) == len(launch.arguments)
        assert torch._C.parse_schema(f"voltune::{op.schema}").name == f"voltune::{op.name}"
        used = {each.operand for each in op.arguments if each.source in ("POINTER", "ITEM_BYTES", "LENGTH")}
        assert used == set(range(len(op.operands)))


def test_another_set_has_another_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = set()
    for name, found in {"a": made(), "b": made(date="2026-01-02"), "c": made(target="v100-measured")}.items():
        (tmp_path / name).mkdir()
        spaces.add(exported(tmp_path / name, found, monkeypatch).namespace)
    assert len(spaces) == 3


@pytest.mark.parametrize(("target", "said"), [("v100-predicted", "predicted"), ("v100-measured", "timings measured")])
def test_a_folder_says_what_its_timings_are_worth(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = exported(tmp_path, made(target=target), monkeypatch)
    assert said in done.timings
    for name in ("README.md", "manifest.json"):
        assert done.timings in (done.folder / name).read_text()


def test_kernels_that_need_more_shared_memory_than_a_launch_has_by_itself_are_allowed_it(tmp_path: Path) -> None:
    wide = replace(SMALL, hidden=12288)
    (tmp_path / "computing").mkdir()
    found = Computing(write(tmp_path, wide), wide, tmp_path / "computing")
    assert max(kernel.shared for kernel in found.kernels) > 48 << 10
    found.driver.library.fake_run(None)
    held = {name: torch.from_numpy(array) for name, array in golden.weights(wide.to_dict()).items()}
    layer, reason = found.op.bind(held, interleaved=wide.interleaved, top_k=wide.top_k)
    assert layer is not None, reason
    layer(*map(torch.from_numpy, golden.step(wide.to_dict(), 1)))
    assert found.driver.launches[0].shared > 48 << 10


# ---- what is not ---------------------------------------------------------------------------------------------------
def test_a_link_is_followed_and_nothing_is_left_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "folder"
    link.symlink_to(tmp_path / "real")
    for _ in range(2):  # into an empty folder, then in the place of an export
        exported(tmp_path, made(), monkeypatch)
        assert link.is_symlink()
        assert (link / export.MANIFEST).is_file()
        assert {path.name for path in tmp_path.iterdir()} == {"real", "folder", "set"}


def test_a_set_of_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="is the set of h200-measured, and an export is for a V100"):
        exported(tmp_path, made(target="h200-measured", device="NVIDIA H200"), monkeypatch)


def test_a_level_without_a_verified_winner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()
    with pytest.raises(RequestError, match="no verified winner at 2, 12 tokens"):
        exported(tmp_path, replace(found, levels={n: found.levels[n] for n in (1, 5)}), monkeypatch)


def test_a_level_without_a_verdict_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()
    bare = {n: replace(level, verdicts=()) for n, level in found.levels.items()}
    with pytest.raises(RequestError, match="expected other values for verdicts"):
        exported(tmp_path, replace(found, levels=bare), monkeypatch)


def test_verdicts_of_kernels_that_are_no_longer_rendered_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winners.write(made(), tmp_path / "set")
    texts = winners.rerender(made())
    changed = {f"{name[:-4]}0.cu" if name.startswith("w2_") else name: text for name, text in texts.items()}
    monkeypatch.setattr(winners, "rerender", lambda found: changed)
    with pytest.raises(RequestError, match=r"its verdicts are stale: this version renders w2_"):
        exported(tmp_path, made(), monkeypatch)


def test_another_compilers_machine_code_is_not_what_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"made with NVRTC 12\.8\.93, and its kernels are built by NVRTC 12\.9\.86"):
        exported(tmp_path, made(toolchain={"compiler": "NVRTC 12.8.93"}), monkeypatch)


def test_another_kind_of_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(MissingTool, match="is built on Linux on x86-64"):
        exported(tmp_path, made(), monkeypatch)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("three years")
    with pytest.raises(RequestError, match="holds no export: move it away"):
        exported(tmp_path, made(), monkeypatch)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "three years"


def test_a_failed_build_leaves_the_earlier_export_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (exported(tmp_path, made(), monkeypatch).folder / "manifest.json").read_bytes()
    monkeypatch.setattr(export, "_UNITS", ("no_such_file.c",))
    with pytest.raises(BuildFailed, match=r"no_such_file\.c"):
        exported(tmp_path, made(), monkeypatch)
    assert (tmp_path / "folder" / "manifest.json").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "set"]


# ---- the command, and the checked-in set ---------------------------------------------------------------------------
V100 = Path(__file__).parent.parent / "generated" / "qwen38-tp4" / "v100-predicted"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main contract's export, with its real machine code."""
    folder = tmp_path_factory.mktemp("whole") / "folder"
    command = ["export", "--contract", "qwen38-tp4", "--set", str(V100), "--output", str(folder), "--json"]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["folder"] == str(folder)
    return folder


def test_the_checked_in_sets_export_is_whole_and_small(whole: Path) -> None:
    own = conftest(whole)
    found = winners.read(V100)
    assert own.SPEC["max_tokens"] == found.contract.max_tokens
    assert own.SPEC["timings"] == "timings predicted for V100-PCIE-32GB, not measured on one"
    assert sum(path.stat().st_size for path in (whole / "src").glob("*.cubin")) <= 2_500_000
    library = (own.PACKAGE / own.SPEC["library"]).read_bytes()
    kernels = {path.stem: path.read_bytes() for path in (whole / "src").glob("*.cubin")}
    assert sorted(kernels) == sorted(own.SPEC["kernels"])
    assert all(library.count(code) == 1 for code in kernels.values())
    fused = {path.name for path in V100.glob("*.cu")}
    assert fused <= {f"{name}.cu" for name in kernels}


def test_its_golden_outputs_are_the_references(whole: Path) -> None:
    content = json.loads((whole / "manifest.json").read_text())["contract"]
    small = Contract.from_dict(content)
    x, ids, _ = golden.step(content, golden.ROWS)
    expected = np.load(whole / "tests" / "golden.npy")
    assert expected.shape == (golden.ROWS, small.hidden)
    assert np.isfinite(expected).all()
    assert (np.abs(expected).max(axis=1) > 0.01).all()
    assert len({tuple(row) for row in ids.tolist()}) == golden.ROWS
    assert (ids == -1).any()
    assert np.array_equal(golden.step(content, golden.ROWS + 1)[0][-1], x[0])


def test_golden_outputs_are_what_the_op_computes(computing: Computing) -> None:
    content = computing.small.to_dict()
    held = {name: shared(array) for name, array in golden.weights(content).items()}
    layer, reason = computing.op.bind(held, interleaved=computing.small.interleaved, top_k=computing.small.top_k)
    assert layer is not None, reason
    out = shared(np.zeros((golden.ROWS, computing.small.hidden), np.float16))
    workspace = torch.zeros(computing.spec["workspace_bytes"], dtype=torch.uint8).share_memory_()
    layer(*map(shared, golden.step(content, golden.ROWS)), out=out, workspace=workspace)
    expected = export._golden(computing.small)
    assert np.linalg.norm(out.numpy() - expected) <= computing.small.tolerance * np.linalg.norm(expected)


def test_the_command_refuses_a_contract_without_a_v100_set() -> None:
    result = CliRunner().invoke(cli.main, ["export", "--contract", "qwen3-235b-tp4"])
    assert result.exit_code == 2
    assert "no set of contract qwen3-235b-tp4 is tuned for a V100: run tune --contract qwen3-235b-tp4 first" in (
        result.stderr
    )


def test_the_command_refuses_a_set_of_another_contract() -> None:
    result = CliRunner().invoke(cli.main, ["export", "--contract", "qwen3-235b-tp4", "--set", str(V100)])
    assert result.exit_code == 2
    assert "is tuned for another contract than qwen3-235b-tp4" in result.stderr


# ---- the other target ----------------------------------------------------------------------------------------------
def test_the_source_target_holds_the_kernels_as_they_were_verified(tmp_path: Path) -> None:
    folder = write(tmp_path, target="source")
    kernels = frozen.tables(SMALL, {tokens: level.config for tokens, level in made().levels.items()}).kernels
    text = (folder / "csrc" / "kernels.cu").read_text()
    for kernel in kernels:
        assert (folder / "csrc" / "kernels" / f"{kernel.file}.cu").read_text() == kernel.source.text
        assert text.count(f'#include "kernels/{kernel.file}.cu"') == 1
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "csrc/frozen_op.c"]
    subprocess.run(command, cwd=folder, check=True)
    assert not list(folder.rglob("*.so"))


def test_where_nvcc_has_no_code_for_the_gpu_its_own_tests_are_skipped_and_say_why(tmp_path: Path) -> None:
    folder = write(tmp_path, target="source")
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\ntest $1 = --list-gpu-arch && echo compute_75 && echo compute_90\n")
    nvcc.chmod(0o755)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests"]
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "the nvcc here builds for compute_75, compute_90, not for sm_70" in done.stdout
    assert "passed" not in done.stdout


def test_a_sigterm_leaves_nothing_beside_the_folder(tmp_path: Path) -> None:
    """As Ctrl-C does."""
    (tmp_path / "bin").mkdir()
    gcc, place = tmp_path / "bin" / "gcc", tmp_path / "place"
    gcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 60\n")
    gcc.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, cli.__file__, "export", "--contract", "qwen38-tp4", "--output", str(place / "op")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        ends = time.monotonic() + 120
        while not (tmp_path / "begun").exists():
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.02)
        assert list(place.iterdir())
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "\nAborted!\n")
    assert list(place.iterdir()) == []


@pytest.mark.lab
@pytest.mark.parametrize("python", os.environ.get("VOLTUNE_TORCHES", "").split(":"))
def test_one_build_passes_its_tests_in_other_torches(whole: Path, python: str) -> None:
    """VOLTUNE_TORCHES: Pythons of environments that hold torch, NumPy and pytest alone, with colons between."""
    if not python:
        pytest.skip("VOLTUNE_TORCHES names no other environment")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(whole / "tests")]
    done = subprocess.run(command, cwd=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.lab
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_nvcc_builds_the_source_target_and_its_own_tests_pass(tmp_path: Path) -> None:
    folder = write(tmp_path, target="source")
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    arch = "sm_70" if "compute_70" in known else "sm_90"
    subprocess.run(["make", f"ARCH={arch}", f"PYTHON={sys.executable}"], cwd=folder, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
