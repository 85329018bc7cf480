"""Paths in an object store, with the methods of `pathlib.Path` that jfsdp uses, through the library obstore.

An object store has no directories: a "directory" here is the common prefix of some keys. It has neither renames
nor locks, but a single object is written atomically, and only if it does not exist (`create`) or has not changed
(`replace`).

[Note: three answers]
"There is no such object" is a FileNotFoundError, and decides, for example, which steps a run has. An error of the
server, and no answer, are `StoreError`s after the client's retries, and decide nothing. So is a missing bucket, since
its name may be mistyped.

Credentials are found as by the tools of the store: for S3 the environment, the profiles in ~/.aws (by boto3), and the
metadata of the instance; for GCS the application default credentials. They are never part of a path.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import io
import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from jfsdp.extras import load

SCHEMES = ("s3", "gs", "memory")
READ_AHEAD = 4 << 20
"""Bytes per request where an object is read from the start to the end."""


Tag = dict[str, str]  # which version of an object


class StoreError(OSError):
    """An object store refused a request or did not answer; the message has the reason and a remedy."""

    @property
    def is_passing(self) -> bool:
        """Whether the store failed, so that the same request may succeed later."""
        return self.errno in (errno.EIO, errno.ETIMEDOUT)


class ChangedError(StoreError):
    """An object is not the one that was to be replaced."""


class ObjectPath(os.PathLike[str]):
    """The path of an object, or of a prefix of objects, such as `s3://bucket/runs/one`.

    Raises (all methods):
      FileNotFoundError: for an object that does not exist.
      StoreError: see [Note: three answers].
    """

    def __init__(self, address: str):
        scheme, _, rest = str(address).partition("://")
        bucket, _, key = rest.partition("/")
        parts = key.rstrip("/").split("/") if key.rstrip("/") else []
        if scheme not in SCHEMES or not bucket or any(part in ("", ".", "..") for part in parts):
            known = ", ".join(f"{known}://BUCKET/PATH" for known in SCHEMES[:2])
            raise ValueError(f"{address!r} is not an address of an object store; use {known}")
        self.root, self.key = f"{scheme}://{bucket}", "/".join(parts)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store; this operation needs a file")

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: Any) -> ObjectPath:
        return ObjectPath(f"{self}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(f"{self.root}/{self.key.rpartition('/')[0]}")

    @property
    def parents(self) -> list[ObjectPath]:
        return [] if not self.key else [self.parent, *self.parent.parents]

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def relative_to(self, other: ObjectPath) -> PurePosixPath:
        return PurePosixPath(self.key).relative_to(other.key)

    @property
    def _client(self) -> Any:
        return open_store(self.root)

    def stat(self) -> SimpleNamespace:
        """Return the size, as `st_size`."""
        return SimpleNamespace(st_size=self.entry()["size"])

    def is_file(self) -> bool:
        try:
            return bool(self.key) and self.stat().st_size >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Return whether there are objects below this prefix."""
        with _named(self):
            return bool(next(iter(self._client.list(self.key or None, chunk_size=1)), ()))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects and prefixes directly below this one."""
        with _named(self):
            found = self._client.list_with_delimiter(self.key or None)
        keys = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        for key in dict.fromkeys(key.rstrip("/") for key in keys):
            if key != self.key:  # an empty object that marks a folder
                yield ObjectPath(f"{self.root}/{key}")

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yield the objects and prefixes directly below this one whose name matches."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def walk(self) -> dict[str, dict[str, Any]]:
        """Return `size` and `e_tag` of all objects below this prefix, by their names relative to it, sorted."""
        start = len(self.key) + bool(self.key)
        with _named(self):
            entries = [entry for part in self._client.list(self.key or None) for entry in part]
        found = {entry["path"][start:]: entry for entry in sorted(entries, key=lambda entry: entry["path"])}
        folders = {str(folder) for name in found for folder in PurePosixPath(name).parents} | {""}
        return {name: entry for name, entry in found.items() if entry["size"] or name not in folders}

    def entry(self) -> dict[str, Any]:
        """Return `size` and `e_tag` of the object."""
        with _named(self):
            return self._client.head(self.key)

    def read_bytes(self) -> bytes:
        return self.read_versioned()[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_versioned(self) -> tuple[bytes, Tag]:
        """Return the contents, and the tag of this version for `replace`."""
        with _named(self):
            found = self._client.get(self.key)
            return bytes(found.bytes()), _tag(found.meta)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`; fewer at the end of the object."""
        with _named(self):
            return bytes(self._client.get_range(self.key, start=start, end=stop)) if start < stop else b""

    def open(self, mode: str = "rb", *, read_ahead: int = READ_AHEAD) -> io.BufferedReader:
        """Open the object for reading, with requests of at least `read_ahead` bytes."""
        if mode != "rb":
            raise ValueError(f"{self}: open with mode {mode!r}; objects are read by mode 'rb' and written whole")
        return io.BufferedReader(_Reader(self), read_ahead)

    def write_bytes(self, data: Any) -> Tag:
        """Write the object, or write over it; return its tag."""
        with _named(self):
            return _tag(self._client.put(self.key, data, use_multipart=False))

    def _put_if(self, mode: Any, data: Any) -> Tag:
        """Write the object under a condition. If it has these contents already, a retry found its own object."""
        try:
            with _named(self):
                return _tag(self._client.put(self.key, data, use_multipart=False, mode=mode))
        except (FileExistsError, ChangedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                found, tag = self.read_versioned()
                if found == bytes(data):
                    return tag
            raise

    def create(self, data: Any) -> Tag:
        """Write the object if there is none; return its tag.

        Raises:
          FileExistsError: if there is one with other contents.
        """
        return self._put_if("create", data)

    def replace(self, data: Any, tag: Tag) -> Tag:
        """Write over the object if it has this tag; return the new one.

        Raises:
          ChangedError: if it has another tag and other contents, or does not exist.
        """
        try:
            return self._put_if(tag, data)
        except FileNotFoundError as error:
            raise ChangedError(errno.ESTALE, "was deleted by another process", str(self)) from error

    def copy(self, target: ObjectPath) -> None:
        """Copy the object inside the store."""
        with _named(self):
            self._client.copy(self.key, target.key)

    def unlink(self) -> None:
        """Delete the object, if there is one."""
        with _named(self), contextlib.suppress(FileNotFoundError):
            self._client.delete(self.key)

    def remove_below(self) -> None:
        """Delete all objects below this prefix."""
        keys = [f"{self.key}/{name}" for name in self.walk()]
        with _named(self):
            for start in range(0, len(keys), 1000):
                self._client.delete(keys[start : start + 1000])


def _tag(found: Any) -> Tag:
    return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}


class _Reader(io.RawIOBase):
    """The bytes of an object by ranged requests."""

    def __init__(self, path: ObjectPath):
        self._path, self._size, self._at = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._path.read_range(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


AnyPath = Path | ObjectPath


def is_address(path: Any) -> bool:
    """Return whether a path is the address of an object store, or of another service."""
    return isinstance(path, ObjectPath) or "://" in str(path)


def as_path(path: Any) -> Any:
    """Return a path as a `Path`, with `~` expanded, or as an `ObjectPath`.

    Raises:
      ValueError: for an address with one slash, as a `pathlib.Path` makes it.
    """
    if re.match(f"({'|'.join(SCHEMES)}):/(?!/)", str(path)):
        raise ValueError(f"{str(path)!r}: an address has two slashes, as in s3://BUCKET/PATH; pass it as a str")
    return ObjectPath(str(path)) if is_address(path) else Path(path).expanduser()


def on_disk(path: str, option: str) -> Path:
    """Return the path of an option that takes no address."""
    if is_address(path):
        raise ValueError(f"{option} {path}: must be on a file system; pass a path there")
    return Path(path).expanduser()


def read_at(path: AnyPath, start: int, length: int) -> bytes:
    """Return bytes of a file or an object; fewer at its end."""
    if isinstance(path, ObjectPath):
        return path.read_range(start, start + length)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def read_json(path: AnyPath, remedy: str) -> Any:
    """Read a JSON file.

    Raises:
      ValueError: if it is not JSON; ends with the remedy.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); {remedy}") from error


def match_below(pattern: str) -> tuple[ObjectPath, list[str]]:
    """Return the longest prefix of an address without `*`, `?` and `[`, and the names below it that match the rest.

    `**` crosses prefixes, as in `pathlib`.
    """
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    root, rest = ObjectPath(fixed), pattern[len(fixed) + 1 :]
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[.[^]]*\])", rest)
    texts = (part.replace("[!", "[^", 1) if part[:1] == "[" and part[-1] == "]" else re.escape(part) for part in parts)
    regex = "".join(kinds.get(part, text) for part, text in zip(parts, texts, strict=True))
    return root, [name for name in root.walk() if re.fullmatch(regex, name)]


@functools.cache
def open_store(root: str) -> Any:
    """Return obstore's client for a bucket."""
    obstore = load("obstore.store", "store")
    if root.startswith("memory://"):
        return obstore.MemoryStore()
    options: dict[str, Any] = {"client_options": {"allow_http": True}}  # if the user's endpoint is http://
    backoff = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=15), "base": 2}
    options["retry_config"] = {"max_retries": 12, "backoff": backoff, "retry_timeout": timedelta(minutes=3)}
    if root.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"AWS_ENDPOINT_URL={endpoint}: must begin with http:// or https://")
        options |= {} if endpoint is None else {"endpoint": endpoint}
        if "AWS_ACCESS_KEY_ID" not in os.environ and _has_profiles():
            try:
                options["credential_provider"] = load("obstore.auth.boto3", "store").Boto3CredentialProvider()
            except Exception as error:  # boto3's own kinds
                raise StoreError(errno.EACCES, f"the profiles of AWS cannot be used: {error}", root) from error
    return obstore.from_url(root, **options)


def _has_profiles() -> bool:
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return "AWS_PROFILE" in os.environ or Path(file).expanduser().is_file()


# Pattern of an answer -> error number, reason and remedy. The first match decides.
_NO_BUCKET = "NoSuchBucket|bucket does not exist"
_REASONS = {
    _NO_BUCKET: (errno.ENOENT, "the bucket does not exist; check its name and the endpoint"),
    "RequestTimeTooSkewed": (errno.EACCES, "the clock of this machine is off; set it"),
    "InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|401 Unauthorized": (
        errno.EACCES,
        "the credentials are not valid; renew them",
    ),
    r"169\.254\.169\.254|metadata\.google|Missing (SecretAccessKey|AccessKeyId)": (
        errno.EACCES,
        "no credentials were found; set them as for the command line of the store (AWS_ACCESS_KEY_ID or AWS_PROFILE; "
        "GOOGLE_APPLICATION_CREDENTIALS or gcloud auth application-default login)",
    ),
    "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation|Moved Permanently": (
        errno.EINVAL,
        "the bucket is in another region; set AWS_REGION",
    ),
    "AccessDenied|AllAccessDisabled|403 Forbidden": (
        errno.EACCES,
        "the credentials do not allow this; grant reading, writing, listing and deleting of objects",
    ),
    "NotImplemented|501 Not Implemented|not supported|NotSupported": (
        errno.ENOTSUP,
        "the store has no conditional writes, without which two jobs could write one run; use another store",
    ),
    "timed out|timeout|connect|dns|sending request": (errno.ETIMEDOUT, "the store did not answer"),
}


@contextlib.contextmanager
def _named(path: ObjectPath) -> Iterator[None]:
    """Convert errors of obstore; see [Note: three answers]."""
    try:
        yield
    except Exception as error:
        # Only the host of an address: its path may have words of the patterns, and its user a password.
        text = re.sub(r"https?://(?:[^/@\s]*@)?([^/\s]*)\S*", r"\1", str(error).partition("\n\nDebug source")[0])
        kind = type(error).__name__
        if kind == "AlreadyExistsError":
            raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
        if kind == "PreconditionError":
            raise ChangedError(errno.ESTALE, "was changed by another process", str(path)) from error
        if isinstance(error, FileNotFoundError) and not re.search(_NO_BUCKET, text):
            raise FileNotFoundError(errno.ENOENT, "does not exist", str(path)) from error
        if not type(error).__module__.startswith("obstore") and not isinstance(error, FileNotFoundError):
            raise
        answers = (found for pattern, found in _REASONS.items() if re.search(pattern, text))
        code, reason = next(answers, (errno.EIO, "the store answered with an error"))
        status = re.search(r"status code: ([^:\n]+)", text)
        raise StoreError(code, reason + (f" ({status[1]})" if status else f" ({text[:200]})"), str(path)) from error
