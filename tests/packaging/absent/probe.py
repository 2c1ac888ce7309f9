"""What attnswitch does in this process, as JSON: asked in processes that lack a package."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import attnswitch
from attnswitch import BackendUnavailable, Unsupported


def said(ask: Callable[[], Any]) -> str | None:
    """What it raised, with its type; None if it did not."""
    try:
        ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def calls() -> dict[str, str]:
    """By every backend: that output and gradients are right, or why it does not take the arrays of any library."""
    import torch

    rng = np.random.default_rng(0)
    query, key, value, grad = rng.standard_normal((4, 1, 2, 9, 8))
    expected = attnswitch.attention(query, key, value, is_causal=True, backend="reference")
    wanted = attnswitch.attention_backward(grad, query, key, value, is_causal=True, backend="reference")
    found = {}
    for name, absence in attnswitch.backends().items():
        leaves = [torch.tensor(x, requires_grad=True) for x in (query, key, value)]
        try:
            out = attnswitch.attention(*leaves, is_causal=True, backend=name)
            out.backward(torch.tensor(grad))
        except BackendUnavailable as error:
            found[name] = "says so" if absence and absence in str(error) else f"{absence} against {error}"
            continue
        except Unsupported as error:
            found[name] = "refuses float64" if "dtype float64" in str(error) else str(error)
            continue
        np.testing.assert_allclose(out.detach(), expected, rtol=1e-9, atol=1e-12)
        for leaf, exact in zip(leaves, wanted, strict=False):
            np.testing.assert_allclose(leaf.grad, exact, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
        found[name] = "right"
    return found


def verified(backend: str) -> int:
    """The exit code of ``attnswitch verify --quick`` on this backend."""
    main = importlib.import_module("attnswitch.cli.app").main

    command = ["attnswitch", "verify", "--quick", "--no-corpus", "--examples", "3", "--workers", "1"]
    sys.argv = [*command, "--device", "cpu", "--backend", backend]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def plotted() -> None:
    """Fails for want of a run, unless before that for want of matplotlib."""
    from attnswitch.bench import plots

    plots.draw("forward", {}, Path("plot.svg"))


def registered(name: str) -> None:
    module = importlib.import_module(f"attnswitch.integrations.{name}")
    if hasattr(module, "register"):
        module.register()


def integrations() -> dict[str, str | None]:
    """What each raises where it is registered; the other libraries' own warnings are none of ours."""
    names = ("torch", "jax", "transformers", "diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: said(functools.partial(registered, name)) for name in names}


def main(hidden: list[str], *backends: str) -> dict[str, Any]:
    """All of it; with no ``backends`` to verify, what integrations do alone."""
    facts: dict[str, Any] = {
        "found": [name for name in hidden if importlib.util.find_spec(name)],
        "imported": {name: said(functools.partial(importlib.import_module, name)) for name in hidden},
        "integrations": integrations(),
    }
    if backends:
        facts["backends"] = attnswitch.backends()
        facts["calls"] = calls()
        facts["plot"] = said(plotted)
        facts["verify"] = {name: verified(name) for name in backends}
    return facts


if __name__ == "__main__":
    print(json.dumps(main(os.environ["HIDDEN"].split(), *sys.argv[1:])))
