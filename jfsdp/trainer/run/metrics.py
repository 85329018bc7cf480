"""What a run reports about itself: throughput, MFU, memory; as JSON lines.

[Note: metrics.jsonl] One line per logged step, in the order of the steps, no step twice; a resumed run goes on in the
same file. Logged are multiples of `log_every`, steps with an evaluation, and the last one. All values are numbers
or null; a number that JSON has no word for (a loss that is NaN) is null.

    step                      from 1
    loss                      of this step alone: the mean over its tokens (or rows), before its update
    grad_norm                 before clipping
    learning_rate             that this step's update used
    tokens_per_s              of all devices, since the last line; null if only a compiling step was taken since
    tokens_per_s_per_device   (of jobs whose rows are not tokens these read rows_per_s, and so on)
    mfu                       model FLOPs over peak FLOPs, 0..1; null where either is not known (CPUs)
    mfu_causal                the same, but attention counts the keys that tokens see, in the rows of process 0
    step_s                    mean seconds per step since the last line, without evaluation, saving and compiling
    data_s                    of these, spent in waiting for the data: in the process that waited longest
    host_s                    of these, not spent in waiting for devices: in the process where that took longest
    slowest_process           which one that was, where there are several
    goodput                   the part of the run's time that went into steps that count; see [Note: goodput]
    memory_bytes              GPU: peak of the fullest local device; CPU: resident memory of this process
    num_skipped               steps skipped for non-finite gradients so far
    tokens_seen               tokens trained on so far
    eval_loss, eval_tokens    held-out loss after this step's update and the tokens it is the mean of; null if not taken
    loss_scale                with --param-dtype float16: the factor that this step's loss was multiplied by

What the job's loss returns as `aux` is added under its own names, and that of an evaluation with `eval_` before it:
`correct` and `eval_correct` are the share of tokens (or rows) that the models of this repository get right.
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
    """Return the peak memory of the fullest local device; else this process's resident memory (or its peak)."""
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
    """Counts steps and the time they took, leaving out what is done under `paused`.

    Args:
      items_per_step: tokens (or rows) of all devices together: every row of the global batch counts, once.
      num_devices: all of the mesh.
      flops_per_item: `f(num_keys)`, forward and backward, of an item that attends to so many keys; None if unknown.
      row_items: tokens of a row: the keys that MFU counts.
      device_kind: to look the peak up.
      item: what is counted: "token" or "row".
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
        """Forget the steps counted; the clock starts now."""
        self._num_steps, self._seen_flops, self._paused_s, self._start = 0, 0.0, 0.0, time.perf_counter()

    def count_step(self, keys: Sequence[float] | None = None) -> None:
        """Count a step.

        Args:
          keys: how many keys some of its tokens see; None: all before them in their row.
        """
        self._num_steps += 1
        if self.flops_per_item is not None and self._peak is not None:
            self._seen_flops += causal_flops(self.flops_per_item, causal_keys(self.row_items) if keys is None else keys)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the time what happens inside."""
        begin = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - begin

    def mean_step_s(self, num_running: int = 0) -> float | None:
        """Return the mean seconds of the steps since the last `take` or `restart`; None: there are none.

        Args:
          num_running: steps that were counted and have not ended.
        """
        passed, num_ended = time.perf_counter() - self._start - self._paused_s, self._num_steps - num_running
        return passed / num_ended if num_ended > 0 else None

    def take(self) -> Record:
        """Return the rates since the last `take` or `restart`, and start anew."""
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
    """Replace numbers that JSON has no word for by None."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}


class JsonLines:
    """Appends one line per record to a file; see [Note: metrics.jsonl]. A line is in the file when `write` returns."""

    def __init__(self, path: Path):
        # Without a buffer nothing is left to be written, and to fail once more, when the file is closed.
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        if not os.path.exists(self._file.name):
            raise OSError(
                f"{self._file.name} was removed while the run wrote to it; leave the directory of a run alone, and "
                "begin the run again"
            )
        try:
            self._file.write(f"{json.dumps(finite(record), allow_nan=False)}\n".encode())
        except OSError as error:
            raise OSError(
                f"{self._file.name} cannot be written ({error.strerror}); complete checkpoints stand"
            ) from error

    def close(self) -> None:
        self._file.close()


def closing(close: Callable[[], Any]) -> Callable[..., None]:
    """Return an exit callback that closes; after another error, that one is told and not what fails here."""

    def leave(kind: Any, *_: Any) -> None:
        with suppress(*[Exception] * (kind is not None)):
            close()

    return leave


def save_loss_curve(path: Path, records: Sequence[Mapping[str, Any]], item: str, title: str) -> None:
    """Draw training and held-out loss over steps.

    Args:
      records: lines of metrics.jsonl.
      item: what losses are means over.
      title: the model and the data.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, records, "loss", "training loss, of the batch of a step", linewidth=1)
    _draw(axes, records, "eval_loss", "held-out loss, of rows that are not trained on", marker="o", markersize=4)
    axes.set(title=title, xlabel="step", ylabel=f"loss (nats per {item})")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], key: str, label: str, **style: Any) -> None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=f"{label}: {points[-1][1]:.3f} at the end", **style)
