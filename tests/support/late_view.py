"""A rank whose file system shows the steps of a directory late, as network file systems do."""

from __future__ import annotations

from typing import Any

from torchrelay.stores.store import Store


def show_late(store: Store, looks: int) -> list[str]:
    """Hide the steps from the first `looks` that this process takes at them. Returns the list of
    its looks, which grows."""
    taken: list[str] = []
    steps, open_step, lookalike = store.steps, store.open, store.lookalike

    def listed() -> list[int]:
        taken.append("steps")
        return [] if len(taken) <= looks else steps()

    def opened(step: int, *words: Any) -> Any:
        taken.append("open")
        if len(taken) <= looks:
            raise FileNotFoundError(f"no step {step}")
        return open_step(step, *words)

    def looks_like() -> str:
        return "" if len(taken) <= looks else lookalike()

    store.steps, store.open, store.lookalike = listed, opened, looks_like  # type: ignore[method-assign]
    return taken
