"""What a server answers to which request (docs/http.md)."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash
from aiohttp import ClientSession, web

from torchrelay.endpoint.admission import Refusal
from torchrelay.endpoint.page import PAGE, PATHS
from torchrelay.endpoint.seed_word import read_seed_word
from torchrelay.endpoint.server import limits
from torchrelay.endpoint.server.sending import (
    FileReader,
    Pieces,
    SourceFault,
    copied,
    send,
    volume_pieces,
)
from torchrelay.endpoint.server.service import MAX_SEEDS, Service
from torchrelay.endpoint.server.snapshots import ServedStep
from torchrelay.endpoint.server.status import metrics, status
from torchrelay.endpoint.server.transfers import Transfer
from torchrelay.endpoint.server.whole_file import WholeFile, chosen
from torchrelay.machine import machine
from torchrelay.sources.lease import LocalFacts

if TYPE_CHECKING:
    from torchrelay.endpoint.page.answers import PageAnswers

READER = re.compile(r"[A-Za-z0-9]{16,64}")
MAX_WAIT = 60.0
STEP_SECONDS = 30.0  # that a request waits for a step that is being published
MAX_PATTERNS, MAX_PATTERN = 16, 200
RESUME_SECONDS = 10.0  # that a step is kept for a download that broke off
FILES_KEPT = 8  # headers of whole files

Answer = Awaitable[web.StreamResponse]


class ByteRange(NamedTuple):
    """Bytes [start, stop) of so many; `partial`: a range was asked for."""

    start: int
    stop: int
    nbytes: int
    partial: bool


class App:
    """Answers requests from what is shown. All of it runs on one event loop."""

    def __init__(self, service: Service, token: str | None, *, tls: bool) -> None:
        self._token, self._tls = token, tls
        self.service = service
        self._answers: PageAnswers | None = None  # once the page was asked for
        self._session: ClientSession | None = None
        self._files: dict[tuple[str, tuple[str, ...]], WholeFile] = {}
        self._routes: dict[str, tuple[str, Callable[[web.BaseRequest], Answer]]] = {
            "/healthz": ("GET", self._healthz),
            "/steps.json": ("GET", self._steps),
            "/record": ("GET", self._record),
            "/places.json": ("GET", self._places),
            "/local.json": ("GET", self._local),
            "/marks": ("GET", self._marks),
            "/seeds": ("POST", self._seeds),
            "/model.safetensors": ("GET", self._file),
            "/status.json": ("GET", self._status),
            "/metrics": ("GET", self._metrics),
        }

    def take_token(self, token: str) -> None:
        """What readers have to know from here on."""
        self._token = token
        self._answers = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; whatever is wrong with it is said in a line."""
        try:
            self._let_in(request)
            return await self._route(request)
        except Refusal as refused:
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else None
            return web.Response(status=refused.status, text=str(refused) + "\n", headers=headers)

    def _let_in(self, request: web.BaseRequest) -> None:
        # The page holds nothing of the state; a browser cannot send a token to get it.
        open_to_all = ("/healthz",) if self._token is None else ("/healthz", PAGE)
        if request.path in open_to_all:
            return
        if why := limits.refusal(request, self._token):
            self.service.ledger.refused["token"] += 1
            raise Refusal(401, why)

    def _route(self, request: web.BaseRequest) -> Answer:
        path = request.path
        if path in self._routes:
            allowed, act = self._routes[path]
        elif path in (PAGE, *PATHS):
            allowed, act = "GET", self._page
        elif path.startswith("/volumes/"):
            allowed, act = "GET", self._volume
        elif path.startswith("/readers/"):
            allowed, act = "POST", self._reader_ends
        else:
            raise Refusal(404, "there is nothing here: docs/http.md lists what can be asked for")
        if request.method != allowed and not (allowed == "GET" and request.method == "HEAD"):
            raise Refusal(405, f"{path} takes {allowed}")
        return act(request)

    # Steps.

    async def _healthz(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _steps(self, request: web.BaseRequest) -> web.StreamResponse:
        above = _number(request, "newer_than")
        wait = min((_number(request, "wait_ms") or 0) / 1000, MAX_WAIT)
        if above is not None:
            await self.service.until(lambda: self._newest_step() > above, wait)
        else:
            await self.service.until(lambda: not self.service.pending, STEP_SECONDS)
        return _json({"steps": [snapshot.facts() for snapshot in self.service.snapshots.listed]})

    def _newest_step(self) -> int:
        newest = self.service.snapshots.newest
        return -1 if newest is None else newest.step

    async def _asked_for(self, request: web.BaseRequest) -> ServedStep:
        """The step that a request names, or the newest."""
        step = _number(request, "step")
        if step is None:
            await self.service.until(lambda: not self.service.pending, STEP_SECONDS)
            newest = self.service.snapshots.newest
            if newest is None:
                raise Refusal(503, "no step has been published yet: ask again")
            return newest
        found = self.service.snapshots.by_step(step)
        if found is None:
            there = ", ".join(str(one.step) for one in self.service.snapshots.listed) or "none"
            raise Refusal(404, f"no step {step} here; there: {there}")
        return found

    def _by_id(self, snapshot: str) -> ServedStep:
        found = self.service.snapshots.by_id(snapshot)
        if found is None:
            raise Refusal(410, "that step is gone, or was never here: ask for the newest")
        return found

    async def _record(self, request: web.BaseRequest) -> web.StreamResponse:
        snapshot = await self._asked_for(request)
        # Who has the record comes back for the volumes, and finds them.
        self._transfer(request, snapshot, "http", snapshot.nbytes)
        headers = {"ETag": f'"{snapshot.etag}"', "Torchrelay-Snapshot": snapshot.id}
        return web.Response(body=snapshot.record, content_type="application/json", headers=headers)

    async def _places(self, request: web.BaseRequest) -> web.StreamResponse:
        snapshot = self._by_id(request.query.get("snapshot", ""))
        volumes = {
            # An empty text stands for the URL that was asked, by whichever name that was.
            volume.name: ["" if snapshot.place(volume.name) else snapshot.ranks[place]]
            for volume, place in zip(snapshot.order, snapshot.places, strict=True)
        }
        facts = {"step": snapshot.step, "snapshot": snapshot.id, "volumes": volumes}
        facts["seeds"] = self.service.seeds_of(snapshot.id)
        return _json(facts)

    async def _local(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(LocalFacts(machine(), self.service.socket))

    async def _marks(self, request: web.BaseRequest) -> web.StreamResponse:
        snapshot = self._by_id(request.query.get("snapshot", ""))
        return web.Response(body=snapshot.marks(), content_type="application/octet-stream")

    async def _seeds(self, request: web.BaseRequest) -> web.StreamResponse:
        """A puller says where it serves what it has, and hears of the others."""
        if request.content_type != "application/json":
            raise Refusal(400, "this takes application/json")
        try:
            word = read_seed_word(await request.read(), request.remote)
        except (ValueError, web.HTTPException) as fault:
            raise Refusal(400, str(fault)) from None
        self._by_id(word.snapshot)
        others = [url for url in self.service.seeds_of(word.snapshot) if url != word.url]
        if word.url in self.service.seeds or len(self.service.seeds) < MAX_SEEDS:
            self.service.seeds[word.url] = word.snapshot, time.monotonic()
        return _json(others)

    # Bytes.

    async def _volume(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = request.path.split("/")
        if len(parts) != 4:
            raise Refusal(404, "volumes are asked for as /volumes/SNAPSHOT/NAME")
        snapshot = self._by_id(parts[2])
        place = snapshot.place(parts[3])
        if place is None:
            raise Refusal(404, "that volume is not here: /places.json says where it is")
        slot, volume = place
        extent = self._extent(request, volume.nbytes, snapshot.etag)
        if not snapshot.has(volume, extent.start, extent.stop):
            raise Refusal(404, "these bytes have not arrived here yet: /marks says which have")
        transfer = self._transfer(request, snapshot, "http", snapshot.nbytes)
        act = copied if self._tls else volume_pieces
        pieces = act(slot, volume, extent.start, extent.stop)
        return await self._send(request, transfer, extent, snapshot.etag, pieces)

    async def _file(self, request: web.BaseRequest) -> web.StreamResponse:
        patterns = request.query.getall("include", [])
        if len(patterns) > MAX_PATTERNS or any(len(one) > MAX_PATTERN for one in patterns):
            raise Refusal(400, f"at most {MAX_PATTERNS} patterns of {MAX_PATTERN} characters")
        snapshot = await self._asked_for(request)
        key = "\n".join(patterns)
        if self._goes_on(request):
            snapshot = self._begun_with(request, key)
        file = self._whole_file(snapshot, patterns)
        etag = snapshot.etag + (f"-{_digest(key)}" if patterns else "")
        if f'"{etag}"' in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers={"ETag": f'"{etag}"'})
        extent = self._extent(request, file.nbytes, etag)
        if request.method == "HEAD":
            return await self._head(request, extent, etag)
        transfer = self._transfer(request, snapshot, "file", file.nbytes)
        if self._session is None:
            bearer = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
            self._session = ClientSession(headers=bearer)
        pieces = FileReader(snapshot, self._session).pieces(file, extent.start, extent.stop)
        before = transfer.bytes
        try:
            return await self._send(request, transfer, extent, etag, pieces)
        finally:
            sent = extent.start + transfer.bytes - before
            address = request.remote or ""
            self.service.ledger.note_sent(address, key, snapshot, sent, whole=sent >= file.nbytes)

    def _goes_on(self, request: web.BaseRequest) -> bool:
        """Whether a request wants the rest of a file without saying of which step."""
        wanted = _slice(request)
        named = "step" in request.query or "If-Range" in request.headers
        return wanted is not None and (wanted.start or 0) != 0 and not named

    def _begun_with(self, request: web.BaseRequest, key: str) -> ServedStep:
        """The step that an address has begun with, if it can have been no other."""
        wanted = _slice(request)
        start = 0 if wanted is None else max(0, wanted.start or 0)
        begun = self.service.ledger.begun_with(request.remote or "", key, start)
        found = self.service.snapshots.by_id(next(iter(begun))) if len(begun) == 1 else None
        if found is None:
            raise Refusal(
                412,
                "this download cannot be continued: the step that it began with is gone or is not "
                "known here. Say ?step=STEP, or begin again",
            )
        return found

    def _whole_file(self, snapshot: ServedStep, patterns: Sequence[str]) -> WholeFile:
        key = snapshot.id, tuple(patterns)
        if key not in self._files:
            tensors = chosen(snapshot.tensors, patterns)
            if not tensors:
                raise Refusal(404, "no tensor has a name like that: the record lists the names")
            metadata = {"step": str(snapshot.step), "snapshot": snapshot.id}
            while len(self._files) >= FILES_KEPT:
                self._files.pop(next(iter(self._files)))
            self._files[key] = WholeFile(tensors, metadata)
        return self._files[key]

    def _extent(self, request: web.BaseRequest, nbytes: int, etag: str) -> ByteRange:
        """The bytes that are asked for."""
        wanted = _slice(request)
        condition = request.headers.get("If-Range")
        if wanted is None or (condition is not None and condition != f'"{etag}"'):
            return ByteRange(0, nbytes, nbytes, False)
        start, stop, _ = wanted.indices(nbytes)
        if start >= stop:
            self.service.ledger.refused["range"] += 1
            raise Refusal(416, f"the range is outside of {nbytes} bytes")
        return ByteRange(start, stop, nbytes, True)

    def _transfer(
        self, request: web.BaseRequest, snapshot: ServedStep, kind: str, total: int
    ) -> Transfer:
        reader = request.headers.get("Torchrelay-Reader", "")
        if reader and not READER.fullmatch(reader):
            raise Refusal(400, "Torchrelay-Reader is 16 to 64 letters and digits")
        name = reader or f"request{secrets.token_hex(8)}"
        agent = request.headers.get("User-Agent", "")
        found = self.service.ledger.of(name, request.remote or "", agent, snapshot, kind, total)
        if found is None:
            self.service.ledger.refused["limit"] += 1
            raise Refusal(429, "too many readers at once: ask again later")
        return found

    async def _head(
        self, request: web.BaseRequest, extent: ByteRange, etag: str
    ) -> web.StreamResponse:
        response = _ranged(extent, etag)
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _send(
        self,
        request: web.BaseRequest,
        transfer: Transfer,
        extent: ByteRange,
        etag: str,
        pieces: Pieces,
    ) -> web.StreamResponse:
        alone = not request.headers.get("Torchrelay-Reader")
        if request.method == "HEAD":
            if alone:
                self.service.ledger.end(transfer, "done")
            return await self._head(request, extent, etag)
        response = _ranged(extent, etag)
        reason = ""
        try:
            await response.prepare(request)
            await send(request, response, pieces, transfer, self.service.ledger, self.service.stall)
            await response.write_eof()
        except asyncio.TimeoutError:
            self.service.ledger.refused["slow"] += 1
            reason = f"the reader took no bytes for {self.service.stall:g} s and was dropped"
        except ConnectionError:
            reason = "the reader went away"
        except SourceFault as fault:
            reason = str(fault)
        except asyncio.CancelledError:
            if not transfer.cut:
                raise
            reason = transfer.cut
        if reason and request.transport is not None:
            limits.cut(request.transport)
        transfer.fault = reason
        if alone:
            self.service.ledger.end(transfer, "failed" if reason else "done", reason)
            kept = RESUME_SECONDS if reason and not transfer.cut else 0.0
            transfer.snapshot.wanted_until = time.monotonic() + kept
        return response

    # Readers and watchers.

    async def _reader_ends(self, request: web.BaseRequest) -> web.StreamResponse:
        reader = request.path.removeprefix("/readers/")
        if request.content_type != "application/json":
            raise Refusal(400, "this takes application/json")
        try:
            word = msgspec.json.decode(await request.read(), type=Ending)
        except (msgspec.MsgspecError, ValueError, web.HTTPException):
            raise Refusal(400, 'this takes {"outcome": "done"} or "failed", "reason"') from None
        for transfer in list(self.service.ledger.active.values()):
            if transfer.reader == reader:
                outcome = "done" if word.outcome == "done" else "failed"
                self.service.ledger.end(transfer, outcome, word.reason)
        return web.Response(status=204)

    async def _status(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(status(self.service))

    async def _page(self, request: web.BaseRequest) -> web.StreamResponse:
        # Imported for the page alone: with numpy it takes as much memory as the server itself.
        from torchrelay.endpoint.page.answers import PageAnswers
        from torchrelay.endpoint.page.served import ServedWatch

        if self._answers is None:
            self._answers = PageAnswers(ServedWatch(self.service, self._token))
        status, body, headers = await self._answers.answer(request.path, request.query)
        return web.Response(status=status, body=body, headers=headers)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=metrics(self.service), content_type="text/plain")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Ending(msgspec.Struct):
    """How a reader says that it ended."""

    outcome: str
    reason: str = ""


def _json(facts: object) -> web.Response:
    body = msgspec.json.encode(facts)
    return web.Response(
        body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _ranged(extent: ByteRange, etag: str) -> web.StreamResponse:
    start, stop, nbytes, partial = extent
    response = web.StreamResponse(status=206 if partial else 200)
    response.headers["Accept-Ranges"] = "bytes"
    response.headers["ETag"] = f'"{etag}"'
    response.content_type = "application/octet-stream"
    if partial:
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
    response.content_length = stop - start
    return response


def _slice(request: web.BaseRequest) -> slice | None:
    """What `Range` asks for; None where it asks for everything."""
    if "Range" not in request.headers:
        return None
    try:
        found = request.http_range
    except ValueError:
        raise Refusal(416, "one range of bytes, as in Range: bytes=0-99") from None
    return None if found.start is None and found.stop is None else found


def _number(request: web.BaseRequest, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise Refusal(400, f"{name} is a number")
    return int(text)


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
