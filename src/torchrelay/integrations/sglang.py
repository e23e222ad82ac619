"""SGLang takes new weights from a directory, one whole version at a time, by its HTTP API.

reader = WeightReader(endpoint.url)            # or a Checkpointer, a path, a bucket
server = SGLangServer("http://127.0.0.1:30000", "/shared/weights")
server.update(reader, step=101)
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

from torchrelay.checkpointer.export import export_hf
from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.errors import (
    EndpointError,
    PeerRefusedError,
    RelayError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.integrations.json_server import JsonServer
from torchrelay.integrations.weights import WeightReader
from torchrelay.sources.access import Access

Pause = Literal["retract", "abort"]


class SGLangServer:
    """A running SGLang server, and a directory that it can read too.

    - `url`: the server's, or that of a proxy in front of it, which may have a path.
    - `api_key`: the server's `--admin-api-key`, or its `--api-key`.
    - `pause`: "retract" has requests continue on the new weights; "abort" ends them.
    - `timeout` bounds the export and each call to the server.
    """

    def __init__(
        self,
        url: str,
        directory: str | os.PathLike[str],
        *,
        api_key: str | None = None,
        cafile: str | os.PathLike[str] | None = None,
        pause: Pause = "retract",
        timeout: Timeout = 300.0,
    ) -> None:
        if pause not in ("retract", "abort"):
            raise UsageError(f"pause is 'retract' or 'abort', not {pause!r}")
        context = None if cafile is None else Access(cafile=cafile).client_context()
        self._server = JsonServer(url, key=api_key, context=context)
        self._directory = Path(directory).absolute()
        self._pause, self._timeout = pause, seconds_of(timeout)
        self._loaded: tuple[int, Path] | None = None  # the version that the server has

    def update(self, reader: WeightReader, *, step: int | None = None) -> int:
        """Have the server load a step, by default the newest, and return its number.

        The version is read, verified and written to the directory before generation is paused.
        Generation continues afterwards, also if the server failed to load it. In that case the
        server first loads the version before again. Raises `PeerRefusedError` if the server did
        not load it, `TransferTimeoutError` or `EndpointError` if it did not answer, and what the
        reader raises.
        """
        version = reader.read(step=step)
        # A name of its own: another attempt at the step may have left files, or be read right now.
        folder = self._directory / f"step-{version.step}-{secrets.token_hex(4)}"
        export_hf(version.tensors, folder, self._timeout)
        step = version.step
        fault: BaseException | None = None
        request = False  # the server may read the folder
        try:
            self._post("/pause_generation", {"mode": self._pause}, step)
            request = True
            self._load(step, folder)
        except BaseException as found:
            fault = found
            if not request:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._continue(step, fault)
        return step

    def close(self) -> None:
        """Does nothing: each request has a connection of its own, and the version that the server
        has stays on disk."""

    def _load(self, step: int, folder: Path) -> None:
        before = self._loaded
        try:
            self._ask_to_load(step, folder)
        except PeerRefusedError as fault:
            state = self._restored()
            shutil.rmtree(folder, ignore_errors=True)
            raise PeerRefusedError(f"{fault.message}. {state}", step=step, phase="load") from fault
        self._loaded = step, folder
        if before is not None:
            shutil.rmtree(before[1], ignore_errors=True)

    def _restored(self) -> str:
        """Have the server load the version before again; how that went. When SGLang fails to load,
        it reads the same files once more, and may end with parts of both versions."""
        why = "No version before this one is known"
        if self._loaded is not None:
            try:
                self._ask_to_load(*self._loaded)
                return f"It has step {self._loaded[0]} again"
            except RelayError as fault:
                why = fault.message
        return f"It may have weights of two versions: update it again. {why}"

    def _ask_to_load(self, step: int, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": str(step), "flush_cache": True}
        answer = self._post("/update_weights_from_disk", body, step)
        if answer.get("success") is not True:
            why = str(answer.get("message", "it does not say why"))[:300]
            raise PeerRefusedError(
                f"{self._server.url} did not load the weights: {why}", step=step, phase="load"
            )

    def _continue(self, step: int, fault: BaseException | None) -> None:
        try:
            self._post("/continue_generation", {}, step)
        except RelayError as failed:
            before = "" if fault is None else f"{fault}. Then "
            raise EndpointError(
                f"{before}{failed.message}. Generation may still be paused: POST "
                "/continue_generation when the server answers",
                step=step,
                phase="continue",
            ) from fault or failed

    def _post(self, path: str, body: dict[str, Any], step: int) -> dict[str, Any]:
        """The server's answer; an error for any other than success and a refusal to load."""
        where = f"{self._server.url}{path}"
        at: dict[str, Any] = {"step": step, "phase": path.strip("/")}
        try:
            reply = self._server.post(path, body, seconds=self._timeout)
        except TimeoutError as fault:
            raise TransferTimeoutError(
                f"{where} did not answer in {self._timeout:g} s: the server may still be at it. "
                "See its log, or give a longer timeout",
                **at,
            ) from fault
        except OSError as fault:
            raise EndpointError(f"cannot reach {where}: {fault}", **at) from fault
        except EndpointError as fault:
            raise EndpointError(fault.message, **at) from fault
        if reply.status != 200 and "success" not in reply.answer:
            raise EndpointError(f"{where} answers {reply.status}: {reply.text}", **at)
        return reply.answer
