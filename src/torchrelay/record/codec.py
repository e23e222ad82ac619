"""Manifests as bytes: MessagePack, in columns on the wire, in records beside small states.

Decoding is total: any byte string gives a manifest whose every number is in range and whose
records agree with each other, or a `ManifestError`; time and memory are bounded by its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import xxhash

from torchrelay.errors import ManifestError
from torchrelay.record import compact
from torchrelay.record.compact import KnownTree
from torchrelay.record.manifest import MAX_ENCODED_BYTES, VERSION, Manifest
from torchrelay.record.pause import gc_paused
from torchrelay.record.validation import check, check_step

Buffer = bytes | bytearray | memoryview


def _always() -> None:
    """For callers who have time."""


def _unknown() -> None:
    """No tree is at hand."""


class _Version(msgspec.Struct, array_like=True):
    """The first field of every manifest of every version."""

    version: tuple[int, int]


class _Step(_Version):
    step: int | None


class _Form(_Step):
    form: msgspec.Raw


class _Again(_Step):
    """In place of a manifest that the peer has, but for the step; `digest` is that of the rest."""

    form: Literal["again"]
    digest: bytes


_AGAIN: Literal["again"] = "again"
_MOST_AGAIN = 64  # bytes
_again = msgspec.msgpack.Decoder(_Again)
_form = msgspec.msgpack.Decoder(_Form)
_text = msgspec.msgpack.Decoder(str)
_step = msgspec.msgpack.Decoder(_Step)
_manifest = msgspec.msgpack.Decoder(Manifest)
_version = msgspec.msgpack.Decoder(_Version)


def encode(manifest: Manifest) -> bytes:
    """In records. `compact.encode` is the same manifest in columns."""
    return msgspec.msgpack.encode(manifest, enc_hook=tuple)


def decode(
    data: Buffer, known: KnownTree | None = None, in_time: Callable[[], None] = _always
) -> Manifest:
    """The manifest in MessagePack `data`, validated whole, or `ManifestError`.

    Where it is in columns and has the tree of `known`, it is given that object. `in_time` is called
    now and then, and raises when the caller's time is over.
    """
    in_time()
    with gc_paused():
        if _in_columns(data):
            return _decode_columns(data, known, in_time)
        return _decode_records(data, in_time)


def _in_columns(data: Buffer) -> bool:
    """By the third field. Both start with version and step."""
    try:
        _, stop = _step_span(data)
        third = bytes(data[stop : stop + len(_COLUMNS)])
        if third == _COLUMNS or third[:1] in _ARRAYS:
            return third == _COLUMNS
    except ValueError:
        pass  # more fields than there are today, or numbers that another encoder wrote
    try:
        return _text.decode(_form.decode(data).form) == compact.FORM
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


def _decode_columns(data: Buffer, known: KnownTree | None, in_time: Callable[[], None]) -> Manifest:
    _check_length(data)
    try:
        manifest, same_tree = compact.decode(data, known)
    except ManifestError:
        _check_version(_version_in(data))
        raise
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        _check_version(_version_in(data))
        raise ManifestError(f"not a manifest: {fault}") from None
    _check_version(manifest.version)
    check(manifest, tree=not same_tree, in_time=in_time)
    return manifest


def with_step(data: bytes, step: int | None) -> bytes:
    """What `encode` makes of the same manifest with another step."""
    start, stop = _step_span(data)
    return b"".join((data[:start], msgspec.msgpack.encode(step), memoryview(data)[stop:]))


# The bytes before the step: an array of up to 15 fields, the first of them the version.
_STEP_AT = 4
# Bytes of a step, by its first one: nothing, or an unsigned number. Small numbers are one byte.
_STEP_BYTES = {0xC0: 1, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, **dict.fromkeys(range(0x80), 1)}


_COLUMNS = msgspec.msgpack.encode(compact.FORM)
_ARRAYS = [bytes([head]) for head in (*range(0x90, 0xA0), 0xDC, 0xDD)]  # how a tree starts


def _step_span(data: Buffer) -> tuple[int, int]:
    """Where the step stands in an encoded manifest. `ValueError` if not where `encode` puts it."""
    plain = len(data) > _STEP_AT and data[0] >> 4 == 0x9 and data[1] == 0x92
    if not plain or max(data[2], data[3]) > 0x7F or data[_STEP_AT] not in _STEP_BYTES:
        raise ValueError("not as a manifest starts")
    return _STEP_AT, _STEP_AT + _STEP_BYTES[data[_STEP_AT]]


def _without_step(data: Buffer) -> bytes:
    start, stop = _step_span(data)
    return b"".join((memoryview(data)[:start], memoryview(data)[stop:]))


def digest_of(data: bytes, beside: Sequence[bytes] = ()) -> bytes:
    """Of a manifest without its step, and of what is told beside it."""
    found = xxhash.xxh3_128()
    for part in (data, *beside):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def shortened(data: bytes, knows: bytes, beside: Sequence[bytes] = ()) -> bytes:
    """What `completed` makes `data` of at a peer that has a manifest with the digest `knows`.

    That is `data` itself, unless the manifest which the peer has differs in its step at most.
    """
    if not knows or digest_of(_without_step(data), beside) != knows:
        return data
    start, stop = _step_span(data)
    step = msgspec.msgpack.decode(memoryview(data)[start:stop])
    return msgspec.msgpack.encode(_Again(VERSION, step, _AGAIN, knows))


def completed(data: bytes, known: bytes | None, beside: Sequence[bytes] = ()) -> bytes:
    """An encoded manifest, where `data` may be short for `known` with another step.

    `ManifestError` where it is short for anything else.
    """
    if len(data) > _MOST_AGAIN:
        return data
    try:
        short = _again.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return data
    if known is None or digest_of(known, beside) != short.digest:
        raise ManifestError("a manifest as before, where there was none like it")
    rest = memoryview(known)
    return b"".join((rest[:_STEP_AT], msgspec.msgpack.encode(short.step), rest[_STEP_AT:]))


class Recall:
    """`decode` that remembers the last few manifests, whatever their step.

    The same manifest again, with any step, has the same records (`leaves`, `storages` and `tree`
    are the same objects) and is not decoded and validated once more. Threads may share it. What is
    kept is bounded: `limit` bytes of encoded manifests, whose records take about ten times that.
    """

    def __init__(self, limit: int = 8 << 20, count: int = 3) -> None:
        self._limit = limit
        self._count = count
        # Encoded without the step, and decoded; the last used is last. Never changed, only
        # replaced: threads that do so at once may forget an entry, and nothing else.
        self._known: tuple[tuple[bytes, Manifest], ...] = ()

    def decode(
        self,
        data: Buffer,
        known: Callable[[], KnownTree | None] = _unknown,
        in_time: Callable[[], None] = _always,
    ) -> Manifest:
        """As the function `decode`; `known` is asked for where the manifest is not remembered."""
        try:
            start, stop = _step_span(data)
        except ValueError:
            return decode(data, known(), in_time)
        rest = _without_step(data)
        found = next((entry for entry in self._known if entry[0] == rest), None)
        if found is None:
            manifest = decode(data, known(), in_time)
            found = rest, manifest
        else:
            step = msgspec.msgpack.decode(memoryview(data)[start:stop])
            check_step(step)
            manifest = msgspec.structs.replace(found[1], step=step)
        self._keep(found)
        return manifest

    def _keep(self, entry: tuple[bytes, Manifest]) -> None:
        known = [other for other in self._known if other[1] is not entry[1]]
        known = [*known, entry][-self._count :]
        while known and sum(len(rest) for rest, _ in known) > self._limit:
            del known[0]
        self._known = tuple(known)

    @property
    def last(self) -> tuple[bytes, Manifest] | None:
        """What was decoded last, if it is remembered: encoded without its step, and the manifest.
        With another step that has the same records."""
        known = self._known
        return known[-1] if known else None

    def clear(self) -> None:
        """Forget everything."""
        self._known = ()


def step_of(data: Buffer) -> int | None:
    """The step of an encoded manifest, by itself; None also where it cannot be read."""
    try:
        return _step.decode(data).step
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _decode_records(data: Buffer, in_time: Callable[[], None]) -> Manifest:
    _check_length(data)
    try:
        manifest = _manifest.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        _check_version(_version_in(data))
        raise ManifestError(f"not a manifest: {fault}") from None
    _check_version(manifest.version)
    check(manifest, in_time=in_time)
    return manifest


def _check_length(data: Buffer) -> None:
    if len(data) > MAX_ENCODED_BYTES:
        raise ManifestError(f"manifest of {len(data)} bytes, the cap is {MAX_ENCODED_BYTES}")


def _version_in(data: Buffer) -> tuple[int, int]:
    """The version of what may be the manifest of another one; ours where it cannot be read."""
    try:
        return _version.decode(data).version
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return VERSION


def _check_version(version: tuple[int, int]) -> None:
    major, minor = version
    if major != VERSION[0]:
        raise ManifestError(
            f"manifest of version {major}.{minor}, this library reads {VERSION[0]}.x: "
            "use the same major version of torchrelay on both sides"
        )
    if minor < 0:
        raise ManifestError(f"manifest of version {major}.{minor}")
