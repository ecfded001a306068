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
from tuner.plan import Buffer, Plan

TOKENS = 5
HAS_GPU, WHY_NOT = device.available()
MADE = plan.make(SMALL, space.default(SMALL))
STAGED = plan.make(SMALL, space.default(SMALL), "staged")
(OP,) = (launch.kernel for launch in MADE.launches)
COMPACT, W13, W2 = (launch.kernel for launch in STAGED.launches)


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
    made = FakeCuda(MADE, {OP: fill_out, W2: fill_out})
    monkeypatch.setattr(device, "_bindings", lambda: (made, made))
    return made


def execute(gpu: Gpu, given: dict[str, Any] | None = None) -> plan.Outputs:
    return gpu.execute(MADE, images(MADE), operands() if given is None else given, TOKENS, "cubin")


# Operands


def test_an_operand_that_does_not_fit_is_refused_and_one_on_the_gpu_is_as_good_as_an_array(fake: FakeCuda) -> None:
    gpu, x = Gpu(), inputs(SMALL, TOKENS)
    gpu.step(MADE, operands() | {"X": gpu.upload(x)}, TOKENS)
    with pytest.raises(RequestError, match=r"operand X is float32 \[5, 256\]: expected float16 \[5, 256\]"):
        gpu.step(MADE, operands() | {"X": gpu.upload(x.astype(np.float32))}, TOKENS)


# Launches


def test_a_kernel_gets_each_operand_by_its_name_and_null_for_an_absent_one(fake: FakeCuda) -> None:
    given = operands() | {"EXPERT_MAP": np.arange(6, dtype=np.int32)}
    seen: dict[str, np.ndarray] = {}

    def look(arguments: dict[str, int]) -> None:
        for name in ("X", "TOPK_IDS", "EXPERT_MAP", "W13_Q", "W13_SCALES"):
            seen[name] = at(arguments[name], given[name].dtype.name, given[name].shape).copy()
        assert arguments["W13_ZEROS"] == arguments["LIVE_TOKENS"] == 0
        assert (arguments["TOKENS"], arguments["ID_BYTES"], arguments["MAP_SIZE"]) == (5, 4, 6)
        fill_out(arguments)

    fake.kernels = {OP: look}
    outputs = execute(Gpu(), given)
    assert set(seen) == {"X", "TOPK_IDS", "EXPERT_MAP", "W13_Q", "W13_SCALES"}
    for name, array in seen.items():
        np.testing.assert_array_equal(array, given[name])
    assert (outputs.out == 1.5).all() and outputs.out.shape == (5, 256)


def test_the_workspace_starts_as_poison_and_is_handed_from_kernel_to_kernel_and_back(fake: FakeCuda) -> None:
    def first(arguments: dict[str, int]) -> None:
        hidden = at(arguments["HIDDEN"], "uint32", (TOKENS * 3, 64))
        assert (hidden == 0xFFFFFFFF).all()
        hidden.view("float32")[...] = 2.0

    def second(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        at(arguments["HIDDEN"], "float32", (TOKENS * 3, 64))[...] += 1.0

    fake.plan, fake.kernels = STAGED, {W13: first, W2: second}
    outputs = Gpu().execute(STAGED, images(STAGED), operands(), TOKENS, "cubin")
    assert (outputs.hidden == 3.0).all() and outputs.hidden.shape == (15, 64)


def test_grid_block_and_shared_memory_are_the_plans(fake: FakeCuda) -> None:
    fake.plan = STAGED
    Gpu().execute(STAGED, images(STAGED), operands(), TOKENS, "cubin")
    for launch, seen in zip(STAGED.launches, fake.launches, strict=True):
        assert seen["kernel"] == launch.kernel
        grid, block, shared = seen["sizes"][:3], seen["sizes"][3:6], seen["sizes"][6]
        assert grid == (launch.grid[0].at(5), launch.grid[1].at(5), 1)
        assert (block, shared) == ((launch.block, 1, 1), launch.shared.at(5))


@pytest.mark.parametrize("made", [MADE, STAGED], ids=lambda made: made.name)
def test_a_launch_by_ticket_has_no_more_ctas_than_the_gpu_holds_at_once_and_any_other_all_of_its_own(
    made: Plan, fake: FakeCuda
) -> None:
    asked = []

    def blocks_per_sm(kernel: str, threads: int, shared: int) -> int:
        asked.append((kernel, threads, shared))
        return 2

    fake.plan, fake.blocks_per_sm = made, blocks_per_sm
    fake.attributes[16] = 3  # multiprocessors
    gpu = Gpu()
    kernels, step = gpu.load(made, images(made), "cubin"), gpu.step(made, operands(), TOKENS)
    for _ in range(2):  # a graph's launches too
        gpu.launch(Call(made, kernels, step))
        gpu.capture([Call(made, kernels, step)])
        fake.launches += fake.captured.pop()
        assert len(fake.launches) == 2 * len(made.launches)
        for launch, seen in zip(made.launches * 2, fake.launches, strict=True):
            whole = launch.grid[0].at(TOKENS)
            assert launch.by_ticket == (launch.kernel in (OP, W2))
            assert whole > 6 or not launch.by_ticket
            assert seen["sizes"][:3] == (6 if launch.by_ticket else whole, launch.grid[1].at(TOKENS), 1)
        fake.launches.clear()
    assert asked == [(launch.kernel, launch.block, launch.shared.at(TOKENS)) for launch in made.launches]


def test_a_launch_by_ticket_of_fewer_ctas_than_the_gpu_holds_keeps_them(fake: FakeCuda) -> None:
    execute(Gpu())
    (seen,) = fake.launches
    assert seen["sizes"][0] == MADE.launches[0].grid[0].at(TOKENS) < 80 * 8


def with_shared(nbytes: int) -> Plan:
    (op,) = MADE.launches
    return replace(MADE, launches=(replace(op, shared=plan.Linear(nbytes)),))


def test_more_than_48_kb_of_shared_memory_is_asked_for_and_no_less(fake: FakeCuda) -> None:
    gpu = Gpu()
    gpu.load(with_shared(48 << 10), images(MADE), "cubin")
    assert fake.dynamic_shared == {}
    gpu.load(with_shared((48 << 10) + 16), images(MADE), "cubin")
    assert fake.dynamic_shared == {OP: (48 << 10) + 16}


def test_more_shared_memory_than_the_gpu_has_is_an_invalid_config(fake: FakeCuda) -> None:
    with pytest.raises(InvalidConfig, match=r"voltune_op needs 98320 bytes.*Fake V100 has 98304"):
        Gpu().load(with_shared((96 << 10) + 16), images(MADE), "cubin")


def test_machine_code_of_another_gpu_is_refused_and_its_ptx_is_taken_as_a_c_string(fake: FakeCuda) -> None:
    fake.attributes |= {75: 9, 76: 0}
    gpu = Gpu()
    with pytest.raises(RequestError, match=r"sm_70 code, Fake V100 runs sm_90: use ptx"):
        gpu.load(MADE, images(MADE), "cubin")
    kernels = gpu.load(MADE, images(MADE), "ptx")
    assert list(fake.modules.values()) == [b"ptx\0"]
    del kernels
    assert fake.modules == {}


def test_an_output_element_left_unwritten_is_a_failure_that_names_it(fake: FakeCuda) -> None:
    def forgetful(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        at(arguments["OUT"], "uint16", (TOKENS, 256))[3, 7] = 0xFFFF

    fake.kernels = {OP: forgetful}
    with pytest.raises(LaunchFailed, match=r"1 elements of OUT were never written, first \[3, 7\]"):
        execute(Gpu())


@pytest.mark.parametrize(
    ("name", "offset"), [("OUT", -1), ("OUT", TOKENS * 256 * 2), ("HIDDEN", -1), ("HIDDEN", 15 * 64 * 4)]
)
def test_a_byte_written_just_outside_a_buffer_is_a_failure(fake: FakeCuda, name: str, offset: int) -> None:
    def stray(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        at(arguments[name] + offset, "uint8", (1,))[0] = 0

    fake.kernels = {OP: stray}
    with pytest.raises(LaunchFailed, match=r"1 bytes of the guard .* were overwritten"):
        execute(Gpu())


COUNTED = replace(
    STAGED,
    launches=tuple(replace(launch, arguments=(*launch.arguments, "TALLY")) for launch in STAGED.launches[1:]),
    buffers=(*STAGED.buffers, Buffer("TALLY", "int32", (plan.Linear(2), plan.Linear(0, 1)), "counters")),
)


def counters(arguments: dict[str, int]) -> np.ndarray:
    return at(arguments["TALLY"], "int32", (2, TOKENS))


def test_counters_start_at_zero_and_keep_what_a_launch_left_in_the_next_ones(fake: FakeCuda) -> None:
    seen = []

    def first(arguments: dict[str, int]) -> None:
        seen.append(counters(arguments).copy())
        counters(arguments)[0, 1] = 6

    def second(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        seen.append(counters(arguments).copy())
        counters(arguments)[...] = 0

    fake.plan, fake.kernels = COUNTED, {W13: first, W2: second}
    gpu = Gpu()
    step, kernels = gpu.step(COUNTED, operands(), TOKENS), gpu.load(COUNTED, images(COUNTED), "cubin")
    for _ in range(2):
        gpu.launch(Call(COUNTED, kernels, step))
    assert [array.tolist() for array in seen] == [[[0] * 5, [0] * 5], [[0, 6, 0, 0, 0], [0] * 5]] * 2
    assert (gpu.outputs(step).buffers["TALLY"] == 0).all()


def test_a_counter_not_left_zero_is_a_failure_that_names_it_and_a_poisoned_step_is_good_again(fake: FakeCuda) -> None:
    def forgetful(arguments: dict[str, int]) -> None:
        fill_out(arguments)
        counters(arguments)[1, 2:4] += [-3, 8]

    fake.plan, fake.kernels = COUNTED, {W2: forgetful}
    gpu = Gpu()
    step = gpu.step(COUNTED, operands(), TOKENS)
    call = Call(COUNTED, gpu.load(COUNTED, images(COUNTED), "cubin"), step)
    for _ in range(2):
        gpu.launch(call)
    with pytest.raises(LaunchFailed, match=r"^2 elements of the counters TALLY .* zero, first \[1, 2\]: -6"):
        gpu.outputs(step)
    fake.kernels = {W2: fill_out}
    gpu.poison(step)
    gpu.launch(call)
    gpu.outputs(step)


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
    fake.plan, gpu = STAGED, Gpu()
    step, kernels = gpu.step(STAGED, operands(), TOKENS), gpu.load(STAGED, images(STAGED), "cubin")
    layers = [{"W13_Q": gpu.upload(weights(SMALL).w13.q)} for _ in range(3)]
    fake.us = lambda launch: 7.0 if launch["kernel"] == W13 else 1000.0
    replay = gpu.capture([Call(STAGED, kernels, step.over(layer), ("w13",)) for layer in layers])
    assert fake.launches == []
    (graph,) = fake.graphs.values()
    assert [launch["arguments"]["W13_Q"] for launch in graph] == [layer["W13_Q"].address for layer in layers]
    assert replay.time_us() == pytest.approx(7.0)
    assert len(fake.replayed) == 2  # the first keeps the GPU busy and is not timed


def test_a_call_of_no_named_stage_is_the_whole_plan(fake: FakeCuda) -> None:
    fake.plan, gpu = STAGED, Gpu()
    call = Call(STAGED, gpu.load(STAGED, images(STAGED), "cubin"), gpu.step(STAGED, operands(), TOKENS))
    fake.us = lambda launch: {COMPACT: 20.0, W13: 7.0, W2: 1000.0}[launch["kernel"]]
    assert gpu.capture([call, call]).time_us() == pytest.approx(1027.0)


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
