"""`jfsdp profile`: traces with known intervals, and the trace of a run."""

import json
import types

import pytest
from jax.profiler import ProfileData

from jfsdp.cli import main
from jfsdp.plan.time.profile import Profile, read_profile
from jfsdp.trainer.options import StepOptions
from tests.cli.refused import refused
from tests.scripts.command import ONE_LAYER, train, write_corpus

# (line, kernel, HLO operation, begin and length in us) of one step of 100 us
STEP = [
    ("Stream #1(Compute)", "nvjet_tst_128x256_64x4", "cublas-gemm.3", 0, 40),
    ("Stream #1(Compute)", "cudnn_generated_fort_native_sdpa_sm90", "custom-call.2", 40, 10),
    ("Stream #1(Compute)", "loop_add_fusion", "loop_add_fusion", 60, 5),
    ("Stream #1(Compute)", "wrapped_convert", "wrapped_convert", 65, 5),
    ("Stream #2(Collective)", "ncclDevKernel_AllGather_RING_LL", "all-gather-start.1", 30, 30),
    ("Stream #2(Collective)", "ncclDevKernel_ReduceScatter", "reduce-scatter-start", 50, 5),  # within the gather
    ("Stream #3(MemcpyD2H)", "MemcpyD2H", "copy-start", 68, 10),
    ("XLA Modules", "jit__step(123)", "", 0, 100),  # lines that repeat the kernels
    ("XLA Ops", "cublas-gemm.3", "cublas-gemm.3", 0, 90),
]
PARTS = {"matmul_s": 40, "attention_s": 10, "memory_s": 10, "exposed_s": 10, "host_exposed_s": 8, "idle_s": 22}
HIDDEN = 20  # from 30 to 50


def write_trace(directory, num_steps=3, *, host="node-0", annotated=True, scale=1):
    """Write steps that begin every 100 us; a last kernel of no length ends the last one."""
    ids: dict[str, int] = {}
    lines: dict[str, list[str]] = {}

    def number(name):
        return ids.setdefault(name, len(ids) + 1)

    def event(name, begin_us, length_us, **stats):
        texts = "".join(
            f"stats {{ metadata_id: {number(key)} {kind}: {json.dumps(value)} }} "
            for key, value in stats.items()
            for kind in ["int64_value" if isinstance(value, int) else "str_value"]
        )
        times = f"offset_ps: {int(begin_us * 1e6)} duration_ps: {int(length_us * 1e6)}"
        return f"events {{ metadata_id: {number(name)} {times} {texts}}} "

    for step in range(num_steps):
        for line, kernel, operation, begin, length in STEP:
            stats = {"hlo_op": operation, "hlo_module": "jit__step"}
            lines.setdefault(line, []).append(event(kernel, scale * (100 * step + begin), scale * length, **stats))
    once = "jit__step" if annotated else "other"  # annotations count, not repetitions
    end = event("once", scale * 100 * num_steps, 0, hlo_op="x", hlo_module=once)
    lines["Stream #1(Compute)"].append(end)
    steps = [event("train", 100 * step, 1, step_num=step) for step in range(num_steps)]

    def plane(number, name, lines):
        made = "".join(
            f'lines {{ id: {index} name: "{line}" {"".join(events)} }} '
            for index, (line, events) in enumerate(lines.items())
        )
        kinds = ("event_metadata", "stat_metadata")
        named = "".join(
            f'{kind} {{ key: {i} value {{ id: {i} name: "{of}" }} }} ' for kind in kinds for of, i in ids.items()
        )
        return f'planes {{ id: {number} name: "{name}" {made} {named} }} '

    text = plane(1, "/device:GPU:0", lines) + plane(2, "/host:CPU", {"python": steps} if annotated else {})
    file = directory / "plugins" / "profile" / "2026_11_28" / f"{host}.xplane.pb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


@pytest.mark.parametrize("annotated", [True, False])
def test_parts_of_a_step_are_those_of_the_trace(tmp_path, annotated):
    write_trace(tmp_path, annotated=annotated)
    (found,) = read_profile(tmp_path)
    assert (found.device, found.num_steps) == ("node-0 GPU:0", 3)
    assert found.counted_by == ("annotations" if annotated else "repetitions")
    assert found.seconds == pytest.approx({name: time * 1e-6 for name, time in PARTS.items()}, rel=1e-3)
    assert found.hidden_s == pytest.approx(HIDDEN * 1e-6, rel=1e-3)


def test_every_host_is_read_and_only_the_newest_trace(tmp_path):
    write_trace(tmp_path)
    write_trace(tmp_path, host="node-1", scale=2)
    old = tmp_path / "plugins" / "profile" / "2026_11_27" / "node-0.xplane.pb"
    old.parent.mkdir()
    old.write_bytes(b"damaged")
    first, second = read_profile(tmp_path)
    assert (first.device, second.device) == ("node-0 GPU:0", "node-1 GPU:0")
    assert second.seconds["matmul_s"] == pytest.approx(2 * first.seconds["matmul_s"])


def run_of(directory, devices, **config):
    write_trace(directory / "profile")
    stored = {"config": {"model": "llama-tiny", "seq_len": 128, **config}, "decides": {}, "devices": devices}
    (directory / "config.json").write_text(json.dumps(stored))
    return str(directory)


def test_a_profile_is_printed_beside_the_plan_of_the_run(tmp_path, capsys, monkeypatch):
    seen = []

    def plan_job(options, cluster):
        seen.append((options, cluster))
        times = {name: 2e-6 for name in PARTS if name != "idle_s"} | {"slowdown_s": 3e-6}
        return types.SimpleNamespace(timeline=types.SimpleNamespace(critical=times, wire_s=9e-6, exposed_s=2e-6))

    monkeypatch.setattr("jfsdp.plan.jobs.plan_job", plan_job)
    run = run_of(tmp_path, ["NVIDIA H100 80GB HBM3", 2, 4], mesh=[["fsdp", -1]], steps=7)
    assert main(["profile", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ((options, cluster),) = seen
    assert options == StepOptions(model="llama-tiny", seq_len=128)
    assert (cluster.gpu.name, cluster.nodes, cluster.gpus_per_node) == ("h100", 2, 4)
    assert found["planned_hidden_s"] == pytest.approx(7e-6) and found["not_planned"] == ""
    assert Profile(**found["devices"][0]) == read_profile(tmp_path / "profile")[0]
    assert main(["profile", run]) == 0
    rows = {line.rsplit("  ", 3)[0].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    (total,) = [words for words in rows.values() if words[:1] == ["total"]]
    assert total[1:] == ["0.1", "100.0%", "0.0"]


def test_without_a_plan_the_reason_is_printed(tmp_path, capsys):
    assert main(["profile", run_of(tmp_path, ["cpu", 1, 2])]) == 0
    assert "are cpu" in capsys.readouterr().out
    (tmp_path / "config.json").unlink()
    assert main(["profile", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["planned"] is None and "devices" in found["not_planned"]


def test_a_run_without_a_trace_is_refused(tmp_path, capsys):
    assert "--profile START:STOP" in refused(capsys, "profile", tmp_path)
    assert "nowhere" in refused(capsys, "profile", tmp_path / "nowhere")


def test_a_trace_that_is_cut_short_is_named(tmp_path, capsys):
    write_trace(tmp_path / "profile")
    (file,) = (tmp_path / "profile").rglob("*.xplane.pb")
    file.write_bytes(file.read_bytes()[:-20])
    assert str(file) in refused(capsys, "profile", tmp_path)


def test_the_trace_of_a_run_has_its_steps(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    model = ["--model", "llama-tiny", "--model-config", *ONE_LAYER, "--seq-len", 32, "--batch-per-device", 2]
    where = ["--data", tmp_path / "corpus", "--sample-tokens", 0, "--eval-fraction", 0, "--run-dir", tmp_path / "run"]
    done = train(*model, *where, "--steps", 5, "--profile", "2:4", "--simulate-devices", 2, "--no-check-loss")
    assert done.returncode == 0, done.stderr
    assert main(["profile", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["device"].split()[-1] for one in found["devices"]] == ["CPU:0", "CPU:1"]
    for one in found["devices"]:
        assert (one["num_steps"], one["counted_by"]) == (3, "annotations")
        assert all(one["seconds"][name] > 0 for name in ("matmul_s", "memory_s", "exposed_s", "idle_s"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["devices"] == ["cpu", 1, 2]
