"""Cases of the fuzz, each through one API, in processes that may crash.

A rank writes which case it is at before it begins. `Tally` counts how they ended: equal to the
oracle, or refused by path; anything else is a failure, with its seed.
"""

from __future__ import annotations

import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support import flat
from tests.support.fuzz import Case, Landing, Maker
from tests.support.oracle import Seen, meant, walk
from torchrelay.dropin import PGTransport
from torchrelay.weights import Encoding

SECONDS = 30
REFUSED = tr.errors.StateError
PEERS = (tr.errors.PeerRefusedError, tr.errors.PeerAbortedError)


@dataclass
class Tally:
    """How cases ended, by API."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Wrong(Exception):
    """A case that ended otherwise than it must."""


def of_case(path: str) -> str:
    """A path as an error has it, without what is around it."""
    return path.replace('"', "'")


def check_refusal(fault: BaseException, bad: list[str], what: str) -> None:
    """A refusal must name one of the paths at fault."""
    text = of_case(f"{fault} {getattr(fault, 'path', '')}")
    if not bad:
        raise Wrong(f"{what} refuses what it must take: {fault!r}") from fault
    if not any(of_case(path) in text for path in bad):
        raise Wrong(f"{what} names no path of {bad}: {fault!r}") from fault


def check_equal(before: Seen, state: Any, what: str, **how: bool) -> None:
    with torch.no_grad():
        found = before.difference(Seen.of(state), **how)
    if found:
        raise Wrong(f"{what}: {found}")


@dataclass
class Job:
    """One case: its state, the oracle, and what a receiver has for it."""

    seed: int
    random: random.Random
    made: Case
    before: Seen | None
    landing: Landing
    into: Case | None
    left_out: str | None = None  # a key that the destination lacks

    @classmethod
    def of(cls, seed: int, *, plain: bool = False) -> Job:
        made = Maker(seed, plain=plain).case()
        rng = random.Random(seed ^ 0xCA5E)
        landing = Landing(seed)
        before = None if made.bad else Seen.of(made.state)
        into = landing.case(made.state) if rng.random() < 0.5 and not made.bad else None
        job = cls(seed, rng, made, before, landing, into)
        if into is not None and rng.random() < 0.15:
            job.leave_out(rng.choice(list(made.state)))
        return job

    @property
    def strict(self) -> bool:
        return self.left_out is None

    def leave_out(self, name: str) -> None:
        """Have a destination that lacks a key, and has one more."""
        assert self.into is not None
        self.left_out = name
        del self.into.state[name]
        self.into.state["extra"] = torch.full((3,), 7.0)
        for paths in (self.into.bad, self.into.may):
            paths[:] = [path for path in paths if not path.startswith(f"['{name}']")]

    def check_source(self) -> None:
        """The state that was given is as it was."""
        if self.before is not None:
            check_equal(self.before, self.made.state, "the source changed")

    def check_landed(self, got: Any, *, at_rest: bool = False) -> None:
        assert self.before is not None
        if self.into is None:
            check_equal(self.before, got, "received", at_rest=at_rest)
            return
        before = self.before
        if self.left_out is not None:
            name = self.left_out
            before = Seen.of({key: one for key, one in self.made.state.items() if key != name})
            if name in got or got.pop("extra").tolist() != [7, 7, 7]:
                raise Wrong("a destination that lacks a key has other ones now")
        both = zip(tensors_of(got), tensors_of(self.into.state), strict=True)
        for (path, mine), (_, its) in both:
            # By the drop-in, tied tensors of a registered type are those of its first one.
            if mine is not its and not (
                "Note" in str(self.before.tree) and meant(mine) == meant(its)
            ):
                raise Wrong(f"the result has another tensor than the destination at {path}")
        check_equal(before, got, "received in place", in_place=True)
        if self.landing.outside_changed():
            raise Wrong("bytes outside of the destination were written")

    def taken(self, take: Callable[[Any], Any], what: str, *, at_rest: bool = False) -> str:
        """Take the state, by a call that gets `into`; how that ended."""
        into = None if self.into is None else self.into.state
        bad = [*self.made.bad, *([] if self.into is None else self.into.bad)]
        try:
            got = take(into)
        except (REFUSED, *PEERS) as fault:
            check_refusal(fault, [*bad, *([] if self.into is None else self.into.may)], what)
            if not self.landing.untouched():
                raise Wrong(f"{what} refused, and wrote") from fault
            return "refused"
        if bad:
            raise Wrong(f"{what} takes what it must refuse: {bad}")
        self.check_landed(got, at_rest=at_rest)
        return "equal"


def tensors_of(state: Any) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in walk(state) if isinstance(leaf, torch.Tensor)]


def given(job: Job, give: Callable[[], Any], what: str) -> str:
    """Give the state away; how that ended."""
    try:
        give()
    except (REFUSED, *PEERS) as fault:
        into = job.into or Case(None)
        check_refusal(fault, [*job.made.bad, *job.made.may, *into.bad, *into.may], what)
        return "refused"
    finally:
        job.check_source()
    if job.made.bad:
        raise Wrong(f"{what} takes what it must refuse: {job.made.bad}")
    return "equal"


# Between two ranks


class Pairs:
    """One transfer at a time, from rank 0 to rank 1."""

    def __init__(self, rank: int, group: Any) -> None:
        self._rank, self._group = rank, group
        self._drop_in_into: Any = None
        seconds, cpu = timedelta(seconds=SECONDS), torch.device("cpu")
        self._plain = PGTransport(group, seconds, cpu)
        self._in_place = PGTransport(group, seconds, cpu, lambda: self._drop_in_into)

    def run(self, api: str, job: Job) -> str:
        if api == "drop-in":
            return self._by_drop_in(job)
        rng = job.random
        route = rng.choice([None, None, "tcp", "memory"]) if api == "recv" else None
        atomic = rng.random() < 0.7 or api == "gather"
        source: Any = [0] if api == "gather" else 0
        with tr.Relay(
            self._group,
            timeout=SECONDS,
            verify=rng.choice([True, "all", False]),
            chunk_bytes=rng.choice([16, 48, 256, 4096, None]),
            route=route,
        ) as relay:
            if self._rank == 0:
                return given(job, lambda: relay.send(job.made.state, 1, step=job.seed), "send")
            return job.taken(
                lambda into: (
                    relay.recv(
                        source, into=into, step=job.seed, atomic=atomic, strict=job.strict
                    ).state
                ),
                api,
            )

    def _by_drop_in(self, job: Job) -> str:
        if job.into is not None and (job.into.bad or not job.strict):
            job.into = None
        used = self._plain if job.into is None else self._in_place
        if self._rank == 0:
            return given(job, lambda: used.send_checkpoint([1], job.made.state), "send_checkpoint")

        def take(into: Any) -> Any:
            self._drop_in_into = into
            return used.recv_checkpoint(0)

        return job.taken(take, "recv_checkpoint")


LIVE = ["recv", "recv", "recv", "gather", "drop-in"]


def pairs(rank: int, group: Any, seeds: list[int], at: str, bucket: str) -> Tally:
    """Rank 0 sends each state, rank 1 receives it."""
    between = Pairs(rank, group)
    return tallied(between, seeds, LIVE, Path(at) / f"rank-{rank}", counts=rank == 1)


# In each process alone


class Solo:
    """APIs of one process, kept open for all of its cases."""

    def __init__(self, stack: ExitStack, scratch: str, bucket: str, rank: int) -> None:
        self._stack, self._step = stack, 0
        places = {"checkpoint": f"{scratch}/steps", "bucket": f"{bucket}-{rank}"}
        self.stores = {
            name: stack.enter_context(tr.Checkpointer(place, no_dist=True))
            for name, place in places.items()
        }
        begin = {"nothing": torch.zeros(1)}
        self.endpoint = stack.enter_context(
            tr.serve(
                begin,
                step=0,
                no_dist=True,
                timeout=SECONDS,
                options=tr.options.ServeOptions(hold_seconds=0.01),
            )
        )
        encoding = Encoding(dtype=CAST)
        self.casting = stack.enter_context(
            tr.serve(
                begin,
                step=0,
                no_dist=True,
                timeout=SECONDS,
                encoding=encoding,
                options=tr.options.ServeOptions(hold_seconds=0.01),
            )
        )
        self.keeper = tr.Keeper(
            f"fuzz-{rank}-{Path(scratch).name}",
            no_dist=True,
            options=tr.options.KeeperOptions(lease_seconds=30),
        )
        stack.callback(self.keeper.end)

    def run(self, api: str, job: Job) -> str:
        self._step += 1
        return str(getattr(self, f"_{api}")(job, self._step))

    def _checkpoint(self, job: Job, step: int, name: str = "checkpoint") -> str:
        store = self.stores[name]
        before = store.steps()
        save = store.save
        if job.random.random() < 0.3:

            def save(step: int, state: Any) -> Any:
                return store.save_async(step, state).result(SECONDS)

        ended = given(job, lambda: save(step, job.made.state), name)
        if ended == "refused":
            if store.steps() != before:
                raise Wrong("a refused state was committed")
            return ended
        how = {"verify": job.random.random() < 0.7, "atomic": job.random.random() < 0.7}
        how["strict"] = job.strict
        ended = job.taken(lambda into: store.load(into, step=step, **how).state, name, at_rest=True)
        store.delete(step)
        return ended

    def _bucket(self, job: Job, step: int) -> str:
        return self._checkpoint(job, step, "bucket")

    def _publish(self, job: Job, step: int, name: str, endpoint: Any = None) -> str:
        def give() -> None:
            published = (endpoint or self.endpoint).publish(job.made.state, step=step)
            published.result(SECONDS)
            if published.skipped:
                raise Wrong(published.skipped)

        return given(job, give, name)

    def _pull(self, job: Job, step: int) -> str:
        if self._publish(job, step, "pull") == "refused":
            return "refused"
        how: dict[str, Any] = {"same_host": job.random.random() < 0.5}
        how |= {"verify": job.random.random() < 0.5 or "all", "atomic": job.random.random() < 0.7}
        how["strict"] = job.strict
        if job.into is None and job.random.random() < 0.1:
            how |= {"reshare": True}

        def take(into: Any) -> Any:
            got = flat.pull(self.endpoint.url, into=into, no_dist=True, timeout=SECONDS, **how)
            if got.seed is not None:
                self._stack.callback(got.seed.close)
            return got.state

        return job.taken(take, "pull")

    def _cast(self, job: Job, step: int) -> str:
        """By an endpoint that publishes floats in another dtype: the values of `tensor.to`."""
        job.into = None
        job.made.may = uncastable(job.made.state)
        if self._publish(job, step, "cast", self.casting) == "refused":
            return "refused"
        got = tr.pull(
            self.casting.url,
            no_dist=True,
            timeout=SECONDS,
            options=tr.options.PullOptions(same_host=job.random.random() < 0.5),
        ).state
        found = dict(tensors_of(got))
        for path, sent in tensors_of(job.made.state):
            wanted = converted(sent)
            if wanted.layout is not torch.strided or wanted.is_meta:
                continue
            mine = found[path].detach()
            if (mine.dtype, mine.shape) != (wanted.dtype, wanted.shape):
                raise Wrong(f"{path}: {mine.dtype} {mine.shape}, not {wanted.dtype}")
            if meant(mine) != meant(wanted):
                raise Wrong(f"{path}: other values than those of {sent.dtype} to {CAST}")
        return "equal"

    def _subscribe(self, job: Job, step: int) -> str:
        if self._publish(job, step, "subscribe") == "refused":
            return "refused"
        job.into = job.into or job.landing.case(job.made.state)
        same_host = job.random.random() < 0.5

        def take(into: Any) -> Any:
            how: Any = {"same_host": same_host, "timeout": SECONDS, "strict": job.strict}
            with tr.subscribe(self.endpoint.url, into=into, no_dist=True, **how) as subscription:
                return subscription.update().state

        return job.taken(take, "subscribe")

    def _keeper(self, job: Job, step: int) -> str:
        def give() -> None:
            staged = self.keeper.stage(step, job.made.state)
            staged.result(SECONDS)
            if staged.skipped:
                raise Wrong(staged.skipped)

        if given(job, give, "keeper") == "refused":
            return "refused"

        def take(into: Any) -> Any:
            source = self.keeper.source()
            how: Any = {"timeout": SECONDS, "strict": job.strict}
            return flat.recover(sources=[source], into=into, no_dist=True, **how).state

        return job.taken(take, "keeper")


def converted(leaf: Any) -> Any:
    """A leaf as an endpoint publishes it in `CAST`."""
    strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    if not strided or not leaf.is_floating_point() or leaf.is_meta:
        return leaf
    return leaf.detach().to(CAST)


def uncastable(state: Any) -> list[str]:
    """The paths of tensors that have no values of their own to cast."""
    homes: dict[int, list[str]] = {}
    for path, tensor in tensors_of(state):
        strided = tensor.layout is torch.strided and not tensor.is_nested
        strided = strided and not str(tensor.dtype).startswith("torch.float4")
        home = tensor.untyped_storage()._cdata if strided else -1
        homes.setdefault(home, []).append(path.removeprefix("state"))
    return [path for home, paths in homes.items() for path in paths if home == -1 or len(paths) > 1]


CAST = torch.bfloat16
APIS = ["checkpoint", "checkpoint", "bucket", "pull", "pull", "subscribe", "keeper", "cast"]


def solos(rank: int, group: Any, seeds: list[int], at: str, bucket: str) -> Tally:
    """Each rank has its own cases: it is alone."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=at))
        solo = Solo(stack, scratch, bucket, rank)
        return tallied(solo, seeds[rank::2], APIS, Path(at) / f"rank-{rank}")


class Runs(Protocol):
    def run(self, api: str, job: Job) -> str: ...


def tallied(
    runs: Runs, seeds: list[int], apis: list[str], at: Path, *, counts: bool = True
) -> Tally:
    """Run the cases, whatever becomes of each; `at` says which one is under way."""
    tally = Tally()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for seed in seeds:
            api = random.Random(f"api of {seed}").choice(apis)
            at.write_text(f"seed {seed}, {api}")
            try:
                job = Job.of(seed)
                ended = runs.run(api, job)
                if counts:
                    tally.ended[api + (" in place" if job.into else ""), ended] += 1
            except Exception as fault:
                lines = traceback.format_exception(fault, limit=-4)
                tally.failures.append(f"{at.name}, seed {seed}, {api}: {''.join(lines)}")
    return tally


# All ranks together


PLACEMENTS = [Replicate(), Shard(0), Shard(1)]
TOGETHER = ["checkpoint", "pull", "keeper"]


class Together:
    """Ranks that have one state together: DTensors on meshes, next to plain tensors and values that
    are equal on all of them."""

    def __init__(self, stack: ExitStack, group: Any, at: str) -> None:
        world = group.size()
        self._meshes = [init_device_mesh("cpu", (world,))]
        if world == 4:
            self._meshes.append(init_device_mesh("cpu", (2, 2)))
        self._steps = stack.enter_context(tr.Checkpointer(f"{at}/together", timeout=SECONDS))
        self._endpoint = stack.enter_context(
            tr.serve(
                {}, step=0, timeout=SECONDS, options=tr.options.ServeOptions(hold_seconds=0.01)
            )
        )
        self._keeper = tr.Keeper(
            f"fuzz-{crc32(at.encode())}",
            timeout=SECONDS,
            options=tr.options.KeeperOptions(lease_seconds=30),
        )
        stack.callback(self._keeper.end)

    def _spread(self, whole: torch.Tensor, rng: random.Random) -> torch.Tensor:
        """A tensor as this rank has it, by placements that are the same on all ranks."""
        mesh = rng.choice(self._meshes)
        placements = [rng.choice(PLACEMENTS) for _ in range(mesh.ndim)]
        wide = [p for p in placements if isinstance(p, Replicate) or p.dim < whole.ndim]
        if len(wide) < mesh.ndim or rng.random() < 0.2:
            return whole.clone()
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    def run(self, api: str, job: Job) -> str:
        rng = random.Random(job.seed)
        wholes, state, into = {}, {}, {}
        for number in range(rng.randint(1, 5)):
            name = f"w{number}"
            dtype = rng.choice(SHARDED_DTYPES)
            shape = [rng.choice([0, 1, 2, 3, 5, 7, 8]) for _ in range(rng.randint(0, 3))]
            generator = torch.Generator().manual_seed(job.seed * 10 + number)
            whole = torch.randint(-99, 99, shape, generator=generator).to(dtype)
            wholes[name], state[name] = whole, self._spread(whole, rng)
            into[name] = self._spread(torch.zeros_like(whole), rng)
        value = {"epoch": 2**70, "loss": float("nan"), "names": ["a", None]}
        landing = None if rng.random() < 0.3 else {"model": into, **value}
        got = self._through(api, job.seed, {"model": state, **value}, landing)
        for name, whole in wholes.items():
            mine = got["model"][name]
            expected = whole
            if isinstance(mine, DTensor):
                expected = distribute_tensor(
                    whole, mine.device_mesh, mine.placements, src_data_rank=None
                ).to_local()
                mine = mine.to_local()
            if mine.shape != expected.shape or meant(mine) != meant(expected):
                raise Wrong(f"{name}: {mine} is not {expected}")
        if Seen.of({name: got[name] for name in value}).difference(Seen.of(value)):
            raise Wrong(f"values became {got}")
        return "equal"

    def _through(self, api: str, step: int, state: Any, into: Any) -> Any:
        if api == "checkpoint":
            self._steps.save(step, state)
            return self._steps.load(into, step=step).state
        if api == "pull":
            self._endpoint.publish(state, step=step).result(SECONDS)
            url = self._endpoint.url
            return tr.pull(
                url,
                into=into,
                step=step,
                timeout=SECONDS,
                options=tr.options.PullOptions(same_host=step % 2 == 0),
            ).state
        self._keeper.stage(step, state).result(SECONDS)
        return tr.recover(sources=[self._keeper], into=into, timeout=SECONDS).state


SHARDED_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def together(rank: int, group: Any, seeds: list[int], at: str, bucket: str) -> Tally:
    """All ranks have each state together."""
    with ExitStack() as stack:
        runs = Together(stack, group, at)
        return tallied(runs, seeds, TOGETHER, Path(at) / f"rank-{rank}", counts=rank == 0)
