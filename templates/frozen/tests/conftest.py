"""The folder's package as it is, and built again for CPU tensors against the stand-in driver of fake_driver.c."""

import ctypes
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent
(PACKAGE,) = (path.parent for path in (FOLDER / "build").glob("*/*/__init__.py"))
SPEC = json.loads((PACKAGE / "op.json").read_text())
CONTRACT = SPEC["contract"]
MAX_TOKENS, TOP_K, HIDDEN, EXPERTS = SPEC["max_tokens"], CONTRACT["top_k"], CONTRACT["hidden"], CONTRACT["experts"]
FAKE = f"{SPEC['namespace']}_fake"


def pytest_addoption(parser):
    parser.addoption("--allow-ptx", action="store_true", help="on another GPU than a V100, test the kernels' PTX")


def load(folder, name):
    """A folder's package, imported as `name`."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[each]
        raise
    return module


def sign(folder, **changed):
    """Gives a changed copy of the package the digests of what it now holds."""
    spec = json.loads((folder / "op.json").read_text()) | changed
    spec["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in spec["files"]}
    signed = {key: value for key, value in spec.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()
    (folder / "op.json").write_text(json.dumps(signed | {"digest": digest}))


def build(library, folder, *flags):
    """src/ built to `library`. The flags say what is another than in the folder's own."""
    src = folder / "src"
    shutil.copytree(FOLDER / "src", src)
    recipe = [line for line in (src / "Makefile").read_text().splitlines() if line.startswith("\t")]
    command = recipe[0].strip().replace(SPEC["library"], str(library))
    options = " ".join(f"'{flag}'" for flag in flags)
    subprocess.run(["sh", "-c", f"{command} {options}"], cwd=src, check=True)


@pytest.fixture(scope="session")
def package():
    """The folder's package."""
    return load(PACKAGE, "voltune_folder")


def build_driver(folder):
    """The stand-in driver's library, in an empty folder."""
    path = folder / "libfake_driver.so"
    stub = ["gcc", "-shared", "-o", str(folder / "libtorch.so"), str(FOLDER / "src" / "stub.c")]
    command = ["gcc", "-std=c11", "-O1", "-fPIC", "-Wall", "-Wextra", "-shared", "-o", str(path)]
    link = ["-Wl,--no-as-needed", f"-L{folder}", "-ltorch"]
    subprocess.run(stub, check=True)
    subprocess.run([*command, str(FOLDER / "tests" / "fake_driver.c"), *link], check=True)
    return path


def build_fake(folder, driver, namespace=FAKE):
    """The package in an empty folder, its library built for CPU tensors and the stand-in driver; else the same."""
    package = shutil.copytree(PACKAGE, folder / "package")
    build(
        package / SPEC["library"],
        folder / "built",
        "-DVOLTUNE_DEVICE_TYPE=aoti_torch_device_type_cpu",
        '-DVOLTUNE_DEVICE_NAME="a CPU tensor"',
        f'-DVOLTUNE_DRIVER="{driver}"',
        f'-DNAMESPACE="{namespace}"',
        "-Daoti_torch_get_current_cuda_stream=fake_current_stream",
        "-Daoti_torch_get_device_index=fake_device_index",
        str(driver),
        f"-Wl,-rpath,{driver.parent}",
    )
    sign(package, namespace=namespace, device_type="cpu")
    return load(package, namespace)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    """The stand-in driver's library."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def op(tmp_path_factory, fake_library):
    """The package for CPU tensors and the stand-in driver."""
    return build_fake(tmp_path_factory.mktemp("op"), fake_library)


class Record(ctypes.Structure):
    """fake_driver.c's record."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("gpu", "kernel")),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block")),
        *(("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("count", ctypes.c_int)),
        *(("arguments", ctypes.c_uint64 * 32), ("entry", ctypes.c_char * 64)),
    )


class Driver:
    """What a test says to the stand-in driver and asks it."""

    Run = ctypes.CFUNCTYPE(None, ctypes.POINTER(Record))

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.fake_record.restype = ctypes.POINTER(Record)
        for name, arguments in {op: each["arguments"] for op, each in SPEC["ops"].items()}.items():
            self.library.fake_entry(SPEC["ops"][name]["entry"].encode(), len(arguments))
        self.gpus = iter(range(1, 64))  # each is prepared once

    def reset(self, major=7, minor=0, sms=80, blocks=4):
        self.library.fake_reset(major, minor, sms, blocks)

    def fail(self, function, code=999, after=0):
        self.library.fake_fail(function.encode(), code, after)

    def stream(self, value):
        self.library.fake_stream(ctypes.c_void_p(value))

    def place(self, gpu, *tensors):
        for tensor in tensors:
            self.library.fake_place(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), gpu)

    def capture(self, stream):
        self.stream(stream)
        self.library.fake_capture(ctypes.c_void_p(stream))

    def end_capture(self, stream):
        return self.library.fake_end_capture(ctypes.c_void_p(stream))

    def replay(self, stream):
        self.library.fake_replay(ctypes.c_void_p(stream))

    def clear(self, stream):
        """Destroys the graph that was captured on a stream."""
        self.library.fake_clear(ctypes.c_void_p(stream))

    def run(self, function):
        self._running = self.Run(lambda record: function(record.contents))
        self.library.fake_run(self._running)

    @property
    def launches(self):
        return [self.library.fake_record(i).contents for i in range(self.library.fake_records())]

    @property
    def held(self):
        """Modules, contexts, and contexts pushed: what a failure must not leave more of."""
        return self.library.fake_modules(), self.library.fake_contexts(), self.library.fake_depth()


@pytest.fixture(scope="session")
def _driver(op, fake_library):
    return Driver(fake_library)


@pytest.fixture
def driver(_driver):
    _driver.reset()
    yield _driver
    _driver.reset()


def tensors_of(name, tokens, device="cpu"):
    """Operands of an op at a token count, by name, with memory but no values; optional ones None."""
    made = {}
    for each in SPEC["ops"][name]["operands"]:
        shape = [constant + per_token * tokens for constant, per_token in each["shape"]]
        made[each["name"]] = None
        if not each["optional"]:
            made[each["name"]] = torch.empty(shape, dtype=getattr(torch, each["types"][0]), device=device)
    for name in ("workspace", "topk_ids"):
        if name in made:
            made[name].zero_()
    return made


@pytest.fixture(scope="session")
def weights():
    """The layer's weight tensors by name, with memory but no values."""
    return {name: each for name, each in tensors_of("moe_out", 1).items() if name.startswith(("w13_", "w2_"))}
