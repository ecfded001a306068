"""Loads the op: checks every file's digest, registers the ops with torch, and holds what Python keeps for them."""

import ctypes
import hashlib
import json
import os
import threading
from pathlib import Path

import torch

HERE = Path(__file__).parent
OLDEST_TORCH = (2, 8)
_TEXT = 640  # bytes of a reason, as backend.h has it


def _sound():
    """op.json, if it and every file it names are as they were exported. Raises ImportError, but for what is rolled back
    and runs nothing."""
    remedy = "restore the folder, or export it again"
    try:
        content = json.loads((HERE / "op.json").read_bytes())
        if os.environ.get(content["variable"]) == "0":
            return content
        signed = json.dumps({k: v for k, v in content.items() if k != "digest"}, sort_keys=True).encode()
        damaged = [] if hashlib.sha256(signed).hexdigest() == content["digest"] else ["op.json"]
        digests = content["files"].items() if not damaged else ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImportError(f"{HERE / 'op.json'} cannot be used ({error}): {remedy}") from None
    for name, digest in digests:
        try:
            found = hashlib.sha256((HERE / name).read_bytes()).hexdigest()
        except OSError as error:
            raise ImportError(f"{HERE / name} cannot be read ({error.strerror}): {remedy}") from None
        damaged += [name] if found != digest else []
    if damaged:
        raise ImportError(f"{HERE}: {', '.join(damaged)} not as exported: the digest differs; {remedy}")
    return content


def _load():
    """The library, with its ops registered. Raises ImportError."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"torch {torch.__version__}: the op needs 2.8 or newer")
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"{LIBRARY} cannot be loaded into torch {torch.__version__}: {error}") from None
    if library.voltune_register() == 2:
        raise ImportError(
            f"torch.ops.{NAMESPACE} cannot be registered: the same export was loaded from another folder, or torch "
            f"{torch.__version__} refused it; torch's reason is on stderr"
        )
    library.voltune_stream.restype = ctypes.c_ssize_t
    library.voltune_capturing.argtypes = ctypes.c_int, ctypes.c_ssize_t
    library.voltune_capturing.restype = ctypes.c_bool
    return library


SPEC = _sound()
NAMESPACE = SPEC["namespace"]
LIBRARY = HERE / SPEC["library"]
VARIABLE = SPEC["variable"]
MAX_TOKENS = SPEC["max_tokens"]
SETTING = os.environ.get(VARIABLE, "")
if SETTING not in ("", "0", "1"):
    raise ImportError(f"{VARIABLE}={SETTING!r}: expected 0 (roll back), 1 (anything missing is an error), or unset")

ROLLED_BACK = f"{VARIABLE}=0: rolled back" if SETTING == "0" else ""  # the reason, if it is


class _RolledBack:
    """In the place of what is not loaded."""

    def __getattr__(self, name):
        raise RuntimeError(ROLLED_BACK)


_library = _RolledBack() if ROLLED_BACK else _load()
ops = _RolledBack() if ROLLED_BACK else getattr(torch.ops, NAMESPACE)
_first = not ROLLED_BACK and not hasattr(ops, "moe")  # else it was imported before, under another name


def _fake(*operands):
    """What an op that writes its operands and returns nothing looks like to a compiler."""


if _first:
    for _name in SPEC["ops"]:
        torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake)


def prepare(index, allow_ptx):
    """Loads the kernels on a GPU, once. Raises RuntimeError with the driver's reason."""
    text = ctypes.create_string_buffer(_TEXT)
    ptx = None
    if allow_ptx and SPEC["target"] == "op":  # a build of one's own is for one's own GPU
        texts = [(HERE / "ptx" / f"{name}.ptx").read_bytes() for name in SPEC["kernels"]]
        ptx = (ctypes.c_char_p * len(texts))(*texts)
    if _library.voltune_prepare(index, ptx, text):
        raise RuntimeError(text.value.decode(errors="replace"))


class Workspaces:
    """One workspace a (device, stream): scratch memory that is zero before each call, and that each call leaves zero.

    A capture cannot make one that eager calls may use too, so that `reserve` lays one by for the first stream that is
    captured before it has run anything.
    """

    def __init__(self):
        self._held, self._spare, self._lock = {}, {}, threading.Lock()

    @staticmethod
    def new(device):
        return torch.zeros(SPEC["workspace_bytes"], dtype=torch.uint8, device=device)

    def reserve(self, device):
        with self._lock:
            if device not in self._spare:
                self._spare[device] = self.new(device)
                if device.type == "cuda":  # zero before any other stream may take it
                    torch.cuda.current_stream(device).synchronize()

    def get(self, device):
        if device.type != SPEC.get("device_type", "cuda"):  # torch's own answer to that is a trace on stderr
            raise RuntimeError(f"{NAMESPACE}: x is on the wrong kind of device, {device}: expected a CUDA tensor")
        index = device.index or 0
        stream = _library.voltune_stream(index)
        held = self._held.get((device, stream))
        if held is not None:
            return held
        if stream == -1:
            raise RuntimeError(f"this torch, {torch.__version__}, gives no CUDA stream: install one built with CUDA")
        key, capturing = (device, stream), _library.voltune_capturing(index, stream)
        with self._lock:
            if key not in self._held:
                if not capturing:
                    self._held[key] = self.new(device)
                elif device in self._spare:
                    self._held[key] = self._spare.pop(device)
                else:
                    raise RuntimeError(
                        f"this stream of {device} has no workspace, and a capture cannot make one: call the op on it "
                        "once before the capture, or prepare(device) again"
                    )
            return self._held[key]

    def check(self):
        """Waits for the GPUs; raises RuntimeError where a workspace is not zero, which no call leaves behind."""
        for (device, stream), held in list(self._held.items()):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if held.any():
                raise RuntimeError(f"the workspace of stream {stream:#x} of {device} is not zero: what wrote to it?")


workspaces = Workspaces()


def moe(x, topk_ids, topk_weights, expert_map, live_tokens, weights, out=None, workspace=None):
    """The whole op, on this stream's workspace by default. Raises RuntimeError, and then has launched nothing."""
    call = ops.moe_out
    if out is None:
        out = torch.empty_like(x)
    if workspace is None:
        workspace = workspaces.get(x.device)
    call(x, topk_ids, topk_weights, expert_map, live_tokens, *weights, workspace, out)
    return out


def _define_functional():
    """`moe` as an op of torch, opaque to torch.compile: its workspace is no tensor of the compiled program."""
    weights = [each["name"] for each in SPEC["ops"]["moe_out"]["operands"] if each["name"].startswith(("w13_", "w2_"))]
    inputs = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor? live_tokens"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"moe({inputs}, {', '.join(f'Tensor {name}' for name in weights)}) -> Tensor")

    def run(x, topk_ids, topk_weights, expert_map, live_tokens, *weights):
        return moe(x, topk_ids, topk_weights, expert_map, live_tokens, weights)

    library.impl("moe", run, "CUDA")
    library.impl("moe", run, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::moe", lambda x, *_: torch.empty_like(x), lib=library)
    return library


_functional = _define_functional() if _first else None  # whose end would take the op away
