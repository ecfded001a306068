"""Unpacks the probe into a folder of its own, runs it, and takes the folder away again."""

import importlib.util
import os
import sys
import tempfile
import zipfile


def main():
    missing = [name for name in ("numpy", "jinja2") if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 11) or missing:
        have = f"Python {sys.version_info[0]}.{sys.version_info[1]}" + "".join(f", no {name}" for name in missing)
        sys.exit(f"the probe needs Python 3.11 with NumPy and Jinja2, as beside torch; here: {have}")
    with tempfile.TemporaryDirectory(prefix="voltune-probe-") as folder:
        with zipfile.ZipFile(os.path.dirname(os.path.abspath(__file__))) as archive:
            archive.extractall(folder)
        sys.path.insert(0, folder)
        os.environ["VOLTUNE_CUDA"] = "driver"
        from tuner import probing

        return probing.main(folder)


if __name__ == "__main__":
    sys.exit(main())
