"""The command for keepers: run one, list them, end one."""

from __future__ import annotations

import sys
from typing import Any

import typer

from torchrelay.cli.access import CERTFILE, KEYFILE, chosen_access
from torchrelay.cli.output import JSON, fail, plain, print_json, size
from torchrelay.endpoint.address import Address
from torchrelay.endpoint.publish.server_process import START_SECONDS
from torchrelay.endpoint.server.messages import Listen
from torchrelay.errors import EndpointError, UsageError
from torchrelay.keeper import process
from torchrelay.keeper.server import messages as k
from torchrelay.sources.access import Access

JOB = typer.Argument(None, help="Name of the job, or JOB@HOST; without it, all keepers are listed.")
STATUS = typer.Option(False, "--status", help="Show the keeper's steps; do not start one.")
END = typer.Option(False, "--end", help="End the keeper and free its steps.")
LEASE = typer.Option(60.0, "--lease", min=0.1, help="Seconds to stay alive without a worker.")
MEMORY = typer.Option(None, "--memory", min=1, help="Most bytes of memory to use.")
ADDRESS = typer.Option("127.0.0.1:0", "--address", help="HOST:0 to listen at.")


def keeper(
    job: str | None = JOB,
    status: bool = STATUS,
    end: bool = END,
    lease: float = LEASE,
    memory: int | None = MEMORY,
    address: str = ADDRESS,
    certfile: str | None = CERTFILE,
    keyfile: str | None = KEYFILE,
    as_json: bool = JSON,
) -> None:
    """Run the keeper of a job on this machine, or show its steps.

    It runs in the background until no worker has been connected for the length of its lease.
    Workers start a keeper themselves; use this command if the launcher would end it with them.
    """
    if job is None:
        if end:
            raise UsageError("--end needs the name of a job")
        names = process.KeeperName.all()
    else:
        names = [process.KeeperName.of(job)]
        if end:
            if process.ask(names[0], k.End()) is None:
                fail(f"no keeper of job {job} runs here")
            return
        if not status:
            _run(
                names[0], lease, memory, address, chosen_access(certfile=certfile, keyfile=keyfile)
            )
    found = []
    for name in names:
        try:
            facts = process.status(name)
        except EndpointError as fault:
            if job is not None:
                raise
            print(plain(str(fault)), file=sys.stderr)  # the others are listed all the same
            continue
        if facts is not None:
            found.append((name, facts))
    if job is not None and not found:
        fail(f"no keeper of job {job} runs here")
    if as_json:
        print_json([{"job": name.job, "host": name.host, **facts} for name, facts in found])
        return
    for name, facts in found:
        print(_line(name, facts))
    if not found:
        print("no keeper of yours runs on this machine")


def _run(
    name: process.KeeperName, lease: float, memory: int | None, address: str, access: Access
) -> None:
    listen = Listen.at(*Address.parse(address), access)
    join = k.JoinKeeper(listen, memory, lease=lease, begins=True)
    worker = process.KeeperProcess(name, join)
    worker.start(START_SECONDS)
    worker.process.close()


def _line(name: process.KeeperName, facts: dict[str, Any]) -> str:
    steps = ", ".join(str(one["step"]) for one in facts.get("steps", ())) or "none"
    limit = "" if facts["memory"] is None else f" of {size(facts['memory'])}"
    workers = f"{facts['workers']} worker{'' if facts['workers'] == 1 else 's'}"
    return (
        f"{name}: process {facts['pid']}, {workers}, "
        f"{size(facts['staged_bytes'])}{limit}, steps: {steps}"
    )
