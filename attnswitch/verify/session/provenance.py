"""What produced a result: versions of software and names of devices. Nothing of it identifies the machine."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib import metadata

__all__ = ["provenance"]

_PACKAGES = ("attnswitch", "torch", "numpy", "ml-dtypes", "hypothesis", "triton", "cupy-cuda13x", "cupy-cuda12x")


@functools.cache
def provenance() -> dict[str, str]:
    """Names and versions as text."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["cores"] = str(os.cpu_count())
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = str(torch.get_num_threads())
        if torch.cuda.is_available():
            facts["gpu"] = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
            facts["cuda"] = str(torch.version.cuda)
            facts["cudnn"] = str(torch.backends.cudnn.version())
    return facts
