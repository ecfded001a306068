"""Mixture-of-experts decode of one AWQ layer on a V100, as Torch ops. README.md of the folder shows how to use it.

Importing checks that every file is as exported, and needs neither GPU nor driver; what is missing for use, `available`
and `bind` say.
"""

import warnings

import torch

try:
    from . import _ops, _weights
    from ._ops import MAX_TOKENS, NAMESPACE, VARIABLE, ops
    from ._weights import convert_weights
except SyntaxError as error:
    raise ImportError(f"{error.filename} is not as exported: restore the folder, or export it again") from None

__all__ = [
    *("MAX_TOKENS", "NAMESPACE", "VARIABLE", "Layer", "admits", "available", "bind", "check_workspaces"),
    *("compact", "compact_sorted", "moe", "ops", "prepare", "w13", "w2", "workspace"),
    "convert_weights",
]

_CONTRACT = _ops.SPEC["contract"]


def available(device=None):
    """(whether the op can be used on this GPU, why): `why` says what is missing, or where the timings come from."""
    if _ops.ROLLED_BACK:
        return False, _ops.ROLLED_BACK
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no GPU: install the NVIDIA driver and a torch built with CUDA"
    index = torch.cuda.current_device() if device is None else torch.device(device).index or 0
    capability = torch.cuda.get_device_capability(index)
    if _ops.SPEC["target"] == "op" and capability != (7, 0):
        name = torch.cuda.get_device_name(index)
        return (
            False,
            f"{name} has compute capability {capability[0]}.{capability[1]}: the kernels are code of 7.0, a V100's",
        )
    if _ops.SPEC["target"] == "op" and not any(map(_runs_on_a_v100, torch.cuda.get_arch_list())):
        return (
            False,
            f"torch {torch.__version__} has no code of its own for a V100: install one built with CUDA 12 that has "
            "sm_70 in torch.cuda.get_arch_list()",
        )
    return True, _ops.SPEC["timings"]


def _runs_on_a_v100(arch):  # an entry of torch.cuda.get_arch_list()
    kind, _, number = arch.partition("_")
    return arch == "sm_70" or (kind == "compute" and number.isdigit() and int(number) <= 70)


def admits(tokens, layer):
    """Whether `layer`, what `bind` returned first, takes a step of `tokens` tokens, an integer: the one question that
    warm-up and a step ask."""
    return layer is not None and isinstance(tokens, int | torch.SymInt) and 1 <= tokens <= MAX_TOKENS


def prepare(device=None, allow_ptx=False):
    """Makes a GPU ready: loads the kernels, and lays a workspace by for a capture. Once at load, outside any capture.

    allow_ptx: on another GPU than a V100, let its driver compile the kernels' PTX: to check the op, not to time it.
    Raises RuntimeError with the reason.
    """
    device = _device(device)
    _ops.prepare(device.index or 0, allow_ptx)
    _ops.workspaces.reserve(device)


def _device(device):
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def bind(tensors, *, interleaved, top_k, dtype=torch.float16, allow_ptx=False):
    """(a Layer on these weights, "") or (None, the reason why not), once at load.

    tensors: the weights by name, as the contract's layout has them and the engine holds them: they are read in place.
    interleaved: whether W13's columns are gate 0, up 0, gate 1, ...; top_k, dtype: of the engine's calls.
    Unset, the environment variable VARIABLE makes a reason a warning, once; 1 makes it a RuntimeError; 0 is a reason.
    """
    try:
        if _ops.ROLLED_BACK:
            raise ValueError(_ops.ROLLED_BACK)
        facts = {
            "interleaved": (interleaved, _CONTRACT["weights"]["interleaved"]),
            "top_k": (top_k, _CONTRACT["top_k"]),
        }
        facts["dtype"] = dtype, torch.float16
        wrong = [f"{name} = {given}: expected {own}" for name, (given, own) in facts.items() if given != own]
        if wrong:
            raise ValueError("; ".join(wrong))
        weights = _weights.check(tensors)
        prepare(weights[0].device, allow_ptx)
    except (ValueError, RuntimeError) as error:
        reason = str(error)
        if _ops.SETTING == "1":
            raise RuntimeError(f"{VARIABLE}=1, and the op cannot be used: {reason}") from error
        if not _ops.ROLLED_BACK:
            _warn_once(reason)
        return None, reason
    return Layer(weights), ""


_said = set()


def _warn_once(reason):
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"{NAMESPACE} is not used: {reason}", stacklevel=3)


class Layer:
    """One layer's weights, bound. Call it with a step that `admits`."""

    def __init__(self, weights):
        self.weights = tuple(weights)

    def __call__(self, x, topk_ids, topk_weights, expert_map=None, live_tokens=None, *, out=None, workspace=None):
        """The layer's output f16 [M, H]: see `moe`."""
        return moe(x, topk_ids, topk_weights, *self.weights, expert_map=expert_map, live_tokens=live_tokens, out=out,
                   workspace=workspace)  # fmt: skip


def moe(x, topk_ids, topk_weights, *weights, expert_map=None, live_tokens=None, out=None, workspace=None):
    """Routed experts of one step: f16 [M, H].

    x f16 [M, H]; topk_ids int32 or int64 [M, k], where what names no local expert contributes nothing; topk_weights f32
    [M, k]; weights in the order of `convert_weights`; expert_map int32, global id -> local or -1; live_tokens int32 [1]
    on the GPU: tokens past it stream no weights and give zeros. Every tensor contiguous and on one GPU that is
    prepared. By default `out` is new, and the workspace the current stream's; one workspace serves one stream at a
    time, so that graphs captured on one stream must not be replayed at once. Raises RuntimeError; then nothing has been
    launched.
    """
    if torch.compiler.is_compiling() and out is None and workspace is None:
        return ops.moe(x, topk_ids, topk_weights, expert_map, live_tokens, *weights)
    return _ops.moe(x, topk_ids, topk_weights, expert_map, live_tokens, weights, out, workspace)


def workspace(device=None):
    """Scratch memory for `workspace=` of one caller: zero, as every call leaves it. Not from within a capture."""
    return _ops.Workspaces.new(_device(device))


def check_workspaces():
    """Waits for the GPUs. Raises RuntimeError where a workspace is not zero: something else has written to it, and
    later calls on its stream would be wrong."""
    _ops.workspaces.check()


# The stages alone, for an engine that sorts itself. A slot is token * k + choice; S = M * k. Segments are (count int32
# [1], expert int32 [S], begin int32 [S + 1]): count[0] of them; segment i's slots are rows[begin[i]:begin[i + 1]].


def compact(topk_ids, *, expert_map=None, live_tokens=None):
    """(segments, rows int32 [S]) of raw ids."""
    slots = topk_ids.numel()
    segments, rows = _segments(slots, topk_ids), topk_ids.new_empty(slots, dtype=torch.int32)
    ops.compact(topk_ids, expert_map, live_tokens, *segments, rows)
    return segments, rows


def compact_sorted(offsets, tokens):
    """Segments of slots the engine has sorted: expert e has rows[offsets[e]:offsets[e + 1]]; offsets int32 [E + 1]."""
    segments = _segments(tokens * _CONTRACT["top_k"], offsets)
    ops.compact_sorted(offsets, *segments)
    return segments


def _segments(slots, like):
    return tuple(like.new_empty(size, dtype=torch.int32) for size in (1, slots, slots + 1))


def w13(x, segments, rows, *weights):
    """silu(gate) * up of each routed slot, f32 [S, I]; rows of other slots are not written. weights: W13's."""
    features = _CONTRACT["intermediate"] // _CONTRACT["tensor_parallel"]
    hidden = x.new_empty((len(rows), features), dtype=torch.float32)
    ops.w13(x, *segments, rows, *weights, hidden)
    return hidden


def w2(hidden, topk_weights, segments, rows, *weights, out=None, workspace=None):
    """W2 and the weighted sum over a token's routed slots, f16 [M, H]. weights: W2's."""
    if out is None:
        out = hidden.new_empty((len(topk_weights), _CONTRACT["hidden"]), dtype=torch.float16)
    workspace = _ops.workspaces.get(hidden.device) if workspace is None else workspace
    ops.w2_out(hidden, topk_weights, *segments, rows, *weights, workspace, out)
    return out
