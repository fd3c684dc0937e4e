"""The store room on a real S3 server: atomic and conditional puts, parts, listings, refusals."""

import pickle
import threading
import time
import uuid
from types import SimpleNamespace

import pytest

from pipeline.errors import ConfigError, InputError, LockedError, StoreError
from pipeline.store import filesystem, lease, retry
from pipeline.store.files import Store
from pipeline.store.lease import LEASE_NAME, Lease, describe_holder
from pipeline.store.listing import list_input
from tests.s3.server import READER_KEY, READER_SECRET
from tests.store.test_lease import foreign


@pytest.fixture
def store(s3_server):
    return Store(f"s3://outputs/{uuid.uuid4().hex}/out", s3_server.options())


def test_objects_by_name(store):
    store.put("a/b.json", b"1")
    store.put("a/b.json", b"22")
    store.put("a/deep/c", b"")
    assert store.read("a/b.json") == b"22"
    assert store.names("a") == ["a/b.json"]
    assert store.names("nothing") == [] == store.names_with("a/bc")
    assert store.names_with("a/b") == ["a/b.json"]
    assert store.exists("a/b.json") and store.exists("a") and not store.exists("a/x")
    assert pickle.loads(pickle.dumps(store)).read("a/b.json") == b"22"
    store.delete(["a/b.json", "never"])
    store.delete_folder("a")
    store.delete_folder("a")
    assert store.names("a") == []
    store.put("emptied/x", b"")
    store.delete(["emptied/x"])
    assert store.names("emptied") == []


def at_once(act, count):
    """Call `act(n)` in as many threads, and wait for all."""
    threads = [threading.Thread(target=act, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_of_many_creates(store):
    won = []

    def create(n):
        if store.create("x", str(n).encode()):
            won.append(n)

    at_once(create, 16)
    assert len(won) == 1
    assert store.read("x") == str(won[0]).encode()


def test_replace_only_the_version_that_was_read(store):
    store.put("x", b"first")
    data, version = store.tagged("x")
    assert data == b"first"
    store.put("x", b"second")
    assert not store.replace("x", b"third", version)
    assert store.replace("x", b"third", store.tagged("x")[1])
    assert store.read("x") == b"third"
    assert store.tagged("gone") is None
    assert not store.replace("gone", b"x", version)


def test_large_objects_go_in_parts_which_are_dropped_on_failure(store, s3_server, monkeypatch):
    monkeypatch.setattr(filesystem, "MULTIPART_ABOVE", 6 << 20)
    monkeypatch.setattr(filesystem, "PART_BYTES", 5 << 20)
    data = bytes(range(256)) * (44 << 10)  # 11 MiB
    store.put("large", data)
    assert s3_server.client().info(store.path("large"))["ETag"].strip('"').endswith("-3")
    assert store.read("large") == data
    with store.open("large") as file:
        file.seek(-10, 2)
        assert (file.read(), file.seek(6 << 20)) == (data[-10:], 6 << 20)
        assert file.read(100) == data[6 << 20 :][:100]

    original, calls = store.fs.call_s3, []

    def third_part_fails(method, **ask):
        calls.append(method)
        if ask.get("PartNumber") == 3:
            raise KeyboardInterrupt
        return original(method, **ask)

    monkeypatch.setattr(store.fs, "call_s3", third_part_fails)
    with pytest.raises(KeyboardInterrupt):
        store.put("other", data)
    assert calls[-1] == "abort_multipart_upload"
    assert not store.exists("other")
    assert s3_server.client().list_multipart_uploads("outputs") == []


def test_uploads_that_nobody_ended_are_aborted_page_by_page(store, s3_server):
    bucket, key, _ = store.fs.split_path(store.path("x"))
    for name in (f"{key}{i}" for i in range(5)):
        store.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name)
    store.fs.call_s3("create_multipart_upload", Bucket=bucket, Key="another/upload")
    assert store.abort_uploads(page_size=2) == 5
    assert store.abort_uploads(page_size=2) == 0
    left = s3_server.client().list_multipart_uploads(bucket)
    assert [upload["Key"] for upload in left] == ["another/upload"]
    for upload in left:
        store.fs.call_s3(
            "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
        )


def test_odd_keys(s3_server):
    store = Store(
        f"s3://outputs/{uuid.uuid4().hex}/mit Leer+zeichen/für %41 ß", s3_server.options()
    )
    for name in ("a b", "ü/ö%20", "100%", "plus+plus", "emoji 🏳️‍🌈"):
        store.put(name, name.encode())
        assert store.read(name) == name.encode()
    assert store.names() == sorted(["a b", "100%", "plus+plus", "emoji 🏳️‍🌈"])
    assert [e["name"].removeprefix(store.root) for e in store.files_below(store.path("ü"))] == [
        "/ü/ö%20"
    ]


def test_more_keys_than_a_page(s3_server, store, monkeypatch):
    original, pages = store.fs.call_s3, []

    def small_pages(method, **ask):
        pages.append(method)
        return original(method, **ask, MaxKeys=3)

    for n in range(8):
        store.put(f"many/{n}", b"x")
    monkeypatch.setattr(store.fs, "call_s3", small_pages)
    found = [entry["name"][-1] for entry in store.files_below(store.path("many"))]
    assert found == [*"01234567"]
    assert len(pages) == 3


REFUSALS = [
    ({"secret": "wrong"}, "outputs", r"_run/lease.json: the secret key is wrong"),
    ({"key": "nobody"}, "outputs", r"access key is unknown \(InvalidAccessKeyId\)"),
    ({"key": READER_KEY, "secret": READER_SECRET}, "outputs", r"lease.json: .*grant s3:PutObject"),
    ({}, "no-such-bucket", r"no-such-bucket/.*: there is no such bucket; create it"),
]


@pytest.mark.parametrize(("credentials", "bucket", "message"), REFUSALS)
def test_refusals_are_final_and_say_what_to_do(s3_server, credentials, bucket, message):
    store = Store(f"s3://{bucket}/{uuid.uuid4().hex}", s3_server.options(**credentials))
    retry.take_retries()
    with pytest.raises(StoreError, match=message):
        store.put(LEASE_NAME, b"x")
    assert retry.take_retries() == 0
    with pytest.raises(ConfigError, match=r"^output.path: s3://"):
        Lease(store, "r1").__enter__()
    if credentials.get("key") != READER_KEY:
        with pytest.raises(InputError, match=r"^input.path: s3://.*/in: .*; "):
            list_input(f"s3://{bucket}/in", s3_server.options(**credentials))


def test_no_credentials(s3_server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match=r"no credentials; set AWS_ACCESS_KEY_ID"):
        list_input("s3://prompts/in", {"endpoint_url": s3_server.endpoint})


def test_clock_an_hour_off(store, monkeypatch):
    """The clock as the signature sees it."""
    import datetime

    import botocore.auth

    late = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda **_: late.replace(tzinfo=None)
    )
    with pytest.raises(StoreError, match=r"_run/x: the clocks of this host and of the store"):
        store.put("_run/x", b"")


def test_lease_on_the_store(store):
    with Lease(store, "r1", period_s=0.5) as held:
        with pytest.raises(LockedError, match="r1, process"), Lease(store, "r2"):
            pass
        threading.Event().wait(0.4)
        held.check()
        held.guard.check()
        assert b'"counter": 1' not in store.read(LEASE_NAME)  # it counts
    assert describe_holder(store) is None


def test_lease_that_is_left_alone_is_taken_over_by_one_of_many(store):
    foreign(store)
    won, lost = [], []

    def take(n):
        mine = Lease(Store(store.url, store._options), f"r{n}", period_s=1)
        try:
            mine.__enter__()
            won.append(mine)
        except LockedError as error:
            lost.append(error)

    at_once(take, 5)
    assert (len(won), len(lost)) == (1, 4)
    won[0].guard.check()
    won[0].__exit__(None, None, None)


def test_store_without_conditions_has_a_holder_too(store, monkeypatch):
    """An S3 that passes over If-None-Match and If-Match: the last put wins, seen a moment later."""
    original = store.fs.call_s3

    def plain(method, **ask):
        ask.pop("IfNoneMatch", None)
        ask.pop("IfMatch", None)
        return original(method, **ask)

    monkeypatch.setattr(store.fs, "call_s3", plain)
    monkeypatch.setattr(lease, "SETTLE_S", 0.1)
    with Lease(store, "r1") as held:
        held.guard.check()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: foreign(store))
    monkeypatch.setattr(lease, "time", clock)
    with pytest.raises(LockedError, match="on elsewhere"):
        Lease(store, "r2").__enter__()
