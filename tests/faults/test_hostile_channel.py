"""A sender does not choose where a receiver connects to, nor what it says there."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

import torchrelay as tr
from tests.support.faults import CHUNK, same, weights
from tests.support.ways import by, patched
from torchrelay.deadlines import Deadline
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import addresses, channels
from torchrelay.transports.routes.channels import TOKEN_BYTES, Channels

NEW = 1
LONG = 25.0


def test_the_token_is_the_receivers_own() -> None:
    assert "token" not in wire.Channel.__struct_fields__
    with socket.create_server(("127.0.0.1", 0)) as there:
        record = wire.Channel("x", 1, *there.getsockname()[:2])
        with socket.create_connection(there.getsockname()):
            there.accept()[0].close()
            said = []
            for _ in range(2):
                berth = Channels().answer(0, record, 1, LONG)
                one = there.accept()[0]
                said.append(one.recv(TOKEN_BYTES, socket.MSG_WAITALL))
                one.close()
                assert len(berth.token) == TOKEN_BYTES and said[-1] == berth.token
                berth.end(keep=False)
    assert said[0] != said[1]


@pytest.mark.parametrize("token", [b"", b"t", b"t" * 15])
def test_a_sender_lets_in_nobody_without_a_whole_token(
    monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    berth = Channels().propose(1, 1, near=False)
    assert berth.record is not None
    with socket.create_connection((berth.record.host, berth.record.port)) as guest:
        guest.sendall(token + bytes(4 + TOKEN_BYTES))
        berth.answered(wire.Accept(channel=True, token=token), Deadline(LONG))
    assert berth.channel is None and "says no token" in berth.instead["connections"]
    berth.end(keep=False)


def test_only_addresses_that_are_connected_to_are_a_peers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        with socket.create_connection(there.getsockname()):
            for host in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"):
                addresses.check_peer(host)  # one machine, by whatever name
            for host in ("192.0.2.1", "2001:db8::1", "0.0.0.0", "::"):
                with pytest.raises(OSError, match="no connection to that address"):
                    addresses.check_peer(host)
            for host in ("localhost", "metadata.google.internal", "", "a\0b", "1" * 300):
                with pytest.raises(OSError, match="not say an address, but a name"):
                    addresses.check_peer(host)


def sent_elsewhere(rank: int, group: Any, host: str) -> Any:
    """The sender offers a channel to another machine than its own."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG)
    tries: list[Any] = []
    connect = socket.create_connection

    def counted(address: Any, *args: Any) -> socket.socket:
        tries.append(address)
        return connect(address, *args)

    if rank == 0:
        propose = Channels.propose

        def lie(self: Channels, *args: Any, **how: Any) -> channels.ChannelUse:
            berth = propose(self, *args, **how)
            assert berth.record is not None
            berth.record = msgspec.structs.replace(berth.record, host=host)
            return berth

        with patched(Channels, propose=lie):
            return relay.send(weights(NEW), 1).connections
    with patched(socket, create_connection=counted):
        got = relay.recv(0)
    return same(got.state, weights(NEW)), tries, got.report.instead["connections"]


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_a_receiver_connects_to_no_address_but_the_senders(pool2: Any, host: str) -> None:
    ours, (right, tries, why) = pool2.run(by, "channel", sent_elsewhere, host, fresh_group=True)
    assert right and ours == 0 and tries == [] and "not made" in why
