"""Metrics of a run: throughput, MFU and memory, written as JSON lines.

[Note: metrics.jsonl] One line per logged step, in order, each step once. A resumed run appends to the same file. Logged
steps are multiples of `log_every`, steps with an evaluation, and the last one. All values are numbers or null.
Non-finite numbers are null.

    step                      counted from 1
    loss                      mean over the tokens (or rows) of this step, before its update
    grad_norm                 before clipping
    learning_rate             of this step's update
    tokens_per_s              all devices, since the last line; null if the only step since then was compiled
    tokens_per_s_per_device   (rows_per_s and so on, if rows are not tokens)
    mfu                       model FLOPs / peak FLOPs, 0..1; null if either is unknown (CPUs)
    mfu_causal                mfu with the keys that tokens attend to, estimated from the rows of process 0
    step_s                    mean seconds per step since the last line, without evaluation, saving and compilation
    data_s                    part of step_s spent waiting for data, in the process with the longest wait
    host_s                    part of step_s not spent waiting for devices, in the process with the longest
    slowest_process           the process of host_s, if there are several
    goodput                   fraction of the run's time spent in steps that count; see [Note: goodput]
    memory_bytes              GPU: peak of the local device with the highest; CPU: resident memory of this process
    num_skipped               steps skipped so far because of non-finite gradients
    tokens_seen               tokens trained on so far
    eval_loss, eval_tokens    evaluation loss after this step's update, and its number of tokens; null without one
    compile_s                 only in the first line of a start: seconds to compile the step, or to load its program
    loss_scale                with --param-dtype float16: factor of this step's loss

`aux` of the job's loss is added under its names, and `aux` of an evaluation with the prefix `eval_`. `correct` and
`eval_correct` of the included models are the fraction of correct tokens (or rows).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jfsdp.trainer.step import causal_flops, causal_keys

PEAK_FLOPS = tomllib.loads(Path(__file__).with_name("peak_flops.toml").read_text(encoding="utf-8"))

Record = dict[str, Any]


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device, or None if it is not in the table (every CPU)."""
    words = f" {device_kind.replace('-', ' ')} ".lower()
    return next((flops for name, flops in PEAK_FLOPS.items() if f" {name.lower()} " in words), 0.0) or None


def memory_bytes() -> int:
    """Return the highest peak memory of the local devices; on CPUs this process's resident memory (or its peak)."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclasses.dataclass
class Throughput:
    """Counts steps and their time, except time inside `paused`.

    Args:
      items_per_step: tokens (or rows) of the global batch.
      num_devices: devices of the mesh.
      flops_per_item: `f(num_keys)`, FLOPs of forward and backward of an item that attends to `num_keys` keys; None if
        unknown.
      device_kind: name of the device, for its peak FLOP/s.
      item: unit of the rates: "token" or "row".
      row_items: tokens of a row, the number of keys for MFU.
    """

    items_per_step: int
    num_devices: int
    flops_per_item: Callable[[float], float] | None
    device_kind: str
    item: str = "token"
    row_items: int = 1

    def __post_init__(self) -> None:
        self._peak = peak_flops(self.device_kind)
        self.restart()

    def restart(self) -> None:
        """Reset the count of steps and the clock."""
        self._num_steps, self._seen_flops, self._paused_s, self._start = 0, 0.0, 0.0, time.perf_counter()

    def count_step(self, keys: Sequence[float] | None = None) -> None:
        """Count a step.

        Args:
          keys: numbers of keys of a sample of its tokens; None: all previous tokens of the row.
        """
        self._num_steps += 1
        if self.flops_per_item is not None and self._peak is not None:
            self._seen_flops += causal_flops(self.flops_per_item, causal_keys(self.row_items) if keys is None else keys)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        begin = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - begin

    def mean_step_s(self, num_running: int = 0) -> float | None:
        """Return the mean seconds of the steps since the last `take` or `restart`; None without steps.

        Args:
          num_running: counted steps that have not finished.
        """
        passed, num_ended = time.perf_counter() - self._start - self._paused_s, self._num_steps - num_running
        return passed / num_ended if num_ended > 0 else None

    def take(self) -> Record:
        """Return the rates since the last `take` or `restart`, and reset."""
        step_s, items_per_s = self.mean_step_s(), None
        per_device = mfu = mfu_causal = None
        if step_s is not None:
            items_per_s = self.items_per_step / step_s
            per_device = items_per_s / self.num_devices
            if self._peak is not None and self.flops_per_item is not None:
                mfu = per_device * self.flops_per_item(self.row_items) / self._peak
                mfu_causal = per_device * self._seen_flops / self._num_steps / self._peak
        self.restart()
        rate = f"{self.item}s_per_s"
        rates = {rate: items_per_s, f"{rate}_per_device": per_device}
        return rates | {"mfu": mfu, "mfu_causal": mfu_causal, "step_s": step_s}


def finite(record: Mapping[str, Any]) -> Record:
    """Replace non-finite numbers by None, because JSON has none."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}


class JsonLines:
    """Appends one line per record to a file, unbuffered; see [Note: metrics.jsonl]."""

    def __init__(self, path: Path):
        # A buffer would be written again on close, and fail again.
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        if not os.path.exists(self._file.name):
            raise OSError(
                f"{self._file.name} was removed while the run wrote to it; do not change the directory of a run, and "
                "start the run again"
            )
        try:
            self._file.write(f"{json.dumps(finite(record), allow_nan=False)}\n".encode())
        except OSError as error:
            raise OSError(
                f"{self._file.name} cannot be written ({error.strerror}); complete checkpoints are kept: free space, "
                "or restore write access"
            ) from error

    def close(self) -> None:
        self._file.close()


def closing(close: Callable[[], Any]) -> Callable[..., None]:
    """Return an exit callback that closes. After another error, errors of closing are suppressed."""

    def leave(kind: Any, *_: Any) -> None:
        with suppress(*[Exception] * (kind is not None)):
            close()

    return leave


def save_loss_curve(path: Path, records: Sequence[Mapping[str, Any]], unit: str, title: str) -> None:
    """Plot training and evaluation loss over steps.

    Args:
      records: lines of metrics.jsonl.
      unit: unit of the losses; "": unknown.
      title: model and data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, records, "loss", "training loss (batch of the step)", linewidth=1)
    _draw(axes, records, "eval_loss", "evaluation loss (held-out rows)", marker="o", markersize=4)
    axes.set(title=title, xlabel="step", ylabel=f"loss ({unit})" if unit else "loss")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], key: str, label: str, **style: Any) -> None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=f"{label}: {points[-1][1]:.3f} at the end", **style)
