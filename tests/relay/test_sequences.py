"""One transfer after another, or at once, on one group: what one leaves behind harms no other."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, GRACE, attempt, received, same, sent, verdict, weights
from tests.support.ranks import RankPool, run_ranks
from tests.support.ways import by, every_way, patched, refused_soon
from torchrelay.memory.threads import IDLE
from torchrelay.transports.protocol import receive_plan
from torchrelay.transports.protocol.serving import Serving
from torchrelay.transports.routes import outgoing as outgoing_module
from torchrelay.transports.routes.memory import MemoryFetch
from torchrelay.transports.routes.reading import ReadingFetch
from torchrelay.transports.streams import sockets
from torchrelay.transports.streams.sockets import DataSocket

OLD = 100
LONG = 30.0


def meet(group: Any) -> None:
    """Wait for all ranks, apart from anything the relay does."""
    dist.barrier(group=group)


class Threads:
    """The relay's threads of this process that were not busy when this was made."""

    def __init__(self) -> None:
        self._before = self._busy()

    @staticmethod
    def _busy() -> set[threading.Thread]:
        ours = {one for one in threading.enumerate() if one.name.startswith("torchrelay")}
        return {one for one in ours if one.name not in (IDLE, "torchrelay-listener")}

    def _new(self) -> list[str]:
        return [thread.name for thread in self._busy() - self._before]

    def left(self, seconds: float = 1.0) -> list[str]:
        """Those that are still there after a while."""
        until = time.monotonic() + seconds
        while self._new() and time.monotonic() < until:
            time.sleep(0.01)
        return self._new()


# Refusals and aborts


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end the worker."""


def failing(progress: Any) -> None:
    if progress.done > progress.total // 3:
        raise RuntimeError("no more of this")


def interrupting(progress: Any) -> None:
    if progress.done > progress.total // 3:
        raise Interrupt


def ends_with(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The name of what a call raises, or "fine"."""
    try:
        call(*args, **options)
    except (tr.errors.RelayError, RuntimeError, Interrupt) as fault:
        return type(fault).__name__
    return "fine"


KINDS = ("fine", "dtype", "step", "extra", "unsupported", "sender", "receiver", "interrupt", "stop")


def mixed(rank: int, group: Any, rounds: int) -> list[Any]:
    threads = Threads()
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    live, seed = weights(OLD), OLD
    outcomes = []
    for number in range(rounds):
        kind = KINDS[number % len(KINDS)]
        state, step, new = weights(number), number, number
        into: dict[str, Any] = live
        sending = receiving = None
        if kind == "dtype":
            into = {**live, "h": live["h"].to(torch.float16)}
        elif kind == "step":
            step = 10_000
        elif kind == "extra":
            state["unexpected"] = torch.zeros(3)
        elif kind == "unsupported":
            state["thing"] = threading.Lock()
        elif kind in ("sender", "interrupt"):
            sending = failing if kind == "sender" else interrupting
        elif kind in ("receiver", "stop"):
            receiving = failing if kind == "receiver" else interrupting
        begun = time.monotonic()
        with refused_soon():
            if rank == 0:
                end = ends_with(relay.send, state, 1, step=number, progress=sending)
            else:
                end = ends_with(relay.recv, 0, into=into, step=step, progress=receiving)
        outcomes.append((kind, end, time.monotonic() - begun))
        if rank == 1:
            expected = new if kind == "fine" else seed
            assert verdict(live, seed, new) == expected, (kind, end)
            seed = expected
    outcomes.append(threads.left())
    return outcomes


ENDS = {
    "fine": ("fine", "fine"),
    "dtype": ("PeerRefusedError", "MismatchError"),
    "step": ("StepMismatchError", "StepMismatchError"),
    "extra": ("PeerRefusedError", "MismatchError"),
    "unsupported": ("UnsupportedLeafError", "PeerAbortedError"),
    "sender": ("RuntimeError", "PeerAbortedError"),
    "receiver": ("PeerLostError", "RuntimeError"),
    "interrupt": ("Interrupt", "PeerAbortedError"),
    "stop": ("PeerLostError", "Interrupt"),
}


@every_way
def test_refusals_aborts_and_successes_in_turn(pool2, way):
    ours, theirs = pool2.run(by, way, mixed, 27, timeout=60, fresh_group=True)
    for (kind, sent_end, took), (_, got_end, _) in zip(ours[:-1], theirs[:-1], strict=True):
        assert (sent_end, got_end) == ENDS[kind], kind
        assert took < 5, kind
    assert ours[-1] == theirs[-1] == []


def refusal(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=LONG)
    meet(group)
    if rank == 1:
        live = weights(OLD)
        live["small"][1] = live["small"][1].to(torch.int32)
        with pytest.raises(tr.errors.MismatchError, match=r"small"):
            relay.recv(0, into=live)
        return None
    begun = time.monotonic()
    with pytest.raises(tr.errors.PeerRefusedError) as refused:
        relay.send(weights(1), 1, step=3)
    fault = refused.value
    return time.monotonic() - begun, fault.rank, fault.path, fault.step, str(fault)


def test_a_refusal_reaches_the_sender_at_once(pool2):
    took, rank, path, step, text = pool2.run(refusal, fresh_group=True)[0]
    assert took < 1 + GRACE - 1, took
    assert (rank, step) == (1, 3)
    assert path is not None and "small" in path and path in text and "int32" in text


def one_refuses(rank: int, group: Any) -> Any:
    """Rank 1 refuses, rank 2 takes it, rank 3 does not come."""
    relay = tr.Relay(group, timeout=LONG, join_window=1.0)
    meet(group)
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(tr.errors.PeerRefusedError) as refused:
            relay.send(weights(1), [1, 2, 3], step=1)
        report = refused.value.report
        assert isinstance(report, tr.Report)
        return time.monotonic() - begun, report.receivers, sorted(report.failed)
    if rank == 1:
        return attempt(lambda: relay.recv(0, into={"w": torch.zeros(1)}))
    if rank == 2:
        return received(relay, 0, weights(OLD), OLD, 1, LONG)
    return None


def test_a_refusal_does_not_keep_the_state_from_others(pool4):
    (took, got, failed), first, second, _ = pool4.run(one_refuses, fresh_group=True)
    assert (got, failed) == ((2,), [1, 3])
    assert took < 1 + GRACE
    assert first.error == "MismatchError" and second.weights == 1


def error_before_answer(rank: int, group: Any) -> Any:
    """The receiver fails in code of its own while it looks at the offer."""
    relay = tr.Relay(group, timeout=LONG)
    if rank == 0:
        return sent(relay, 1, 1, LONG), sent(relay, 2, 1, LONG)
    live = weights(OLD)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("in a user's decoder")

    with patched(receive_plan, land=broken), pytest.raises(ZeroDivisionError):
        relay.recv(0, into=live)
    return received(relay, 0, live, OLD, 2, LONG)


def test_an_error_while_looking_at_the_offer_is_told(pool2):
    (first, second), got = pool2.run(error_before_answer, fresh_group=True)
    assert first.error == "PeerLostError" and "user's decoder" in first.text, first
    assert first.seconds < 5
    assert second.error is None and got.weights == 2


# Late ones


def late_receiver(rank: int, group: Any) -> Any:
    threads = Threads()
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    outcomes = []
    if rank == 0:
        for seed, timeout in ((1, 0.4), (2, 0.05), (3, 0.2)):
            outcomes.append((sent(relay, seed, 1, timeout), timeout))
        meet(group)
        outcomes.append((sent(relay, 4, 1, LONG), LONG))
    else:
        meet(group)
        outcomes.append((received(relay, 0, weights(OLD), OLD, 4, LONG), LONG))
    return outcomes, threads.left()


def test_a_receiver_that_comes_late_gets_the_newest_state(pool2):
    (ours, left), (theirs, left_there) = pool2.run(late_receiver, fresh_group=True)
    for out, timeout in ours[:-1]:
        assert out.error == "TransferTimeoutError" and "did not join" in out.text
        assert out.seconds < timeout + GRACE
    assert ours[-1][0].error is None
    assert theirs[0][0].weights == 4
    assert left == left_there == []


def late_sender(rank: int, group: Any) -> Any:
    threads = Threads()
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    if rank == 0:
        meet(group)
        return sent(relay, 4, 1, LONG), threads.left()
    live = weights(OLD)
    early = [received(relay, 0, live, OLD, 4, timeout) for timeout in (0.05, 0.3)]
    meet(group)
    return early, received(relay, 0, live, OLD, 4, LONG), threads.left()


def test_a_receiver_that_gave_up_receives_the_next(pool2):
    (ours, left), (early, got, left_there) = pool2.run(late_sender, fresh_group=True)
    assert [out.error for out in early] == ["TransferTimeoutError"] * 2
    assert all(out.seconds < 0.3 + GRACE and out.weights == OLD for out in early)
    assert ours.error is None and got.weights == 4
    assert left == left_there == []


def polling(rank: int, group: Any) -> Any:
    """A receiver that calls again and again with little time: it is served all the same."""
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    live, got = weights(OLD), []
    if rank == 0:
        for seed in range(5):
            time.sleep(0.02 + 0.03 * seed)
            got.append(sent(relay, seed, 1, LONG))
        while sent(relay, 5, 1, LONG).error is not None:
            pass  # so that the receiver knows that this was all
        return got
    until = time.monotonic() + LONG
    while live["seed"] != 5 and time.monotonic() < until:
        out = attempt(lambda: relay.recv(0, into=live, timeout=0.25))
        if out.error is None:
            got.append(live["seed"])
        else:
            assert out.error in ("TransferTimeoutError", "PeerAbortedError"), out
    return got


@every_way
def test_a_receiver_that_polls_misses_nothing(pool2, way):
    ours, theirs = pool2.run(by, way, polling, fresh_group=True, timeout=60)
    told = [seed for seed, out in enumerate(ours) if out.error is None]
    # Who runs out of time with data on the way may have it or not; the sender says so.
    assert set(told) <= set(theirs)
    assert theirs == sorted(theirs) and theirs[-1] == 5


def impatient(rank: int, group: Any, rounds: int) -> Any:
    """Both sides give up after next to no time, again and again, then take theirs."""
    relay = tr.Relay(group, chunk_bytes=CHUNK)
    chance = random.Random(rank)
    live, errors = weights(OLD), set()
    for number in range(rounds):
        timeout = chance.choice((0.002, 0.005, 0.01, 0.02, 0.05))
        if rank == 0:
            out = sent(relay, number, 1, timeout)
        else:
            out = attempt(lambda timeout=timeout: relay.recv(0, into=live, timeout=timeout))
            assert same(live, weights(live["seed"])), (number, out)
        assert out.seconds < timeout + 2 * GRACE, out
        errors.add(out.error)
    meet(group)
    if rank == 0:
        return errors, sent(relay, 9999, 1, LONG)
    return errors, received(relay, 0, live, live["seed"], 9999, LONG)


@every_way
def test_a_group_survives_impatience(pool2, way):
    (ours, last), (theirs, got) = pool2.run(by, way, impatient, 60, fresh_group=True, timeout=60)
    assert ours <= {None, "TransferTimeoutError", "PeerLostError"}
    assert theirs <= {None, "TransferTimeoutError", "PeerAbortedError"}
    assert last.error is None and got.weights == 9999, (last, got)


def after_the_window(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=1.0)
    live = weights(OLD)
    meet(group)
    if rank == 0:
        first = sent(relay, 1, [1, 2, 3], LONG)
        meet(group)
        return first, sent(relay, 2, [1, 2, 3], LONG)
    outcomes = []
    if rank != 3:
        outcomes.append(received(relay, 0, live, OLD, 1, LONG))
    meet(group)
    outcomes.append(received(relay, 0, live, live["seed"], 2, LONG))
    return outcomes


def test_who_comes_after_the_window_is_named_and_served_next_time(pool4):
    (first, second), *others = pool4.run(after_the_window, fresh_group=True)
    assert first.failed == (3,) and first.receivers == (1, 2)
    assert first.seconds < 1 + GRACE
    assert second.failed == () and second.receivers == (1, 2, 3)
    assert [out.weights for out in others[0]] == [1, 2]
    assert [out.weights for out in others[2]] == [2]


def short_deadline(rank: int, group: Any) -> Any:
    """The window is longer than the whole call; one receiver never comes."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=60)
    meet(group)
    if rank == 0:
        return sent(relay, 1, [1, 2, 3], 4.0)
    if rank == 3:
        return None
    return received(relay, 0, weights(OLD), OLD, 1, LONG)


def test_an_absent_receiver_leaves_the_others_time_to_be_served(pool4):
    ours, one, two, _ = pool4.run(short_deadline, fresh_group=True)
    assert ours.error is None and ours.failed == (3,) and ours.seconds < 4 + GRACE
    assert one.weights == two.weights == 1


def first_comes_late(rank: int, group: Any) -> Any:
    """Nobody is there when the window would have closed; then both come, one after the other."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=1.2)
    meet(group)
    if rank == 0:
        return sent(relay, 1, [1, 2], LONG)
    if rank == 3:
        return None
    time.sleep(1.3 + 0.2 * rank)
    return received(relay, 0, weights(OLD), OLD, 1, LONG)


def test_the_window_opens_with_the_first_to_come(pool4):
    ours, one, two, _ = pool4.run(first_comes_late, fresh_group=True)
    assert ours.error is None and ours.receivers == (1, 2)
    assert one.weights == two.weights == 1


# At once


def together(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as fault:
            results[index] = repr(fault)

    workers = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def at_once(rank: int, group: Any, rounds: int) -> Any:
    threads = Threads()
    relay, other = (tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG) for _ in range(2))
    bad: list[Any] = []

    def take(source: int, who: tr.Relay, *seeds: int) -> int:
        got = who.recv(source).state
        assert same(got, weights(got["seed"])), "mixed"
        assert got["seed"] in seeds
        return int(got["seed"])

    for number in range(rounds):
        base = number * 100
        if rank == 0:
            ends = together(
                lambda base=base: relay.send(weights(base + 1), 1),
                lambda base=base: other.send(weights(base + 2), 1),
                lambda base=base: relay.send(weights(base + 3), 2),
                lambda base=base: take(1, relay, base + 4),
            )
            bad += [end for end in ends[:3] if not isinstance(end, tr.Report)]
            bad += [] if ends[3] == base + 4 else [ends[3]]
        elif rank == 1:
            seeds = (base + 1, base + 2)
            ends = together(
                lambda seeds=seeds: take(0, relay, *seeds),
                lambda seeds=seeds: take(0, other, *seeds),
                lambda base=base: relay.send(weights(base + 4), 0),
            )
            bad += [] if sorted(ends[:2], key=str) == [*seeds] else [ends]
        elif rank == 2:
            bad += [] if take(0, relay, base + 3) == base + 3 else ["other state"]
    return bad, threads.left()


@every_way
def test_transfers_at_once_are_each_whole(pool4, way):
    for bad, left in pool4.run(by, way, at_once, 3, timeout=60, fresh_group=True):
        assert bad == [] and left == []


# Memory that changes, and bytes that do


def changed_while_sent(rank: int, group: Any, way: str) -> Any:
    """The sender's memory changes after it was hashed and before it has left. On route tcp each
    piece is hashed before it leaves; where the receiver reads, it waits until all are hashed."""
    threads = Threads()
    relay = tr.Relay(group, chunk_bytes=1 << 20, timeout=LONG, verify="all", connections=2)
    size, chunks = 16 << 20, 16
    store = group.get_group_store()
    if rank == 1:
        live = {"w": torch.zeros(size, dtype=torch.uint8)}
        begin = MemoryFetch._begin

        def later(self: Any) -> None:
            store.wait(["changed"])
            begin(self)

        with patched(MemoryFetch, _begin=later):
            out = attempt(lambda: relay.recv(0, into=live))
        return out, int(live["w"].max())
    state = {"w": torch.ones(size, dtype=torch.uint8)}
    original, running = outgoing_module.digest_of, sockets.RunningDigest
    hashed, lock = [], threading.Lock()

    def change(data: Any) -> None:
        with lock:
            hashed.append(data)
            now = len(hashed) == (5 if way == "tcp" else chunks)
        if now:
            np.asarray(data).fill(2)  # autograd does not notice
            store.set("changed", b"")

    def digest(data: torch.Tensor) -> bytes:
        value = original(data)
        change(data)
        return value

    class Changing:
        """A digest that is made on the way; memory changes after a piece of it."""

        def __init__(self) -> None:
            self._made = running()

        def update(self, data: memoryview) -> None:
            self._made.update(data)
            change(data)

        def digest(self) -> bytes:
            return bytes(self._made.digest())

    with patched(outgoing_module, digest_of=digest), patched(sockets, RunningDigest=Changing):
        return attempt(lambda: relay.send(state, 1)), threads.left()


@every_way
def test_memory_that_changes_under_the_sender_is_noticed(pool2, way):
    (ours, left), (theirs, highest) = pool2.run(
        by, way, changed_while_sent, way, fresh_group=True, timeout=60
    )
    assert theirs.error == "DigestError" and "changed while it was sent" in theirs.text, theirs
    assert highest == 0
    assert ours.error == "PeerLostError" and "digest" in ours.text, ours
    assert left == []


def trained_while_sent(rank: int, group: Any, way: str, atomic: bool) -> Any:
    """A step of training in the middle of a send, which autograd counts; no digests."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, verify=False)
    if rank == 1:
        live = weights(OLD)
        return received(relay, 0, live, OLD, 1, LONG, atomic=atomic)
    state = weights(1)
    original = Serving.go

    def trained(*args: Any) -> Any:
        found = original(*args)
        with torch.no_grad():
            state["h"].add_(1)
        return found

    with patched(Serving, go=trained):
        out = attempt(lambda: relay.send(state, 1, step=1))
    return out, sent(relay, 2, 1, LONG)


def trained_then_again(rank: int, group: Any, way: str, atomic: bool) -> Any:
    first = trained_while_sent(rank, group, way, atomic)
    if rank == 0:
        return first
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    return first, received(relay, 0, weights(OLD), OLD, 2, LONG)


@pytest.mark.parametrize("atomic", [True, False])
@every_way
def test_a_state_that_is_trained_on_while_it_is_sent_is_an_error(pool2, way, atomic):
    (ours, after), (theirs, again) = pool2.run(
        by, way, trained_then_again, way, atomic, fresh_group=True
    )
    assert ours.error == "StateError" and "changed while it was sent" in ours.text, ours
    assert "['h']" in ours.text
    if atomic:
        assert theirs.error == "PeerAbortedError" and theirs.weights == OLD, theirs
    else:
        assert theirs.error in ("TornStateError", "PeerAbortedError"), theirs
        assert theirs.error == "TornStateError" or theirs.weights == OLD, theirs
    assert "changed while it was sent" in theirs.text
    assert after.error is None and again.error is None and again.weights == 2


def corrupted(rank: int, group: Any, way: str, bad: list[int], atomic: bool) -> Any:
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, verify="all")
    if rank == 0:
        return sent(relay, 1, 1, LONG)
    places: dict[str, tuple[Any, str]] = {
        "tcp": (DataSocket, "take_chunk"),
        "memory": (MemoryFetch, "_read_and_hash"),
    }
    owner, name = places.get(way, (ReadingFetch, "_land"))
    original, count, lock = getattr(owner, name), [0], threading.Lock()

    def spoils() -> bool:
        with lock:
            count[0] += 1
            return count[0] in bad

    def spoiled(self: Any, *args: Any, **options: Any) -> Any:
        spoil = spoils()
        if name == "_land":
            if spoil:
                args[1][args[1].numel() // 2] ^= 0x10
            return original(self, *args)
        done = original(self, *args, **options)
        if way == "tcp" and spoil:
            return bytes(16), done[1]  # as if other bytes had come
        if spoil:
            self._mine[args[0]] = bytes(16)
        return done

    with patched(owner, **{name: spoiled}):
        return received(relay, 0, weights(OLD), OLD, 1, LONG, atomic=atomic), count[0]


@pytest.mark.parametrize("atomic", [True, False])
@every_way
def test_a_corrupted_chunk_is_asked_for_again(pool2, way, atomic):
    clean, chunks = pool2.run(by, way, corrupted, way, [], atomic)[1]
    assert clean.weights == 1
    ours, (got, count) = pool2.run(by, way, corrupted, way, [3, 7, chunks + 1], atomic)
    assert ours.error is None and got.error is None and got.weights == 1
    assert count == chunks + 3


@every_way
def test_a_line_that_corrupts_everything_is_an_error(pool2, way):
    ours, (got, _) = pool2.run(by, way, corrupted, way, list(range(1, 200)), True)
    assert got.error == "DigestError" and got.weights == OLD
    assert ours.error == "PeerLostError"
    torn = pool2.run(by, way, corrupted, way, list(range(1, 200)), False)[1][0]
    assert torn.error == "TornStateError" and "digest" in torn.text


# Resources


def groups_are_let_go(rank: int, group: Any) -> Any:
    import gc
    import weakref

    threads = Threads()
    mine = dist.new_group()
    relay = tr.Relay(mine, timeout=LONG)
    out = sent(relay, 1, 1, LONG) if rank == 0 else received(relay, 0, weights(OLD), OLD, 1, LONG)
    meet(mine)
    left, watched = threads.left(), weakref.ref(mine)
    dist.destroy_process_group(mine)
    del mine, relay
    gc.collect()
    return out.error, left, watched() is None


@every_way
def test_nothing_is_left_of_a_transfer_and_its_group(pool2, way):
    assert pool2.run(by, way, groups_are_let_go) == [(None, [], True)] * 2


def peak() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def in_place(rank: int, group: Any, nbytes: int, route: str) -> Any:
    state = {f"w{n}": torch.full((nbytes // 8,), rank + n, dtype=torch.uint8) for n in range(8)}
    relay = tr.Relay(group, timeout=60, route=route)
    meet(group)
    before = peak()
    if rank == 0:
        relay.send(state, 1)
    else:
        relay.recv(0, into=state, atomic=False)
        assert all(int(state[f"w{n}"][-1]) == n for n in range(8))
    return peak() - before


@pytest.mark.parametrize("route", ["tcp", "memory"])
def test_an_in_place_receive_takes_the_buffers_in_flight_and_no_more(route):
    nbytes = 512 << 20
    sender_grew, receiver_grew = run_ranks(in_place, 2, nbytes, route, timeout=110)
    # Two chunks of 32 MiB on their way, and what the allocator and the threads need.
    assert receiver_grew < 128 << 20, receiver_grew
    assert sender_grew < 64 << 20, sender_grew


def in_a_fork(rank: int, group: Any) -> str:
    """A forked child has its parent's connections: what it sent would be the parent's words."""
    with tr.Relay(group, timeout=20) as relay:
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            try:
                relay.recv(1 - rank, timeout=2)
            except BaseException as fault:
                os.write(theirs, f"{type(fault).__name__} {fault}".encode())
            os._exit(0)
        os.close(theirs)
        with open(ours) as told:
            text = told.read()
        os.waitpid(child, 0)
        if rank == 0:
            relay.send({"w": torch.ones(2)}, to=1)
        else:
            assert relay.recv(0).state["w"].sum() == 2
    return text


def test_a_forked_child_has_no_relay_and_its_parent_goes_on(pool2: RankPool) -> None:
    for text in pool2.run(in_a_fork, timeout=60):
        assert text.startswith("UsageError this Relay belongs to process"), text
