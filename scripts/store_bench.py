"""Measure saves to and restores from an object store: `python scripts/store_bench.py`.

A state with the optimizer states of AdamW (default: 1.0 GB) on simulated devices is saved and restored, in turn with an
upload and a download of as many bytes by boto3, the client of S3: objects of 32 MiB, 8 at once. Without `--url` it
starts a server of S3 (moto) on the loopback interface, which holds everything in memory and computes in Python: use it
for ratios only.

It prints the median seconds of each, the ratio to boto3 (median and range over rounds), and the peak memory of a save
and of a restore, beyond what the process had before.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.launch.runtime import configure_xla
from jfsdp.trainer.options import read_config

_SERVER = """
import logging, sys, time
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False).start()
time.sleep(1e6)
"""


@dataclasses.dataclass(frozen=True)
class StoreBenchOptions:
    """Options of the measurement."""

    url: Annotated[str | None, tyro.conf.arg(metavar="s3://BUCKET/PATH")] = None
    """Prefix for all objects, which are removed at the end. None: a server on the loopback interface."""
    model: str = "llama-1b"
    """Name of a model (`jfsdp models` lists them)."""
    config: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")] = ("num_layers=1", "vocab_size=10240")
    """Fields of the model."""
    devices: int = 8
    """Simulated devices."""
    rounds: int = 5
    """Saves, restores, uploads and downloads."""


def main(argv: Sequence[str]) -> int:
    """Measure and print. Return the exit status."""
    options = tyro.cli(StoreBenchOptions, args=list(argv), prog="store_bench.py", description=__doc__)
    configure_xla(simulate_devices=options.devices)
    server = None if options.url else start_server()
    try:
        measure(options.url or "s3://bench/run", options)
    finally:
        if server is not None:
            server.kill()
    return 0


def start_server() -> subprocess.Popen[bytes]:
    """Start a server of S3 with the bucket `bench`, and set the environment of clients."""
    import boto3

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", _SERVER, str(port)])
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    while True:
        try:
            boto3.client("s3").create_bucket(Bucket="bench")
            return server
        except Exception as error:
            if server.poll() is not None:
                raise RuntimeError("the server ended") from error
            time.sleep(0.2)


def measure(url: str, options: StoreBenchOptions) -> None:
    """Save, restore, upload and download in turn, and print a table."""
    import boto3
    import jax
    import optax

    import jfsdp
    from jfsdp.checkpoint.objects.writer import PACK_BYTES
    from jfsdp.checkpoint.store import bytes_of
    from jfsdp.objects.path import ObjectPath
    from jfsdp.trainer.job import load_job
    from jfsdp.trainer.options import StepOptions, shard_job

    job = load_job(options.model, None).with_config(
        **dict(pair for text in options.config for pair in read_config(text))
    )
    model, tx = shard_job(StepOptions(), job, jfsdp.make_mesh()), optax.adamw(1e-3)
    state = jax.block_until_ready(model.init(tx))
    like, root, size = model.abstract_state(tx), ObjectPath(url), bytes_of(state)
    bucket, _, prefix = str(root / "copy").removeprefix("s3://").partition("/")
    data, keys = os.urandom(PACK_BYTES), [f"{prefix}/{n}" for n in range(-(-size // PACK_BYTES))]
    client = boto3.client("s3")
    peaks: dict[str, int] = {}

    def run(name: str, do: Callable[[], Any]) -> float:
        before = reset_peak()
        begin = time.perf_counter()
        jax.block_until_ready(do())
        seconds = time.perf_counter() - begin
        peaks[name] = max(peaks.get(name, 0), peak_bytes() - before)
        return seconds

    def upload(key: str) -> None:
        client.put_object(Bucket=bucket, Key=key, Body=data)

    def download(key: str) -> None:
        client.get_object(Bucket=bucket, Key=key)["Body"].read()

    found: dict[str, list[float]] = {"save": [], "upload": [], "restore": [], "download": []}
    for place in range(options.rounds):
        path = root / f"state-{place}"
        found["save"].append(run("save", lambda path=path: jfsdp.checkpoint.save(path, state)))
        found["upload"].append(run("upload", lambda: in_threads(upload, keys)))
        found["restore"].append(run("restore", lambda path=path: jfsdp.checkpoint.restore(path, like).params))
        found["download"].append(run("download", lambda: in_threads(download, keys)))
        path.remove_below()
        (root / "copy").remove_below()
    print(f"state of {size:,} bytes, {options.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for ours, theirs in (("save", "upload"), ("restore", "download")):
        ratios = [one / other for one, other in zip(found[ours], found[theirs], strict=True)]
        one, other = (statistics.median(found[name]) for name in (ours, theirs))
        print(
            f"{ours}: {one:.2f} s; {theirs} by boto3: {other:.2f} s; ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); peak memory {peaks[ours] / 2**20:,.0f} MiB"
        )


def in_threads(do: Callable[[str], None], keys: Sequence[str]) -> None:
    """Call a function for each key, 8 at once."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(do, keys))


def reset_peak() -> int:
    """Reset the peak memory of this process; return its memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak memory of this process since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
