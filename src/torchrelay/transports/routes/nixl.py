"""Route "nixl": the receiver reads the sender's memory through NIXL (extra `torchrelay[nixl]`).

NIXL moves memory over whatever UCX finds between two processes: RDMA between machines that have it,
TCP, or shared memory. The sender registers the memory of its state for as long as the send lasts.
Chunks that are not in host memory, or not in one piece there, are staged in another block.

A read that has begun cannot be taken back. So the receiver reads into buffers of its own, and lands
them as messages of a group are landed.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.geometry.runs import Moves, Runs
from torchrelay.memory import threads, vectors
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.memory.host import host_block
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.reading import ReadDone, ReadingFetch
from torchrelay.transports.wire import messages as m

BACKEND = "UCX"
PROGRESS_SECONDS = 0.001
POLL_SECONDS = (0.0001, 0.002)  # between looks at a read that is under way: first, and last


@cache
def _library() -> Any:
    """NIXL's Python API; `ImportError` where it is not installed."""
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        try:
            return import_module(f"{package}._api")
        except ModuleNotFoundError as fault:
            if fault.name != package:
                raise
    raise ImportError("NIXL is not installed: pip install 'torchrelay[nixl]'")


class NixlError(Exception):
    """NIXL cannot do what it was asked for."""


class Agent:
    """This process's end of NIXL. Threads may share it. It raises where NIXL cannot be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        library = _library()
        mode = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        # Its own progress thread never rests, and would take a core from training for good.
        config = library.nixl_agent_config(
            backends=[BACKEND], sync_mode=mode, enable_prog_thread=False
        )
        self._agent = library.nixl_agent(f"torchrelay-{secrets.token_hex(8)}", config)
        self._users: dict[str, int] = {}  # of the agents of peers that are known here
        self._abandoned: dict[int, tuple[object, ...]] = {}  # by read: may still be written to

    def call(self, name: str, *args: Any) -> Any:
        """A method of NIXL's agent; `NixlError` for whatever it raises."""
        try:
            return getattr(self._agent, name)(*args)
        except Exception as fault:
            raise NixlError(f"NIXL cannot {name.replace('_', ' ')}: {fault}") from fault

    def register(self, rows: np.ndarray[Any, Any]) -> Any:
        """Let memory be read by others, or be read into: rows of address, bytes and device."""
        return self.call("register_memory", rows, "DRAM", [BACKEND])

    def forget_memory(self, registered: Any) -> None:
        self.call("deregister_memory", registered, [BACKEND])

    def meet(self, told: bytes) -> str:
        """The name of a peer's agent, from what it tells of itself and its memory."""
        with self._lock:
            name = self.call("add_remote_agent", told)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._users[name] = self._users.get(name, 0) + 1
            return name

    def part(self, name: str) -> None:
        """A transfer from a peer is over; its memory is forgotten with the last."""
        with self._lock:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self.call("remove_remote_agent", name)

    def abandon(self, handle: Any, *memory: object) -> None:
        """Keep the memory of a read that was given up, until NIXL says that the read is over."""
        for number, (other, *_) in list(self._abandoned.items()):
            with suppress(NixlError):
                if self.call("check_xfer_state", other) == "PROC":
                    continue
                self.call("release_xfer_handle", other)
            self._abandoned.pop(number, None)
        if handle is not None:
            self._abandoned[id(handle)] = (handle, *memory)


_agents: dict[int, Agent | r.Unavailable] = {}  # by process: one that was forked has its own
_agents_lock = threading.Lock()


def agent_here() -> Agent | r.Unavailable:
    """The agent of this process. To start one takes a good part of a second, so it stays."""
    with _agents_lock:
        if os.getpid() not in _agents:
            try:
                _agents[os.getpid()] = Agent()
            except Exception as fault:  # of a library that has its own
                _agents[os.getpid()] = r.Unavailable(str(fault))
        return _agents[os.getpid()]


def _rows(memory: Runs) -> np.ndarray[Any, Any]:
    """Memory as NIXL takes it: address, bytes and device. A run that several arrays show is there
    once, because NIXL 1.5 crashes when it forgets the same memory twice."""
    sizes = memory.stops - memory.starts
    rows = np.stack([memory.addresses, sizes, np.zeros_like(sizes)], axis=1).astype(np.uint64)
    return np.unique(rows, axis=0)


class NixlTable(msgspec.Struct, array_like=True, frozen=True):
    """How to reach the sender's memory, and where in it the bytes are."""

    agent: m.Blob = b""  # NIXL's description of the sender's agent; empty for an empty state
    memory: m.Blob = b""  # `geometry.runs.Runs.pack`


_read_table = m.reader(NixlTable)


class NixlService(r.RouteService):
    """Registers the memory of a state, and says where it is."""

    def __init__(self, receiver: r.Receiver) -> None:
        super().__init__(receiver)
        self._registered: tuple[Agent, Any] | None = None
        self._staged: torch.Tensor | None = None
        self._closed = threading.Event()
        self._progress: threads.Running | None = None

    def offer(self, outgoing: Outgoing) -> bytes | r.Unavailable:
        agent = agent_here()
        return agent if isinstance(agent, r.Unavailable) else b""

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        self.outgoing = outgoing
        agent, memory = agent_here(), self._memory(outgoing)
        if isinstance(agent, r.Unavailable):
            raise r.RouteFault(agent.because)
        if not len(memory.starts):
            return m.write(NixlTable())
        try:
            registered = agent.register(_rows(memory))
            self._registered = agent, registered
            self._progress = threads.run(partial(self._make_progress, agent), "worker")
            told = agent.call("get_partial_agent_metadata", registered, True, [BACKEND])
        except NixlError as fault:
            raise r.RouteFault(str(fault)) from fault
        return m.write(NixlTable(told, memory.pack()))

    def _make_progress(self, agent: Agent) -> None:
        """Have NIXL answer receivers, where the link does not do so alone."""
        with suppress(NixlError):  # then they find out for themselves
            while not self._closed.wait(PROGRESS_SECONDS):
                agent.call("get_new_notifs")

    def _memory(self, outgoing: Outgoing) -> Runs:
        """Where the bytes of each chunk are: in tensors, or in the staged block."""
        snapshot, apart = outgoing.snapshot, set(outgoing.apart)
        chunks = snapshot.chunks
        inside = [index for index in range(len(chunks)) if index not in apart]
        found = snapshot.stream.host.only(
            [chunks.offsets[index] for index in inside], [chunks.sizes[index] for index in inside]
        )
        if not apart:
            return found
        self._staged = host_block(sum(chunks.sizes[index] for index in apart))
        staged, at = [], 0
        for index in sorted(apart):
            size = chunks.sizes[index]
            with on_side_stream():
                snapshot.read(index, self._staged[at : at + size], vectors.copy)
            staged.append((chunks.offsets[index], self._staged.data_ptr() + at, size))
            at += size
        return Runs.merged(found, Runs.of(staged))

    def close(self) -> None:
        self._closed.set()
        if self._progress is not None:
            self._progress.wait()
        if self._registered is not None:
            agent, registered = self._registered
            with suppress(NixlError):
                agent.forget_memory(registered)
        self._registered = self._staged = None


class NixlFetch(ReadingFetch):
    """Reads chunk by chunk into a registered buffer for each thread, and lands it from there."""

    _sources: Runs

    def __init__(self, incoming: r.Incoming, agent: Agent) -> None:
        super().__init__(incoming, verify=incoming.offer.verify)
        self._agent, self._peer = agent, ""
        self._stopped = False
        self._idle: list[tuple[torch.Tensor, Any]] = []  # buffers that are registered

    def run(self, go: bytes) -> None:
        table = _read_table(go)
        try:
            self._sources = Runs.unpack(table.memory, self._chunks.stream_bytes)
            self._peer = self._agent.meet(table.agent) if len(self._sources.starts) else ""
        except ValueError as fault:
            raise self._wrong(str(fault)) from None
        except NixlError as fault:
            raise self._lost(fault) from fault
        super().run(go)

    def _read_chunks(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self._submit(partial(self._read_buffered, chunk))

    def _read_buffered(self, chunk: int) -> ReadDone:
        try:
            buffer, registered = self._idle.pop()
        except IndexError:
            buffer = host_block(max(self._chunks.sizes))
            whole = Runs([0], [buffer.data_ptr()], [buffer.numel()])
            registered = self._agent.register(_rows(whole))
        done = self._read_and_land(
            chunk, self._sources, buffer, lambda found: self._read(found, buffer, registered)
        )
        self._idle.append((buffer, registered))
        return done

    def _read(self, found: Moves, *memory: object) -> None:
        """Returns when it is over. The memory of a read that fails is left to the agent."""
        none, handle = np.zeros_like(found.nbytes), None
        try:
            sides = [
                self._agent.call("get_xfer_descs", np.stack([at, found.nbytes, none], 1), "DRAM")
                for at in (found.destinations, found.sources)
            ]
            handle = self._agent.call("initialize_xfer", "READ", *sides, self._peer)
            self._finish(handle)
            self._agent.call("release_xfer_handle", handle)
        except NixlError:
            self._agent.abandon(handle, *memory)
            raise

    def _finish(self, handle: Any) -> None:
        state = self._agent.call("transfer", handle)
        pause, longest = POLL_SECONDS
        while state == "PROC":
            if self._stopped:
                raise NixlError("the read was given up")
            time.sleep(pause)
            pause = min(2 * pause, longest)
            state = self._agent.call("check_xfer_state", handle)
        if state != "DONE":
            raise NixlError("NIXL cannot read the sender's memory")

    def _lost(self, fault: Exception) -> Exception:
        return self._talk.lost(str(fault)) if isinstance(fault, NixlError) else fault

    def close(self) -> None:
        self._stopped = True
        super().close()
        peer, self._peer = self._peer, ""
        with suppress(NixlError):  # of a peer that is gone
            for _, registered in self._idle:
                self._agent.forget_memory(registered)
            self._idle.clear()
            if peer:
                self._agent.part(peer)


def _fetch(facts: bytes, incoming: r.Incoming) -> NixlFetch | r.Unavailable:
    agent = agent_here()
    return agent if isinstance(agent, r.Unavailable) else NixlFetch(incoming, agent)


ROUTE = r.Route("nixl", NixlService, _fetch, reads=True, by_request=True)
