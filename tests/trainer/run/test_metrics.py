import contextlib
import json
import time

import pytest

from jfsdp.trainer.run import metrics
from jfsdp.trainer.run.metrics import JsonLines, Throughput, peak_flops
from tests.refusals import refuses


def test_peak_flops_are_those_of_the_very_gpu_and_of_none_whose_name_its_own_contains():
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA A100-PCIE-40GB": 312, "NVIDIA GB200": 2500, "NVIDIA L4": 121}
    assert {kind: peak_flops(kind) for kind in known} == {kind: tera * 1e12 for kind, tera in known.items()}
    unknown = ("cpu", "NVIDIA A10G", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA L400")
    assert not any(map(peak_flops, unknown))


def test_mfu_counts_every_row_of_the_batch_once_and_every_device(monkeypatch):
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    flops = lambda num_keys: 989e9 * num_keys / 100  # noqa: E731
    throughput = Throughput(1000, num_devices=4, flops_per_item=flops, device_kind="NVIDIA H100", row_items=100)
    for keys in ([10.0], [5.0, 15.0], [10.0], [20.0], None):
        throughput.count_step(keys)
    rates = throughput.take()
    assert rates["step_s"] == 2.0 and rates["tokens_per_s"] == 500.0
    assert rates["tokens_per_s_per_device"] == 125.0
    assert rates["mfu"] == pytest.approx(125 * 989e9 / 989e12)
    assert rates["mfu_causal"] == pytest.approx(rates["mfu"] * 0.2), "(10 + 10 + 10 + 20 + 50) / 5 of 100 keys"


def test_what_is_done_while_paused_is_no_step_time():
    throughput = Throughput(10, num_devices=1, flops_per_item=None, device_kind="cpu", item="image")
    assert throughput.take().keys() == {"images_per_s", "images_per_s_per_device", "mfu", "mfu_causal", "step_s"}
    assert set(throughput.take().values()) == {None}, "there was no step"
    with throughput.paused():
        time.sleep(0.2)
    throughput.count_step()
    assert throughput.take()["step_s"] < 0.1


def test_json_lines_append_and_write_nan_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, loss in ((1, 2.5), (2, float("nan"))):
        lines = JsonLines(path)
        lines.write({"step": step, "loss": loss})
        assert len(path.read_text().splitlines()) == step, "a line must not wait in a buffer"
        lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
    ]
    assert "NaN" not in path.read_text()
    log = JsonLines(path)
    path.unlink()
    refuses(lambda: log.write({"step": 3}), "metrics.jsonl", "removed", error=OSError)
    log.close()
    with contextlib.closing(JsonLines(metrics.Path("/dev/full"))) as log:
        refuses(lambda: log.write({"step": 1}), "/dev/full", "No space left on device", error=OSError)
