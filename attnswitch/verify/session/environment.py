"""What a result was found on: versions and device names, nothing that identifies the machine."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import metadata

__all__ = ["environment"]

_PACKAGES = ("attnswitch", "torch", "numpy", "ml-dtypes", "hypothesis", "triton", "cupy-cuda13x", "cupy-cuda12x")


@functools.cache
def environment() -> dict[str, str]:
    """Names and versions as text."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["cores"] = str(os.cpu_count())
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = str(torch.get_num_threads())
        if torch.cuda.is_available():
            found["gpu"] = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
            found["cuda"] = str(torch.version.cuda)
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found
