"""The worked integration, on a stand-in for an engine's layer, its order of calls and its padded graphs."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frozen_set import Computing, write
from small import SMALL, inputs, references, weights

torch = pytest.importorskip("torch")

from examples.sm70_awq_moe import VoltuneMoEMethod  # noqa: E402  which imports torch

STREAM = 0x300


class Own:
    """The engine's own method: what it prepares, and how often it computed a step itself."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            setattr(layer, f"{name}_weight", layer.checkpoint[f"{name}_q"])
            setattr(layer, f"{name}_stats", layer.checkpoint[f"{name}_scales"])
        del layer.checkpoint

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        self.steps.append(len(x))
        return torch.zeros_like(x)


def shared(array: np.ndarray) -> Any:
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array.copy()).share_memory_()


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Computing:
    place = tmp_path_factory.mktemp("example")
    return Computing(write(place), SMALL, place)


@pytest.fixture
def on_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the op and the adapter allocate, where the CPU executor's processes see it."""
    for name in ("empty_like", "zeros", "full"):
        made: Callable[..., Any] = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, made=made, **given: made(*args, **given).share_memory_())
    yield


def prepared(computing: Computing, **changed: Any) -> tuple[VoltuneMoEMethod, Any]:
    """A method and a layer as the engine has them after loading."""
    held = weights(SMALL)
    layer = SimpleNamespace(
        checkpoint={
            f"{name}_{part}": shared(getattr(gemm, part))
            for name, gemm in (("w13", held.w13), ("w2", held.w2))
            for part in ("q", "scales")
        },
        w13_interleaved=True,
        top_k=SMALL.top_k,
        params_dtype=torch.float16,
        expert_map=None,
    )
    vars(layer).update(changed)
    method = VoltuneMoEMethod(computing.op, Own())
    method.process_weights_after_loading(layer)
    return method, layer


def step(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, SMALL.experts, (tokens, SMALL.top_k), dtype=np.int32)
    return inputs(SMALL, tokens, seed), rng.random((tokens, SMALL.top_k), dtype=np.float32), ids


def right(out: Any, given: tuple[np.ndarray, ...], live: int) -> None:
    x, shares, ids = given
    expected = references(SMALL).exact(x, ids, shares, live_tokens=live).output
    assert np.linalg.norm(out.numpy() - expected) <= SMALL.tolerance * np.linalg.norm(expected)
    assert not out.numpy()[live:].any()


def test_captured_graphs_of_padded_batches_are_right_for_every_routing_and_live_count(
    computing: Computing, on_shared_memory: None
) -> None:
    method, layer = prepared(computing)
    driver, sizes = computing.driver, [12, 5, 2, 1]
    driver.stream(STREAM)
    method.warm_up(layer, sizes)
    for size in sizes:
        x, shares, ids = (shared(each) for each in step(size, 0))
        live = shared(np.array([size], np.int32))
        driver.capture(STREAM)
        out = method.apply(layer, x, shares, ids, live)
        assert driver.end_capture(STREAM) == 1
        for seed, real in enumerate((size, max(1, size - 2), 1)):
            given = step(size, seed)
            for held, new in zip((x, shares, ids), given, strict=True):
                held.copy_(torch.from_numpy(new))
            live.fill_(real)
            driver.replay(STREAM)
            right(out, given, real)
        driver.clear(STREAM)
    assert method.own.steps == []
    computing.op.check_workspaces()


def test_warming_up_runs_each_admitted_size_once_and_names_no_expert(
    computing: Computing, on_shared_memory: None
) -> None:
    method, layer = prepared(computing)
    before = len(computing.driver.launches)
    method.warm_up(layer, [1, 5, 12, 13, 64])
    assert len(computing.driver.launches) == before + 3
    assert method.own.steps == []


def test_a_step_that_is_not_admitted_takes_the_engines_own_way(computing: Computing, on_shared_memory: None) -> None:
    method, layer = prepared(computing)
    x, shares, ids = (shared(each) for each in step(13, 0))
    method.apply(layer, x, shares, ids)
    assert method.own.steps == [13]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"w13_interleaved": False}, "interleaved = False: expected True"),
        ({"params_dtype": torch.bfloat16}, "dtype = torch.bfloat16: expected torch.float16"),
        ({"top_k": 8}, "top_k = 8: expected 3"),
    ],
)
def test_a_layer_that_does_not_fit_takes_the_engines_own_way_and_says_why_once(
    computing: Computing, changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.warns(UserWarning, match="is not used"):
        method, layer = prepared(computing, **changed)
    method.process_weights_after_loading(layer_again := prepared_again(layer))
    assert [record.message for record in caplog.records] == [
        f"AWQ experts: the engine's own kernels; not Voltune, because {reason}"
    ]
    method.warm_up(layer_again, [1])
    method.apply(layer, *(shared(each) for each in step(2, 0)))
    assert method.own.steps == [2]


def prepared_again(layer: Any) -> Any:
    """Another layer like it, not yet prepared."""
    held = {
        "w13_q": layer.w13_weight,
        "w13_scales": layer.w13_stats,
        "w2_q": layer.w2_weight,
        "w2_scales": layer.w2_stats,
    }
    return SimpleNamespace(checkpoint=held, **{name: value for name, value in vars(layer).items() if "w2_" not in name})


def test_one_log_line_says_that_the_op_is_used(computing: Computing, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    method, layer = prepared(computing)
    method.process_weights_after_loading(prepared_again(layer))
    (record,) = caplog.records
    assert record.message.startswith(f"AWQ experts: Voltune, {computing.op.NAMESPACE}, up to 12 tokens a step")


def test_the_adapter_is_under_80_lines() -> None:
    path = Path(__file__).parent.parent / "examples" / "sm70_awq_moe.py"
    assert len(path.read_text().splitlines()) < 80
