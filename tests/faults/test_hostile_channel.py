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
from torchrelay.transports.routes.sockets import addresses, channels
from torchrelay.transports.routes.sockets.channels import TOKEN_BYTES, Channel, Channels

NEW = 1
LONG = 25.0


def test_the_token_is_the_receivers_own() -> None:
    assert "token" not in Channel.__struct_fields__
    with socket.create_server(("127.0.0.1", 0)) as there:
        record = Channel("x", 1, *there.getsockname()[:2])
        with socket.create_connection(there.getsockname()):
            there.accept()[0].close()
            said = []
            for _ in range(2):
                use = Channels().answer(0, record, 1, LONG)
                one = there.accept()[0]
                said.append(one.recv(TOKEN_BYTES, socket.MSG_WAITALL))
                one.close()
                assert len(use.token) == TOKEN_BYTES and said[-1] == use.token
                use.end(keep=False)
    assert said[0] != said[1]


@pytest.mark.parametrize("token", [b"", b"t", b"t" * 15])
def test_a_sender_lets_in_nobody_without_a_whole_token(
    monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    use = Channels().propose(1, 1, near=False)
    assert use.record is not None
    with socket.create_connection((use.record.host, use.record.port)) as guest:
        guest.sendall(token + bytes(4 + TOKEN_BYTES))
        use.answered("connections", token, Deadline(LONG))
    assert use.channel is None and "says no token" in use.instead["connections"]
    use.end(keep=False)


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
            use = propose(self, *args, **how)
            assert use.record is not None
            use.record = msgspec.structs.replace(use.record, host=host)
            return use

        with patched(Channels, propose=lie):
            return relay.send(weights(NEW), 1).connections
    with patched(socket, create_connection=counted):
        got = relay.recv(0)
    return same(got.state, weights(NEW)), tries, got.report.instead["connections"]


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_a_receiver_connects_to_no_address_but_the_senders(pool2: Any, host: str) -> None:
    ours, (right, tries, why) = pool2.run(by, "channel", sent_elsewhere, host, fresh_group=True)
    assert right and ours == 0 and tries == [] and "not made" in why
