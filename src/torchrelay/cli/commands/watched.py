"""Places and endpoints, and what they hold, as `watch` and the page look into them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

import torchrelay as tr
from torchrelay.cli.commands.steps import listed, store_at
from torchrelay.cli.output import in_words
from torchrelay.cli.sources import is_url, opened_source
from torchrelay.errors import EndpointError, UsageError
from torchrelay.inspection.opened_state import Contents, OpenedState
from torchrelay.memory.bounded import bounded
from torchrelay.steps import epoch_seconds
from torchrelay.stores.store import Store

ASK_SECONDS = 20.0
STATUS_BYTES = 16 << 20


class EndpointStatus(msgspec.Struct):
    """`/status.json` of an endpoint, as far as it is shown."""

    url: str
    now: float
    step: int | None
    steps: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    finished: list[dict[str, Any]]
    publishes: list[dict[str, Any]]
    seeds: list[dict[str, Any]]
    ranks: list[str]
    readers: int
    failures: int


_status = msgspec.json.Decoder(EndpointStatus)


class WatchedPlaces:
    """Implements `WatchedSteps` on places with checkpoints and at most one endpoint. Where several
    have a step, the first of them counts."""

    def __init__(self, where: Sequence[str]) -> None:
        urls = [name for name in where if is_url(name)]
        if len(urls) > 1:
            raise UsageError("watch one endpoint at a time, with any number of directories")
        self.name = ", ".join(where)
        self._url = urls[0] if urls else None
        self._places = {name: store_at(name) for name in where if name not in urls}
        self._started = time.time()
        # With the version of the step that they are of: it may be saved again.
        self._facts: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {}

    def steps(self) -> list[int]:
        found = {step for there in self._places.values() for step in _steps(there)}
        if self._url is not None:
            found |= {one["step"] for one in self._endpoint()["steps"]}
        return sorted(found)

    def contents(self, step: int) -> Contents:
        with self.source(step) as source:
            return source.contents

    @contextmanager
    def source(self, step: int) -> Iterator[OpenedState]:
        for place, there in self._places.items():
            if step in _steps(there):
                with opened_source(place, step) as source:
                    yield source
                return
        if self._url is None:
            raise KeyError(f"step {step}")
        with opened_source(self._url, step) as source:
            yield source

    def status(self) -> dict[str, Any]:
        """The answer to `/status.json`: that of the endpoint, and steps on disk."""
        disks: list[dict[str, Any]] = [
            {"url": there.url, "steps": [self._listed(there, step) for step in _steps(there)]}
            for there in self._places.values()
        ]
        if self._url is not None:
            return {**self._endpoint(), "disk": disks}
        steps = [facts["step"] for disk in disks for facts in disk["steps"]]
        return {
            "version": tr.__version__,
            "url": ", ".join(there.url for there in self._places.values()),
            "now": time.time(),
            "started": self._started,
            "step": max(steps, default=None),
            "disk": disks,
            "transfers": [],
            "finished": [],
            "publishes": [],
            "readers": 0,
        }

    def _endpoint(self) -> dict[str, Any]:
        from torchrelay.cli.access import endpoints

        assert self._url is not None
        (host,) = endpoints(self._url).hosts
        try:
            answer = host.get("/status.json", seconds=ASK_SECONDS, limit=STATUS_BYTES)
            if answer.status != 200:
                raise EndpointError(f"{host.url} answered {answer.status}: {answer.text}")
            shown = _status.decode(answer.body)
        except (OSError, msgspec.MsgspecError) as fault:
            raise EndpointError(f"{host.url} does not answer as an endpoint: {fault}") from fault
        finally:
            host.close()
        facts: dict[str, Any] = msgspec.to_builtins(shown)
        return facts

    def _listed(self, there: Store, step: int) -> dict[str, Any]:
        key = (there.url, step)
        known = self._facts.get(key)
        self._facts[key] = bounded(
            lambda: _look(there, step, known), ASK_SECONDS, "read the record", file=there.url
        )
        return self._facts[key][1]


def _look(
    there: Store, step: int, known: tuple[str, dict[str, Any]] | None
) -> tuple[str, dict[str, Any]]:
    """The version of a step and its facts: those that are known, if they are whole and of it."""
    try:
        version = there.version(step)
    except OSError:  # `listed` says why
        version = ""
    if version and known is not None and known[0] == version and not in_words(known[1]):
        return known
    facts = listed(there, step)
    return version, {
        "step": step,
        "bytes": facts.get("bytes", 0),
        "ranks": facts.get("ranks", 0),
        "time": epoch_seconds(facts.get("time", "")),
        "damage": facts["damage"],
        "unread": facts["unread"],
    }


def _steps(there: Store) -> list[int]:
    return bounded(there.steps, ASK_SECONDS, "list the steps", file=there.url)
