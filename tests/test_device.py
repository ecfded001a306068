"""The GPU executor: its own logic on a fake CUDA, and on a GPU where there is one."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import L2_BYTES, FakeCuda, at, images
from small import SMALL, inputs, run, weights

from tuner import build, device, nvml, plan, render, routing, space
from tuner.device import Call, Gpu
from tuner.errors import InvalidConfig, LaunchFailed, MissingTool, RequestError
from tuner.plan import Plan

TOKENS = 5
HAS_GPU, WHY_NOT = device.available()
MADE = plan.make(SMALL, space.default(SMALL))
W13, W2 = (launch.kernel for launch in MADE.launches)


def operands(made: Plan = MADE, tokens: int = TOKENS) -> dict[str, Any]:
    drawn, held = routing.make("uniform", SMALL, tokens, 3), weights(SMALL)
    return {
        "X": inputs(SMALL, tokens),
        "TOPK_IDS": drawn.ids,
        "TOPK_WEIGHTS": drawn.weights,
        "W13_Q": held.w13.q,
        "W13_SCALES": held.w13.scales,
        "W2_Q": held.w2.q,
        "W2_SCALES": held.w2.scales,
    }


def fill_out(arguments: dict[str, int]) -> None:
    at(arguments["OUT"], "float16", (TOKENS, SMALL.hidden))[...] = 1.5


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda(MADE, {W2: fill_out})
    monkeypatch.setattr(device, "_bindings", lambda: (made, made))
    return made


def execute(gpu: Gpu, given: dict[str, Any] | None = None) -> plan.Outputs:
    return gpu.execute(MADE, images(MADE), operands() if given is None else given, TOKENS, "cubin")


# Operands


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"X": None}, r"operand X is missing: expected float16 \[5, 256\]"),
        ({"X": np.zeros((5, 256), np.float32)}, r"operand X is float32 \[5, 256\]: expected float16"),
        (
            {"TOPK_IDS": np.zeros((5, 2), np.int32)},
            r"operand TOPK_IDS is int32 \[5, 2\]: expected int32 or int64 \[5, 3\]",
        ),
        ({"EXPERT_MAP": np.zeros(6, np.int64)}, r"operand EXPERT_MAP is int64 \[6\]: expected int32"),
        ({"TOKENS": 4}, "operand TOKENS is 4: expected 5"),
        ({"ID_BYTES": 8}, "operand ID_BYTES is 8: expected 4"),
    ],
)
def test_an_operand_that_does_not_fit_is_named_with_what_was_expected(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        device.resolve(MADE, operands() | change, TOKENS)


def test_more_tokens_than_the_contracts_largest_level_are_refused() -> None:
    with pytest.raises(RequestError, match="13 tokens: expected 1 to 12"):
        device.resolve(MADE, operands(), 13)


def test_the_scalars_follow_from_ids_and_map() -> None:
    wide = operands() | {"TOPK_IDS": np.zeros((TOKENS, 3), np.int64), "EXPERT_MAP": np.zeros(9, np.int32)}
    assert device.resolve(MADE, operands(), TOKENS)[1] == {"TOKENS": 5, "ID_BYTES": 4, "MAP_SIZE": 0}
    assert device.resolve(MADE, wide, TOKENS)[1] == {"TOKENS": 5, "ID_BYTES": 8, "MAP_SIZE": 9}


# Launches


def test_a_kernel_gets_each_operand_by_its_name_and_null_for_an_absent_one(fake: FakeCuda) -> None:
    given = operands() | {"EXPERT_MAP": np.arange(6, dtype=np.int32)}
    seen: dict[str, np.ndarray] = {}

    def look(arguments: dict[str, int]) -> None:
        for name in ("X", "TOPK_IDS", "EXPERT_MAP", "W13_Q", "W13_SCALES"):
            seen[name] = at(arguments[name], given[name].dtype.name, given[name].shape).copy()
        assert arguments["W13_ZEROS"] == arguments["LIVE_TOKENS"] == 0
        assert (arguments["TOKENS"], arguments["ID_BYTES"], arguments["MAP_SIZE"]) == (5, 4, 6)
        hidden = at(arguments["HIDDEN"], "uint32", (TOKENS * 3, 64))
        assert (hidden == 0xFFFFFFFF).all()
        hidden.view("float32")[...] = 2.0

    fake.kernels = {W13: look, W2: fill_out}
    outputs = execute(Gpu(), given)
    assert set(seen) == {"X", "TOPK_IDS", "EXPERT_MAP", "W13_Q", "W13_SCALES"}
    for name, array in seen.items():
        np.testing.assert_array_equal(array, given[name])
    assert (outputs.out == 1.5).all() and outputs.out.shape == (5, 256)
    assert (outputs.hidden == 2.0).all() and outputs.hidden.shape == (15, 64)


def test_grid_block_and_shared_memory_are_the_plans(fake: FakeCuda) -> None:
    execute(Gpu())
    for launch, seen in zip(MADE.launches, fake.launches, strict=True):
        assert seen["kernel"] == launch.kernel
        grid, block, shared = seen["sizes"][:3], seen["sizes"][3:6], seen["sizes"][6]
        assert grid == (launch.grid[0].at(5), launch.grid[1].at(5), 1)
        assert (block, shared) == ((launch.block, 1, 1), launch.shared.at(5))


def with_shared(nbytes: int) -> Plan:
    first, second = MADE.launches
    return replace(MADE, launches=(replace(first, shared=plan.Linear(nbytes)), second))


def test_more_than_48_kb_of_shared_memory_is_asked_for_and_no_less(fake: FakeCuda) -> None:
    gpu = Gpu()
    gpu.load(with_shared(48 << 10), images(MADE), "cubin")
    assert fake.dynamic_shared == {}
    gpu.load(with_shared((48 << 10) + 16), images(MADE), "cubin")
    assert fake.dynamic_shared == {W13: (48 << 10) + 16}


def test_more_shared_memory_than_the_gpu_has_is_an_invalid_config(fake: FakeCuda) -> None:
    with pytest.raises(InvalidConfig, match=r"voltune_w13 needs 98320 bytes.*Fake V100 has 98304"):
        Gpu().load(with_shared((96 << 10) + 16), images(MADE), "cubin")


def test_machine_code_of_another_gpu_is_refused_and_its_ptx_is_taken_as_a_c_string(fake: FakeCuda) -> None:
    fake.attributes |= {75: 9, 76: 0}
    gpu = Gpu()
    with pytest.raises(RequestError, match=r"sm_70 code, Fake V100 runs sm_90: use ptx"):
        gpu.load(MADE, images(MADE), "cubin")
    kernels = gpu.load(MADE, images(MADE), "ptx")
    assert list(fake.modules.values()) == [b"ptx\0", b"ptx\0"]
    del kernels
    assert fake.modules == {}


def test_an_output_element_left_unwritten_is_a_failure_that_names_it(fake: FakeCuda) -> None:
    def forgetful(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        at(arguments["OUT"], "uint16", (TOKENS, 256))[3, 7] = 0xFFFF

    fake.kernels = {W2: forgetful}
    with pytest.raises(LaunchFailed, match=r"1 elements of OUT were never written, first \[3, 7\]"):
        execute(Gpu())


@pytest.mark.parametrize(
    ("name", "offset"), [("OUT", -1), ("OUT", TOKENS * 256 * 2), ("HIDDEN", -1), ("HIDDEN", 15 * 64 * 4)]
)
def test_a_byte_written_just_outside_a_buffer_is_a_failure(fake: FakeCuda, name: str, offset: int) -> None:
    def stray(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        at(arguments[name] + offset, "uint8", (1,))[0] = 0

    fake.kernels = {W2: stray}
    with pytest.raises(LaunchFailed, match=r"1 bytes of the guard .* were overwritten"):
        execute(Gpu())


def test_a_cuda_error_is_a_launch_failure_with_its_text(fake: FakeCuda) -> None:
    gpu = Gpu()
    step = gpu.step(MADE, operands(), TOKENS)
    gpu.launch(Call(MADE, gpu.load(MADE, images(MADE), "cubin"), step))
    fake.fails_at_synchronize = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(LaunchFailed, match="cudaErrorIllegalAddress"):
        gpu.outputs(step)


def test_what_a_run_took_is_freed_when_it_is_over(fake: FakeCuda) -> None:
    gpu = Gpu()
    execute(gpu)
    assert fake.memory == {} and fake.modules == {}


def test_weights_already_on_the_gpu_are_used_in_place(fake: FakeCuda) -> None:
    gpu = Gpu()
    held = gpu.upload(weights(SMALL).w13.q)
    execute(gpu, operands() | {"W13_Q": held})
    assert fake.launches[0]["arguments"]["W13_Q"] == held.address
    np.testing.assert_array_equal(gpu.download(gpu.copy(held)), weights(SMALL).w13.q)


# Graphs


def test_a_graph_holds_the_chosen_stage_of_each_call_in_order_and_is_timed_a_call(fake: FakeCuda) -> None:
    gpu = Gpu()
    step, kernels = gpu.step(MADE, operands(), TOKENS), gpu.load(MADE, images(MADE), "cubin")
    layers = [{"W13_Q": gpu.upload(weights(SMALL).w13.q)} for _ in range(3)]
    fake.us = lambda launch: 7.0 if launch["kernel"] == W13 else 1000.0
    replay = gpu.capture([Call(MADE, kernels, step.over(layer), ("w13",)) for layer in layers])
    assert fake.launches == []
    (graph,) = fake.graphs.values()
    assert [launch["arguments"]["W13_Q"] for launch in graph] == [layer["W13_Q"].address for layer in layers]
    assert replay.time_us() == pytest.approx(7.0)
    assert len(fake.replayed) == 2  # the first keeps the GPU busy and is not timed


def test_a_call_of_no_named_stage_is_the_whole_plan(fake: FakeCuda) -> None:
    gpu = Gpu()
    call = Call(MADE, gpu.load(MADE, images(MADE), "cubin"), gpu.step(MADE, operands(), TOKENS))
    fake.us = lambda launch: 7.0 if launch["kernel"] == W13 else 1000.0
    assert gpu.capture([call, call]).time_us() == pytest.approx(1007.0)


# The machine


def test_what_the_executor_calls_is_in_cupys_bindings_with_the_fakes_constants() -> None:
    text = Path(device.__file__).read_text()
    for name, binding in zip(("driver", "runtime"), device._bindings(), strict=True):
        used = set(re.findall(rf"\b(?:self\._)?{name}\.(\w+)", text)) - {"api"}
        assert len(used) > 4
        for attribute in used:
            real, stand_in = getattr(binding, attribute), getattr(FakeCuda, attribute)
            assert real == stand_in if isinstance(real, int) else callable(real) == callable(stand_in)


def test_the_gpu_is_described_by_its_own_figures(fake: FakeCuda) -> None:
    info = Gpu().info
    assert (info.name, info.arch, info.sms, info.l2_bytes) == ("Fake V100", "sm_70", 80, L2_BYTES)
    assert info.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_reason_is_given_and_opening_one_is_a_missing_tool() -> None:
    assert WHY_NOT
    with pytest.raises(MissingTool, match=r"GPU|CuPy"):
        Gpu()


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
#define GPU ((void *)0x123456789)
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **h) { *h = GPU; return strcmp(bus, "0000:3B:00.0"); }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { strncpy(s, "GPU-1", n); return h != GPU; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.1", n); return 0; }
int nvmlDeviceGetClockInfo(void *h, int type, unsigned *mhz)
{ *mhz = type == 1 ? 1380 : type == 2 ? 877 : 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *r) { *r = 0x01 | 0x04 | 0x40; return 0; }
"""


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(folder / "nvml.so"), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return folder / "nvml.so"


def test_clocks_identity_and_what_limits_them_are_read_from_nvml(nvml_library: Path) -> None:
    found = nvml.Nvml("0000:3B:00.0", str(nvml_library))
    assert (found.uuid, found.driver) == ("GPU-1", "580.1")
    assert found.clocks() == nvml.Clocks(1380, 877, ("power cap", "hardware thermal slowdown"))


@pytest.mark.parametrize(
    "where", [lambda library: ("0000:00:00.0", str(library)), lambda _: ("0000:3B:00.0", "absent.so")]
)
def test_without_nvml_or_for_a_gpu_it_does_not_know_clocks_are_zero(
    nvml_library: Path, where: Callable[[Path], tuple[str, str]]
) -> None:
    found = nvml.Nvml(*where(nvml_library))
    assert (found.uuid, found.driver, found.clocks()) == ("", "", nvml.Clocks())


@pytest.mark.skipif(not HAS_GPU, reason=WHY_NOT)
@pytest.mark.parametrize("name", ["fused", "staged", "all-experts"])
def test_on_a_gpu_a_plan_gives_the_cpu_executors_bits(name: plan.PlanName) -> None:
    made, gpu = plan.make(SMALL, space.default(SMALL), name), Gpu()
    try:
        built = {stage: build.build(source) for stage, source in render.render(made).items()}
        code: device.Code = "cubin" if gpu.info.arch == "sm_70" else "ptx"
    except MissingTool:
        built = {stage: build.build(source, gpu.info.arch) for stage, source in render.render(made).items()}
        code = "cubin"
    given = operands()
    outputs = gpu.execute(made, built, given, TOKENS, code)
    wanted = run(SMALL, given["X"], given["TOPK_IDS"], given["TOPK_WEIGHTS"], name=name)
    np.testing.assert_array_equal(outputs.out.view(np.uint16), wanted.out.view(np.uint16))
    np.testing.assert_array_equal(outputs.hidden.view(np.uint32), wanted.hidden.view(np.uint32))
