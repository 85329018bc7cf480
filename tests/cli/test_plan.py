"""`jfsdp plan` and `jfsdp audit`: what is printed, exit statuses, bad input."""

import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jfsdp.cli import main
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.jobs import plan_job
from jfsdp.plan.plan import EagerComputation
from jfsdp.trainer.options import StepOptions
from tests.cli.refused import refused
from tests.refusals import check_facts, refuses

TINY = ("--model", "llama-tiny", "--seq-len", "128")
KEYS = (
    "fits peak_bytes memory state_bytes wire_bytes wire_bytes_theory wire_ratio collectives overlapped_share exposed_s "
    "step_s tokens_per_s_per_gpu mfu mfu_causal bound_by options compile_s"
)
BROKEN_JOB = """
def make():
    raise RuntimeError("the user's own mistake")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where a plan of a tiny model writes its program and, beside it, its timeline; and the command."""
    path = tmp_path_factory.mktemp("plan") / "step.hlo"
    files = ("--dump-hlo", str(path), "--timeline", str(path.with_suffix(".svg")))
    return path, ("plan", *TINY, "--gpu", "h100", *files)


def test_plan_prints_json_that_says_all(saved, capsys):
    path, command = saved
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(KEYS.split()) <= found.keys()
    assert found["cluster"] == {"gpu": "h100", "nodes": 1, "gpus_per_node": 8, "num_devices": 8}
    assert found["wire_ratio"] == pytest.approx(1, abs=1e-3)
    assert found["job"]["model"] == "llama-tiny" and found["job"]["seq_len"] == 128
    assert sum(found["memory"].values()) == found["needed_bytes"] + found["memory"]["host"]
    assert found["step_s"] == pytest.approx(sum(found["critical"].values()))
    assert path.read_text().startswith("HloModule")
    picture = path.with_suffix(".svg").read_text()
    assert picture.startswith("<?xml") and picture.rstrip().endswith("</svg>")


@pytest.mark.proof
def test_no_line_of_a_plan_is_wider_than_its_terminal_and_no_word_is_cut(capsys, monkeypatch):
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    more = "--tokens 1e9 --mesh fsdp=-1,tensor=2 --nodes 2 --network 25 --offload opt_state --accumulate 2"
    assert main(["plan", *TINY, "--gpu", "h100", "--verbose", "--batch-per-device", "4", *more.split()]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    facts, _, xla = out.partition("XLA options")  # whose values may have no place to break
    assert max(map(len, facts.splitlines())) <= 80 and "…" not in out and xla
    words = "communication reduce-scatter --reshard-after-forward xla_gpu_enable_latency_hiding_scheduler=True"
    assert set(words.split()) <= set(out.split()) and "site-packages" not in out
    said = " ".join(facts.split())
    check_facts(said, "FITS", "of host memory per node", "network 25 GB/s per GPU, given", "--accumulate 1")
    check_facts(said, "llama-tiny:", "4 rows x 128 tokens", "4,096 tokens per step", "2 microbatches", "remat full")
    check_facts(said, "offload opt_state", "hours", "GPU-hours", "the model's own", "memory at the peak MiB", "MB sent")


def test_a_job_that_no_option_fits_is_told_on_how_many_nodes_it_would(capsys):
    assert main(["plan", "--model", "llama-405b", "--nodes", "1", "--analytic"]) == 3
    check_facts(capsys.readouterr().out, "no option fits on 1 node", "--nodes 16", "--offload opt_state,params")


def test_audit_takes_the_program_that_plan_wrote(saved, capsys):
    path, command = saved
    if not path.exists():
        main(list(command))
    capsys.readouterr()
    assert main(["audit", str(path), *TINY]) == 0
    assert ": ok" in capsys.readouterr().out
    assert main(["audit", str(path), *TINY, "--reshard-after-forward", "false", "--json"]) == 4
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_plan_and_audit_know_what_goes_over_tensor_and_what_does_not_fit_has_status_3(tmp_path, capsys):
    path = tmp_path / "step.hlo"
    options = [*TINY, "--mesh", "fsdp=4,tensor=2"]
    assert main(["plan", *options, "--gpu", "h100", "--reserve", "79.109", "--dump-hlo", str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["needed_bytes"] > found["limit_bytes"]
    assert found["own_ratio"] == pytest.approx(1, abs=5e-3)
    assert main(["audit", str(path), *options]) == 0
    check_facts(capsys.readouterr().out, "own", "over tensor")
    assert main(["audit", str(path), *options, "--remat", "none", "--json"]) == 4
    assert "activations" in {one["trap"] for one in json.loads(capsys.readouterr().out)["findings"]}


def test_without_compiling_it_says_so_and_whether_the_state_fits_and_options_override_a_recipe(capsys):
    assert main(["plan", *TINY, "--analytic"]) == 0
    check_facts(out := capsys.readouterr().out, "THE STATE FITS", "nothing was compiled")
    assert "DOES NOT" not in out and not re.search(r"\b0\.0+ (GiB|GB|ms|us)", out), "units are small enough"
    assert main(["plan", "--recipe", "llama-8b", "--strategy", "ddp", "--analytic"]) == 3
    check_facts(capsys.readouterr().out, "DOES NOT FIT  89.7 GiB of 76.1 GiB", "--strategy full_shard")


def test_a_recipe_gives_defaults(capsys):
    assert main(["plan", "--recipe", "llama-8b", "--nodes", "8", "--analytic", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"]["fsdp"] == 64 and found["analytic"] is True


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "llama-tiny", "--gpu", "h99"), "no GPU is called 'h99'; there are "),
        (("--recipe", "nope"), "recipe 'nope' is unknown; the recipes are"),
        ((*TINY, "--mesh", "fsdp=16"), "--mesh fsdp=16: the product of the sizes, 16, is not the cluster"),
        ((*TINY, "--gpu", "h100", "--xla", "nonsense"), "'nonsense' is not NAME=VALUE"),
        ((*TINY, "--xla", "xla_gpu_nonsense=1"), "--xla xla_gpu_nonsense: the XLA of this jaxlib has no such option"),
        ((*TINY, "--batch-per-device", "3", "--accumulate", "2"), "microbatches"),
        ((*TINY, "--timeline", "step.pdf"), "--timeline step.pdf: must end in .png or .svg"),
        ((*TINY, "--timeline", "no/step.svg"), "--timeline no/step.svg: directory 'no' does not exist"),
        ((*TINY, "--timeline", "step.svg", "--analytic"), "--timeline needs a plan of one program"),
    ],
)
def test_bad_arguments_have_status_2_and_one_line(args, message, capsys):
    assert message in refused(capsys, "plan", *args)


def test_what_a_factory_raises_passes_through_and_a_wrong_type_of_its_job_is_one_line(workdir, capsys):
    (workdir / "broken_jobs.py").write_text(BROKEN_JOB)
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        main(["plan", "--factory", "broken_jobs:make"])
    made = "import jfsdp\n    return jfsdp.trainer.Job(name='own', seq_len='long',"
    (workdir / "typed_jobs.py").write_text(EAGER_JOB.replace("return dict(", made))
    for command in ("plan", "explain"):
        assert "must be a whole number" in refused(capsys, command, "--factory", "typed_jobs:make")


EAGER_JOB = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 64, rngs=rngs)
    def __call__(self, x):
        with jax.ensure_compile_time_eval():
            scale = CONSTANT
        return self.up(x) * scale.sum()

def make():
    return dict(
        model=Net, loss=lambda model, batch: model(batch).mean(), units=[], optimizer=optax.adamw,
        batch=lambda rows, seq_len: jax.ShapeDtypeStruct((rows, 64), jnp.float32),
    )
"""


@pytest.mark.parametrize("constant", ["jnp.arange(4.0)", "jax.device_put([1.0])[0]"])
def test_a_model_that_computes_while_it_is_traced_is_told_so_at_its_line(constant, workdir):
    (workdir / "eager_jobs.py").write_text(EAGER_JOB.replace("CONSTANT", constant))
    job = StepOptions(factory="eager_jobs:make")
    error = refuses(lambda: plan_job(job, Cluster(find_gpu("h100"))), "numpy", "traced", error=EagerComputation)
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    assert ("eager_jobs.py", 10) in {(Path(frame.filename).name, frame.lineno) for frame in frames}


@pytest.mark.proof
def test_search_writes_a_recipe_that_plan_takes(tmp_path, capsys):
    recipe = tmp_path / "best.toml"
    assert main(["plan", *TINY, "--search", "--budget", "0", "--write-recipe", str(recipe)]) == 0
    assert "best: " in capsys.readouterr().out
    assert main(["plan", "--recipe", str(recipe), "--analytic", "--json"]) == 0


@pytest.mark.proof
def test_a_plan_reads_the_program_that_xla_compiles_with_tuning(tmp_path):
    """Tilings of matmuls are in backend_config alone, and XLA numbers names anew in every run.

    In other processes: programs of this one are never tuned.
    """
    paths = tmp_path / "plan.hlo", tmp_path / "tuned.hlo"
    for path, tuned in zip(paths, ((), ("--xla", "xla_gpu_autotune_level=4"))):
        command = ("plan", *TINY, "--gpu", "h100", "--dump-hlo", str(path), *tuned)
        subprocess.run([sys.executable, "-m", "jfsdp", *command], check=True, capture_output=True)
    apart = r"\.\d+|(, (metadata=\{[^}]*\}|backend_config=.*))+"
    found, wanted = (re.sub(apart, "", path.read_text()) for path in paths)
    assert found.partition("\n")[2] == wanted.partition("\n")[2]


@pytest.mark.parametrize(("text", "message"), [("", "not HLO"), ("HloModule x\nENTRY e { }", "scheduled")])
def test_audit_refuses_what_is_no_scheduled_program(tmp_path, text, message, capsys):
    path = tmp_path / "program.txt"
    path.write_text(text)
    assert message in refused(capsys, "audit", path, *TINY)


@pytest.mark.proof
@pytest.mark.filterwarnings("error:Error reading persistent compilation cache entry")
def test_a_plan_made_again_finds_nothing_in_the_compilation_cache_that_it_cannot_load(capsys, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0)):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            assert main(["plan", *TINY, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["fits"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
