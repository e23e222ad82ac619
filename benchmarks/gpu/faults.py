"""What the ranks of `routes` do when something goes wrong: bytes that changed, deaths, memory that
was opened and is to be given back. Rank 0 sends, unless it is the one that survives."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

import torchrelay as tr
from benchmarks.gpu import mixed as m
from benchmarks.gpu.crew import Me, Wrong
from benchmarks.gpu.scenes import MODES, NEW, OLD, expect, patched, relay_of, told
from tests.support.gpu_on_host import landed
from torchrelay.memory.gpu import kernels
from torchrelay.transports.routes import outgoing as outgoing_module
from torchrelay.transports.routes.cuda_ipc import CudaFetch
from torchrelay.transports.routes.memory import MemoryFetch
from torchrelay.transports.routes.route import RETRIES
from torchrelay.transports.streams import sockets
from torchrelay.transports.streams.chunk_receiver import ChunkReceiver

# Tools


def before_copying(route: str, act: Callable[[], Any]) -> ExitStack:
    """Within: `act` is called when this receiver has joined and begins to take the bytes."""
    spots: dict[str, tuple[Any, str]] = {
        "cuda_ipc": (CudaFetch, "_copy_device_memory"),
        "memory": (MemoryFetch, "_wait"),
        "tcp": (ChunkReceiver, "_landed"),
    }
    owner, name = spots[route]
    original, left = getattr(owner, name), [act]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return original(*args, **kwargs)

    stack = ExitStack()
    stack.enter_context(patched(owner, name, wrapper))
    return stack


def free_memory() -> int:
    """Of the device, for all processes."""
    return int(torch.cuda.mem_get_info()[0])


def let_go(refs: list[Any], me: Me) -> None:
    """`Wrong` if tensors are still held that nobody of ours holds."""
    ends = time.monotonic() + 3
    while gc.collect() >= 0 and any(ref() is not None for ref in refs):
        if time.monotonic() > ends:
            raise Wrong("the relay still holds tensors of a transfer that is over")
        time.sleep(0.05)
    if me.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def await_free(wanted: int, what: str) -> None:
    """`Wrong` if less is free for long. Callers allow for half of what they wait for: a process
    that begins to use the GPU meanwhile takes half a gigabyte."""
    ends = time.monotonic() + 5
    while (free := free_memory()) < wanted:
        if time.monotonic() > ends:
            raise Wrong(f"{what}: {(wanted - free) / 1e6:.0f} MB of the GPU are not free again")
        time.sleep(0.05)


# Bytes that are not what was sent


def altered(me: Me, route: str, mode: str, verify: Any) -> Any:
    """The sender's digests are not those of its bytes: found, and the destination told apart."""
    relay = relay_of(me, route=route, verify=verify)

    def hash_memory(hashed: Any, device: int) -> torch.Tensor:
        found = digests(hashed, device)
        found[len(found) // 2, 3] ^= 1
        return found

    def digest(data: torch.Tensor) -> bytes:
        found = hashed(data)
        return bytes([found[0] ^ 1]) + found[1:]

    def on_the_way() -> Any:
        """The digest of other bytes: some come before those that are sent."""
        running = made()
        running.update(b"others")
        return running

    digests, hashed, made = kernels.digests, outgoing_module.digest_of, sockets.RunningDigest
    if me.rank == 0:
        state = m.weights(1, me.device, most=7)
        by_host = (outgoing_module, "digest_of", digest)
        by_gpu = (kernels, "digests", hash_memory)
        by_socket = (sockets, "RunningDigest", on_the_way)
        with patched(*by_host), patched(*by_gpu), patched(*by_socket):
            expect(("PeerLostError",), lambda: relay.send(state, to=1))
        report = relay.send(state, to=1)
    else:
        report, note = _refuses(me, relay, mode, "DigestError")
        relay.close()
        return told(report, note)
    relay.close()
    return told(report)


def _refuses(me: Me, relay: tr.Relay, mode: str, error: str) -> tuple[tr.Report, str]:
    """A receive that must fail, and one that must not."""
    into = None if mode == NEW else m.weights(OLD, me.device, most=7)
    torn = mode == "in place"
    kind = "TornStateError" if torn else error
    note = expect((kind,), lambda: relay.recv(0, into=into, **MODES[mode]), cause=error)
    if into is not None and not torn:
        m.check_same(m.weights(OLD, "cpu", most=7), into, device=me.device, in_place=True)
    got = relay.recv(0, into=into, **MODES[mode])
    expected = m.weights(1, "cpu", most=7)
    m.check_same(expected, got.state, device=me.device, in_place=mode != NEW)
    return got.report, note


def written_wrong(me: Me, route: str, mode: str) -> Any:
    """A bit flips in the receiver's memory when it has been copied: hashed there, and found. What
    can be fetched again flips again."""
    relay = relay_of(me, route=route, verify="all")
    if me.rank == 0:
        state = m.weights(1, me.device, most=7)
        expect(("PeerLostError",), lambda: relay.send(state, to=1))
        report, note = relay.send(state, to=1), ""
    else:
        original, left = kernels.digests, [0] * (RETRIES + 1)
        flipped: list[int] = []  # in which chunk, if it is one chunk's turn

        def flip(hashed: Any, device: int) -> torch.Tensor:
            found = original(hashed, device)
            if hashed.copies != (route == "cuda_ipc"):
                raise Wrong("it was not hashed as it should be")
            here = landed(hashed) if hashed.copies else hashed
            base, end, _ = here.segments[here.segments[:, 0] > 0][-1].tolist()
            flipped[:] = flipped or [base]
            if not left or flipped != [base]:
                return found
            left.pop()
            kernels.device_bytes((base + end - 1) % (1 << 64), 1, device).bitwise_xor_(4)
            return original(here, device)

        with patched(kernels, "digests", flip):
            report, note = _refuses(me, relay, mode, "DigestError")
        if left:
            raise Wrong(f"a chunk was not hashed {len(left)} times")
        if mode != "in place" and not ("['" in note and "from byte" in note):
            raise Wrong(f"the tensor and the place in it are not named: {note}")
    relay.close()
    return told(report, note)


def changed_unseen(me: Me, mode: str, verify: Any) -> Any:
    """The sender's memory changes after it was hashed, behind the version counter's back."""
    relay = relay_of(me, route="cuda_ipc", verify=verify)
    if me.rank == 0:
        state = m.weights(1, me.device, most=7)
        digests = kernels.digests

        def change(hashed: Any, device: int) -> torch.Tensor:
            found = digests(hashed, device)
            torch.cuda.current_stream().synchronize()
            m.alias(state["b"])[5] ^= 64
            torch.cuda.current_stream().synchronize()
            return found

        with patched(kernels, "digests", change):
            expect(("PeerLostError",), lambda: relay.send(state, to=1))
        m.alias(state["b"])[5] ^= 64
        report, note = relay.send(state, to=1), ""
    else:
        with before_copying("cuda_ipc", lambda: time.sleep(0.5)):
            report, note = _refuses(me, relay, mode, "DigestError")
    relay.close()
    return told(report, note)


def changed_seen(me: Me, route: str, mode: str) -> Any:
    """The sender's caller changes a tensor while it is sent: an error on both sides."""
    relay = relay_of(me, route=route)
    if me.rank == 0:
        state = m.weights(1, me.device, most=7)

        def change() -> None:
            time.sleep(0.15)
            state["c"].bitwise_xor_(1)

        thread = threading.Thread(target=change)
        thread.start()
        note = expect(("StateError",), lambda: relay.send(state, to=1))
        thread.join()
        state["c"].bitwise_xor_(1)
        report = relay.send(state, to=1)
    else:
        with before_copying(route, lambda: time.sleep(0.6)):
            report, note = _refuses(me, relay, mode, "PeerAbortedError")
    relay.close()
    return told(report, note)


# Deaths


def measure(me: Me) -> int:
    gc.collect()
    if me.device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return free_memory()


def receiver_dies(me: Me, victim: int, route: str, nbytes: int, free: int) -> Any:
    """As it begins to copy. The sender hears of it, and its memory is its own again."""
    relay = relay_of(me, route=route)
    if me.rank == victim:
        into = m.large(OLD, me.device, nbytes)
        with before_copying(route, lambda: os.kill(os.getpid(), 9)):
            relay.recv(0, into=into)
        raise Wrong("was not killed: the copy was never begun")
    state = m.large(1, me.device, nbytes)
    refs = [weakref.ref(tensor) for tensor in state.values()]
    note = expect(("PeerLostError",), lambda: relay.send(state, to=victim))
    state.clear()
    let_go(refs, me)
    if free:
        await_free(free - nbytes // 2, "after the receiver's death")
    relay.close()
    return {"note": note}


def sender_dies(
    me: Me, victim: int, pid: int, route: str, atomic: bool, nbytes: int
) -> Any:  # fmt: skip
    """As rank 0 begins to copy from it: old weights stay, or are said to be torn."""
    relay = relay_of(me, route=route)
    if me.rank == victim:
        relay.send(m.large(1, me.device, nbytes), to=0)
        raise Wrong("was not killed: the copy was never begun")
    into = m.large(OLD, me.device, nbytes)

    def kill() -> None:
        os.kill(pid, 9)
        ends = time.monotonic() + 10
        while _alive(pid) and time.monotonic() < ends:
            time.sleep(0.01)

    kind = "PeerLostError" if atomic else "TornStateError"
    with before_copying(route, kill):
        note = expect(
            (kind,), lambda: relay.recv(victim, into=into, atomic=atomic), cause="PeerLostError"
        )
    if atomic and not m.same_large(m.large(OLD, me.device, nbytes), into):
        raise Wrong("the destination has changed")
    relay.close()
    return {"note": note}


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def after_deaths(me: Me, friend: int, route: str) -> Any:
    """The survivor's group still serves, both ways."""
    relay = relay_of(me, route=route)
    if me.rank == 0:
        relay.send(m.weights(1, me.device), to=friend)
        got = relay.recv(friend)
    else:
        got = relay.recv(0)
        relay.send(m.weights(1, me.device), to=0)
    m.check_same(m.weights(1, "cpu"), got.state, device=me.device, in_place=False)
    relay.close()
    return told(got.report)


# What a process keeps open


def gives_back(me: Me, step: str, nbytes: int, free: int) -> Any:
    """The sender frees what the receiver has opened; `step` is one act in both, in turn."""
    if step == "send":
        _kept["relay"] = relay = relay_of(me, route="cuda_ipc")
        state = _kept["state"] = m.large(1, me.device, nbytes)
        report = relay.send(state, to=1) if me.rank == 0 else relay.recv(0, into=state).report
        return told(report)
    relay, state = _kept["relay"], _kept["state"]
    if step == "another":  # the newest state does not use the old memory any more
        if me.rank == 0:
            state.clear()
            measure(me)  # else new tensors would be made in what the old ones leave behind
            relay.send(m.weights(1, me.device), to=1)
        else:
            relay.recv(0)
    elif step == "close" and me.rank == 1:
        relay.close()
    elif step == "free" and me.rank == 0:
        state.clear()
        relay.close()
    if step in ("free", "another") and me.rank == 0:
        gc.collect()
        torch.cuda.empty_cache()
        await_free(free + nbytes // 2, step)
    if step == "end":
        relay.close()
        _kept.clear()
        measure(me)
    return {}


_kept: dict[str, Any] = {}


def two_relays(me: Me) -> Any:
    """Two relays of one process open the same memory; one closes it, the other goes on."""
    relays = [relay_of(me, route="cuda_ipc") for _ in range(2)]
    state = m.weights(1 if me.rank == 0 else OLD, me.device, most=7)
    for turn, which in enumerate((0, 1, 0, 1, 1)):
        if turn == 3:
            relays[0].close()
        if me.rank == 0:
            m.overwrite(state, 10 + turn)
            report = relays[which].send(state, to=1)
        else:
            report = relays[which].recv(0, into=state, atomic=False).report
            expected = m.weights(10 + turn, "cpu", most=7)
            m.check_same(expected, state, device=me.device, in_place=True)
    relays[1].close()
    return told(report)
