"""Atomic writes of the store, on a local disk and on an object store that lives in memory."""

import os
import pickle
import uuid

import pytest

from pipeline.store.files import Store


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        return Store(str(tmp_path / "out"))
    return Store(f"memory://{uuid.uuid4().hex}/out")


def test_put_replaces_and_reads_back(store):
    store.put("a/b.json", b"1")
    store.put("a/b.json", b"22")
    assert store.read("a/b.json") == b"22"
    assert store.names("a") == ["a/b.json"]


def test_create_writes_once(store):
    assert store.create("x", b"first")
    assert not store.create("x", b"second")
    assert store.read("x") == b"first"


def test_list_is_flat_sorted_and_empty_for_no_folder(store):
    for name in ("b", "a", "sub/c"):
        store.put(name, b"")
    assert store.names() == ["a", "b"]
    assert store.names("nothing") == []


def test_delete_forgives_what_is_gone(store):
    store.put("a", b"")
    store.delete(["a", "never"])
    store.delete_folder("no/folder")
    assert store.names() == []


def test_survives_pickling(store):
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).read("a") == b"1"


def test_failed_put_leaves_old_object_and_no_litter(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    store.put("a", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.put("a", b"new")
    assert store.read("a") == b"old"
    assert os.listdir(tmp_path) == ["a"]
