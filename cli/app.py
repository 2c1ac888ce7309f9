"""The ``attnswitch`` command and its subcommands, one module each."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from attnswitch.call import finite, recording
from attnswitch.errors import AttnswitchError
from attnswitch.planning import policy

from . import backends, benches, build, estimate, explain, replay, tune, verify, wisdom
from .render import error

__all__ = ["app", "main"]

#: What typer makes of Ctrl-C, in most of its versions.
_INTERRUPTED = 130

app = typer.Typer(
    name="attnswitch",
    help="Exact attention over every kernel this machine has: chosen with reasons, verified here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("verify")(verify.verify)
app.command("replay")(replay.replay)
app.command("backends")(backends.backends)
app.command("explain")(explain.explain)
app.command("estimate")(estimate.estimate)
app.command("tune")(tune.tune)
app.command("build")(build.build)
app.add_typer(benches.app, name="bench")
app.add_typer(wisdom.app, name="wisdom")


def _version(asked: bool) -> None:
    if asked:
        import attnswitch

        typer.echo(f"attnswitch {attnswitch.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact attention over every kernel this machine has: chosen with reasons, verified here."""
    # A variable that says nothing is no fault of a kernel: it is told before anything runs.
    for read in (policy.of_process, finite.of_process, recording.whole_process):
        read()


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 a mismatch, 2 the tool could not do its work, 3 nothing was done."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: what was found is told, and workers are ended
    try:
        code = app(standalone_mode=False)
    except BrokenPipeError:  # the reader of a pipe left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 2
    except (KeyboardInterrupt, typer.Abort):  # outside a run, which ends with what it found
        code = _INTERRUPTED
    except (AttnswitchError, OSError) as problem:
        error(problem)
        code = 2
    except Exception as usage:
        if not hasattr(usage, "show"):
            raise
        usage.show()  # a mistake in the options, which typer explains
        code = 2
    if code == _INTERRUPTED:
        error("interrupted")
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
