"""The step server: snapshots, complete or partial, that others read by HTTP or map on this host.

It runs next to a trainer (`serve`), in a process that outlives the worker (`Keeper`), and in a
puller that passes on what it has (a seed). They differ in who tells it what to show. docs/http.md
lists the requests.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import xxhash

from torchrelay.endpoint.page import PAGE, PATHS
from torchrelay.endpoint.server.http.connections import (
    FRESH,
    Handler,
    HttpConnection,
    HttpServer,
    Response,
    SlowReader,
    Span,
)
from torchrelay.endpoint.server.http.requests import (
    BODY_BYTES,
    ByteRange,
    Refusal,
    Request,
    byte_range,
)
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_at
from torchrelay.endpoint.server.local_memory import LocalMemory
from torchrelay.endpoint.server.messages import Listen, SeedAnnouncement, SeedAnswer
from torchrelay.endpoint.server.service import Service, metrics, status
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.endpoint.server.step_reader import StepReader
from torchrelay.endpoint.server.transfers import ONE_REQUEST, Transfer
from torchrelay.errors import EndpointError, RemoteProtocolError, UsageError
from torchrelay.machine import machine
from torchrelay.sources.access import Access
from torchrelay.sources.http_head import ServerUrl
from torchrelay.sources.lent_memory import LocalFacts

if TYPE_CHECKING:
    from torchrelay.endpoint.page.answers import PageAnswers


READER = re.compile(r"[A-Za-z0-9]{16,64}")
MAX_WAIT = 60.0  # seconds that a request waits for a newer step
STEP_SECONDS = 30.0  # for a step that is being published
CHUNK_SECONDS = 2.0  # for chunks that are on their way here
MAX_PATTERNS, MAX_PATTERN = 16, 200
PARTS, PARTS_BODY = "/parts", 4 << 20  # a request for parts has many runs
POSTED = ("/seeds", "/readers/", PARTS)

Posted = TypeVar("Posted", bound=msgspec.Struct)
Pieces = Iterator[bytes | memoryview | Span]


class Ending(msgspec.Struct):
    """`POST /readers/READER`: how a reader ended, and how much of mapped memory it used."""

    outcome: str
    reason: str = ""
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


_ending = msgspec.json.Decoder(Ending)
_announcement = msgspec.json.Decoder(SeedAnnouncement)


class StepServer:
    """Listens until `close`. `lends`: whether processes of this host may map its memory."""

    def __init__(self, listen: Listen, *, lends: bool = True) -> None:
        # Ranks with one self-signed certificate read from each other without a `cafile`.
        cafile = listen.cafile or listen.certfile
        access = Access(listen.token, None, cafile, listen.certfile, listen.keyfile)
        listener = listen_at(listen.host, listen.port)
        self.port: int = listener.getsockname()[1]
        http = HttpServer(
            self._answer,
            connections=listen.connections,
            stall=listen.stall,
            context=access.server_context(),
            body_limit=self._body_limit,
        )
        url = ServerUrl(access.scheme, listen.host, self.port).url
        self.service = service = Service(http, url, access=access, stall=listen.stall)
        self._memory = LocalMemory(service) if lends else None
        # Handlers by path. Short answers are made with the lock held.
        local = LocalFacts(machine(), "" if self._memory is None else self._memory.name)
        self._short: dict[str, Handler] = {
            "/healthz": lambda *_: Response(body=b"ok\n"),
            "/steps.json": self._steps,
            "/record": self._record,
            "/places.json": self._places,
            "/local.json": lambda *_: Response.json(local),
            "/seeds": self._seeds,
            "/readers/": self._reader_ends,
            "/status.json": lambda *_: Response.json(status(service)),
            "/metrics": lambda *_: Response(body=metrics(service).encode()),
        }
        self._long: dict[str, Handler] = {
            "/volumes/": self._volume,
            "/model.safetensors": self._file,
            PARTS: self._parts,
            **dict.fromkeys((PAGE, *PATHS), lambda url, _: self._page_answers.answer(url)),
        }
        self._acceptor = Acceptor(listener, http.serve)

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self._acceptor.close()
        if self._memory is not None:
            self._memory.close()
        self.service.http.close()

    def _body_limit(self, request: Request, connection: HttpConnection) -> int:
        """The most bytes of a body. Long ones are taken from clients that may ask alone."""
        if request.path != PARTS or request.length <= BODY_BYTES:
            return BODY_BYTES
        self._admit(request, connection)
        return PARTS_BODY

    def _answer(self, request: Request, connection: HttpConnection) -> Response | None:
        """The answer to a request; None where it was sent already."""
        self._admit(request, connection)
        path = request.path
        for prefix in ("/readers/", "/volumes/"):
            path = prefix if path.startswith(prefix) else path
        act = self._short.get(path) or self._long.get(path)
        if act is None:
            raise Refusal(404, "nothing is here: docs/http.md lists what can be asked for")
        methods = ("POST",) if path in POSTED else ("GET", "HEAD")
        if request.method not in methods:
            raise Refusal(405, f"this path takes {methods[0]}", {"Allow": ", ".join(methods)})
        with self.service.lock if path in self._short else nullcontext():
            return act(request, connection)

    def _admit(self, request: Request, connection: HttpConnection) -> None:
        # The page holds nothing of the state; a browser cannot send a token to get it.
        token = self.service.access.token
        connection.admit(request, token, ("/healthz",) if token is None else ("/healthz", PAGE))

    # Steps.

    def _steps(self, request: Request, connection: HttpConnection) -> Response:
        above = request.number("newer_than")
        service, snapshots = self.service, self.service.snapshots
        if above is not None:
            wait = min((request.number("wait_ms") or 0) / 1000, MAX_WAIT)

            def over() -> bool:
                newer = any(one.step > above for one in snapshots.listed[-1:])
                return newer or connection.gives_way

            with connection.waiting(service.wake):
                service.lock.wait_for(over, wait)
        else:
            service.lock.wait_for(lambda: not service.pending, STEP_SECONDS)
        return Response.json({"steps": [snapshot.facts() for snapshot in snapshots.listed]})

    def _requested(self, request: Request) -> ServedSnapshot:
        """The step that a request names, or the newest."""
        step, service, snapshots = request.number("step"), self.service, self.service.snapshots
        with service.lock:
            if step is None:
                service.lock.wait_for(lambda: not service.pending, STEP_SECONDS)
                if snapshots.newest is None:
                    raise Refusal(503, "no step has been published yet: ask again")
                return snapshots.newest
            found = snapshots.by_step(step)
            if found is None:
                there = ", ".join(str(one.step) for one in snapshots.listed) or "none"
                raise Refusal(404, f"no step {step} here; available: {there}")
            return found

    def _by_id(self, snapshot: str) -> ServedSnapshot:
        with self.service.lock:
            found = self.service.snapshots.by_id(snapshot)
        if found is None:
            raise Refusal(410, "that step is gone, or was never here: ask for the newest")
        return found

    def _record(self, request: Request, connection: HttpConnection) -> Response:
        snapshot = self._requested(request)
        if "torchrelay-reader" in request.headers:  # it comes back for the volumes: keep them
            self._enter(request, connection, snapshot)
        headers = {"ETag": f'"{snapshot.etag}"', "Torchrelay-Snapshot": snapshot.id}
        return Response(body=snapshot.record, kind="application/json", headers=headers)

    def _places(self, request: Request, connection: HttpConnection) -> Response:
        snapshot = self._by_id(request.field("snapshot"))
        whole = snapshot.whole
        volumes = {
            # An empty text stands for the URL that was asked, by whichever name that was.
            volume.name: ["" if snapshot.place(volume.name) else whole.ranks[place]]
            for volume, place in zip(whole.volumes, whole.places, strict=True)
        }
        return Response.json({"step": snapshot.step, "snapshot": snapshot.id, "volumes": volumes})

    def _seeds(self, request: Request, connection: HttpConnection) -> Response:
        """A puller says where it serves what it has, and learns of the others."""
        message = _body(request, _announcement, '{"url": "http://HOST:PORT", "snapshot": "ID"}')
        try:
            place = ServerUrl.parse(message.url)
        except UsageError as fault:
            raise Refusal(400, fault.message) from None
        if place.host != connection.remote:
            raise Refusal(400, "a seed is named by the address that it asks from")
        if self.service.access.tls and place.scheme != "https":
            raise Refusal(400, "a seed of an https endpoint serves by https")
        snapshot = self._by_id(message.snapshot)
        return Response.json(
            SeedAnswer(self.service.announce(place.url, snapshot.id), snapshot.complete)
        )

    def _reader_ends(self, request: Request, connection: HttpConnection) -> Response:
        message = _body(request, _ending, '{"outcome": "done"} or "failed", with "reason"')
        reader, transfers = request.path.removeprefix("/readers/"), self.service.transfers
        for transfer in [one for one in transfers.active.values() if one.reader == reader]:
            if transfer.kind == "mapped":
                transfer.bytes = min(message.bytes, transfer.total)
            outcome = "done" if message.outcome == "done" else "failed"
            transfers.end(transfer, outcome, message.reason)
        return Response(204)

    # Bytes.

    def _volume(self, request: Request, connection: HttpConnection) -> None:
        parts = request.path.split("/")
        if len(parts) != 4:
            raise Refusal(404, "volumes are asked for as /volumes/SNAPSHOT/NAME")
        snapshot = self._by_id(parts[2])
        place = snapshot.place(parts[3])
        if place is None:
            raise Refusal(404, "that volume is not here: /places.json says where it is")
        name = place[1].name
        extent = byte_range(request, place[1].nbytes, snapshot.etag)
        wait = min((request.number("wait_ms") or 0) / 1000, CHUNK_SECONDS)
        if not snapshot.wait(name, extent.start, extent.stop, wait):
            raise Refusal(404, "these bytes have not arrived here yet")

        def pieces() -> Pieces:
            return filter(None, [snapshot.span(name, extent.start, extent.stop)])

        headers = extent.headers(snapshot.etag)
        self._send(request, connection, snapshot, pieces, headers, extent)

    def _parts(self, request: Request, connection: HttpConnection) -> None:
        # Imported for this alone: numpy takes as much memory as the server itself.
        from torchrelay.endpoint.server.parts import wanted_parts
        from torchrelay.parts.runs import decode_request
        from torchrelay.parts.stream import part_stream

        try:
            message = decode_request(request.body)
            snapshot = self._by_id(message.snapshot)
            wanted = wanted_parts(message, snapshot, self.service.snapshots.changes)
        except RemoteProtocolError as fault:
            raise Refusal(400, fault.message) from None
        headers = {"Content-Type": "application/octet-stream", **FRESH}
        self._send(request, connection, snapshot, partial(part_stream, wanted), headers)

    def _file(self, request: Request, connection: HttpConnection) -> Response | None:
        patterns = request.query.get("include", [])
        if len(patterns) > MAX_PATTERNS or any(len(one) > MAX_PATTERN for one in patterns):
            raise Refusal(400, f"give at most {MAX_PATTERNS} patterns of {MAX_PATTERN} characters")
        # Imported for this alone: what reads a record takes as much memory as the server itself.
        from torchrelay.endpoint.server.whole_file import whole_file

        snapshot = self._requested(request)
        if not snapshot.whole.tensors:
            raise Refusal(404, "a seed has the volumes of a step: ask the endpoint for its file")
        file = whole_file(snapshot.record, tuple(patterns), snapshot.id)
        if not file.contents.tensors:
            raise Refusal(404, "no tensor has a name like that: the record lists the names")
        digest = xxhash.xxh3_64_hexdigest("\n".join(patterns).encode("utf-8", "replace"))
        etag = snapshot.etag + (f"-{digest}" if patterns else "")
        if f'"{etag}"' in request.headers.get("if-none-match", ""):
            return Response(304, headers={"ETag": f'"{etag}"'})
        extent = byte_range(request, file.nbytes, etag)

        def pieces() -> Pieces:
            with self.service.lock:
                reader = StepReader(snapshot, file.contents, self.service.access)
            with closing(reader):
                yield from file.pieces(reader, extent.start, extent.stop)

        self._send(request, connection, snapshot, pieces, extent.headers(etag), extent, "file")
        return None

    def _enter(
        self,
        request: Request,
        connection: HttpConnection,
        snapshot: ServedSnapshot,
        kind: str = "http",
        total: int | None = None,
    ) -> Transfer:
        """The transfer that a request belongs to, by the name of its reader if it has one."""
        reader = request.headers.get("torchrelay-reader", "")
        if reader and not READER.fullmatch(reader):
            raise Refusal(400, "Torchrelay-Reader is 16 to 64 letters and digits")
        name = reader or f"{ONE_REQUEST}{secrets.token_hex(8)}"
        agent = request.headers.get("user-agent", "")
        total = snapshot.nbytes if total is None else total
        found = self.service.transfers.enter(name, connection.remote, agent, snapshot, kind, total)
        if found is None:
            raise Refusal(429, "too many readers at once: ask again later")
        return found

    def _send(
        self,
        request: Request,
        connection: HttpConnection,
        snapshot: ServedSnapshot,
        pieces: Callable[[], Pieces],
        headers: dict[str, str],
        extent: ByteRange | None = None,
        kind: str = "http",
    ) -> None:
        """Send bytes of a step, and note how that ended. While they are sent, the memory of the
        snapshot is not taken back. Without an `extent`, their number is not known before."""
        status = 206 if extent is not None and extent.partial else 200
        length = None if extent is None else extent.stop - extent.start
        if request.method == "HEAD":
            connection.send_head(status, length, headers)
            return
        service, transfers = self.service, self.service.transfers
        total = extent.nbytes if extent is not None and kind == "file" else None
        with service.lock:
            self._by_id(snapshot.id)  # it may be gone by now
            transfer = self._enter(request, connection, snapshot, kind, total)
            transfer.connections.add(connection)
            sending = pieces()

        def moved(nbytes: int) -> None:
            with service.lock:
                transfers.moved(transfer, nbytes)

        reason = ""
        try:
            connection.send_head(status, length, headers)
            connection.stream(sending, moved)
        except SlowReader:
            reason = f"the reader took no bytes for {service.stall:g} s and was dropped"
            raise
        except (OSError, EndpointError) as fault:
            reason = fault.message if isinstance(fault, EndpointError) else "the reader went away"
            connection.cut()
            raise ConnectionResetError(reason) from fault
        finally:
            with service.lock:
                transfer.connections.discard(connection)
                transfer.fault = reason = transfer.cut or reason
                if transfer.reader.startswith(ONE_REQUEST):
                    transfers.end(transfer, "failed" if reason else "done", reason)
                service.lock.notify_all()

    @cached_property
    def _page_answers(self) -> PageAnswers:
        # Imported for the page alone: with numpy it takes as much memory as the server itself.
        from torchrelay.endpoint.page.answers import PageAnswers
        from torchrelay.endpoint.page.served import ServedWatch

        return PageAnswers(ServedWatch(self.service))


def _body(request: Request, decoder: msgspec.json.Decoder[Posted], form: str) -> Posted:
    """The body of a request; `Refusal` where it is something else."""
    try:
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise ValueError
        return decoder.decode(request.body)
    except (msgspec.MsgspecError, ValueError):
        raise Refusal(400, f"this takes application/json: {form}") from None
