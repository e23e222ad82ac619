"""The `torchrelay` command.

Commands import what they need when they run: `torchrelay --help` imports no torch.
"""

from __future__ import annotations

import sys

NEEDS_TYPER = "the torchrelay command needs typer and rich: pip install 'torchrelay[cli]'"


def main() -> None:
    """Entry point of the `torchrelay` script."""
    try:
        from importlib.util import find_spec

        import typer

        if find_spec("rich") is None:
            raise ImportError
    except ImportError:
        print(NEEDS_TYPER, file=sys.stderr)
        sys.exit(2)

    from torchrelay.cli import access
    from torchrelay.cli.commands import (
        contents,
        conversion,
        copying,
        differences,
        keepers,
        steps,
        transfer,
        watch,
    )

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # help in plain text needs a third of the time
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            from torchrelay.version import __version__

            print(f"torchrelay {__version__}, torch {version('torch')}")
            raise typer.Exit()

    @app.callback(help="Move and keep the whole live state of a PyTorch job.")
    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the versions."
        ),
        token_file: str | None = access.TOKEN_FILE,
        cafile: str | None = access.CAFILE,
    ) -> None:
        access.keep(token_file, cafile, begins=True)

    def demo(
        small: bool = typer.Option(False, "--small", help="A tiny model, fewer steps."),
    ) -> None:
        """Workers and a host of a training job are killed, and training resumes."""
        from torchrelay.demo.__main__ import run

        raise typer.Exit(run(small=small))

    def check(
        folder: str | None = typer.Option(None, help="A folder that steps are to be saved to."),
        bucket: str | None = typer.Option(None, help="The URL of a bucket."),
        json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """What of this machine helps, slows or breaks a job. On all ranks of a cluster: `torchrun
        ... -m torchrelay.check`."""
        from torchrelay.check.__main__ import run
        from torchrelay.check.run import CheckPlan

        raise typer.Exit(run(CheckPlan(folder, bucket), json=json))

    for act in (
        demo,
        check,
        *(steps.ls, steps.rollback, steps.rm),
        *(contents.inspect, contents.verify, differences.diff),
        *(transfer.serve, transfer.pull, keepers.keeper, watch.watch),
        *(copying.copy, conversion.convert, conversion.export_hf),
    ):
        # diff(1) has 2 for trouble, and 1 for differences.
        trouble = 2 if act is differences.diff else 1
        app.command(act.__name__.replace("_", "-"))(access.command(act, trouble))
    app(prog_name="torchrelay")
