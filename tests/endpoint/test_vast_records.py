"""A record that promises more than any machine has is refused as what it is, and at once."""

from __future__ import annotations

import base64
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support import flat
from torchrelay.errors import EndpointError, MismatchError, RelayError
from torchrelay.memory import free
from torchrelay.record.encoding import content_digest, decode_at_rest
from torchrelay.stores.reading.chunks import Scratch

TIMEOUT = 30.0
STATE = {"w": torch.arange(1000.0), "n": 1}


def inflated(nbytes: int, chunk: int) -> Callable[[str, bytes], bytes]:
    """Gives the record of a step a volume of this many bytes."""

    def alter(line: str, body: bytes) -> bytes:
        try:
            sealed = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError:
            return body
        if "record" not in sealed:
            return body
        volume = sealed["record"]["volumes"][0]
        volume[1], volume[2] = nbytes, chunk
        volume[4] = base64.b64encode(bytes(16 * (nbytes // chunk))).decode()
        record = msgspec.json.encode(sealed["record"])
        digest = xxhash.xxh3_128_hexdigest(record)
        return msgspec.json.encode({"record": msgspec.Raw(record), "digest": digest})

    return alter


@contextmanager
def lying(nbytes: int, chunk: int) -> Iterator[str]:
    alter = inflated(nbytes, chunk)
    with tr.serve(STATE, step=1, timeout=TIMEOUT) as endpoint:
        tr.pull(endpoint.url, timeout=TIMEOUT)  # from here on the step is shown
        with urllib.request.urlopen(f"{endpoint.url}/record?step=1", timeout=TIMEOUT) as answer:
            body = answer.read()
        both = [content_digest(decode_at_rest(one)) for one in (body, alter("", body))]
        with Between(endpoint.url, alter, (both[0].encode(), both[1].encode())) as between:
            yield between.url


@pytest.mark.parametrize(
    ("nbytes", "chunk"), [(1 << 40, 1 << 40), (1 << 40, 1 << 30), (1 << 55, 1 << 40)]
)
def test_a_vast_volume(nbytes: int, chunk: int) -> None:
    with lying(nbytes, chunk) as url:
        for options in ({}, {"same_host": False}, {"verify": True}, {"reshare": True}):
            with pytest.raises(RelayError) as caught:
                flat.pull(url, timeout=TIMEOUT, **options)  # type: ignore[arg-type]
            assert not isinstance(caught.value, EndpointError) or url in str(caught.value)
        into = {"w": torch.zeros(1000), "n": 0}
        with pytest.raises(RelayError) as caught:
            tr.pull(url, into=into, timeout=TIMEOUT)
        if chunk == nbytes:
            assert isinstance(caught.value, MismatchError) and "are free" in caught.value.message
        assert not into["w"].any() and into["n"] == 0  # type: ignore[union-attr]


def test_memory_that_the_system_refuses_is_told_from_what_a_store_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(free, "free_bytes", lambda: None)
    for nbytes in (1 << 56, 1 << 70):
        with pytest.raises(MemoryError, match="bytes of memory"):
            Scratch().view(nbytes)
