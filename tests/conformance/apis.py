"""The APIs that a state can go through, each as its users call it.

A durable one saves a job at a root and loads it into another job, on as many ranks or others. A
live one sends the job of each rank of one replica to the same rank of another. One of parts sends
from all ranks of a job to all ranks of another one, which may be more or fewer.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import torchrelay as tr
from tests.conformance.jobs import Job, painted
from tests.support.torchft_files import find_torchft
from torchrelay import dropin
from torchrelay.dcp import Reader, Writer
from torchrelay.endpoint.front import Endpoint

TIMEOUT = 20.0
LIMIT = timedelta(seconds=TIMEOUT)


class Durable:
    """A way to save and to load. `whole`: it carries all of the state, not the model alone.
    `of_each_rank`: it carries values that are others on each rank. torch's calls save those of one
    rank."""

    whole = True
    of_each_rank = True

    def save(self, root: str, job: Job) -> None:
        raise NotImplementedError

    def load(self, root: str, job: Job) -> None:
        raise NotImplementedError


class ByCheckpointer(Durable):
    def save(self, root: str, job: Job) -> None:
        with tr.Checkpointer(root, timeout=TIMEOUT) as there:
            there.save(job.step, job.objects())

    def load(self, root: str, job: Job) -> None:
        with tr.Checkpointer(root, timeout=TIMEOUT) as there:
            job.taken(there.load(into=job.objects()).state)


class ByCheckpointerAsync(ByCheckpointer):
    def save(self, root: str, job: Job) -> None:
        with tr.Checkpointer(root, timeout=TIMEOUT) as there:
            there.save_async(job.step, job.objects())


class ByRecover(ByCheckpointer):
    """From a directory. Ranks recover together."""

    def load(self, root: str, job: Job) -> None:
        group = dist.group.WORLD  # which is not the default of `recover` yet
        found = tr.recover(into=job.objects(), sources=[root], group=group, timeout=TIMEOUT)
        job.taken(found.state)


class ByDcp(Durable):
    of_each_rank = False

    def save(self, root: str, job: Job) -> None:
        dcp.save(job.plain(), storage_writer=Writer(f"{root}/step-{job.step}", timeout=TIMEOUT))

    def load(self, root: str, job: Job) -> None:
        job.train(1)  # torch loads into an optimizer that has a state
        into = job.plain()
        dcp.load(into, storage_reader=Reader(root, timeout=TIMEOUT))
        job.adopt(into)


class ByDcpAsync(ByDcp):
    def save(self, root: str, job: Job) -> None:
        writer = Writer(f"{root}/step-{job.step}", timeout=TIMEOUT)
        dcp.async_save(job.plain(), storage_writer=writer).result(TIMEOUT)


class ByDropin(Durable):
    of_each_rank = False

    def save(self, root: str, job: Job) -> None:
        self._there(root).save(job.plain(), checkpoint_id=f"{root}/step-{job.step}")

    def load(self, root: str, job: Job) -> None:
        job.train(1)
        into = job.plain()
        self._there(root).load(into)
        job.adopt(into)

    @staticmethod
    def _there(root: str) -> dropin.Checkpointer:
        return dropin.Checkpointer(Writer(root, timeout=TIMEOUT), Reader(root, timeout=TIMEOUT))


class ByDropinAsync(ByDropin):
    def save(self, root: str, job: Job) -> None:
        target = f"{root}/step-{job.step}"
        self._there(root).async_save(job.plain(), checkpoint_id=target).result(TIMEOUT)


class ByExport(ByCheckpointer):
    """The model alone, as Hugging Face files: it trains on with a new optimizer."""

    whole = False
    of_each_rank = False

    def save(self, root: str, job: Job) -> None:
        super().save(root, job)
        if dist.get_rank() == 0:
            with tr.Checkpointer(
                root,
                no_dist=True,
                timeout=TIMEOUT,
                options=tr.options.CheckpointerOptions(read_only=True),
            ) as there:
                there.export_hf(Path(root) / "hf", key=job.model_key)
        dist.barrier()

    def load(self, root: str, job: Job) -> None:
        found = load_file(Path(root) / "hf" / "model.safetensors")
        plain = job.plain()
        model = plain[job.model_key]
        # A tied tensor is in the file once, under the first of its names.
        names: dict[int, str] = {}
        named = {}
        for name, tensor in model.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            first = names.setdefault(local.data_ptr(), name) if local.numel() else name
            bare = [part for part in first.split(".") if part not in ("module", "_orig_mod")]
            named[name] = found[".".join(bare)]
        job.adopt({**plain, job.model_key: painted(model, named)})


class ByPull(Durable):
    """Published by the ranks of a job at one URL, and pulled by those of another, which are in no
    group with them. A pool of ranks keeps one endpoint for all of its jobs."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._step = 0

    def save(self, root: str, job: Job) -> None:
        self._step += 1
        if self._endpoint is None:
            self._endpoint = tr.serve(job.objects(), step=self._step, timeout=TIMEOUT)
        else:
            published = self._endpoint.publish(job.objects(), step=self._step)
            assert published.skipped is None, published.skipped
        if dist.get_rank() == 0:
            (Path(root) / "url").write_text(f"{self._endpoint.url} {self._step}")
        dist.barrier()

    def load(self, root: str, job: Job) -> None:
        url, step = (Path(root) / "url").read_text().split()
        options: dict[str, Any] = {"group": dist.group.WORLD, "timeout": TIMEOUT}
        job.taken(
            tr.pull(
                url,
                into=job.objects(),
                options=tr.options.PullOptions(newer_than=int(step) - 1),
                **options,
            ).state
        )


class ByRecoverFromEndpoint(ByPull):
    """Published as for a pull, and recovered by ranks together."""

    def load(self, root: str, job: Job) -> None:
        url, step = (Path(root) / "url").read_text().split()
        group = dist.group.WORLD
        options: dict[str, Any] = {"group": group, "timeout": TIMEOUT, "min_step": int(step)}
        job.taken(tr.recover(into=job.objects(), sources=[url], **options).state)


DURABLE: dict[str, Durable] = {
    "Checkpointer.save": ByCheckpointer(),
    "Checkpointer.save_async": ByCheckpointerAsync(),
    "dcp.save": ByDcp(),
    "dcp.async_save": ByDcpAsync(),
    "dropin.Checkpointer.save": ByDropin(),
    "dropin.Checkpointer.async_save": ByDropinAsync(),
    "export_hf": ByExport(),
    "serve, pull": ByPull(),
    "Checkpointer.save, recover": ByRecover(),
    "serve, recover": ByRecoverFromEndpoint(),
}


class Live:
    """A way from a rank that has a state to one that needs it."""

    def send(self, job: Job, to: int) -> None:
        raise NotImplementedError

    def recv(self, job: Job, source: int) -> None:
        raise NotImplementedError


class ByRelay(Live):
    def send(self, job: Job, to: int) -> None:
        with tr.Relay(timeout=TIMEOUT) as relay:
            relay.send(job.objects(), to, step=job.step)

    def recv(self, job: Job, source: int) -> None:
        with tr.Relay(timeout=TIMEOUT) as relay:
            job.taken(relay.recv(source, into=job.objects()).state)


class ByTransport(Live):
    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    def send(self, job: Job, to: int) -> None:
        self._transport(None).send_checkpoint([to], job.plain())

    def recv(self, job: Job, source: int) -> None:
        job.train(1)
        got: Any = self._transport(job.plain).recv_checkpoint(source)
        job.adopt(got)

    def _transport(self, state: Any) -> dropin.PGTransport:
        group: Any = dist.group.WORLD
        cpu = torch.device("cpu")
        return dropin.PGTransport(group, LIMIT, cpu, state, protocol=self._protocol)


class ByTorchft(Live):
    """torchft's manager passes the metadata of a transport on; here a message does."""

    def send(self, job: Job, to: int) -> None:
        transport = self._transport(None)
        dist.send_object_list([transport.metadata()], to)
        transport.send_checkpoint([to], job.step, job.plain(), LIMIT)

    def recv(self, job: Job, source: int) -> None:
        job.train(1)
        metadata: list[Any] = [None]
        dist.recv_object_list(metadata, source)
        transport = self._transport(job.plain)
        job.adopt(transport.recv_checkpoint(source, metadata[0], 2, LIMIT))

    def _transport(self, state: Any) -> Any:
        find_torchft()
        from torchrelay.integrations.torchft import RelayTransport

        return RelayTransport(dist.group.WORLD, LIMIT, "cpu", state)


LIVE: dict[str, Live] = {
    "Relay": ByRelay(),
    "PGTransport, relay": ByTransport("relay"),
    "PGTransport, torch": ByTransport("torch"),
    "torchft": ByTorchft(),
}


class Parts:
    """A way from ranks that each have a part of a state to ranks of another number."""

    def __init__(self, route: str) -> None:
        self._route = route

    def send(self, job: Job, to: list[int]) -> None:
        with tr.Relay(timeout=TIMEOUT, route=self._route) as relay:
            relay.send(job.objects(), to, step=job.step)

    def recv(self, job: Job, sources: list[int]) -> None:
        with tr.Relay(timeout=TIMEOUT, route=self._route) as relay:
            job.taken(relay.recv(sources, into=job.objects()).state)


PARTS: dict[str, Parts] = {
    "Relay, several sources": Parts("memory"),
    "Relay, several sources, tcp": Parts("tcp"),
}
