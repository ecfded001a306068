"""The dense arm's arithmetic, where torch is; its weights' orders are checked on the CPU."""

from typing import Any

import numpy as np
import pytest
from small import LAYOUTS, inputs, references, weights

from tuner import dense, routing, tensors
from tuner.errors import MissingTool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routed", ["uniform", "single-hot"])
def test_the_dense_arm_gives_the_reference_but_for_f16(layout: str, routed: str) -> None:
    torch = pytest.importorskip("torch")
    small = LAYOUTS[layout]
    made = routing.make(routed, small, 5, 0)
    step = inputs(small, 5), made.ids, made.weights
    held = weights(small)
    tensors: dict[str, Any] = {}
    for prefix, part in (("W13", held.w13), ("W2", held.w2)):
        for name, array in (("Q", part.q), ("SCALES", part.scales), ("ZEROS", part.zeros)):
            if array is not None:
                signed = array.view(np.int32) if array.dtype == np.uint32 else array
                tensors[f"{prefix}_{name}"] = torch.from_numpy(signed)
    out = dense._Call(torch, "cpu", small, step).run(tensors).numpy()
    expected = references(small).exact(*step).output
    error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert out.dtype == np.float16
    assert error < 2e-3


def test_without_torch_the_arm_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingTool, match=r"torch cannot be imported.*install a PyTorch with CUDA"):
        tensors.load()
