"""Object storage, against a real S3 server on loopback: what only happens there."""

from __future__ import annotations

import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.stores.test_conformance import contents, manifest, read, save, write
from tests.support.s3 import BUCKET, LOSE, S3
from torchrelay.errors import CommitUnknownError, UsageError
from torchrelay.stores.objects import bucket as buckets
from torchrelay.stores.objects import draft as drafts
from torchrelay.stores.objects.bucket import client_options
from torchrelay.stores.objects.store import ObjectStore

pytest.importorskip("obstore")

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PART_BYTES", PART)
    monkeypatch.setattr(drafts, "CONCURRENCY", 2)


@pytest.fixture
def url(s3: S3) -> str:
    return s3.url("runs/a")


def open_at(url: str, **options: Any) -> ObjectStore:
    return ObjectStore(url, **({"timeout": 60} | options))


def leave_behind(url: str, step: int, token: str) -> None:
    """A finished data object of a draft whose writer is gone."""
    write(open_at(url).draft(step, token).open("a.safetensors", 1), b"a")


def unfinished(s3: S3) -> int:
    """Uploads whose parts the server still holds."""
    status, body, _ = s3.ask("GET", f"/{BUCKET}?uploads")
    assert status == 200
    return body.count(b"<UploadId>")


def meeting(word: str) -> Callable[[str, str], None]:
    """A hook that lets requests with a word in their path pass in pairs only."""
    pair = threading.Barrier(2, timeout=30)

    def hook(method: str, path: str) -> None:
        if word in path:
            pair.wait()

    return hook


def test_a_large_file_goes_up_in_parts(s3: S3, url: str) -> None:
    content = random.Random(0).randbytes(3 * PART + 12_345)
    store = open_at(url)
    draft = store.draft(1, "t")
    draft.begin()
    sink = draft.open("a.safetensors", len(content))
    scratch = bytearray(4_000_037)
    for start in range(0, len(content), len(scratch)):
        piece = content[start : start + len(scratch)]
        scratch[: len(piece)] = piece
        sink.write(start, memoryview(scratch)[: len(piece)])
        scratch[:] = bytes(len(scratch))  # a buffer is the caller's again after the call
    sink.finish()
    draft.commit(manifest("m"))
    assert len(s3.seen("PUT .*partNumber=")) == 4
    assert read(store, 1, "a.safetensors") == content
    assert store.open(1).sizes() == {"a.safetensors": len(content)}


def test_one_large_buffer_goes_up_in_parts(s3: S3, url: str) -> None:
    content = random.Random(1).randbytes(2 * PART + 1)
    store = open_at(url)
    draft = store.draft(1, "t")
    sink = draft.open("a.safetensors", len(content))
    sink.write(0, content)
    sink.finish()
    draft.commit(manifest("m"))
    assert len(s3.seen("PUT .*partNumber=")) == 3
    assert read(store, 1, "a.safetensors") == content


def test_parts_go_up_side_by_side(s3: S3, url: str) -> None:
    s3.hook = meeting("partNumber=")
    sink = open_at(url).draft(1, "t").open("a.safetensors", 2 * PART)
    sink.write(0, bytes(2 * PART))
    sink.finish()
    assert len(s3.seen("PUT .*partNumber=")) == 2


def test_large_reads_are_ranges_fetched_side_by_side(s3: S3, url: str) -> None:
    content = random.Random(2).randbytes(20 * MIB)
    store = open_at(url)
    save(store, 1, {"a.safetensors": content})
    reader = store.open(1).reader("a.safetensors")
    s3.hook = meeting("a.safetensors")
    target = bytearray(len(content) - 4 * MIB)
    reader.read_into(3, memoryview(target))
    assert target == content[3 : 3 + len(target)]
    ranges = {one.headers["range"] for one in s3.requests[-2:]}
    assert ranges == {f"bytes=3-{8 * MIB + 2}", f"bytes={8 * MIB + 3}-{16 * MIB + 2}"}


def test_a_failed_range_ends_the_read(s3: S3, url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": bytes(20 * MIB)})
    reader = store.open(1).reader("a.safetensors")
    s3.hook = lambda method, path: 403
    with pytest.raises(PermissionError, match=r"runs/a/step-1/host-1-a/a\.safetensors"):
        reader.read_into(0, memoryview(bytearray(20 * MIB)))


def test_objects_that_vanish_under_a_reader(url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"abc"})
    reader = store.open(1).reader("a.safetensors")
    store.delete(1)
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        reader.read_into(0, memoryview(bytearray(3)))


def test_the_manifest_is_an_object_of_its_own_and_put_last(s3: S3, url: str) -> None:
    save(open_at(url), 7, {"a.safetensors": b"a", "b.safetensors": b"b"})
    base = f"/{BUCKET}/runs/a/step-7"
    assert s3.seen("PUT ") == [
        f"PUT {base}/host-1-a/a.safetensors",
        f"PUT {base}/host-1-a/b.safetensors",
        f"PUT {base}/manifest.json",
    ]
    status, body, headers = s3.ask("GET", f"{base}/manifest.json")
    assert (status, body) == (200, b'{"folder":"host-1-a","of":"host-1-a"}')
    assert headers["content-type"] == "application/json"


def test_overwrite_removes_the_old_objects_after_the_commit(s3: S3, url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"old"}, token="old")
    s3.requests.clear()
    save(store, 1, {"a.safetensors": b"new"}, token="new", overwrite=True)
    changes = s3.seen("^(PUT|POST|DELETE) ")
    assert [line.rpartition("/")[2] for line in changes] == [
        "a.safetensors",
        "manifest.json",
        f"{BUCKET}?delete",
    ]
    assert s3.ask("HEAD", f"/{BUCKET}/runs/a/step-1/old/a.safetensors")[0] == 404
    assert contents(store, 1) == {"a.safetensors": b"new"}


def test_an_overwrite_that_fails_leaves_the_old_step(s3: S3, url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"old"}, token="old")
    s3.hook = lambda method, path: 403 if method == "PUT" and "manifest" in path else None
    with pytest.raises(PermissionError, match=r"step-1/manifest\.json"):
        save(store, 1, {"a.safetensors": b"new"}, token="new", overwrite=True)
    s3.hook = None
    store.draft(1, "new").discard()
    assert store.open(1).manifest() == manifest("old")
    assert contents(store, 1) == {"a.safetensors": b"old"}
    assert s3.ask("HEAD", f"/{BUCKET}/runs/a/step-1/new/a.safetensors")[0] == 404


def test_a_step_is_not_written_over_by_its_own_token(url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"old"}, token="same")
    with pytest.raises(UsageError, match="token same"):
        store.draft(1, "same", overwrite=True).begin()
    assert contents(store, 1) == {"a.safetensors": b"old"}


def test_one_of_many_writers_commits(url: str) -> None:
    store = open_at(url)
    drafts = [store.draft(1, f"t{number}") for number in range(6)]
    for number, draft in enumerate(drafts):
        draft.begin()
        write(draft.open("a.safetensors", 1), str(number).encode())
    start = threading.Barrier(len(drafts))
    lost: list[int] = []

    def commit(number: int) -> None:
        start.wait(30)
        try:
            drafts[number].commit(manifest(str(number)))
        except FileExistsError:
            lost.append(number)
            drafts[number].discard()

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(len(drafts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = set(range(len(drafts))) - set(lost)
    assert store.open(1).manifest() == manifest(str(winner))
    assert contents(store, 1) == {"a.safetensors": str(winner).encode()}


def test_a_service_without_conditional_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = open_at(url)
    late = store.draft(1, "late")
    late.begin()
    save(store, 1, {"a.safetensors": b"a"})
    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        late.commit(manifest("late"))
    assert store.open(1).manifest() == manifest("host-1-a")


def test_a_commit_whose_answer_is_lost_is_a_commit(s3: S3, url: str) -> None:
    store = open_at(url)
    losses = [LOSE]
    s3.hook = lambda method, path: (
        losses.pop() if losses and method == "PUT" and "manifest" in path else None
    )
    save(store, 1, {"a.safetensors": b"a"})
    assert len(s3.seen("PUT .*manifest")) == 2  # the retry found the first one's object
    assert contents(store, 1) == {"a.safetensors": b"a"}


def test_discard_spares_a_commit_that_only_seemed_to_fail(s3: S3, url: str) -> None:
    store = open_at(url)
    draft = store.draft(1, "t")
    write(draft.open("a.safetensors", 1), b"a")
    verdicts = [LOSE]
    s3.hook = lambda method, path: verdicts.pop() if verdicts else 403
    with pytest.raises(OSError, match=r"manifest\.json"):
        draft.commit(manifest("m"))
    s3.hook = None
    draft.discard()
    assert contents(store, 1) == {"a.safetensors": b"a"}


def test_delete_takes_the_manifest_first(s3: S3, url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"a", "b.safetensors": b"b"})
    # The rest of the deletion fails: what is left does not count as a step, and can be cleaned.
    s3.hook = lambda method, path: 403 if method == "GET" and "list-type" in path else None
    with pytest.raises(OSError, match="step-1"):
        store.delete(1)
    s3.hook = None
    assert store.steps() == []
    assert open_at(url, grace=0).clean() == ["step-1/host-1-a"]


def test_clean_waits_for_the_grace_period(url: str) -> None:
    leave_behind(url, 1, "dead")
    assert open_at(url).clean() == []
    assert open_at(url, grace=3600).clean() == []
    assert open_at(url, grace=0).clean() == ["step-1/dead"]
    assert open_at(url, grace=0).clean() == []


def test_clean_tells_a_step_from_other_drafts_of_it(url: str) -> None:
    store = open_at(url, grace=0)
    save(store, 1, {"a.safetensors": b"a"})
    leave_behind(url, 1, "dead")
    assert store.clean() == ["step-1/dead"]
    live = store.draft(1, "live", overwrite=True)
    live.begin()
    write(live.open("a.safetensors", 3), b"new")
    assert open_at(url).clean() == [], "it is younger than a day"
    assert contents(store, 1) == {"a.safetensors": b"a"}
    live.commit(manifest("m"))
    assert contents(store, 1) == {"a.safetensors": b"new"}


def test_clean_leaves_what_is_not_ours(s3: S3, url: str) -> None:
    for name in ("notes.txt", "step-1.txt", "step-01/t/a", "other/step-1/a", "step-1/t/deep/a"):
        assert s3.ask("PUT", f"/{BUCKET}/runs/a/{name}", b"x")[0] == 200
    store = open_at(url, grace=0)
    assert (store.clean(), store.steps()) == ([], [])


def test_sizes_are_those_of_data_files(s3: S3, url: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"abc"})
    for name in (
        "step-1/host-1-a/deep/a.safetensors",
        "step-1/other/b.safetensors",
        "step-1/c.safetensors",
    ):
        assert s3.ask("PUT", f"/{BUCKET}/runs/a/{name}", b"x")[0] == 200
    assert store.open(1).sizes() == {"a.safetensors": 3}


def test_prefixes_are_apart(s3: S3) -> None:
    save(open_at(s3.url("a")), 1, {"a.safetensors": b"a"})
    assert open_at(s3.url("a/")).steps() == [1]
    assert open_at(s3.url("ab")).steps() == []
    assert open_at(f"s3://{BUCKET}").steps() == []


def test_a_copied_bucket_is_read_without_attributes(s3: S3, url: str) -> None:
    """Tools that copy a bucket may lose the attributes of its objects."""
    save(open_at(url), 1, {"a.safetensors": b"a"})
    leave_behind(url, 1, "dead")
    for name in (
        "manifest.json",
        "host-1-a/a.safetensors",
        "dead/a.safetensors",
    ):
        status, body, _ = s3.ask("GET", f"/{BUCKET}/runs/a/step-1/{name}")
        assert status == 200
        assert s3.ask("PUT", f"/{BUCKET}/copy/step-1/{name}", body)[0] == 200
    copy = open_at(s3.url("copy"), grace=0)
    assert contents(copy, 1) == {"a.safetensors": b"a"}
    assert copy.open(1).manifest() == manifest("host-1-a")
    assert copy.clean() == ["step-1/dead"]
    assert contents(copy, 1) == {"a.safetensors": b"a"}


@pytest.mark.parametrize("token", ["../other", "a/b", "", ".", None])
def test_a_manifest_without_a_proper_folder_is_damaged(s3: S3, url: str, token: str | None) -> None:
    store = open_at(url, grace=0)
    save(store, 1, {"a.safetensors": b"a"})
    path = f"/{BUCKET}/runs/a/step-1/manifest.json"
    body = b"{}" if token is None else b'{"folder":"%b","of":"x"}' % token.encode()
    assert s3.ask("PUT", path, body)[0] == 200
    with pytest.raises(OSError, match=r"manifest\.json"):
        store.open(1).reader("a.safetensors")
    assert store.clean() == [], "the folder may be the step's"


def test_a_part_that_fails_ends_the_upload(s3: S3, url: str) -> None:
    s3.hook = lambda method, path: 403 if "partNumber=2" in path else None
    draft = open_at(url).draft(1, "t")
    sink = draft.open("a.safetensors", 8 * PART)
    with pytest.raises(PermissionError, match=r"runs/a/step-1/t/a\.safetensors"):
        for start in range(0, 8 * PART, PART):
            sink.write(start, bytes(PART))
    with pytest.raises(UsageError):
        sink.finish()
    sink.abort()
    assert unfinished(s3) == 0
    draft.discard()
    assert open_at(url, grace=0).clean() == []


def test_an_upload_that_does_not_begin_puts_nothing(s3: S3, url: str) -> None:
    s3.hook = lambda method, path: 403 if method == "POST" else None
    sink = open_at(url).draft(1, "t").open("a.safetensors", 3 * PART)
    with pytest.raises(PermissionError, match=r"a\.safetensors"):
        sink.write(0, bytes(3 * PART))
    sink.abort()
    assert s3.seen("PUT ") == []


def test_a_last_act_that_fails_is_an_error(s3: S3, url: str) -> None:
    s3.hook = lambda method, path: 403 if "uploadId=" in path and method == "POST" else None
    sink = open_at(url).draft(1, "t").open("a.safetensors", PART + 1)
    sink.write(0, bytes(PART + 1))
    with pytest.raises(OSError, match=r"a\.safetensors"):
        sink.finish()
    sink.abort()
    assert unfinished(s3) == 0


@pytest.mark.parametrize("written", [10, PART + 10])
def test_an_aborted_file_leaves_nothing(s3: S3, url: str, written: int) -> None:
    sink = open_at(url).draft(1, "t").open("a.safetensors", 3 * PART)
    sink.write(0, bytes(written))
    sink.abort()
    assert unfinished(s3) == 0
    assert s3.ask("HEAD", f"/{BUCKET}/runs/a/step-1/t/a.safetensors")[0] == 404
    with pytest.raises(UsageError):
        sink.write(written, b"more")


def test_an_object_of_another_size_is_seen(s3: S3, url: str) -> None:
    path = f"/{BUCKET}/runs/a/step-1/t/a.safetensors"

    def shorten(method: str, asked: str) -> None:
        if method == "HEAD":
            s3.ask("PUT", path, b"ab")

    s3.hook = shorten
    sink = open_at(url).draft(1, "t").open("a.safetensors", 3)
    sink.write(0, b"abc")
    with pytest.raises(OSError, match=r"2 bytes.*a\.safetensors"):
        sink.finish()


def test_writes_come_in_order_and_within_the_size() -> None:
    sink = ObjectStore("memory://").draft(1, "t").open("a.safetensors", 4)
    sink.write(0, b"ab")
    for position, piece in ((0, b"x"), (3, b"x"), (2, b"xyz")):
        with pytest.raises(UsageError, match=r"a\.safetensors"):
            sink.write(position, piece)
    sink.write(2, b"")
    sink.write(2, b"cd")
    sink.finish()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "ü", "/a"])
def test_bad_names_are_refused(name: str) -> None:
    store = ObjectStore("memory://")
    draft = store.draft(1, "t")
    with pytest.raises(UsageError):
        draft.open(name, 1)
    save(store, 1, {"a.safetensors": b"a"})
    with pytest.raises(UsageError):
        store.open(1).reader(name)
    with pytest.raises(UsageError):
        store.draft(1, name)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("bucket/prefix", {}),
        ("s3://", {}),
        ("file:///tmp/x", {}),
        ("http://host/bucket", {}),
        ("memory://", {"timeout": 0}),
    ],
)
def test_bad_arguments_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ObjectStore(url, **options)
    with pytest.raises(UsageError):
        ObjectStore("memory://").draft(-1, "t")


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"pip install 'torchrelay\[cloud\]'"):
        ObjectStore("s3://bucket")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_the_environment_says_where_and_who(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert open_at(s3.url("x")).steps() == []
    (request,) = s3.requests
    assert "Credential=somebody/" in request.headers["authorization"]
    assert "/eu-north-1/s3/" in request.headers["authorization"]


def test_client_options_of_the_environment() -> None:
    secure = {"AWS_ENDPOINT_URL": "https://host", "GOOGLE_BASE_URL": "http://host"}
    assert client_options("s3", secure) == {}
    assert client_options("gs", secure) == {"allow_http": True}
    assert client_options("az", {"AZURE_STORAGE_ENDPOINT": "HTTP://host"}) == {"allow_http": True}
    given = {"AWS_ALLOW_HTTP": "true", "AWS_PROXY_URL": "http://proxy", "GOOGLE_ALLOW_HTTP": "1"}
    assert client_options("s3", given) == {"allow_http": "true", "proxy_url": "http://proxy"}


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("gs://bucket/a", {"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true"}),
        (
            "az://container/a",
            {
                "AZURE_STORAGE_ENDPOINT": "/account",
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
            },
        ),
        ("s3://bucket/a", {"AWS_ENDPOINT_URL": "", "AWS_SKIP_SIGNATURE": "true"}),
    ],
)
def test_a_silent_endpoint_fails_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in environment.items():
            monkeypatch.setenv(name, address + value if "/" in value or not value else value)
        store = ObjectStore(url, timeout=1.0)
        begun = time.monotonic()
        with pytest.raises(OSError, match=url):
            store.steps()
        with pytest.raises(OSError, match=r"manifest\.json"):
            store.draft(1, "t").begin()
        assert time.monotonic() - begun < 4.0


def test_a_refusing_endpoint_fails_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        sink = ObjectStore("s3://bucket/a", timeout=1.0).draft(1, "t").open("a.safetensors", 1)
        sink.write(0, b"a")
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"s3://bucket/a/step-1/t/a\.safetensors"):
            sink.finish()
        sink.abort()
        assert time.monotonic() - begun < 4.0


def test_a_missing_bucket_is_an_error(s3: S3) -> None:
    store = open_at("s3://elsewhere/a")
    with pytest.raises(OSError, match="s3://elsewhere/a"):
        store.steps()
    with pytest.raises(OSError, match=r"a\.safetensors"):
        write(store.draft(1, "t").open("a.safetensors", 1), b"a")


# Few requests, and none that stalls for long ---------------------------------------------------


@pytest.mark.parametrize("what", ["list-type", "manifest", r"a\.safetensors"])
def test_a_read_that_stalls_is_asked_for_again(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A read may take as long as half of a save, 15 minutes, if bytes arrive."""
    monkeypatch.setattr(buckets, "STALL_SECONDS", 0.5)
    save(open_at(url), 1, {"a.safetensors": b"abc"})
    over, stalled = threading.Event(), []

    def hook(method: str, path: str) -> None:
        if method == "GET" and re.search(what, path) and not stalled:
            stalled.append(path)
            over.wait(100)

    s3.hook = hook
    try:
        store = open_at(url, timeout=1800)
        assert store.steps() == [1] and contents(store, 1) == {"a.safetensors": b"abc"}
        assert len(stalled) == 1
    finally:
        over.set()


@pytest.mark.parametrize("what", [r"PUT \S*manifest", r"PUT \S*a\.safetensors", "POST|DELETE"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_write_that_stalls_is_sent_again(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch, what: str, overwrite: bool
) -> None:
    """By default a save has half an hour. The request that stalls arrives after its successor."""
    monkeypatch.setattr(buckets, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(buckets, "UPLOAD_RATE", 1 << 40)
    store = open_at(url, timeout=1800)
    save(store, 1, {"a.safetensors": b"old"})
    over, stalled, late = threading.Event(), [], threading.Event()

    def hook(method: str, path: str) -> None:
        if re.search(what, f"{method} {path}") and not stalled:
            stalled.append(path)
            over.wait(100)
            late.set()

    s3.hook = hook
    step = 1 if overwrite else 2
    try:
        save(store, step, {"a.safetensors": b"abc"}, token="host-1-b", overwrite=overwrite)
        if not overwrite:
            store.delete(1)
    finally:
        over.set()
    assert len(stalled) == 1 and late.wait(10)
    assert store.steps() == [step] and contents(store, step) == {"a.safetensors": b"abc"}


def test_a_manifest_that_never_arrives_leaves_its_outcome_unknown(
    s3: S3, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "REQUEST_SECONDS", 0.2)
    over = threading.Event()
    s3.hook = lambda method, path: (over.wait(100), 503)[1] if method == "PUT" else None
    try:
        with pytest.raises(CommitUnknownError, match="it is not known whether step 1 was"):
            save(open_at(url, timeout=20), 1, {})
    finally:
        over.set()


def test_sizes_of_many_files_take_one_request(s3: S3, url: str) -> None:
    files = {f"{number}.safetensors": bytes([number]) for number in range(40)}
    store = open_at(url)
    save(store, 1, files)
    s3.requests.clear()
    step = store.open(1)
    for _ in range(2):  # sizes are compared first, and then all is read
        assert [step.reader(name).nbytes for name in files] == [1] * 40
    assert not s3.seen("^HEAD")
    assert len(s3.seen("list-type")) == 1 and len(s3.requests) == 2


@pytest.mark.parametrize("how", ["it is listed late", "it may not be listed"])
def test_an_object_that_is_not_listed_is_asked_for(s3: S3, url: str, how: str) -> None:
    store = open_at(url)
    save(store, 1, {"a.safetensors": b"abc"})
    if how == "it may not be listed":
        s3.hook = lambda method, path: 403 if "list-type" in path else None
    step = store.open(1)
    if how == "it is listed late":
        step._sizes = {}
    assert step.reader("a.safetensors").nbytes == 3
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        step.reader("b.safetensors")


def test_cleaning_does_not_list_the_files_of_steps(s3: S3, url: str) -> None:
    store = open_at(url, grace=0)
    for step in (1, 2, 3):
        save(store, step, {f"{number}.safetensors": b"a" for number in range(9)})
    leave_behind(url, 2, "dead")
    leave_behind(url, 4, "gone")
    s3.requests.clear()
    assert store.clean() == ["step-2/dead", "step-4/gone"]
    listed = s3.seen("list-type")
    assert len(listed) == 1 + 4 + 3, "the root, each step, and the folders where drafts may be"
    assert not [line for line in listed if re.search(r"step-[13](/|%2F)host", line)]
    assert store.steps() == [1, 2, 3] and store.clean() == []
