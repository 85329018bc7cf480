"""A run in an object store: checkpoints in the store, small files in a local directory that is copied there.

Files of a run are appended to, which objects cannot be. So every file but the checkpoints is written to a temporary
directory of this process, and changed files are sent as a whole: every `PUSH_S` seconds, before each checkpoint, and at
the end. So a resumed run finds all metrics up to its checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.files import mark_of
from jfsdp.objects.path import ObjectPath

PUSH_S = 60.0
_IN_STORE = ("checkpoints", "replaced-")


class StoredRun:
    """The directory of a run in an object store. To `os` it is the local directory; `str` gives the address.

    Creation reads the small files of an earlier run.

    Raises:
      StoreError: if the store cannot be read.
    """

    def __init__(self, address: str):
        self.address = ObjectPath(address)
        temporary = tempfile.mkdtemp(prefix="jfsdp-run-")
        weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        self.local = Path(temporary, self.address.name or "run")  # trackers show its name
        self.local.mkdir()
        self._sent: dict[str, Any] = {}
        self._mutex, self._closed = threading.Lock(), threading.Event()
        self._lease: Any = None
        self._pull()

    def _pull(self) -> None:
        for found in self.address.iterdir():
            if found.name.startswith((*_IN_STORE, "profile", "lease")):
                continue
            for name in found.walk() or [""]:
                source = found / name if name else found
                file = self.local / source.relative_to(self.address)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(source.read_bytes())
                self._sent[str(file)] = mark_of(file)

    def __str__(self) -> str:
        return str(self.address)

    def __fspath__(self) -> str:
        return str(self.local)

    def __truediv__(self, name: str) -> Any:
        return (self.address if name.startswith(_IN_STORE) else self.local) / name

    def mkdir(self, **options: Any) -> None:
        """Do nothing: a store has no directories."""

    rmdir = mkdir

    @contextlib.contextmanager
    def in_use(self, what: str, remedy: str) -> Any:
        """Lease the run, and send changed files every `PUSH_S` seconds and at the end.

        Raises:
          ValueError: if another process has the lease.
        """
        from jfsdp.objects.lease import Lease

        lease = self._lease = Lease(self.address / "lease", what, remedy)
        self._pull()  # another process may have written until now
        threading.Thread(target=self._push_often, name="jfsdp-push", daemon=True).start()
        try:
            yield
            self.push()
        except BaseException:
            with contextlib.suppress(OSError):  # does not hide the first error
                self.push()
            raise
        finally:
            self._closed.set()
            lease.release()

    def _push_often(self) -> None:
        while not self._closed.wait(PUSH_S):
            with contextlib.suppress(OSError):  # the push before a checkpoint raises it
                self.push()

    def push(self) -> None:
        """Send the files that changed since they were sent."""
        with self._mutex:
            for directory, _, names in os.walk(self.local):
                for file in (Path(directory, name) for name in names if not name.startswith(".")):
                    with contextlib.suppress(FileNotFoundError):  # a tracker removed it
                        mark = mark_of(file)
                        if self._sent.get(str(file)) != mark:
                            self._send(file, file.read_bytes())
                            self._sent[str(file)] = mark
            for gone in [name for name in self._sent if not os.path.exists(name)]:
                if "compiled" in (path := Path(gone).relative_to(self.local)).parts:  # the run replaced it
                    if self._lease is not None:
                        self._lease.check()
                    with contextlib.suppress(OSError):
                        (self.address / path.as_posix()).unlink()
                    del self._sent[gone]

    def _send(self, file: Path, data: bytes) -> None:
        if self._lease is not None:
            self._lease.check()  # a paused process overwrites nothing
        (self.address / file.relative_to(self.local).as_posix()).write_bytes(data)
