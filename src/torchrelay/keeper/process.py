"""A worker's end of its host's keeper: found by its name, started by whoever needs it first."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.admission import user_of
from torchrelay.endpoint.process import START_SECONDS, StepProcess, check_aiohttp
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.keeper.server import messages as k
from torchrelay.stores.writer.frames import exchange, has_hung_up
from torchrelay.stores.writer.launch import launch

LEASE_SECONDS = 60.0
RATE = 200e6  # bytes a second at which copies are fetched
STEPS = 2  # the newest one, and the one that is being staged
_ASK_SECONDS = 5.0
_PAUSE = 0.02
_PREFIX = "torchrelay-keeper"
_WORD = re.compile(r"[A-Za-z0-9._-]{1,32}")

_answer = msgspec.msgpack.Decoder(k.KeeperAnswer)


class KeeperName(NamedTuple):
    """What a keeper is found by: one for each user, job and host."""

    job: str
    host: str

    @classmethod
    def of(cls, job: str, host: str | None) -> KeeperName:
        """`UsageError` where a word cannot be part of a name."""
        here = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:32] or "host"
        found = cls(job, here if host is None else host)
        for what, word in (("a job", found.job), ("host", found.host)):
            if not isinstance(word, str) or not _WORD.fullmatch(word):
                raise UsageError(
                    f"{what} is named by 1 to 32 letters, digits, dots, dashes and underscores, "
                    f"not {word!r}"
                )
        return found

    @property
    def address(self) -> str:
        """Of a Unix socket that is in no file system. Who has it is asked of the kernel."""
        return f"{_PREFIX}/{os.getuid()}/{self.job}/{self.host}"

    @classmethod
    def all(cls) -> list[KeeperName]:
        """The keepers of this user that run on this machine."""
        found = []
        with suppress(OSError), open("/proc/net/unix") as lines:
            for line in lines:
                parts = line.rstrip("\n").rpartition("@")[2].split("/")
                if len(parts) == 4 and parts[:2] == [_PREFIX, str(os.getuid())]:
                    found.append(cls(*parts[2:]))
        return sorted(set(found))


def full_paths(*files: str | None) -> list[str | None]:
    """Files as a keeper finds them, which is in another folder."""
    return [None if file is None else str(Path(file).resolve()) for file in files]


def connect(name: KeeperName) -> socket.socket | None:
    """A connection to a keeper that runs; None where there is none."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(_ASK_SECONDS)
        link.connect(f"\0{name.address}")
    except OSError:
        link.close()
        return None
    user = user_of(link)
    if user != os.getuid():
        link.close()
        raise EndpointError(f"the name of keeper {name.job} is taken by user {user}")
    return link


def begin(name: KeeperName, deadline: Deadline) -> None:
    """Launch a keeper; nothing is wrong where another has the name by then."""
    check_aiohttp()
    process, link = launch("torchrelay.keeper.server.start", mute=True)
    with link:
        try:
            begun = msgspec.msgpack.encode(k.BeginKeeping(name.address))
            word = exchange(link, begun, deadline.left()).decode()
        except (OSError, EOFError) as fault:
            raise EndpointError(f"the keeper did not start: {fault}") from None
        finally:
            process.wait(START_SECONDS)
    if word not in ("", k.TAKEN):
        raise EndpointError(f"the keeper did not start: {word}")


class KeeperLink:
    """A connection to the keeper: see `endpoint.process.OtherProcess`. It does not end with it."""

    pid: int | None = None
    exit_status = None

    def __init__(self, name: KeeperName) -> None:
        self._name = name
        self._link: socket.socket | None = None
        self.generation = 0

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

    def exchange(self, request: bytes, timeout: float, fds: Sequence[int] = ()) -> bytes:
        return exchange(self._link, request, timeout, fds)

    def drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def forsake(self) -> None:
        self.drop()

    def close(self) -> None:
        if self._link is not None:
            with suppress(OSError):  # for children of a fork too, which have this end
                self._link.shutdown(socket.SHUT_RDWR)
        self.drop()


class KeeperProcess(StepProcess):
    """The keeper of this host, joined. One that was lost is started again."""

    noun = "the keeper"

    def __init__(self, name: KeeperName, join: k.JoinKeeper) -> None:
        super().__init__(KeeperLink(name), _answer)
        self._join = join
        self.joined: k.Joined | None = None

    @property
    def pid(self) -> int | None:
        return None if self.joined is None else self.joined.pid

    def _greet(self, deadline: Deadline) -> None:
        while True:
            try:
                answer = self._ask(self._join, deadline.left())
                break
            except EndpointError:  # one that was just about to end
                if deadline.passed:
                    raise
                time.sleep(_PAUSE)
                self._process.start(deadline)
        if isinstance(answer, m.Refused):
            self._process.drop()
            raise UsageError(f"the keeper does not take this worker: {answer.message}")
        if not isinstance(answer, k.Joined):
            self._process.drop()
            raise EndpointError("the keeper answered something else")
        self.joined = answer

    def know_token(self, token: str) -> None:
        """What a keeper that is started again is to be told."""
        self._join.token = token


def ask(name: KeeperName, request: k.KeeperRequest) -> k.KeeperAnswer | None:
    """One question to a keeper that may not run; None where it does not. `EndpointError` where it
    runs and does not answer."""
    link = connect(name)
    if link is None:
        return None
    with link:
        try:
            data = exchange(link, msgspec.msgpack.encode(request), _ASK_SECONDS)
            answer: k.KeeperAnswer = _answer.decode(data)
        except TimeoutError:
            raise EndpointError(
                f"the keeper of job {name.job} on {name.host} runs, and did not answer in "
                f"{_ASK_SECONDS:g} s: it is stopped, or the machine is very busy"
            ) from None
        except (OSError, EOFError):
            return None
        return answer


def status(name: KeeperName) -> dict[str, Any] | None:
    """What a keeper has and who reads it; None where it does not run."""
    answer = ask(name, m.Tell())
    if not isinstance(answer, m.StatusText):
        return None
    found: dict[str, Any] = msgspec.json.decode(answer.text)
    return found
