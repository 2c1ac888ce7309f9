"""``attnswitch explain``: which backend a problem goes to, and why not the others."""

from __future__ import annotations

from typing import Annotated

import typer

import attnswitch
from attnswitch.planning.policy import Policy

from . import render

__all__ = ["explain"]


def explain(
    problem: Annotated[str, typer.Argument(help="For example b2.h16/4.s1024x4096.d128.bf16.causal; see README.")],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or a known GPU such as h200, here or not.")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="Ask for this backend.")] = None,
    policy: Annotated[
        Policy | None, typer.Option(help="What the choice may rest on. Default: ATTNSWITCH_POLICY, else estimate.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every backend's answer to PROBLEM and the choice. Exit code 0 if something takes it, 2 if nothing does."""
    plan = attnswitch.explain(problem, device=device, backend=backend, policy=policy)
    if json:
        render.write_json(render.plan_json(plan), None)
    else:
        render.plan(plan)
    if plan.chosen is None:
        raise typer.Exit(2)
