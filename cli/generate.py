"""``attnswitch bench generate``: tokens per second of transformers' ``generate()``, beside ``sdpa``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import track

from attnswitch.verify.session.provenance import provenance

from . import files, render
from .named import named, present

if TYPE_CHECKING:
    from attnswitch.bench.generate import Rate

__all__ = ["generate"]


def generate(
    size: Annotated[
        Literal["tiny", "small", "1b"] | None,
        typer.Option(help="Of the Llama; 1b is some layers of one of a billion. Default: tiny on a CPU, else 1b."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, metavar="N", help="In place of those of the size.")] = None,
    cache: Annotated[
        Literal["dynamic", "static", "both"], typer.Option(help="Of keys and values, as transformers has them.")
    ] = "both",
    padding: Annotated[
        Literal["none", "left", "both"], typer.Option(help="Whether all prompts but one begin with padding.")
    ] = "both",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts.")] = 2,
    prompt: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of the first prompts.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that are generated for each.")] = 32,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Tokens that a prompt is longer than the last. Default: as many as no length comes twice.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Runs of each implementation, in turn.")] = 9,
    backend: Annotated[str | None, typer.Option(help="Of attnswitch. Default: the choice.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the model. Default: float32 on a CPU, else bfloat16."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Of torch on the CPU.")] = 1,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Let transformers compile the model, as it does with static caches.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the first GPU, else the CPU.")] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to FILE as JSON; - for standard output.")
    ] = None,
) -> None:
    """Time tokens that transformers generates through attnswitch and through sdpa, in turn, and compare the tokens.

    The model is a Llama of random weights.

    Exit code 0: good. 1: a token differs by more than rounding explains. 2: the tool could not do its work.
    """
    import torch  # slow to import

    from attnswitch.bench import generate as bench

    where = present(device)
    chosen = None if backend in (None, "auto") else named(backend or "")
    quiet = files.is_standard(json)
    files.check([json])
    torch.set_num_threads(threads)
    start = time.monotonic()
    kind = getattr(torch, dtype or ("float32" if where == "cpu" else "bfloat16"))
    model = bench.model_of(size or ("tiny" if where == "cpu" else "1b"), where, kind, layers)
    caches: list[bench.Cache] = ["static", "dynamic"] if cache == "both" else [cache]
    paddings = [False, True] if padding == "both" else [padding == "left"]
    loads = list(bench.loads(caches, paddings, batch, prompt, new_tokens, step))
    bar = track(loads, "generate", console=render.console, transient=True, disable=quiet)
    rates = [bench.measured(model, load, rounds, backend=chosen, compiled=compiled) for load in bar]
    if json is not None:
        document = bench.to_json(
            rates,
            model,
            device=where,
            backend=chosen,
            environment=provenance(),
            command=render.command(json),
            seconds=time.monotonic() - start,
        )
        render.write_json(document, json)
    if not quiet:
        _show(rates)
    raise typer.Exit(int(any(rate.difference is not None and rate.difference.fault for rate in rates)))


def _show(rates: list[Rate]) -> None:
    columns = ("cache", "padding", "attnswitch", "sdpa", "ratio", "from", "to")
    table = render.table(*columns, "tokens", right=columns[2:])
    for rate in rates:
        load = rate.load
        figures = (f"{rate.ours:.1f}", f"{rate.theirs:.1f}", f"{rate.ratio:.3f}")
        spread = (f"{rate.ratio_low:.3f}", f"{rate.ratio_high:.3f}")
        table.add_row(load.cache, "left" if load.padded else "none", *figures, *spread, _tokens(rate))
    render.whole(table)
    render.console.print(
        "\n[dim]attnswitch, sdpa: tokens per second, the medians; ratio: attnswitch over sdpa in the same round, the"
        " median, from the 20th to the 80th percentile[/]",
        soft_wrap=True,
    )


def _tokens(rate: Rate) -> str:
    """Whether both generated the same."""
    d = rate.difference
    if d is None:
        return "[green]the same[/]"
    where = f"prompt {d.prompt} of round {d.turn} differs from token {d.token} on, logits {d.gap:.3g} ulp apart"
    return f"[bold red]{where}[/]" if d.fault else f"[yellow]{where}[/]"
