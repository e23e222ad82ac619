"""A worker's end of its host's keeper: found by its name, started by whoever needs it first."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.publish.server_process import (
    START_SECONDS,
    RequestRefusedError,
    ServerProcess,
)
from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.http.sockets import user_of
from torchrelay.errors import EndpointError, UsageError
from torchrelay.keeper.choice import check_budget, choose
from torchrelay.keeper.server import messages as k
from torchrelay.processes.child_process import ChildProcess, launch
from torchrelay.processes.frames import exchange, has_hung_up
from torchrelay.shortage import raise_shortage

ASK_SECONDS = 5.0
PROGRAM = "torchrelay.keeper.server.start"
_PAUSE = 0.02
_PREFIX = "torchrelay-keeper"
_WORD = re.compile(r"[A-Za-z0-9._-]{1,32}")

_answer = msgspec.msgpack.Decoder(k.KeeperAnswer)
_reported = msgspec.msgpack.Decoder(tuple[int | None, k.KeeperReport])


class KeeperName(NamedTuple):
    """The name of a keeper: there is one for each user, job and host."""

    job: str
    host: str

    @classmethod
    def of(cls, text: str) -> KeeperName:
        """A job's name, or `JOB@HOST` for another host than this machine."""
        job, at, host = text.partition("@") if isinstance(text, str) else ("", "", "")
        here = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:32] or "host"
        found = cls(job, host if at else here)
        if not found.is_valid:
            raise UsageError(
                "a keeper is named by JOB or JOB@HOST, each 1 to 32 letters, digits, dots, dashes "
                f"and underscores, not {text!r}"
            )
        return found

    @property
    def is_valid(self) -> bool:
        return all(_WORD.fullmatch(word) for word in self)

    @property
    def address(self) -> str:
        """Of a Unix socket that is in no file system. The kernel tells which user has it."""
        return f"{_PREFIX}/{os.getuid()}/{self.job}/{self.host}"

    @classmethod
    def all(cls) -> list[KeeperName]:
        """The keepers of this user that run on this machine."""
        found = set()
        with suppress(OSError), open("/proc/net/unix", errors="replace") as lines:
            for line in lines:
                parts = line.rstrip("\n").rpartition("@")[2].split("/")
                if len(parts) == 4 and parts[:2] == [_PREFIX, str(os.getuid())]:
                    found.add(cls(*parts[2:]))
        return sorted(name for name in found if name.is_valid)

    def __str__(self) -> str:
        return f"{self.job} on {self.host}"


def connect(name: KeeperName) -> socket.socket | None:
    """A connection to a keeper that runs; None where there is none."""
    try:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as fault:
        raise_shortage(fault, f"ask keeper {name.job}")
        raise
    try:
        link.settimeout(ASK_SECONDS)
        link.connect(f"\0{name.address}")
    except OSError:
        link.close()
        return None
    user = user_of(link)
    if user != os.getuid():
        link.close()
        raise EndpointError(f"the name of keeper {name.job} is taken by user {user}: use another")
    return link


def begin(name: KeeperName, deadline: Deadline) -> None:
    """Launch a keeper; another may have the name by then, which is fine."""
    process, link = launch(PROGRAM, mute=True)
    with link:
        try:
            answer = exchange(link, name.address.encode(), deadline.left()).decode()
        except (OSError, EOFError) as fault:
            raise EndpointError(f"the keeper did not start: {fault}. Try again") from None
        finally:
            process.wait(START_SECONDS)
    if answer not in ("", k.TAKEN):
        raise EndpointError(f"the keeper did not start: {answer}")


class KeeperSocket(ChildProcess):
    """A connection to the keeper, which is not a child and does not end with the connection."""

    def __init__(self, name: KeeperName) -> None:
        super().__init__(PROGRAM)
        self._name = name

    def start(self, deadline: Deadline | None = None) -> bool:
        deadline = deadline or Deadline(START_SECONDS)
        if self._link is not None and not has_hung_up(self._link):
            return False
        self.drop()
        while (link := connect(self._name)) is None:
            if deadline.passed:
                raise EndpointError(f"no keeper for job {self._name.job} in {deadline.seconds:g} s")
            begin(self._name, deadline)
        self._link = link
        self.generation += 1
        return True


class KeeperProcess(ServerProcess):
    """The keeper of this host, joined; every keeper lists a step. One that was lost is started
    again."""

    operation = "stage"
    on_devices = False

    def __init__(self, name: KeeperName, join: k.JoinKeeper) -> None:
        super().__init__(join.listen, KeeperSocket(name), _answer, "the keeper")
        self._join = join
        self.joined = k.Joined(0, "", [], 0)  # until `start`
        self.known: list[str] = []  # keepers of the job, now and before

    @property
    def token(self) -> str:
        return self._join.listen.token or ""

    def _begin(self, deadline: Deadline) -> None:
        while True:
            try:
                self.joined = self.ask(self._join, k.Joined, deadline.left())
                self.port = self.joined.port
                return
            except RequestRefusedError as fault:
                self.process.drop()
                text = f"the keeper does not take this worker: {fault.message}"
                raise UsageError(text) from None
            except EndpointError:
                if deadline.passed:
                    raise
            time.sleep(_PAUSE)  # one that was just about to end
            self._launch(deadline)

    def agree(self, token: str, known: list[str]) -> None:
        """The ranks have agreed on a token, also for a keeper that has to be started again."""
        self._join.listen.token, self.known = token, known

    def meet(self, urls: list[str], deadline: Deadline) -> None:
        self.ask(k.Members(urls, self.url, self.token), m.Obeyed, deadline.left())
        self.known = list(dict.fromkeys([*urls, *self.known]))

    def report(self, deadline: Deadline) -> bytes:
        found = self.ask(k.AskReport(), k.KeeperReport, deadline.left())
        return msgspec.msgpack.encode((self._join.memory, found))

    def choose(
        self, reports: list[bytes], parts: list[int], urls: list[str], step: int
    ) -> tuple[bytes, str]:
        found = [decoded(_reported, data, rank) for rank, data in enumerate(reports)]
        check_budget(parts, urls, [memory for memory, _ in found], self._join.copies)
        copies = len(set(urls)) > 1 and self._join.copies > 0
        once = {url: reported for url, (_, reported) in zip(urls, found, strict=True)}
        decision, why = choose(list(once.values()), step, copies=copies)
        return msgspec.msgpack.encode(decision), why

    def listing(self, urls: list[str]) -> set[int]:
        return {urls.index(url) for url in urls}


def ask(name: KeeperName, request: k.KeeperRequest) -> k.KeeperAnswer | None:
    """One request to a keeper; None where none runs. `EndpointError` where it does not answer."""
    link = connect(name)
    if link is None:
        return None
    with link:
        try:
            data = exchange(link, msgspec.msgpack.encode(request), ASK_SECONDS)
            answer: k.KeeperAnswer = _answer.decode(data)
        except TimeoutError:
            raise EndpointError(
                f"the keeper of job {name} runs, and did not answer in {ASK_SECONDS:g} s: it is "
                "stopped, or the machine is very busy"
            ) from None
        except (OSError, EOFError):
            return None
        return answer


def status(name: KeeperName) -> dict[str, Any] | None:
    """The steps and readers of a keeper; None where it does not run."""
    answer = ask(name, m.Tell())
    if not isinstance(answer, m.StatusText):
        return None
    found: dict[str, Any] = msgspec.json.decode(answer.text)
    return found
