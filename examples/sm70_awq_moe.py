"""A Voltune export in an engine whose SM70 AWQ method prepares expert layers as vLLM-style engines do.

Wrap the engine's own method: it stays the way for every step that is not admitted, and for all when the op is rolled
back. The engine calls, in this order: `process_weights_after_loading` for each layer at load; `warm_up` for each layer,
on the stream that it will capture on; `apply` for each layer of a step, in a capture or not.
"""

import logging
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)


class VoltuneMoEMethod:
    """The engine's method for SM70 AWQ experts, with Voltune's op where that admits the step.

    op: the exported package. own: the engine's method. A prepared layer has w13_weight int32 [E, H, 2I/8], w13_stats,
    w2_weight int32 [E, I, H/8], w2_stats, w13_interleaved, top_k, params_dtype and expert_map (int32 or None).
    """

    def __init__(self, op: ModuleType, own: Any) -> None:
        self.op, self.own = op, own
        self._logged: set[str] = set()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets the engine prepare the layer, and binds the op to what it then holds: nothing is copied."""
        self.own.process_weights_after_loading(layer)
        held = {"w13_q": layer.w13_weight, "w13_scales": layer.w13_stats}
        held |= {"w2_q": layer.w2_weight, "w2_scales": layer.w2_stats}
        layer.voltune, reason = self.op.bind(
            held, interleaved=layer.w13_interleaved, top_k=layer.top_k, dtype=layer.params_dtype
        )
        if layer.voltune is None:
            self._log_once(f"AWQ experts: the engine's own kernels; not Voltune, because {reason}")
        else:
            why = self.op.available()[1]
            self._log_once(
                f"AWQ experts: Voltune, {self.op.NAMESPACE}, up to {self.op.MAX_TOKENS} tokens a step ({why})"
            )

    def warm_up(self, layer: Any, sizes: list[int]) -> None:
        """Runs each size that a capture will use and the op admits, with no expert named: it reads no weights."""
        if layer.voltune is None:
            return
        hidden, device = layer.w13_weight.shape[1], layer.w13_weight.device
        for tokens in sizes:
            if self.op.admits(tokens, layer.voltune):
                x = torch.zeros(tokens, hidden, dtype=layer.params_dtype, device=device)
                nobody = torch.full((tokens, layer.top_k), -1, dtype=torch.int32, device=device)
                self.apply(layer, x, torch.zeros(nobody.shape, device=device), nobody)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        live_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output. live_tokens: int32 [1] on the GPU, how many tokens of a padded batch are real."""
        if not self.op.admits(x.shape[0], layer.voltune):
            return self.own.apply(layer, x, topk_weights, topk_ids)
        return layer.voltune(x.contiguous(), topk_ids, topk_weights.float(), layer.expert_map, live_tokens)

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.info(line)
