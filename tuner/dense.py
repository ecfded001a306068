"""What a framework does without such kernels: dequantises each active expert to f16 and multiplies densely.

It runs by torch in the process that holds the CUDA context, on weights that are already there. A graph has fixed
routings, so that it need not look for the active experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tuner import tensors
from tuner.awq import NIBBLES, gemm
from tuner.contract import Contract
from tuner.device import Resident
from tuner.tensors import Array, Replay, Step


def run(contract: Contract, weights: Mapping[str, Resident], step: Step) -> Array:
    """The layer's output of one step, f16 [M, H]. Raises MissingTool without torch or its CUDA, LaunchFailed."""
    torch = tensors.load()
    with tensors.faults("running"):
        done = _Call(torch, "cuda", contract, step).run(tensors.views(torch, weights))
        found: Array = done.cpu().numpy()
        return found


def capture(contract: Contract, layers: Sequence[Mapping[str, Resident]], steps: Sequence[Step], calls: int) -> Replay:
    """A CUDA graph of `calls` calls, each on the next step and the next copy of the weights. Raises like `run`."""
    torch = tensors.load()
    with tensors.faults("capturing"):
        ready = [_Call(torch, "cuda", contract, step) for step in steps]
        views = [tensors.views(torch, weights) for weights in layers]
        turns = [partial(ready[i % len(ready)].run, views[i % len(views)]) for i in range(calls)]
        return tensors.capture(torch, [partial(call.run, views[0]) for call in ready], turns)


class _Call:
    """One step with its routing sorted out on the host."""

    def __init__(self, torch: Any, where: str, contract: Contract, step: Step) -> None:
        x, ids, route_weights = step
        self._torch, self._contract = torch, contract
        self._x = torch.from_numpy(x).to(where)
        self._shifts = torch.tensor([4 * place for place in NIBBLES], dtype=torch.int32, device=where)
        self._experts = []
        for expert in np.unique(ids[(ids >= 0) & (ids < contract.experts)]):
            tokens, columns = np.nonzero(ids == expert)
            rows = torch.from_numpy(tokens).to(where), torch.from_numpy(route_weights[tokens, columns]).to(where)
            self._experts.append((int(expert), *rows))

    def run(self, weights: Mapping[str, Any]) -> Any:
        """f16 [M, H]. weights: int32 words, and statistics in their own bytes, by operand name."""
        torch = self._torch
        out = torch.zeros(self._x.shape, dtype=torch.float32, device=self._x.device)
        for expert, tokens, shares in self._experts:
            both = self._x[tokens] @ self._dequantised("w13", weights, expert)
            gate, up = (both[:, 0::2], both[:, 1::2]) if self._contract.interleaved else both.chunk(2, dim=1)
            hidden = torch.nn.functional.silu(gate) * up
            rows = hidden @ self._dequantised("w2", weights, expert)
            out.index_add_(0, tokens, rows.float() * shares[:, None])
        return out.half()

    def _dequantised(self, stage: str, weights: Mapping[str, Any], expert: int) -> Any:
        """f16 [K, N], in the layout's order of columns; the orders are those of tuner.awq."""
        torch, shape = self._torch, gemm(self._contract, stage)
        words, scales = (weights[f"{stage.upper()}_{name}"][expert] for name in ("Q", "SCALES"))
        groups = shape.groups, shape.n
        if self._contract.layout == "awq":
            values = self._nibbles(words).reshape(shape.k, shape.n)
            zeros = self._nibbles(weights[f"{stage.upper()}_ZEROS"][expert]).reshape(groups).half()
        else:
            octets = self._nibbles(words.reshape(shape.n // 32, shape.k // 8, 32))
            values = octets.permute(1, 3, 0, 2).reshape(shape.k, shape.n)
            if self._contract.stats_bytes == 3:
                zeros = scales[..., 2].half()
                scales = scales[..., :2].contiguous().view(torch.float16).reshape(groups)
            else:
                pairs = scales.view(torch.float16).reshape(*groups, 2)
                scales, zeros = pairs[..., 0], -pairs[..., 1].float() / pairs[..., 0].float()
                zeros = zeros.nan_to_num(0.0, 0.0, 0.0).round().half()  # a scale of zero has no zero point
        grouped = values.half().reshape(shape.groups, shape.group, shape.n)
        return ((grouped - zeros[:, None]) * scales[:, None]).reshape(shape.k, shape.n)

    def _nibbles(self, words: Any) -> Any:
        return (words[..., None] >> self._shifts) & 15
