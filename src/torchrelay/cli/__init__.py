"""The `torchrelay` command."""

from __future__ import annotations

import sys

NEEDS_TYPER = "the torchrelay command needs typer and rich: pip install 'torchrelay[cli]'"


def main() -> None:
    """Entry point of the `torchrelay` script."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError:
        print(NEEDS_TYPER, file=sys.stderr)
        sys.exit(2)

    from torchrelay.cli import checkpoints

    app = typer.Typer(
        help="Move and keep the whole live state of a PyTorch job.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.command()
    def demo(
        small: bool = typer.Option(False, "--small", help="A tiny model, fewer repeats."),
    ) -> None:
        """Four processes pass a training job's state on, beside torch's own transport."""
        from torchrelay.demo.__main__ import run

        raise typer.Exit(run(small=small))

    @app.command()
    def version() -> None:
        """Print the versions of torchrelay and torch."""
        import torch

        import torchrelay

        print(f"torchrelay {torchrelay.__version__}, torch {torch.__version__}")

    checkpoints.add_to(app)
    app()
