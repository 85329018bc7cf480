"""A store in memory that drops, delays, duplicates and truncates, and one on the loopback interface."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from jfsdp.objects import path as paths

FAULTS = ("drop", "delay", "duplicate", "lose answer", "truncate")


class Killed(BaseException):
    """The process is gone; nothing that catches errors runs after it."""


class Faulty:
    """A client as obstore's, over a store in memory. Faults are those that a client sees after its own retries.

    Attributes:
      rate: probability of a fault per request.
      until_killed: number of requests after which every request raises `Killed`; None: never.
    """

    def __init__(self, seed: int = 0):
        self.store: Any = MemoryStore()
        self.random: Any = random.Random(seed)
        self.until_killed: int | None = None
        self.rate, self.counts = 0.0, dict.fromkeys(FAULTS, 0)

    def __getattr__(self, name: str) -> Any:
        do = getattr(self.store, name)

        def request(*args: Any, **options: Any) -> Any:
            if self.until_killed is not None:
                self.until_killed -= 1
                if self.until_killed < 0:
                    raise Killed
            fault = self.random.choice(FAULTS) if self.random.random() < self.rate else None
            if fault == "truncate" and name != "put":
                fault = None
            if fault:
                self.counts[fault] += 1
            if fault == "drop":
                raise GenericError("Server returned non-2xx status code: 503 Slow Down: ")
            if fault == "delay":
                time.sleep(0.01)
            if fault == "truncate":  # an upload that breaks off is not stored
                raise GenericError("error sending request: connection closed before message completed")
            if fault == "duplicate":  # the client sends a request again whose first answer was lost
                with contextlib.suppress(Exception):
                    do(*args, **options)
            answer = do(*args, **options)
            if fault == "lose answer":
                raise GenericError("operation timed out")
            return answer

        return request


@contextlib.contextmanager
def faulty_store(root: str, seed: int = 0) -> Iterator[Any]:
    """Use a faulty store for the addresses under `root`."""
    store, real = Faulty(seed), paths.open_store
    paths.open_store = lambda asked: store if asked == root else real(asked)
    try:
        yield store
    finally:
        paths.open_store = real


@contextlib.contextmanager
def s3_server(monkeypatch: Any, bucket: str = "bucket") -> Iterator[str]:
    """Run moto's server of S3 on the loopback interface, with one bucket; set the environment of clients."""
    import logging

    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    paths.open_store.cache_clear()
    try:
        yield f"s3://{bucket}"
    finally:
        paths.open_store.cache_clear()
        server.stop()
