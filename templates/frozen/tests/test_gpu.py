"""Golden outputs, graphs, streams and compilers on a GPU. Without one these tests skip themselves; `--allow-ptx` lets
another GPU than a V100 compile the kernels' PTX."""

import threading
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
from conftest import CONTRACT, EXPERTS, MAX_TOKENS, TOP_K

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LEVELS = CONTRACT["tuning"]["levels"]
TOLERANCE = CONTRACT["tuning"]["tolerance"]
EXPECTED = np.load(Path(__file__).parent / "golden.npy")


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def layer(package, device, request):
    held = {name: torch.from_numpy(each).to(device) for name, each in golden.weights(CONTRACT).items()}
    interleaved = CONTRACT["weights"]["interleaved"]
    bound, reason = package.bind(
        held, interleaved=interleaved, top_k=TOP_K, allow_ptx=request.config.getoption("--allow-ptx")
    )
    if bound is None:
        pytest.skip(reason)
    return bound


def step(tokens, device):
    return tuple(torch.from_numpy(each).to(device) for each in golden.step(CONTRACT, tokens))


def check(out, live=None):
    """Rows of the first `live` tokens are the golden ones, within the contract's tolerance; the others are zero."""
    found = out.float().cpu().numpy()
    live = len(found) if live is None else live
    expected = EXPECTED[np.arange(live) % golden.ROWS].astype(np.float64)
    assert np.isfinite(found).all()
    assert not found[live:].any()
    if live:
        assert np.linalg.norm(found[:live] - expected) <= TOLERANCE * np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", sorted({*LEVELS, *(level - 1 for level in LEVELS if level > 1)}))
def test_golden_outputs(layer, device, tokens):
    check(layer(*step(tokens, device)))


@pytest.mark.parametrize("tokens", [1, LEVELS[len(LEVELS) // 2], MAX_TOKENS])
def test_every_run_has_the_same_bits(layer, device, tokens):
    given = step(tokens, device)
    first = layer(*given)
    assert all(torch.equal(layer(*given), first) for _ in range(100))


def test_int64_ids_a_map_and_live_tokens(layer, device):
    x, ids, shares = step(MAX_TOKENS, device)
    expected = layer(x, ids, shares)
    assert torch.equal(layer(x, ids.long(), shares), expected)
    order = torch.randperm(EXPERTS, device=device)
    inverse = torch.argsort(order).int()  # global id order[e] is local expert e
    mapped = torch.where(ids < 0, ids, order[ids.clamp(min=0).long()].int())
    assert torch.equal(layer(x, mapped, shares, expert_map=inverse), expected)
    for live in (0, 1, MAX_TOKENS):
        count = torch.tensor([live], dtype=torch.int32, device=device)
        out = layer(x, ids, shares, live_tokens=count)
        check(out, live)


def test_a_graph_is_right_for_routings_and_live_tokens_that_change(layer, package, device):
    x, ids, shares = step(MAX_TOKENS, device)
    live = torch.tensor([MAX_TOKENS], dtype=torch.int32, device=device)
    layer(x, ids, shares, live_tokens=live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, ids, shares, live_tokens=live)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        turned = torch.randperm(MAX_TOKENS, generator=generator).to(device)
        given = [each[turned].contiguous() for each in step(MAX_TOKENS, device)]
        count = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
        for held, new in zip((x, ids, shares), given, strict=True):
            held.copy_(new)
        live.fill_(count)
        graph.replay()
        expected = layer(*given, live_tokens=live)
        assert torch.equal(out, expected)
        assert not out[count:].any()
    package.check_workspaces()


def test_threads_on_two_streams(layer, package, device):
    given = step(LEVELS[-1], device)
    expected = layer(*given)
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    wrong = []

    def work(stream):
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.equal(layer(*given), expected):
                    wrong.append(stream)

    threads = [threading.Thread(target=work, args=(streams[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    package.check_workspaces()


def test_the_stages_give_the_ops_output(layer, package, device):
    x, ids, shares = step(MAX_TOKENS, device)
    half = len(layer.weights) // 2
    segments, rows = package.compact(ids)
    hidden = package.w13(x, segments, rows, *layer.weights[:half])
    check(package.w2(hidden, shares, segments, rows, *layer.weights[half:]))
    flat = torch.where(ids.flatten() < 0, EXPERTS, ids.flatten())
    sorted_rows = torch.argsort(flat, stable=True).int()
    counts = torch.bincount(flat, minlength=EXPERTS + 1)[:EXPERTS]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), counts.cumsum(0))).int()
    segments = package.compact_sorted(offsets, MAX_TOKENS)
    hidden = package.w13(x, segments, sorted_rows, *layer.weights[:half])
    check(package.w2(hidden, shares, segments, sorted_rows, *layer.weights[half:]))


def test_torch_compile(layer, device):
    given = step(2, device)
    function = torch.compile(lambda *tensors: layer(*tensors) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(*given), layer(*given) * 2)


def test_opcheck(layer, package, device):
    torch.library.opcheck(package.ops.moe.default, (*step(2, device), None, None, *layer.weights))


def test_a_wrong_call_is_refused_and_the_next_is_right(layer, device):
    x, ids, shares = step(2, device)
    with pytest.raises(RuntimeError, match="shares memory"):
        layer(x, ids, shares, out=x)
    with pytest.raises(RuntimeError, match="is on the wrong kind of device"):
        layer(x, ids.cpu(), shares)
    check(layer(x, ids, shares))
