"""A lease: an object that names the one writer of a prefix, renewed while the writer lives.

[Note: a lease without clocks]
The writer replaces the object every few seconds, each time only if it is still the version that it wrote before.
Another process that finds the object waits: if the version changes, the writer lives, and the process is refused. If it
does not change for `LEASE_S`, the writer is dead, and the process replaces exactly this version. If the writer was only
paused, it finds another version at its next renewal, and writes no more commits. No clock of two machines is compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import threading
import time
import uuid
import weakref
from typing import Any

from jfsdp.launch.hosts import host_id
from jfsdp.objects.path import ChangedError, ObjectPath, StoreError, Tag

LEASE_S = 30.0
"""Seconds without a renewal after which a writer is dead."""
RENEW_S = 5.0


class Lease:
    """A lease on an object, from construction until `release` or `LEASE_S` after the end of the process.

    Args:
      what: beginning of the error, before the owner, such as "checkpoint x: is being written by".
      remedy: end of the error, after the advice to wait.

    Raises:
      ValueError: if another process has the lease; names that process.
      StoreError: if the store does not answer, or ignores conditions of writes.
    """

    def __init__(self, path: ObjectPath, what: str, remedy: str):
        self.path, self._count = path, 0
        self._owner = {"process": os.getpid(), "node": platform.node(), "place": _place(), "id": uuid.uuid4().hex}
        self._mutex, self._released = threading.Lock(), threading.Event()
        self._tag = self._take(what, remedy)
        self._check_conditions()
        args = weakref.ref(self), self._released
        threading.Thread(target=_renew, args=args, name="jfsdp-lease", daemon=True).start()

    def _body(self, *, is_held: bool = True) -> bytes:
        self._count += 1
        return json.dumps(self._owner | {"count": self._count, "is_held": is_held}).encode()

    def _take(self, what: str, remedy: str) -> Tag:
        with contextlib.suppress(FileExistsError):
            return self.path.create(self._body())
        (owner, tag), start = self._read(), time.monotonic()
        is_dead = owner["place"] == self._owner["place"] and not _is_running(owner["process"])
        while owner["is_held"] and not is_dead and time.monotonic() < start + LEASE_S:
            time.sleep(min(RENEW_S / 2, LEASE_S / 4))
            if self._read()[1] != tag:
                raise ValueError(f"{what} process {owner['process']} on {owner['node']}; wait for it, {remedy}")
        try:
            return self.path.replace(self._body(), tag)
        except ChangedError:
            raise ValueError(f"{what} another process, which has just begun; wait for it, {remedy}") from None

    def _check_conditions(self) -> None:
        """Check that the store does not ignore the conditions of writes, as some S3-compatible ones do."""
        other = {name: '"none"' if name == "e_tag" else "9" * 15 for name in self._tag}
        writes = {"If-None-Match": self.path.create, "If-Match": lambda data: self.path.replace(data, other)}
        for condition, write in writes.items():
            with contextlib.suppress(FileExistsError, ChangedError):
                write(b"{}")
                reason = f"the store ignores {condition}, so two jobs could write one run; use another store"
                raise StoreError(errno.ENOTSUP, reason, str(self.path))

    def check(self) -> None:
        """Renew the lease now.

        Raises:
          StoreError: if another process took it, because this one was not able to renew it.
        """
        with self._mutex:
            if self._released.is_set():
                return
            try:
                self._tag = self.path.replace(self._body(), self._tag)
            except ChangedError as error:
                tag = None
                with contextlib.suppress(FileNotFoundError):
                    found, tag = self._read()
                if tag is None or found["id"] != self._owner["id"]:
                    reason = "was taken by another process, or deleted; this process writes no more there"
                    raise ChangedError(errno.ESTALE, f"the lease {reason}", str(self.path)) from error
                self._tag = self.path.replace(self._body(), tag)  # an earlier renewal, whose answer was lost

    def _read(self) -> tuple[dict[str, Any], Tag]:
        data, tag = self.path.read_versioned()
        try:
            found = json.loads(data)
            return {name: found[name] for name in ("process", "node", "place", "id", "is_held")}, tag
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(errno.EINVAL, "is not a lease; delete it if no run uses it", str(self.path)) from error

    def release(self) -> None:
        """Release the lease, if this process still has it."""
        self._released.set()
        with self._mutex, contextlib.suppress(OSError):
            self.path.replace(self._body(is_held=False), self._tag)


def _renew(lease: Any, released: threading.Event) -> None:
    """Renew a lease until it is released or its owner is collected."""
    while not released.wait(RENEW_S):
        if (held := lease()) is None:
            return
        try:
            held.check()
        except ChangedError:  # `check` raises it again before a commit
            return
        except OSError:  # no answer: the lease lasts until LEASE_S after the last renewal
            continue
        finally:
            del held


def _place() -> str:
    """Return where the numbers of processes are those of this one: a host, or a container."""
    try:
        return f"{host_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
