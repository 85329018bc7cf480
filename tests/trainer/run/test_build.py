import json
from typing import Any

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import jfsdp
from jfsdp.checkpoint.foreign.pretrained import config_json, stated_config
from jfsdp.cli.commands import main
from jfsdp.layout.mesh import make_mesh
from jfsdp.trainer.job import find_job
from jfsdp.trainer.run.build import build, with_global_batch
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.weights import check_paths, open_checkpoints, with_tokenizer
from jfsdp.trainer.sources.source import open_source
from jfsdp.trainer.step import make_schedule
from tests.options import changed, made
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.trainer.chats import CHATML, save_tokenizer

CONFIG = made(TrainConfig, model="llama-tiny", model_config=("dim=16", "num_layers=1"), steps=100)
VIT = {"model": None, "factory": "examples.vit:job", "model_config": ()}


IMAGES = {"model": None, "factory": "tests.trainer.run.test_build:image_job", "model_config": ()}
# What cannot be, and the facts that its refusal names, separated by "..".
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"param_dtype": "int4"}, "param_dtype 'int4'..float32, bfloat16"),
    ({"mesh": "fsdp=3", "simulate_devices": 8}, "there are 8..--simulate-devices 8"),
    ({"model_config": ("width=3",)}, "'width'..dim"),
    ({"model_config": (*CONFIG.model_config, "stacked=no")}, "LlamaConfig.stacked='no'"),
    ({"batch_per_device": 3, "accumulate": 2}, "--batch-per-device 3..--accumulate 2"),
    ({"warmup": 100}, "warmup=100..decay_steps=100"),
    ({"lr_schedule": "cosin"}, "lr_schedule='cosin'..'cosine'..linear, wsd, constant"),
    ({"optimizer": "sgd", "beta2": 0.9}, "--beta2 0.9..sgd..--momentum"),
    ({"eps": -1.0}, "eps=-1.0"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0"),
    ({"frozen": ("head",)}, "frozen 'head'..embed.embedding"),
    ({"sync": "last", "program": "xla", "accumulate": 2, "batch_per_device": 2}, "sync='last'..program='xla'"),
    ({"reduce_dtype": "float32", "program": "xla"}, "reduce_dtype='float32'..bfloat16"),
    ({"opt_over": "replica,fsdp", "strategy": "ddp"}, "opt_over=..strategy 'ddp'"),
    ({"preference": "dpo"}, "--preference dpo..--init-from"),
    ({"reference": "x"}, "--reference x..--preference"),
    ({**VIT, "preference": "dpo", "init_from": "x"}, "model of tokens"),
    ({"profile": "5:3"}, "--profile 5:3..START:STOP"),
    ({"profile": "101:102"}, "--profile 101:102..--steps 100"),
    ({"restart_data": True}, "--restart-data..--resume STEP"),
    ({"tracker": "os:getcwd"}, "--tracker os:getcwd..f(config)"),
    ({"rate_scale": ("head=0.1",)}, "rate_scale 'head'"),
    ({"pipe_schedule": "gpipe"}, "--mesh pipe=P"),
    (IMAGES, "tokens and targets"),
    ({**VIT, "tokenizer": "t.json", "seq_len": 8}, "--tokenizer, --seq-len"),
]


@pytest.mark.parametrize(("changes", "facts"), REFUSED)
def test_what_cannot_be_is_refused_before_any_memory_is_used(changes, facts):
    refuses(lambda: build(changed(CONFIG, **changes), {}), *facts.split(".."))


def image_job():
    none = {"model": None, "loss": lambda model, batch: 0.0, "units": [], "optimizer": optax.sgd}
    return none | {"batch": lambda b, t: {"image": b}}


def test_a_prolonged_run_keeps_the_schedule_that_it_began_with():
    parts = build(changed(CONFIG, steps=200), {"decides": {"decay_steps": 100}})
    assert parts.decides["decay_steps"] == 100 and parts.decides["warmup"] == 5


def test_the_schedule_rises_to_the_peak_and_falls_to_the_floor():
    schedule = make_schedule(2.0, 4, 20, 0.1)
    assert [round(float(schedule(n)), 6) for n in (0, 1, 4, 20, 99)] == [0.4, 0.8, 2.0, 0.2, 0.2]


@pytest.mark.parametrize(
    ("kind", "warmup", "steps", "rates"),
    [
        ("cosine", 4, 20, {0: 0.4, 4: 2.0, 12: 1.1, 20: 0.2, 99: 0.2}),
        ("linear", 4, 20, {0: 0.4, 3: 1.6, 4: 2.0, 12: 1.1, 16: 0.65, 20: 0.2, 99: 0.2}),
        ("linear", 0, 10, {0: 2.0, 5: 1.1, 10: 0.2}),
        ("wsd", 4, 100, {0: 0.4, 4: 2.0, 90: 2.0, 95: 1.1, 100: 0.2, 999: 0.2}),
        ("wsd", 98, 100, {97: 1.979798, 98: 2.0, 99: 1.1, 100: 0.2}),
        ("wsd", 0, 5, {0: 2.0, 4: 2.0, 5: 0.2}),
        ("constant", 4, 20, {0: 0.4, 4: 2.0, 99: 2.0}),
    ],
)
def test_every_schedule_has_a_warmup_and_the_floor_at_its_end(kind, warmup, steps, rates):
    schedule = make_schedule(2.0, warmup, steps, 0.1, kind)
    assert {n: round(float(schedule(n)), 6) for n in rates} == rates


def test_the_checkpoints_of_a_run_keep_the_best_by_the_metric_of_keep_best(tmp_path):
    model = fully_shard(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
    state = model.init(optax.sgd(0.1))
    with open_checkpoints(changed(CONFIG, keep=1, keep_best="eval_loss:min:1"), tmp_path) as checkpoints:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
            checkpoints.save(step, state, metrics={"eval_loss": loss})
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]")) == ["2", "3"]


def test_a_run_gets_the_schedule_and_the_optimizer_of_its_options():
    parts = build(changed(CONFIG, lr_schedule="constant", optimizer="sgd", learning_rate=0.5, warmup=0), {})
    assert float(parts.schedule(99)) == 0.5 and parts.decides["lr_schedule"] == "constant"
    tree = parts.model.model.tree
    grads = tree.build({x.path: np.ones(x.shape, np.float32) for x in parts.model.layout.leaves})
    updates, _ = parts.tx.update(grads, parts.tx.init(grads), grads)
    assert {float(np.ravel(x)[0]) for x in jax.tree.leaves(updates)} == {-0.5}


def test_a_false_field_of_the_model_is_false_and_a_row_without_tokens_is_one_item():
    parts = build(changed(CONFIG, model_config=(*CONFIG.model_config, "stacked=false")), {})
    assert "layers.0.attn.q_proj.kernel" in parts.model.layout.by_path
    parts = build(changed(CONFIG, **VIT, batch_per_device=2), {})
    assert (parts.row_items, parts.global_batch, parts.decides["seq_len"]) == (1, 16, 1)
    assert build(CONFIG, {}).row_items == 256


def test_sources_of_both_kinds_answer_what_a_run_asks(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 400)
    (tmp_path / "b.txt").write_text("bcd " * 400)
    text = changed(CONFIG, data=str(tmp_path), eval_fraction=0.5)
    own = changed(CONFIG, **VIT)
    asked = {}
    for config in (text, own):
        parts = build(config, {})
        source = open_source(parts.config, parts.job, parts.row_items)
        batch = source.prepare(next(source.train_batches(batch_size=2, process_index=0, process_count=1)))
        assert {name: x.shape for name, x in batch.items()}.items() >= {
            name: x.shape for name, x in parts.job.batch(2, parts.row_items).items()
        }.items()
        asked[source.item] = source.describe_batch(8)
    assert asked == {"token": "8 rows of 256 tokens", "row": "8 rows"}


@pytest.fixture
def weights(tmp_path):
    """A directory as Hugging Face has them, of another vocabulary, size and length than llama-tiny, and a tokenizer."""
    job = find_job("llama-tiny").with_config(dim=16, num_layers=1, vocab_size=300)
    config = config_json(job.pretrained, job.config, 64) | {"eos_token_id": 299}
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file({"w": np.zeros(1)}, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf"


def test_a_run_has_the_tokenizer_of_its_weights_unless_another_is_given(weights, tmp_path):
    job, other = find_job("llama-tiny"), str(tmp_path)
    begun = changed(CONFIG, init_from=str(weights))
    assert with_tokenizer(CONFIG, job, {}).tokenizer == "byte"
    for data in (begun.data, "a.bin"):
        assert with_tokenizer(changed(begun, data=data), job, {}).tokenizer == str(weights)
    file = changed(begun, init_from=str(weights / "model.safetensors"))
    assert with_tokenizer(file, job, {}).tokenizer == str(weights)
    assert with_tokenizer(changed(begun, tokenizer="byte"), job, {}).tokenizer == "byte"
    assert with_tokenizer(begun, job, {"config": {"tokenizer": other}}).tokenizer == other, "as the run had it"
    assert with_tokenizer(CONFIG, changed(job, vocab_size=None), {}).tokenizer is None


def test_weights_without_a_tokenizer_are_not_trained_on_bytes_unasked(weights):
    (weights / "tokenizer.json").unlink()
    begun = changed(CONFIG, init_from=str(weights), data="nothere")
    refuses(lambda: build(begun, {}), "--init-from", "tokenizer.json", "--tokenizer", "PATH")
    ids = changed(begun, data="a.bin:1,b.bin:1")
    assert build(ids, {}).config.tokenizer == "byte", "token files take none"


@pytest.mark.parametrize("config", [["x"], {"config": "x"}])
def test_a_checkpoint_with_a_config_of_another_form_says_nothing(config, tmp_path, capsys):
    model = fully_shard(lambda rngs: nnx.Linear(8, 8, rngs=rngs), min_size=8)
    jfsdp.checkpoint.save(tmp_path / "c", model.init(optax.sgd(0.1), 0), config=config)
    begun = changed(CONFIG, init_from=str(tmp_path / "c"), data="a.txt")
    refuses(lambda: with_tokenizer(begun, find_job("llama-tiny"), {}), "--tokenizer PATH", "byte")
    assert stated_config(tmp_path / "c") == {}
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "hf")]) == 2
    assert "give --model NAME" in capsys.readouterr().err


def test_a_chat_template_may_be_one_of_the_tokenizer_by_its_name(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "rag", "template": CHATML}]
    tokenizer = save_tokenizer(tmp_path / "t", named)
    check_paths(changed(CONFIG, tokenizer=tokenizer, chat_template="rag"), {})
    other = changed(CONFIG, tokenizer=tokenizer, chat_template="other")
    refuses(lambda: check_paths(other, {}), "--chat-template", "'other'")


def test_defaults_that_contradict_the_weights_are_said_or_follow_from_them(weights, tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 400)
    begun = changed(CONFIG, init_from=str(weights), data=str(tmp_path / "a.txt"), eval_fraction=0)
    parts = build(changed(begun, model_config=()), {})
    assert (parts.row_items, parts.job.vocab_size) == (64, 300)
    assert build(changed(begun, model_config=(), seq_len=128), {}).row_items == 128
    told = {}
    for seq_len, end in ((64, [7, 257]), (128, 299), (32, 0)):
        source = open_source(changed(parts.config, seq_len=seq_len), parts.job, seq_len)
        told[seq_len] = source.describe({"max_position_embeddings": 64, "eos_token_id": end})
        assert f"tokenizer {weights}" in told[seq_len]
    assert "NOTE" not in told[64] and "eos_token_id=0" in told[32]
    for words in ("128", "max_position_embeddings=64", "'</s>' (257)", "eos_token_id=299", "--eod-token"):
        assert words in told[128]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"init_from": "org/Some-1.5B"}, "--init-from..hf download org/Some-1.5B --local-dir Some-1.5B"),
        ({"init_from": "gpt2"}, "--init-from..hf download gpt2 --local-dir gpt2"),
        ({"init_from": "/a/b"}, "--init-from..no such file or directory"),
        ({"init_from": "HF", "model": None}, "--init-from..--model llama"),
        ({"init_from": "HFX"}, "--init-from..did you mean"),
        ({"init_from": "HF", "init_adapter": "org/lora"}, "--init-adapter..hf download org/lora"),
        ({"init_from": "HF", "init_adapter": "HF"}, "--init-adapter..adapter_config.json"),
        ({"init_from": "HF", "preference": "dpo", "reference": "org/ref"}, "--reference..hf download org/ref"),
        ({"tokenizer": "org/t"}, "--tokenizer..hf download org/t --include '*.j*' --local-dir t"),
        ({"tokenizer": "HF/config.json"}, "config.json'..tokenizer.json"),
        ({"chat_template": "x.jinja", "tokenizer": "HF"}, "--chat-template..'x.jinja'"),
        ({"init_from": "HF/torn.safetensors", "tokenizer": "byte"}, "--init-from..torn.safetensors"),
    ],
)
def test_paths_are_opened_before_anything_is_traced_or_written(changes, facts, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("jfsdp.trainer.run.build.make_step", None)
    (weights / "torn.safetensors").write_bytes(b"\xff" * 20)
    changes = {name: value and value.replace("HF", str(weights)) for name, value in changes.items()}
    refuses(lambda: build(changed(CONFIG, model_config=(), **changes), {}), *facts.split(".."))


def test_a_run_that_goes_on_needs_its_first_weights_only_where_checkpoints_leave_them_out():
    begun = changed(CONFIG, init_from="gone", preference="dpo", reference="gone", tokenizer="byte")
    check_paths(begun, {"config": {}})
    refuses(lambda: check_paths(changed(begun, lora=("targets=a",)), {"config": {}}), "--init-from: gone")


def test_what_changes_losses_is_written_down():
    changes = {"frozen": ("norm,embed",), "opt_state_dtype": "bfloat16", "ema": 0.9, "param_dtype": None}
    decides = build(changed(CONFIG, **changes), {}).decides
    assert {name: decides[name] for name in changes} == changes | {"frozen": ["embed", "norm"]}


def test_what_changes_rounding_only_is_not():
    changes = {"offload": ("opt_state",), "remat": "none", "reshard_after_backward": False, "sync": "last"}
    other = changed(CONFIG, **changes, opt_over="fsdp")
    assert build(other, {}).decides == build(CONFIG, {}).decides


@pytest.mark.parametrize(
    ("mesh", "rows", "accumulate", "expected"),
    [("fsdp=8", 2, 1, (6, 3)), ("fsdp=8", 4, 2, (6, 3)), ("replica=2,fsdp=4", 6, 1, (6, 1)), ("fsdp=2", 3, 1, (24, 8))],
)
def test_microbatches_follow_from_the_global_batch_and_the_devices(mesh, rows, accumulate, expected):
    asked = changed(CONFIG, mesh=mesh, global_batch=48, batch_per_device=rows, accumulate=accumulate)
    made = with_global_batch(
        asked, make_mesh(**dict(asked.mesh), devices=jax.devices()[: 2 if mesh == "fsdp=2" else 8])
    )
    assert (made.batch_per_device, made.accumulate) == expected


def test_a_global_batch_that_the_devices_do_not_divide_is_refused_with_the_arithmetic():
    for rows, size, facts in ((5, 48, ["5/1 rows", "--batch-per-device", "1, 2, 3, 6"]), (1, 12, ["8 data shards"])):
        asked = changed(CONFIG, global_batch=size, batch_per_device=rows)
        refuses(lambda asked=asked: with_global_batch(asked, make_mesh(fsdp=8)), f"--global-batch {size}", *facts)
