"""Calls of the library with their rare options given flat, for tests that pass them in dicts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torchrelay as tr


def _given(kind: type[Any], flat: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    rare = {name: value for name, value in flat.items() if name in names}
    common = {name: value for name, value in flat.items() if name not in names}
    return {**common, "options": kind(**rare)} if rare else common


def pull(*args: Any, **flat: Any) -> tr.Loaded:
    return tr.pull(*args, **_given(tr.options.PullOptions, flat))


def recover(*args: Any, **flat: Any) -> tr.Loaded | None:
    return tr.recover(*args, **_given(tr.options.RecoverOptions, flat))


def serve(*args: Any, **flat: Any) -> Any:
    return tr.serve(*args, **_given(tr.options.ServeOptions, flat))


def checkpointer(*args: Any, **flat: Any) -> tr.Checkpointer:
    return tr.Checkpointer(*args, **_given(tr.options.CheckpointerOptions, flat))


def keeper(*args: Any, **flat: Any) -> tr.Keeper:
    return tr.Keeper(*args, **_given(tr.options.KeeperOptions, flat))
