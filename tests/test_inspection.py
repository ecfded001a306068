"""What a contract and its kernels are said to need, against figures worked out by hand."""

import pytest

from tuner import contract, inspection, space
from tuner.errors import InvalidConfig, RequestError
from tuner.space import Config, W2Config

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
    w13, w2 = inspection.inspect(QWEN, {1: DEFAULT}, "V100-PCIE-32GB")
    assert (w13.tokens, w13.stage, w13.config) == (1, "w13", DEFAULT.w13.key())
    assert (w2.tokens, w2.stage, w2.config) == (1, "w2", DEFAULT.w2.key())
    # One token has ten different experts, whatever the routing; the floor counts 2.5 bytes a group and column.
    assert w13.active_experts == w2.active_experts == pytest.approx(10)
    assert w13.weight_bytes == pytest.approx(10 * 486_400)
    assert w13.floor_us == pytest.approx(10 * (2560 * 320 / 2 + 80 * 320 * 2.5) / 900e3)
    assert w2.floor_us == pytest.approx(10 * (160 * 2560 / 2 + 5 * 2560 * 2.5) / 900e3)


def test_occupancy_follows_from_the_registers_that_the_compiler_used() -> None:
    (kernel, _) = inspection.inspect(QWEN, {8: DEFAULT}, "V100-PCIE-32GB")
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
    assert row["weight MB"] == pytest.approx(4.864)
    assert row["floor us"] == kernel.floor_us
    assert kernel.to_dict()["warnings"] == ()


def test_a_kernel_that_does_not_fit_the_gpu_is_refused_with_what_it_needs() -> None:
    large = Config(DEFAULT.w13, W2Config("simt", 32, 1, 5, 8))
    with pytest.raises(InvalidConfig, match="1024 threads"):
        inspection.inspect(QWEN, {8: large}, "V100-PCIE-32GB")


def test_an_unknown_gpu_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="'V7'; described: V100-PCIE-32GB, "):
        inspection.inspect(QWEN, {1: DEFAULT}, "V7")
