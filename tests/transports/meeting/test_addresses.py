"""Where a process listens: where gloo would."""

from __future__ import annotations

import socket

import pytest

import torchrelay as tr
from torchrelay.transports.meeting import addresses, listener
from torchrelay.transports.meeting.addresses import SETTING, listen_here
from torchrelay.transports.meeting.node import Node


def where() -> str:
    with listen_here() as here:
        return str(here.getsockname()[0])


def test_the_interface_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "lo")
    assert where() == "127.0.0.1"
    monkeypatch.setenv(SETTING, "no-such-interface,lo")
    assert where() == "127.0.0.1"


@pytest.mark.parametrize("name", ["no-such-interface", "x" * 300, "é", "lo;", ","])
def test_no_other_interface_is_opened(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(SETTING, name)
    with pytest.raises(OSError, match=SETTING):
        where()


def test_a_name_is_not_cut_to_that_of_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes 15 bytes. The one of this test knows every name of that length."""
    found = bytes(20) + socket.inet_aton("127.0.0.1")
    monkeypatch.setattr(addresses._fcntl, "ioctl", lambda fd, what, request: found)
    monkeypatch.setenv(SETTING, "an-interface-15")
    assert where() == "127.0.0.1"
    monkeypatch.setenv(SETTING, "an-interface-150")
    with pytest.raises(OSError, match=SETTING):
        where()


def test_the_address_of_the_host_name_or_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    for name in ("localhost", "no such host.invalid"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert where() in ("127.0.0.1", "::1")


def test_a_process_that_cannot_listen_says_which_setting_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SETTING, "no-such-interface")
    monkeypatch.setattr(listener, "_here", None)
    with pytest.raises(tr.errors.UsageError, match=f"cannot listen for the other ranks.*{SETTING}"):
        Node()
