"""A server with the part of the XML API of Google Cloud Storage that obstore uses, on the loopback interface."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from jfsdp.objects import path as paths


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]
    lock: Any
    generations: Any

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", generation: int | None = None, **headers: Any) -> None:
        self.send_response(status)
        if generation is not None:
            self.send_header("x-goog-generation", str(generation))
            self.send_header("ETag", f'"{generation}"')
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 00:00:00 GMT")
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.lock:
            source, now = self.headers.get("x-goog-copy-source"), self.objects.get(self._key)
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != (now[1] if now else 0):
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            if source is not None:
                data = self.objects[unquote(source).partition("/")[2]][0]
            generation = next(self.generations)
            self.objects[self._key] = data, generation
        self._answer(200, generation=generation)

    def do_GET(self) -> None:
        if not self._key:
            self._list({name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()})
            return
        if self._key not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data, generation = self.objects[self._key]
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            span = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self._answer(206, part, generation, Content_Range=span)
            return
        self._answer(200, data, generation)

    do_HEAD = do_GET

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter, rows, folders = query.get("prefix", ""), query.get("delimiter"), [], set()
        for key, (data, generation) in sorted(self.objects.items()):
            rest = key[len(prefix) :]
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{generation}</ETag>"
                "<LastModified>2026-11-27T00:00:00.000Z</LastModified></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        self._answer(200, f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode())

    def do_DELETE(self) -> None:
        found = self.objects.pop(self._key, None)
        self._answer(204 if found else 404)


@contextlib.contextmanager
def gcs_server(monkeypatch: Any, directory: Path) -> Iterator[str]:
    """Run the server; set the environment of clients. Yield the address of a bucket."""
    state = {"objects": {}, "lock": threading.Lock(), "generations": itertools.count(1)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), state))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (directory / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(directory / "account.json"))
    paths.open_store.cache_clear()
    try:
        yield "gs://bucket"
    finally:
        paths.open_store.cache_clear()
        server.shutdown()
        server.server_close()
