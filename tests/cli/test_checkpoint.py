"""`jfsdp checkpoint`: what every subcommand prints, exit statuses, bad input; on a run of a tiny Llama."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers

import jfsdp
from jfsdp.checkpoint.convert import write_source
from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import read_whole
from jfsdp.cli import main
from jfsdp.trainer.job import load_job
from jfsdp.trainer.options import StepOptions, shard_job
from tests.checkpoint.arrays import Arrays
from tests.options import config_of
from tests.refusals import check_facts

FIELDS = ("dim=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "ffn_dim=32", "vocab_size=40")
MODEL = ("--model", "llama-tiny")
KERNEL = "params.layers.attn.q_proj.kernel"


@pytest.fixture(scope="module")
def state():
    job = load_job("llama-tiny", None).with_config(**config_of(FIELDS))
    mesh = jfsdp.make_mesh(devices=jax.devices()[:2])
    return shard_job(StepOptions(), job, mesh).init(optax.sgd(1e-3, momentum=0.9))


@pytest.fixture(scope="module")
def run(state, tmp_path_factory):
    """The directory of a run with steps 1, 2 and 3; the second is the best."""
    path = tmp_path_factory.mktemp("run")
    config = {"config": {"model": "llama-tiny", "factory": None, "model_config": FIELDS}}
    with_steps = jfsdp.checkpoint.Checkpointer(path / "checkpoints", keep=None)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        with_steps.save(step, state, config=config, metrics={"eval_loss": loss})
    with_steps.close()
    return path


@pytest.fixture
def step(run):
    """One checkpoint, the newest of the run."""
    return run / "checkpoints" / "3"


@pytest.fixture
def call(capsys):
    """Call a subcommand, whose exit status is as given; return what it printed, as `out` and `err`."""

    def call(*args, status=0):
        assert main(["checkpoint", *map(str, args)]) == status
        return capsys.readouterr()

    return call


def write(path, arrays):
    """Write arrays as a checkpoint."""
    write_source(path, Arrays(arrays), {}, {LAYOUT: None, CONFIG: None, EXTRA: [None]})
    return path


def strict_json(text):
    """Read JSON, without the NaN and Infinity that Python writes and other readers refuse."""

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def flip(path):
    """Flip a bit in the largest file below a directory; return the file."""
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return file


def test_inspect_lists_the_steps_of_a_run(call, run):
    out = call("inspect", run).out
    assert [line.split()[0] for line in out.splitlines()] == ["step", "1", "2", "3"]
    assert "eval_loss 1" in out.splitlines()[2]
    rows = json.loads(call("inspect", run, "--json").out)
    assert [(row["step"], row["metrics"]["eval_loss"]) for row in rows] == [(1, 3.0), (2, 1.0), (3, 2.0)]


def test_inspect_prints_json_that_says_all(call, step):
    found = json.loads(call("inspect", step, "--json").out)
    assert found["arrays"][KERNEL] == {"shape": [2, 16, 16], "dtype": "float32", "key_impl": None}
    assert found["layout"]["strategy"] == "full_shard" and found["config"]["config"]["model"] == "llama-tiny"


def test_inspect_prints_strict_json_of_metrics_that_are_no_numbers(call, state, tmp_path):
    with jfsdp.checkpoint.Checkpointer(tmp_path / "run") as steps:
        steps.save(1, state, metrics={"loss": float("nan")})
        steps.save(2, state, extra=[float("inf")], metrics={"loss": float("inf")})
    rows = strict_json(call("inspect", tmp_path / "run", "--json").out)
    assert [row["metrics"]["loss"] for row in rows] == ["nan", "inf"]
    assert strict_json(call("inspect", tmp_path / "run" / "2", "--json").out)["extra"] == [["inf"]]


@pytest.mark.parametrize("content", ["[]", '{"format": 2, "step": 7, "metrics": {}, "arrays": {}}'])
def test_inspect_does_not_believe_a_damaged_manifest(content, call, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "2"
    (damaged / "manifest.json").write_text(content)
    for options in ([], ["--json"]):
        out, err = call("inspect", damaged, *options, status=4)
        assert out == "" and "manifest.json has changed since it was written" in err
    rows = json.loads(call("inspect", tmp_path / "run", "--json", status=4).out)
    first, second, third = (row["problem"] for row in rows)
    assert first is third is None and "manifest.json" in second


def test_verify_is_0_for_whole_steps_and_4_with_the_file_for_a_damaged_one(call, run, tmp_path):
    out, err = call("verify", run)
    assert out.count(": ok;") == 3 and "takes at most" in err
    shutil.copytree(run, tmp_path / "run")
    file = flip(tmp_path / "run" / "checkpoints" / "2")
    out = call("verify", tmp_path / "run", status=4).out
    assert out.count(": ok;") == 2 and "checkpoints/2: DAMAGED" in out and file.name in out
    out, err = call("verify", tmp_path / "run", "--json", status=4)
    found = {Path(path).name: [*result["problems"]] for path, result in json.loads(out).items()}
    assert (err, found["1"], found["3"]) == ("", [], [])
    assert file.name in found["2"][0]


def test_diff_is_0_for_equals_and_4_with_the_place_of_what_differs(call, step, tmp_path):
    assert "0 differ in value" in call("diff", step, step).out
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = values.copy()
    other[2, 1] += 2
    one, two = write(tmp_path / "a", {"w": values, "b": values}), write(tmp_path / "b", {"w": other, "c": values})
    out = call("diff", one, two, status=4).out
    assert "only in A: b" in out and "only in B: c" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("w "))
    assert row == ["w", "2", "0.1818", "1", "2", "1"]
    found = json.loads(call("diff", one, two, "--only", "w", "--json", status=4).out)
    assert (found["only_first"], found["values"][0]["at"], found["values"][0]["max_abs"]) == ([], [2, 1], 2.0)


def test_convert_casts_and_lists_layers_of_the_newest_step(call, run, step, tmp_path):
    options = ("--dtype", "bfloat16", "--unstack", "layers", "--skip", "opt_state", "--json")
    assert json.loads(call("convert", run, tmp_path / "out", *options).out) == {
        "from": str(step),
        "to": str(tmp_path / "out"),
    }
    ours, theirs = CheckpointSource(step), CheckpointSource(tmp_path / "out")
    assert not any(name.startswith("opt_state") for name in theirs.arrays)
    found = read_whole(theirs, "params.layers.1.attn.q_proj.kernel")
    assert found.tobytes() == read_whole(ours, KERNEL)[1].astype("bfloat16").tobytes()
    call("verify", tmp_path / "out")


def test_what_is_exported_and_imported_is_bitwise_what_it_was(call, run, step, tmp_path):
    out, err = call("export", run, tmp_path / "hf", "--max-length", "64")
    assert "model.safetensors" in out and "takes at most" in err
    stated = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (stated["model_type"], stated["max_position_embeddings"]) == ("llama", 64)
    weights = SafetensorsSource(tmp_path / "hf")
    theirs = read_whole(weights, "model.layers.1.self_attn.q_proj.weight")
    assert np.array_equal(theirs.T, read_whole(CheckpointSource(step), KERNEL)[1])
    assert json.loads(call("import", tmp_path / "hf", tmp_path / "back", *MODEL, "--json").out)["arrays"] == 12
    assert "12 arrays are equal" in call("diff", step, tmp_path / "back", "--only", "params").out
    found = json.loads(call("export", tmp_path / "back", tmp_path / "again", "--dtype", "bfloat16", "--json").out)
    assert found["arrays"] == 21
    assert found["bytes"] * 2 == sum(array.size * 4 for array in weights.arrays.values())


def test_an_export_has_the_files_that_its_run_found_beside_weights_and_tokenizer(call, state, tmp_path):
    for file in ("base/generation_config.json", "base/tokenizer.json", "mine/my.json", "mine/merges.txt", "base/a.bin"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "chat.jinja").write_text("template")
    places = {"init_from": "base", "tokenizer": "mine/my.json", "chat_template": "chat.jinja"}
    stated = {"model": "llama-tiny", "model_config": FIELDS} | {name: str(tmp_path / x) for name, x in places.items()}
    jfsdp.checkpoint.save(tmp_path / "saved", state, config={"config": stated})
    out, err = call("export", tmp_path / "saved", tmp_path / "out")
    assert "note" not in err
    check_facts(out, "generation_config.json", "LlamaForCausalLM.from_pretrained", str(tmp_path / "out"))
    copied = {"generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == copied | {"config.json", "model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine/my.json"


@pytest.mark.parametrize("eod_token", [None, "<stop>"])
def test_an_export_with_only_a_tokenizer_json_states_the_end_token(call, state, tmp_path, eod_token):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<stop>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stated = {"model": "llama-tiny", "model_config": FIELDS, "tokenizer": str(tmp_path / "tokenizer.json")}
    jfsdp.checkpoint.save(tmp_path / "saved", state, config={"config": stated | {"eod_token": eod_token}})
    found = json.loads(call("export", tmp_path / "saved", tmp_path / "out", "--json").out)
    assert found["copied"] == ["tokenizer.json", "tokenizer_config.json"]
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    end = (eod_token or "<|endoftext|>", 3 if eod_token else 2)
    assert (loaded.eos_token, loaded.eos_token_id) == end
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == end[1]


@pytest.fixture
def broken(call, run, tmp_path):
    """Weights in the form of Hugging Face with three values that are not finite, in two arrays."""
    call("export", run, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    arrays["model.norm.weight"][2] = np.nan
    arrays["model.layers.1.mlp.up_proj.weight"][3, [0, 5]] = -np.inf
    safetensors.numpy.save_file(arrays, file)
    return tmp_path / "hf"


def test_weights_that_are_not_finite_come_in_and_go_out_only_where_that_is_asked_for(call, broken, tmp_path):
    out, err = call("import", broken, tmp_path / "in", *MODEL, status=2)
    assert out == "" and "norm.scale: 1 of 16" in err
    assert "layers.mlp.up_proj.kernel: 2 of 1,024" in err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing is written, and nothing stays behind"
    out, err = call("import", broken, tmp_path / "in", *MODEL, "--allow-nonfinite", "--json")
    assert len(json.loads(out)["not_finite"]) == 2
    assert "norm.scale: 1 of 16" in err
    for verb, status in (("export", 2), ("convert", 0)):
        err = call(verb, tmp_path / "in", tmp_path / verb, status=status).err
        assert "norm" in err and "1 of 16 elements are not finite" in err
        assert (tmp_path / verb).exists() == (not status)
    call("export", tmp_path / "in", tmp_path / "out", "--allow-nonfinite")


def test_prune_keeps_the_newest_and_the_best(call, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    there = tmp_path / "run" / "checkpoints"
    options = (tmp_path / "run", "--keep", "1", "--keep-best", "eval_loss")
    out = call("prune", *options, "--dry-run").out
    assert len(list(there.glob("[0-9]"))) == 3
    assert out.startswith("would delete steps 1 (") and out.endswith("kept 2, 3\n")
    found = json.loads(call("prune", *options, "--json").out)
    assert (found["deleted"], found["kept"]) == ([1], [2, 3])
    assert sorted(path.name for path in there.glob("[0-9]")) == ["2", "3"]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ((), [2, 3]),
        (("--keep", "2", "--keep-every", "0"), [2, 3]),
        (("--keep-every", "1"), [1, 2, 3]),
        (("--keep-every", "0"), [3]),
        (("--keep-every", "0", "--keep-best", "eval_loss:max"), [1, 3]),
    ],
)
def test_what_prune_is_not_told_is_as_the_run_was_told(call, run, tmp_path, more, kept):
    shutil.copytree(run, tmp_path / "run")
    told = {"config": {"keep": 1, "keep_every": 2, "keep_best": None}, "decides": {}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(told))
    assert json.loads(call("prune", tmp_path / "run", "--json", *more).out)["kept"] == kept


def test_a_run_in_use_is_not_pruned(call, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    from jfsdp.checkpoint.disk.lock import Lock

    lock = Lock(tmp_path / "run" / "checkpoints" / "lock", "held by", "or stop it")
    try:
        err = call("prune", tmp_path / "run", "--keep", "1", status=2).err
    finally:
        lock.release()
    assert "are written by" in err and err.count("\n") == 1
    assert len(list((tmp_path / "run" / "checkpoints").glob("[0-9]"))) == 3


def test_every_path_that_is_no_checkpoint_is_refused_in_one_line(call, tmp_path):
    for verb in ("inspect", "verify", "prune"):
        for path, what in ((tmp_path / "no", "does not exist"), (tmp_path, "is not a checkpoint and contains none")):
            out, err = call(verb, path, status=2)
            assert (out, err.count("\n")) == ("", 1)
            assert f"{path}: {what}; pass" in err
    for verb in ("convert", "export", "diff"):
        out, err = call(verb, tmp_path / "no", tmp_path / "other", status=2)
        assert (out, err.count("\n")) == ("", 1)
        assert "does not exist" in err


def test_a_newer_format_is_refused(call, tmp_path):
    path = write(tmp_path / "new", {"w": np.ones(3, np.float32)})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    (path / "SHA256SUMS").unlink()
    for verb, status in (("inspect", 2), ("verify", 4)):
        said = "".join(call(verb, path, status=status))
        assert "has format 9" in said and "jfsdp that wrote it" in said


def test_a_damaged_checkpoint_is_neither_converted_nor_exported(call, step, tmp_path):
    shutil.copytree(step, tmp_path / "bad")
    for part in ("params", "opt_state"):
        flip(tmp_path / "bad" / "arrays" / part)
    for verb in ("convert", "export"):
        out, err = call(verb, tmp_path / "bad", tmp_path / "out", status=4)
        error = err.splitlines()[-1]
        assert out == ""
        assert "is damaged: arrays/" in error and "SHA-256 differs" in error
        assert not (tmp_path / "out").exists()


BAD = [
    ("convert STEP OUT --dtype float13", "dtype 'float13' is unknown"),
    ("convert STEP OUT --dtype nope=bfloat16", "dtype 'nope' matches no"),
    ("convert STEP OUT --only nope", "matches no parameter; parameters: "),
    ("convert STEP OUT --skip **", "leave nothing"),
    ("convert STEP OUT --stack layers", "--stack layers"),
    ("convert STEP OUT --unstack nope", "--unstack nope"),
    ("convert STEP THERE", "already exists"),
    ("convert STEP INSIDE", "is inside it"),
    ("export STEP OUT --dtype bf16", "dtype 'bf16' is unknown"),
    ("export STEP THERE", "already exists"),
    ("import HF THERE --model llama-tiny", "already exists"),
    ("export STEP OUT --max-length 0", "--max-length 0 must be a number from 1"),
    ("export STEP OUT --model gpt2-tiny --max-length 99", "has no max_position_embeddings"),
    ("export STEP OUT --model-config vocab_size=41", "[40, 16]"),
    ("export STEP OUT --model-config num_layers=3", "inspect` shows them"),
    ("import HF OUT --model llama-tiny --model-config num_layers=1", "num_layers: config.json says 2"),
    ("import PT OUT --model llama-tiny", "in the checkpoint but not in the model: model.extra"),
    ("import HF OUT", "give --model NAME, or --factory"),
    ("import HF OUT --factory examples.vit:job", "has no mapping to the parameter names"),
    ("import HF OUT --model llama-tiny --key model", "is not a PyTorch file"),
    ("import EMPTY OUT --model llama-tiny", "no weights at all"),
    ("diff STEP STEP --only nope", "only 'nope' matches no"),
    ("prune STEP", "is one checkpoint; prune takes the directory of a run"),
    ("prune RUN --keep 0", "--keep 0 must be a number from 1 to"),
    ("prune RUN --keep-best eval_loss:most", "'eval_loss:most'"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_arguments_have_status_2_and_say_what_to_do(line, message, call, run, step, tmp_path):
    args = line.split()
    for name in ("there", "empty"):
        (tmp_path / name).mkdir()
    if "PT" in args:
        torch.save({"model.extra": torch.ones(2)}, tmp_path / "other.pt")
    if "HF" in args:
        call("export", step, tmp_path / "hf")
    paths = {"STEP": step, "RUN": run, "OUT": tmp_path / "out", "INSIDE": step / "inside", "THERE": tmp_path / "there"}
    paths |= {"HF": tmp_path / "hf", "EMPTY": tmp_path / "empty", "PT": tmp_path / "other.pt"}
    out, err = call(*(paths.get(arg, arg) for arg in args), status=2)
    assert out == ""
    error = err[err.index("jfsdp: error:") :]
    assert message in error
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert len(list((run / "checkpoints").glob("[0-9]"))) == 3
