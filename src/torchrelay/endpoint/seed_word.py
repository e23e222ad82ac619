"""How a puller says that it serves what it has, to an endpoint and to others who pull. No torch."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec


class SeedWord(msgspec.Struct):
    """Where a puller serves what it has of a step."""

    url: str
    snapshot: str


def read_seed_word(body: bytes, address: str | None) -> SeedWord:
    """What somebody at an address said; `ValueError` says what is wrong with it."""
    try:
        word = msgspec.json.decode(body, type=SeedWord)
        host = urlsplit(word.url).hostname
    except (msgspec.MsgspecError, ValueError):
        raise ValueError('this takes {"url": "http://HOST:PORT", "snapshot": "ID"}') from None
    if host != address:
        raise ValueError("a seed is named by the address that it asks from")
    return word
