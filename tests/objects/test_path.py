"""Paths of objects, and the three answers of a store: there is none, an error, and no answer."""

import errno
import itertools
import os
from pathlib import Path

import pytest

from jfsdp.objects import path as paths
from jfsdp.objects.path import ChangedError, ObjectPath, StoreError, as_path, match_below
from tests.objects.faulty import faulty_store, s3_server
from tests.objects.gcs import gcs_server
from tests.refusals import refuses

NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "s3", "gs"])
def root(request, monkeypatch, tmp_path):
    """The address of an empty prefix."""
    if request.param == "memory":
        yield ObjectPath(f"memory://path-{next(NUMBERS)}/a")
        return
    with s3_server(monkeypatch) if request.param == "s3" else gcs_server(monkeypatch, tmp_path) as bucket:
        yield ObjectPath(f"{bucket}/a")


def test_addresses_are_taken_apart_as_paths():
    path = as_path("s3://bucket/runs/one.jsonl")
    assert (path.name, path.suffix, str(path.parent), str(path.with_name("b"))) == (
        "one.jsonl",
        ".jsonl",
        "s3://bucket/runs",
        "s3://bucket/runs/b",
    )
    assert [str(up) for up in path.parents] == ["s3://bucket/runs", "s3://bucket"]
    assert path == ObjectPath("s3://bucket/runs/one.jsonl/") and path.relative_to(path.parent).as_posix() == "one.jsonl"
    for wrong in ("s3://", "http://host/a", "s3://bucket/a//b", "s3://bucket/../b", "gs:///a"):
        refuses(lambda wrong=wrong: as_path(wrong), repr(wrong), "s3://BUCKET/PATH")
    refuses(lambda: as_path(Path("s3://bucket/a")), "s3:/bucket/a", "two slashes")
    refuses(lambda: os.fspath(path), "s3://bucket/runs/one.jsonl", error=TypeError)


def test_objects_are_written_read_in_ranges_listed_and_removed(root):
    assert not root.exists() and list(root.iterdir()) == [] and root.walk() == {}
    for name in ("b/c", "b/d e#%", "x"):
        (root / name).write_bytes(name.encode())
    assert root.is_dir() and not root.is_file() and (root / "b/c").is_file() and not (root / "b/c").is_dir()
    assert sorted(map(str, root.iterdir())) == [f"{root}/b", f"{root}/x"]
    assert {name: entry["size"] for name, entry in root.walk().items()} == {"b/c": 3, "b/d e#%": 7, "x": 1}
    (root / "lines").write_bytes(b"".join(b"%d\n" % n for n in range(1000)))
    with (root / "lines").open(read_ahead=100) as file:
        assert [int(line) for line in file] == list(range(1000))
        assert file.seek(-4, os.SEEK_END) and file.read() == b"999\n"
    assert (root / "lines").read_range(2, 6) == b"1\n2\n" and (root / "lines").read_range(0, 0) == b""
    (root / "x").copy(root / "y")
    assert (root / "y").read_text() == "x"
    (root / "y").unlink()
    (root / "y").unlink()
    root.remove_below()
    assert not root.exists()
    with pytest.raises(FileNotFoundError) as caught:
        (root / "x").read_bytes()
    assert caught.value.filename == f"{root}/x"


def test_markers_of_folders_are_no_objects_and_patterns_are_those_of_glob(root):
    for name in ("a.txt", "b/0.txt", "b/1.txt", "b/c/2.md"):
        (root / name).write_bytes(b"text")
    for folder in ("b", "b/c"):  # the store's console creates "b/"
        root._client.put(f"{root.key}/{folder}/", b"")
    root._client.put(f"{root.key}/", b"")
    assert list(root.walk()) == ["a.txt", "b/0.txt", "b/1.txt", "b/c/2.md"]
    assert sorted(path.name for path in root.iterdir()) == ["a.txt", "b"]
    for pattern, found in {
        "*": ["a.txt"],
        "**": ["a.txt", "b/0.txt", "b/1.txt", "b/c/2.md"],
        "b/**": ["b/0.txt", "b/1.txt", "b/c/2.md"],
        "**/*.txt": ["a.txt", "b/0.txt", "b/1.txt"],
        "b/[!0].txt": ["b/1.txt"],
        "b/[01].txt": ["b/0.txt", "b/1.txt"],
        "?.txt": ["a.txt"],
        "[": [],
    }.items():
        under, names = match_below(f"{root}/{pattern}")
        assert [f"{under}/{name}" for name in names] == [f"{root}/{name}" for name in found], pattern


def test_an_object_is_created_once_and_replaced_only_in_the_version_that_was_read(root):
    tag = (root / "x").create(b"1")
    with pytest.raises(FileExistsError):
        (root / "x").create(b"2")
    assert (root / "x").create(b"1") == tag, "the same contents: a retry found its own object"
    new = (root / "x").replace(b"2", tag)
    with pytest.raises(ChangedError):
        (root / "x").replace(b"3", tag)
    assert (root / "x").replace(b"2", tag) == new and (root / "x").read_bytes() == b"2"
    (root / "x").unlink()
    with pytest.raises(ChangedError):
        (root / "x").replace(b"4", new)


ANSWERS = {
    "404 Not Found: <Error><Code>NoSuchBucket</Code>": ("bucket does not exist", errno.ENOENT),
    "403 Forbidden: <Code>RequestTimeTooSkewed</Code>": ("clock", errno.EACCES),
    "403 Forbidden: <Code>InvalidAccessKeyId</Code>": ("credentials are not valid", errno.EACCES),
    "403 Forbidden: <Code>AccessDenied</Code>": ("do not allow", errno.EACCES),
    "301 Moved Permanently: <Code>PermanentRedirect</Code>": ("AWS_REGION", errno.EINVAL),
    "501 Not Implemented: A header you provided": ("conditional writes", errno.ENOTSUP),
    "503 Service Unavailable: <Code>SlowDown</Code>": ("503 Service Unavailable", errno.EIO),
    "400 Bad Request: x": ("answered with an error (400 Bad Request)", errno.EIO),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_error_of_the_store_is_told_with_its_reason_and_is_never_a_missing_object(answer, monkeypatch):
    from obstore.exceptions import GenericError

    fact, code = ANSWERS[answer]
    text = "Generic S3 error: Error performing GET http://user:word@host/b/501/connect"
    text = f"{text} - Server returned non-2xx status code: {answer}"
    with faulty_store("memory://told") as store:
        monkeypatch.setattr(store, "rate", 0.0)

        def fail(*_, **__):
            raise GenericError(f"{text}\n\nDebug source: secret")

        store.head = store.get = store.list = fail
        path = ObjectPath("memory://told/b/x")
        for ask in (path.exists, path.is_file, path.is_dir, path.read_bytes, path.stat):
            with pytest.raises(StoreError) as caught:
                ask()
            assert caught.value.errno == code and fact in str(caught.value)
            assert caught.value.is_passing == (code == errno.EIO)
            assert "secret" not in str(caught.value) and "word" not in str(caught.value)
            assert caught.value.filename == str(path)


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there(monkeypatch):
    with s3_server(monkeypatch) as bucket:
        for ask in (ObjectPath("s3://other/x").read_bytes, ObjectPath("s3://other/x").walk):
            with pytest.raises(StoreError, match="bucket does not exist"):
                ask()
        assert not ObjectPath(f"{bucket}/x").exists()


def test_no_credentials_are_told_by_the_names_of_the_variables(monkeypatch):
    from obstore.exceptions import GenericError

    with faulty_store("memory://told") as store:

        def fail(*_, **__):
            raise GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 5ms")

        store.get = fail
        with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
            ObjectPath("memory://told/x").read_bytes()


def test_settings_that_cannot_be_used_are_told_by_name(monkeypatch):
    paths.open_store.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:5000")
        refuses(ObjectPath("s3://settings/x").read_bytes, "AWS_ENDPOINT_URL=127.0.0.1:5000", "http://")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    with pytest.raises(StoreError, match="nosuch"):
        ObjectPath("s3://settings/x").read_bytes()
    paths.open_store.cache_clear()


def test_profiles_are_read_by_boto3_unless_the_environment_has_a_key(tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = one\naws_secret_access_key = two\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    paths.open_store.cache_clear()
    assert paths.open_store("s3://profiles").credential_provider is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    paths.open_store.cache_clear()
    assert paths.open_store("s3://profiles").credential_provider is None
    paths.open_store.cache_clear()
