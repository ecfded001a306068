"""The op on CPU tensors against the stand-in driver: arguments, refusals, streams, capture, compilers. Nothing
computes."""

import contextlib
import random
import threading
import warnings
from pathlib import Path

import pytest
import torch
from conftest import CONTRACT, EXPERTS, FAKE, HIDDEN, MAX_TOKENS, SPEC, TOP_K, tensors_of

LEVELS = CONTRACT["tuning"]["levels"]
OPERANDS = [each["name"] for each in SPEC["ops"]["moe_out"]["operands"]]
INTERLEAVED = CONTRACT["weights"]["interleaved"]


@pytest.fixture
def layer(op, driver, weights):
    bound, reason = op.bind(weights, interleaved=INTERLEAVED, top_k=TOP_K)
    assert bound is not None, reason
    return bound


def step(tokens, ids=torch.int32):
    x = torch.zeros(tokens, HIDDEN, dtype=torch.float16)
    return x, torch.zeros(tokens, TOP_K, dtype=ids), torch.zeros(tokens, TOP_K)


def prepare(op, gpu, allow_ptx=False):
    op._ops.prepare(gpu, allow_ptx)


def call(op, tensors, name="moe_out"):
    getattr(op.ops, name)(*tensors.values())


# ---- arguments -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPEC["ops"])
@pytest.mark.parametrize("tokens", sorted({1, 2, MAX_TOKENS}))
def test_every_operand_reaches_the_kernel_and_every_launch_has_its_levels_shape(op, layer, driver, name, tokens):
    tensors = tensors_of(name, tokens)
    call(op, tensors, name)
    (launch,) = driver.launches
    given = list(launch.arguments[: launch.count])
    assert launch.entry.decode() == SPEC["ops"][name]["entry"]
    assert launch.count == len(SPEC["ops"][name]["arguments"])
    assert (launch.grid[2], launch.block[1], launch.block[2]) == (1, 1, 1)
    for each, tensor in tensors.items():
        if tensor is not None and each != "workspace":
            assert tensor.data_ptr() in given, each
    if "workspace" in tensors:
        start = tensors["workspace"].data_ptr()
        assert start in given or any(start < value < start + tensors["workspace"].nbytes for value in given)
    pointers = [
        value for kind, value in zip(SPEC["ops"][name]["arguments"], given, strict=True) if kind == "p" and value
    ]
    assert len(set(pointers)) == len(pointers)
    scalars = [value for kind, value in zip(SPEC["ops"][name]["arguments"], given, strict=False) if kind == "i"]
    assert set(scalars) <= {0, 4, tokens}


def test_the_scalars_follow_from_the_tensors(op, layer, driver):
    tensors = tensors_of("moe_out", 2)
    tensors["topk_ids"] = tensors["topk_ids"].long()
    tensors["expert_map"] = torch.zeros(EXPERTS + 3, dtype=torch.int32)
    tensors["live_tokens"] = torch.ones(1, dtype=torch.int32)
    call(op, tensors)
    (launch,) = driver.launches
    given = list(launch.arguments[: launch.count])
    kinds = SPEC["ops"]["moe_out"]["arguments"]
    assert [value for kind, value in zip(kinds, given, strict=True) if kind == "i"] == [8, EXPERTS + 3, 2]
    assert tensors["expert_map"].data_ptr() in given
    assert tensors["live_tokens"].data_ptr() in given


def test_a_count_between_two_levels_takes_the_next_ones_kernel(layer, driver):
    expected = dict(zip(LEVELS, SPEC["ops"]["moe_out"]["levels"], strict=True))
    for tokens in range(1, MAX_TOKENS + 1):
        driver.reset()
        layer(*step(tokens))
        (launch,) = driver.launches
        assert launch.kernel == expected[next(level for level in LEVELS if tokens <= level)]


def test_ctas_are_no_more_than_the_gpu_holds_or_there_is_work_for(op, driver):
    def ctas(sms):
        gpu = next(driver.gpus)
        driver.reset(sms=sms, blocks=1)
        prepare(op, gpu)
        tensors = tensors_of("moe_out", MAX_TOKENS)
        driver.place(gpu, *(each for each in tensors.values() if each is not None))
        call(op, tensors)
        return driver.launches[0].grid[0]

    work = ctas(10**6)
    assert 1 < work < 10**6
    assert [ctas(sms) for sms in (1, work - 1, work, work + 1)] == [1, work - 1, work, work]


# ---- refusals ------------------------------------------------------------------------------------------------------
def wrong(change):
    tensors = tensors_of("moe_out", 2)
    change(tensors)
    return tensors


def swapped(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


def shifted(tensor):
    """The same shape, beginning 2 bytes later."""
    wide = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
    return wide[1 : tensor.numel() + 1].view(tensor.shape)


REFUSED = {
    "dtype of x": (swapped("x", lambda t: t.float()), "x is float32"),
    "dtype unknown": (swapped("x", lambda t: t.bfloat16()), "x is of another dtype"),
    "dtype of ids": (swapped("topk_ids", lambda t: t.float()), "expected int32 or int64"),
    "dtype of weights": (swapped("topk_weights", lambda t: t.half()), "topk_weights is float16"),
    "hidden size": (swapped("x", lambda t: t[:, :-32].contiguous()), "x is float16"),
    "top-k": (swapped("topk_ids", lambda t: t[:, :-1].contiguous()), "topk_ids is int32"),
    "rows of the weights": (swapped("topk_weights", lambda t: t[:1]), "topk_weights is float32"),
    "experts": (swapped("w13_q", lambda t: t[:-1]), "w13_q is int32"),
    "dimensions": (swapped("w2_scales", lambda t: t.flatten()), "w2_scales is"),
    "strides": (swapped("x", lambda t: torch.zeros(HIDDEN, 2, dtype=t.dtype).t()), "x is not contiguous"),
    "alignment": (swapped("x", shifted), "expected an address that 16 divides"),
    "out": (swapped("out", lambda t: t[:1]), "out is float16"),
    "workspace": (swapped("workspace", lambda t: t[:-1]), "workspace is uint8"),
    "empty map": (swapped("expert_map", lambda t: torch.empty(0, dtype=torch.int32)), "expected int32 [1 or more]"),
    "live tokens": (swapped("live_tokens", lambda t: torch.zeros((), dtype=torch.int32)), "live_tokens is int32 []"),
    "aliasing of out": (lambda t: t.update(out=t["x"]), "out shares memory with x"),
    "aliasing of the workspace": (
        lambda t: t.update(out=t["workspace"][: t["out"].nbytes].view(torch.float16).view(t["out"].shape)),
        "shares memory with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_operand_is_refused_in_words_and_nothing_is_launched(op, layer, driver, case):
    change, words = REFUSED[case]
    held = driver.held
    with pytest.raises(RuntimeError) as caught:
        call(op, wrong(change))
    assert f"{FAKE}::moe_out: " in str(caught.value)
    assert words in str(caught.value)
    assert driver.launches == []
    assert driver.held == held


@pytest.mark.parametrize("tokens", [0, MAX_TOKENS + 1])
def test_a_step_that_is_not_admitted_is_refused(op, layer, driver, tokens):
    assert not op.admits(tokens, layer)
    with pytest.raises(RuntimeError, match=f"expected the rows of 1 to {MAX_TOKENS} tokens"):
        layer(*step(tokens))
    assert driver.launches == []


@pytest.mark.parametrize("tokens", [1.0, 1.5, "1", None])
def test_what_is_no_integer_is_not_admitted(op, layer, tokens):
    assert op.admits(1, layer)
    assert not op.admits(tokens, layer)


def test_what_is_admitted_runs(op, layer, driver):
    assert all(op.admits(tokens, layer) for tokens in LEVELS)
    for tokens in LEVELS:
        assert layer(*step(tokens)).shape == (tokens, HIDDEN)
    assert not op.admits(1, None)


def test_a_gpu_that_is_not_prepared_is_refused(op, driver):
    tensors = tensors_of("moe_out", 1)
    driver.place(next(driver.gpus), *(each for each in tensors.values() if each is not None))
    with pytest.raises(RuntimeError, match="is not prepared: call bind"):
        call(op, tensors)


def test_tensors_on_two_gpus_are_refused(op, layer, driver):
    tensors = tensors_of("moe_out", 1)
    driver.place(next(driver.gpus), tensors["topk_weights"])
    with pytest.raises(RuntimeError, match="expected one device"):
        call(op, tensors)


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuCtxPushCurrent_v2"])
def test_a_failure_of_the_driver_in_a_call_is_told_and_leaves_the_workspace_and_contexts_as_they_were(
    op, layer, driver, function
):
    layer(*step(1))
    held = driver.held
    driver.fail(function)
    with pytest.raises(RuntimeError, match="a failure the test asked for \\(CUDA error 999\\)"):
        layer(*step(1))
    assert driver.held == held
    op.check_workspaces()
    layer(*step(1))


def test_refused_calls_free_every_handle(op, layer, driver):
    tensors = tensors_of("moe_out", 2) | {"expert_map": torch.zeros(EXPERTS, dtype=torch.int32)}
    tensors["out"] = tensors["out"][:1]
    before = {name: each._use_count() for name, each in tensors.items() if each is not None}
    for _ in range(5):
        with pytest.raises(RuntimeError):
            call(op, tensors)
    assert {name: each._use_count() for name, each in tensors.items() if each is not None} == before


def test_calls_free_every_handle(op, layer, driver):
    tensors = tensors_of("moe_out", 2) | {"live_tokens": torch.ones(1, dtype=torch.int32)}
    before = {name: each._use_count() for name, each in tensors.items() if each is not None}
    for _ in range(5):
        call(op, tensors)
    assert {name: each._use_count() for name, each in tensors.items() if each is not None} == before


def resident_kilobytes():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("good", [True, False])
def test_calls_do_not_grow_the_process(op, layer, driver, good):
    tensors = tensors_of("moe_out", 1) | {"live_tokens": torch.ones(1, dtype=torch.int32)}
    tensors["expert_map"] = torch.zeros(EXPERTS, dtype=torch.int32)
    given = list(tensors.values()) if good else [tensors["x"][:0], *list(tensors.values())[1:]]

    def calls(count):
        for _ in range(count):
            with contextlib.nullcontext() if good else pytest.raises(RuntimeError):
                op.ops.moe_out(*given)

    calls(5_000)  # which fills the stand-in's records
    before, count = resident_kilobytes(), 100_000 if good else 20_000
    calls(count)
    assert (resident_kilobytes() - before) * 1024 < 8 * count


# ---- preparing -----------------------------------------------------------------------------------------------------
STEPS = ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2")
STEPS += ("cuModuleLoadData", "cuModuleGetFunction", "cuOccupancyMaxActiveBlocksPerMultiprocessor")


@pytest.mark.parametrize("function", STEPS)
def test_a_gpu_that_cannot_be_prepared_says_why_holds_nothing_and_can_be_prepared_later(op, driver, function):
    gpu, held = next(driver.gpus), driver.held
    late = function in ("cuModuleLoadData", "cuModuleGetFunction") and len(SPEC["kernels"]) > 1
    driver.fail(function, after=1 if late else 0)
    with pytest.raises(RuntimeError, match=rf"device {gpu}: .* failed: a failure the test asked for"):
        prepare(op, gpu)
    assert driver.held == held
    prepare(op, gpu)


def test_preparing_again_loads_nothing(op, layer, driver):
    held = driver.held
    prepare(op, 0)
    assert driver.held == held


def test_another_gpu_is_refused_and_runs_the_ptx_on_request(op, driver):
    gpu = next(driver.gpus)
    driver.reset(major=9)
    with pytest.raises(RuntimeError, match=r"compute capability 9\.0, and these kernels are machine code of 7\.0"):
        prepare(op, gpu)
    prepare(op, gpu, allow_ptx=True)


def test_a_gpu_without_room_for_a_cta_is_refused(op, driver):
    gpu, held = next(driver.gpus), driver.held
    driver.reset(blocks=0)
    with pytest.raises(RuntimeError, match="has no room for a CTA"):
        prepare(op, gpu)
    assert driver.held == held


def test_preparing_during_a_capture_is_refused_by_the_driver_and_leaves_nothing(op, driver):
    gpu, held = next(driver.gpus), driver.held
    driver.capture(0x1000)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        prepare(op, gpu)
    assert driver.held == held
    driver.end_capture(0x1000)
    driver.stream(None)


def test_two_gpus_have_kernels_of_their_own(op, layer, driver):
    gpu = next(driver.gpus)
    prepare(op, gpu)
    tensors = tensors_of("moe_out", 1)
    call(op, tensors)
    driver.place(gpu, *(each for each in tensors.values() if each is not None))
    call(op, tensors)
    assert [launch.gpu for launch in driver.launches] == [0, gpu]


# ---- binding -------------------------------------------------------------------------------------------------------
def test_binding_reads_the_weights_in_place(op, layer, driver, weights):
    layer(*step(1))
    (launch,) = driver.launches
    assert {each.data_ptr() for each in weights.values()} <= set(launch.arguments[: launch.count])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda w: w.pop("w2_q"), {}, "expected a tensor for each of ["),
        (lambda w: w.update(w13_q=w["w13_q"][:-1]), {}, "w13_q is int32"),
        (lambda w: w.update(w13_q=w["w13_q"].float()), {}, "w13_q is float32"),
        (lambda w: w.update(w2_q=w["w2_q"].transpose(1, 2).contiguous().transpose(1, 2)), {}, "not contiguous"),
        (lambda w: None, {"interleaved": not INTERLEAVED}, f"interleaved = {not INTERLEAVED}: expected {INTERLEAVED}"),
        (lambda w: None, {"top_k": TOP_K + 1}, f"top_k = {TOP_K + 1}: expected {TOP_K}"),
        (lambda w: None, {"dtype": torch.bfloat16}, "expected torch.float16"),
    ],
    ids=["missing", "experts", "dtype", "strides", "interleaved", "top-k", "bf16"],
)
def test_weights_that_do_not_fit_are_a_reason_and_warned_of_once(op, driver, weights, change, options, words):
    changed = dict(weights)
    change(changed)
    given = {"interleaved": INTERLEAVED, "top_k": TOP_K} | options
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            bound, reason = op.bind(changed, **given)
            assert bound is None
            assert words in reason
    assert [words in str(each.message) for each in told] == [True]


# ---- streams, capture, threads -------------------------------------------------------------------------------------
def workspace_of(launch, op):
    """Where the workspace of a launch begins: its first buffer's address."""
    held = [each.data_ptr() for each in op._ops.workspaces._held.values()]
    return next(start for start in held if start in launch.arguments[: launch.count])


def test_each_stream_has_a_workspace_of_its_own_and_the_launch_goes_to_it(op, layer, driver):
    for stream in (0x10, 0x20, 0x10):
        driver.stream(stream)
        layer(*step(1))
    first, second, again = driver.launches
    assert [each.stream for each in (first, second, again)] == [0x10, 0x20, 0x10]
    assert workspace_of(first, op) == workspace_of(again, op) != workspace_of(second, op)


def test_a_capture_on_a_new_stream_takes_the_workspace_laid_by_and_a_second_is_refused(op, layer, driver):
    op.prepare("cpu")
    driver.capture(0x30)
    layer(*step(1))
    assert driver.end_capture(0x30) == 1
    assert driver.launches == []
    driver.capture(0x40)
    with pytest.raises(RuntimeError, match="a capture cannot make one"):
        layer(*step(1))
    driver.end_capture(0x40)
    driver.stream(0x30)
    driver.replay(0x30)
    assert len(driver.launches) == 1


def test_a_replay_launches_what_was_captured_on_the_same_memory(op, layer, driver):
    op.prepare("cpu")
    x, ids, shares = step(2)
    layer(x, ids, shares)
    driver.capture(0x50)
    out = layer(x, ids, shares)
    driver.end_capture(0x50)
    for _ in range(3):
        driver.replay(0x50)
    eager, *replays = driver.launches
    assert len(replays) == 3
    for each in replays:
        assert list(each.grid) == list(eager.grid)
        assert {x.data_ptr(), ids.data_ptr(), shares.data_ptr(), out.data_ptr()} <= set(each.arguments[: each.count])


def test_threads_on_two_streams_share_nothing_but_the_streams_workspace(op, layer, driver):
    wrong = []

    def work(stream):
        driver.stream(stream)
        for _ in range(100):
            out = layer(*step(1))
            if out.shape != (1, HIDDEN):
                wrong.append(stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (0x60, 0x70, 0x60, 0x70)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(driver.launches) == 400
    found = {(each.stream, workspace_of(each, op)) for each in driver.launches}
    assert len(found) == 2


def test_a_workspace_that_is_not_zero_is_found(op, layer, driver):
    layer(*step(1))
    held = op._ops.workspaces.get(torch.device("cpu"))
    held[random.Random(0).randrange(len(held))] = 1
    with pytest.raises(RuntimeError, match="is not zero"):
        op.check_workspaces()
    held.zero_()
    op.check_workspaces()


# ---- compilers -----------------------------------------------------------------------------------------------------
def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_torch_compile_keeps_the_op_and_its_shapes(op, layer, driver):
    function = compiled(lambda x, ids, shares: layer(x, ids, shares) + 1)
    assert function(*step(2)).shape == (2, HIDDEN)
    assert function(*step(3)).shape == (3, HIDDEN)
    assert [launch.entry.decode() for launch in driver.launches] == [SPEC["ops"]["moe_out"]["entry"]] * 2


def test_torch_compile_keeps_the_op_that_writes_its_operands(op, layer, driver):
    def function(*tensors):
        op.ops.moe_out(*tensors)
        return tensors[-1] * 2

    tensors = tensors_of("moe_out", 2)
    compiled(function)(*tensors.values())
    (launch,) = driver.launches
    assert tensors["x"].data_ptr() in launch.arguments[: launch.count]


def test_torch_compile_keeps_the_stages(op, layer, driver, weights):
    scratch = op.workspace("cpu")
    first, second = ([each for name, each in weights.items() if name.startswith(half)] for half in ("w13_", "w2_"))

    def function(x, ids, shares):
        segments, rows = op.compact(ids)
        hidden = op.w13(x, segments, rows, *first)
        return op.w2(hidden, shares, segments, rows, *second, workspace=scratch)

    assert compiled(function)(*step(3)).shape == (3, HIDDEN)
    entries = [SPEC["ops"][name]["entry"] for name in ("compact", "w13", "w2_out")]
    assert [launch.entry.decode() for launch in driver.launches] == entries


@pytest.mark.parametrize("name", SPEC["ops"])
def test_opcheck_passes(op, layer, driver, name):
    torch.library.opcheck(getattr(op.ops, name).default, tuple(tensors_of(name, 2).values()))


def test_opcheck_passes_for_the_functional_op(op, layer, driver, weights):
    driver.run(lambda record: None)
    torch.library.opcheck(
        op.ops.moe.default, (*step(2), None, None, *weights.values()), test_utils=("test_schema", "test_faketensor")
    )


# ---- the stages ----------------------------------------------------------------------------------------------------
def test_the_stages_pass_their_segments_on(op, layer, driver, weights):
    x, ids, shares = step(3)
    own = (
        [weights[name] for name in weights if name.startswith("w13_")],
        [weights[name] for name in weights if name.startswith("w2_")],
    )
    segments, rows = op.compact(ids)
    hidden = op.w13(x, segments, rows, *own[0])
    out = op.w2(hidden, shares, segments, rows, *own[1])
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    sorted_segments = op.compact_sorted(offsets, 3)
    assert [each.shape for each in sorted_segments] == [each.shape for each in segments]
    assert out.shape == (3, HIDDEN)
    entries = [SPEC["ops"][name]["entry"] for name in ("compact", "w13", "w2_out", "compact_sorted")]
    assert [launch.entry.decode() for launch in driver.launches] == entries
    listed = {each.data_ptr() for each in (*segments, rows)}
    for launch in driver.launches[:3]:
        assert listed <= set(launch.arguments[: launch.count])
