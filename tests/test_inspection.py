"""What a contract and its kernels are said to need, against figures worked out by hand."""

from pathlib import Path

import pytest

from tuner import contract, inspection, space
from tuner.errors import InvalidConfig, RequestError
from tuner.options import Configs

QWEN = contract.load("qwen38-tp4")
DEFAULT = space.default(QWEN)


def test_a_contract_is_described_with_its_shapes_and_bytes() -> None:
    said = dict(inspection.describe(QWEN))
    # 2560 x 320 nibbles, and 80 groups of 3 bytes a column; 160 x 2560 and 5 groups.
    assert said["W13 [K, N]"] == "[2560, 320], 486,400 bytes an expert"
    assert said["W2 [K, N]"] == "[160, 2560], 243,200 bytes an expert"
    assert said["tensor parallel"] == "4: 160 of 640 intermediate a rank"
    assert said["weight layout"] == "sm70-u4, 3-byte statistics, gate and up interleaved"
    # 512 (1 - (1 - 10/512)^M) at 1 and 8 tokens
    assert said["active experts"].startswith("10.0, 19.8, ")
    assert said["tuned on"] == "uniform 50%, zipf 50%"


def test_a_kernels_bytes_and_floor_are_those_of_the_experts_it_reads() -> None:
    (op,) = inspection.inspect(QWEN, {1: DEFAULT}, "V100-PCIE-32GB")
    assert (op.tokens, op.stage, op.config) == (1, "op", DEFAULT.key())
    # One token has ten different experts, whatever the routing; the floor counts 2.5 bytes a group and column.
    assert op.active_experts == pytest.approx(10)
    assert op.weight_bytes == pytest.approx(10 * (486_400 + 243_200))
    w13, w2 = 2560 * 320 / 2 + 80 * 320 * 2.5, 160 * 2560 / 2 + 5 * 2560 * 2.5
    assert op.floor_us == pytest.approx(10 * (w13 + w2) / 900e3)


def test_occupancy_follows_from_the_registers_that_the_compiler_used() -> None:
    (kernel,) = inspection.inspect(QWEN, {8: DEFAULT}, "V100-PCIE-32GB")
    a_warp = -(-kernel.registers * 32 // 256) * 256
    warps = DEFAULT.w13.threads // 32
    by_registers = 65536 // a_warp // 4 * 4 // warps
    by_shared = 98304 // kernel.shared_bytes
    assert kernel.blocks_per_sm == min(by_registers, by_shared, 64 // warps, 32)
    assert kernel.warps_per_sm == kernel.blocks_per_sm * warps
    assert kernel.spill_bytes == 0


def test_the_row_has_a_cell_for_every_header_and_the_json_every_field() -> None:
    kernel = inspection.inspect(QWEN, {1: DEFAULT}, "V100-PCIE-32GB")[0]
    row = dict(zip(inspection.HEADERS, kernel.cells(), strict=True))
    assert row["registers"] == kernel.registers
    assert row["weight MB"] == pytest.approx(7.296)
    assert row["floor us"] == kernel.floor_us
    assert kernel.to_dict()["warnings"] == ()


def test_a_kernel_that_does_not_fit_the_gpu_is_refused_with_what_it_needs() -> None:
    large = space.parse("simt-t2-k20-u4-r1+simt-t40-k1-u5-r1+m512")  # forty warps
    with pytest.raises(InvalidConfig, match="1280 threads"):
        inspection.inspect(QWEN, {8: large}, "V100-PCIE-32GB")


def test_an_unknown_gpu_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="'V7'; described: V100-PCIE-32GB, "):
        inspection.inspect(QWEN, {1: DEFAULT}, "V7")


def test_machine_code_is_shown_for_a_v100_and_a_row_for_each_stretch_that_reads_weights() -> None:
    found = inspection.machine_code(QWEN, {1: DEFAULT}, "V100-PCIE-32GB")
    rows = [dict(zip(inspection.CODE_HEADERS, row, strict=True)) for row in inspection.code_rows(found)]
    assert {row["weights"] for row in rows} == {"W13_Q", "W2_Q"}
    # Of the fp32 family, a lone row's stretch and one of several rows: each weight takes three instructions at least.
    for operand in ("W13_Q", "W2_Q"):
        few, many = sorted(row["instr/8 w"] for row in rows if row["weights"] == operand)
        assert 3 * 8 < few < many
    assert all("LOP3" in row["opcodes there"] for row in rows)


def test_machine_code_of_another_architecture_is_not_read() -> None:
    assert inspection.machine_code(QWEN, {1: DEFAULT}, "H200") == []


def test_only_a_tuned_sets_evidence_for_a_v100_can_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the configurations are default: give --set"):
        inspection.record(Configs({1: DEFAULT}, "default"), [], "V100-PCIE-32GB")
    with pytest.raises(RequestError, match="H200 runs other: give a V100"):
        inspection.record(Configs({1: DEFAULT}, "winners", tmp_path), [], "H200")
