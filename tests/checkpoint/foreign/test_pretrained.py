"""Weights of Hugging Face in and out, against `transformers`: small models with random weights, made here."""

import dataclasses
import functools
import importlib
import json
import math
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx, traverse_util

from jfsdp.checkpoint.foreign.export import export_safetensors
from jfsdp.checkpoint.foreign.pretrained import config_json, pretrained_fields, pretrained_source
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.cli import main
from jfsdp.modules.adapt import as_model
from jfsdp.trainer.job import as_job
from jfsdp_models import gpt2, gpt2_hf, llama, llama_hf  # pyright: ignore[reportMissingImports]
from tests.checkpoint.arrays import arrays_of, assert_same_bits
from tests.refusals import refuses, refusing

VOCAB, SEQ_LEN = 61, 24
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
MODELS = {
    "llama": ("llama", LLAMA),
    "llama31": (
        "llama",
        {**LLAMA, "max_position_embeddings": 128, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}},
    ),
    "llama-bias": ("llama", {**LLAMA, "attention_bias": True}),
    "llama-yarn": ("llama", {**LLAMA, "rope_parameters": YARN | {"rope_theta": 1e4}, "max_position_embeddings": 64}),
    "llama-tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5, "head_dim": 16}),
    "qwen2": ("qwen2", {**LLAMA, "rms_norm_eps": 1e-5}),
    "qwen2-window": ("qwen2", {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {**LLAMA, "head_dim": 16, "attention_bias": True}),
    "mixtral": ("mixtral", {**LLAMA, **EXPERTS}),
    "qwen3-moe": ("qwen3_moe", {**LLAMA, **EXPERTS, "moe_intermediate_size": 24, "head_dim": 8}),
    "gpt-oss": ("gpt_oss", {**LLAMA, **EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "gpt2": ("gpt2", {**GPT2, **NO_IDS}),
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ_LEN)).astype(np.int32)


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.int64)).logits.float().numpy()


def load(directory, **options) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Make a checkpoint with `transformers`, once per model: its directory, and the logits of its weights."""

    @functools.cache
    def make(name, max_shard_size="5GB"):
        torch.manual_seed(0)
        kind, options = MODELS[name]
        config = transformers.AutoConfig.for_model(kind, initializer_range=0.2, **options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn_like(weight)  # norms and biases too
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory, logits_of(model)

    return make


def pretrained_job(directory, name, **fields):
    """Our job with the configuration of a checkpoint."""
    make_job, config = (
        (gpt2.make_job, gpt2.PRESETS["gpt2-tiny"])
        if name.startswith("gpt2")
        else (llama.make_job, llama.PRESETS["llama-tiny"])
    )
    job = as_job(make_job(config, seq_len=SEQ_LEN), name)
    return job.with_config(**pretrained_fields(directory, job.pretrained), **fields)


def our_logits(job, arrays):
    if isinstance(job.model, tuple):
        return jax.jit(job.model[0].apply)({"params": traverse_util.unflatten_dict(arrays, sep=".")}, TOKENS)
    graph, state = nnx.split(nnx.eval_shape(lambda: job.model(nnx.Rngs(0))))
    flat = nnx.to_flat_state(state)
    values = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in flat]
    return jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(nnx.from_flat_state(values), TOKENS)


def open_source(directory, job, **options):
    return pretrained_source(directory, job.pretrained, as_model(job.model).params, config=job.config, **options)


def relative(ours, reference):
    return np.abs(np.asarray(ours) - reference).max() / np.abs(reference).max()


FORMS = [*((name, True) for name in MODELS), *((name, False) for name in ("llama-bias", "qwen3", "gpt-oss", "gpt2"))]


@pytest.mark.parametrize(("name", "stacked"), FORMS)
def test_logits_in_and_out_equal_those_of_transformers(checkpoint, tmp_path, name, stacked):
    """In: max|d| / max|reference| below 1e-4 in float32 (2e-6 was measured). Out: every bit."""
    directory, reference = checkpoint(name)
    job = pretrained_job(directory, name, stacked=stacked)
    source = open_source(directory, job)
    arrays = jax.tree.map(jax.numpy.asarray, arrays_of(source))
    assert relative(our_logits(job, arrays), reference) < 1e-4

    config = config_json(job.pretrained, job.config, job.seq_len)
    written = export_safetensors(source, tmp_path / "out", job.pretrained, config=config)
    assert written.num_arrays == len(SafetensorsSource(directory).arrays)
    assert_same_leaves(directory, tmp_path / "out")
    if stacked:  # the listed one has written the same files
        assert np.array_equal(logits_of(load(tmp_path / "out")), reference)


ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {**YARN, "beta_slow": 2.0},
    "yarn, no bounds": {"rope_type": "yarn", "factor": 3.0},
    "yarn, scales": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False},
    "yarn, gain": {**YARN, "attention_factor": 1.3},
}


@pytest.mark.parametrize(
    ("kind", "case"), [*(("llama", case) for case in ROPE), ("qwen2", "yarn"), ("qwen3", "dynamic")]
)
def test_cosines_and_sines_of_each_rope_are_those_of_transformers(kind, case):
    """On both sides of the original maximum; of transformers a new module each, as dynamic scaling has a memory."""
    rotary = {"llama": "llama.modeling_llama.Llama", "qwen2": "qwen2.modeling_qwen2.Qwen2"}
    rotary["qwen3"] = "qwen3.modeling_qwen3.Qwen3"
    module, _, name = rotary[kind].rpartition(".")
    make = getattr(importlib.import_module(f"transformers.models.{module}"), f"{name}RotaryEmbedding")
    options = {**LLAMA, "max_position_embeddings": 16, "rope_parameters": {**ROPE[case], "rope_theta": 1e4}}
    theirs = transformers.AutoConfig.for_model(kind, **options)
    fields = llama_hf.fields_from_config({**options, "model_type": kind})
    config = llama.LlamaConfig(**fields)
    assert llama_hf.fields_from_config(llama_hf.config_from_fields(config, 8)) == fields
    for length in (5, 16, 17, 64):
        positions = np.arange(length)[None]
        wanted = make(theirs)(torch.zeros(1), torch.tensor(positions))
        found = llama.rope_table(config, jax.numpy.asarray(positions))
        for ours, reference in zip(found, wanted, strict=True):
            half = reference.numpy()[..., : config.head_size // 2]
            np.testing.assert_allclose(np.asarray(ours)[:, :, 0], half, atol=2e-5)


def test_an_export_keeps_the_length_that_a_dynamic_rope_was_made_for(tmp_path, capsys):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    options = {**LLAMA, "rope_parameters": rope, "max_position_embeddings": 16}
    config, (theirs, ours, again) = transformers.AutoConfig.for_model("llama", **options), map(tmp_path.joinpath, "abc")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(theirs)
    job = pretrained_job(theirs, "llama")
    assert config_json(job.pretrained, job.config, 999)["max_position_embeddings"] == 16
    assert main(["checkpoint", "import", str(theirs), str(ours), "--model", "llama-tiny"]) == 0
    assert main(["checkpoint", "export", str(ours), str(again), "--max-length", "99"]) == 2
    assert "max_position_embeddings=16" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(ours), str(again)]) == 0
    assert_same_leaves(theirs, again)


def test_an_export_in_half_precision_is_what_transformers_casts_to(checkpoint, tmp_path):
    directory, _ = checkpoint("llama-tied")
    job = pretrained_job(directory, "llama-tied")
    config = config_json(job.pretrained, job.config, job.seq_len)
    export_safetensors(open_source(directory, job), tmp_path / "out", job.pretrained, config=config, dtype="bfloat16")
    model, theirs = load(tmp_path / "out"), load(directory, dtype=torch.bfloat16).state_dict()
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(weight, theirs[name]) for name, weight in model.state_dict().items())


def assert_same_leaves(*sources):
    """Compare sources, or directories of safetensors."""
    assert_same_bits(*(arrays_of(SafetensorsSource(x) if isinstance(x, pathlib.Path) else x) for x in sources))


def save_torch(weights, directory):
    import safetensors.torch

    weights = {name: weight.contiguous().clone() for name, weight in weights.items()}
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_checkpoint_may_hold_its_head_if_it_is_the_embedding(checkpoint, tmp_path):
    directory, _ = checkpoint("llama-tied")
    weights = dict(load(directory).state_dict())
    assert "lm_head.weight" in weights
    weights["model.rotary_emb.inv_freq"] = torch.zeros(4)
    save_torch(weights, tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    job = pretrained_job(tmp_path, "llama-tied")
    assert_same_leaves(open_source(tmp_path, job), open_source(directory, job))
    save_torch({**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, tmp_path)
    with refusing("lm_head.weight", "model.embed_tokens.weight", "config.json"):
        open_source(tmp_path, job)
    # The remedy: it computes what transformers does, which keeps both.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    job = pretrained_job(tmp_path, "llama-tied")
    source = open_source(tmp_path, job)
    arrays = jax.tree.map(jax.numpy.asarray, arrays_of(source))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative(our_logits(job, arrays), logits_of(load(tmp_path))) < 1e-4


def test_wrappers_of_torch_and_their_prefix_are_taken_off_names_in_safetensors(checkpoint, tmp_path):
    wrapper = "module._orig_mod."
    directory, _ = checkpoint("llama-tied")
    save_torch({f"{wrapper}{key}": weight for key, weight in load(directory).state_dict().items()}, tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    job = pretrained_job(directory, "llama-tied")
    assert_same_leaves(open_source(tmp_path, job), open_source(directory, job))
    save_torch({"model.norm.weight": torch.ones(32), f"{wrapper}model.norm.weight": torch.ones(32)}, tmp_path)
    source = functools.partial(pretrained_source, tmp_path, job.pretrained, as_model(job.model).params)
    refuses(source, f"{wrapper}model.norm.weight")
    # The files that OpenAI's model has on the hub: without a prefix, and with masks.
    directory, _ = checkpoint("gpt2")
    masks = {f"h.{i}.attn.{name}": torch.ones(1, 1, 40, 40) for i in range(3) for name in ("bias", "masked_bias")}
    save_torch({**load(directory).transformer.state_dict(), **masks}, tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    job = pretrained_job(tmp_path, "gpt2")
    assert_same_leaves(open_source(tmp_path, job), open_source(directory, job))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_directory_with_pytorch_model_bin_is_read(checkpoint, tmp_path, sharded):
    directory, _ = checkpoint("llama")
    weights = load(directory).state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    files = {"pytorch_model.bin": list(weights)}
    if sharded:
        files = {f"pytorch_model-{i}-of-2.bin": list(weights)[i::2] for i in range(2)}
        named = {name: file for file, names in files.items() for name in names if "inv_freq" not in name}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": named}))
    for file, names in files.items():
        torch.save({name: weights[name] for name in names}, tmp_path / file)
    shutil.copy(directory / "config.json", tmp_path)
    job = pretrained_job(directory, "llama")
    for path in [tmp_path, tmp_path / "pytorch_model.bin.index.json"][: 1 + sharded]:
        assert_same_leaves(open_source(path, job), open_source(directory, job))
    if sharded:
        torch.save({"more": torch.ones(1)}, tmp_path / "pytorch_model-1-of-2.bin")
        refuses(lambda: open_source(tmp_path, job), "pytorch_model-1-of-2.bin", "missing")


def test_a_job_of_other_options_is_refused_field_by_field(checkpoint):
    directory, _ = checkpoint("llama31")
    job = pretrained_job(directory, "llama31").with_config(vocab_size=64, rope_theta=1e4, rope_scaling=None)
    facts = ["vocab_size: config.json says 61", "64", "rope_theta", "500000", "10000", "rope_scaling", "factor=8.0"]
    refuses(lambda: open_source(directory, job), directory, *facts, "vocab_size=61")
    directory, _ = checkpoint("llama")
    job = pretrained_job(directory, "llama")
    for fields, facts in (
        ({"vocab_size": 64}, [directory, "embedding", "[61, 32]", "[64,"]),
        ({"num_layers": 2}, ["not in the model", "model.layers.2.input_layernorm.weight"]),
        ({"qkv_bias": True}, ["missing", "layers.0.self_attn.k_proj.bias", "(layers.attn.k_proj.bias)"]),
    ):
        leaves = as_model(llama.make_job(dataclasses.replace(job.config, **fields), SEQ_LEN)["model"]).params
        refuses(functools.partial(pretrained_source, directory, job.pretrained, leaves), *facts)


def test_weights_without_a_configuration_are_refused_unless_asked_for(checkpoint, tmp_path):
    directory, _ = checkpoint("qwen2")
    job = pretrained_job(directory, "qwen2")
    shutil.copy(directory / "model.safetensors", tmp_path)
    refuses(lambda: open_source(tmp_path / "model.safetensors", job), tmp_path, "config.json", "config=None")
    unchecked = pretrained_source(tmp_path / "model.safetensors", job.pretrained, as_model(job.model).params)
    assert_same_leaves(unchecked, open_source(directory, job))
    (tmp_path / "config.json").write_text('{"config": {}, "decides": {}}')
    with refusing("--resume"):
        open_source(tmp_path, job)
    (tmp_path / "config.json").write_text("{")
    refuses(lambda: open_source(tmp_path, job), "config.json", "JSON")


# What is in a config.json, and what the refusal names; without a fact, the option.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "phi3"}, "'phi3'"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "max_position_embeddings"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("mistral", {"attention_bias": True}, ""),
    ("llama", {"attention_bias": "yes"}, ""),
    ("llama", {"hidden_act": "gelu"}, "'silu'"),
    ("llama", {"attention_dropout": 0.1}, ""),
    ("llama", {"sliding_window": 8}, ""),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types='chunked_attention'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("llama", {"logit_softcap": 30.0}, ""),
    ("llama", {"num_attention_heads": True}, ""),
    ("llama", {"num_hidden_layers": 1e9}, ""),
    ("gpt2", {"n_layer": 10**9}, "4,096"),
    ("llama", {"rope_theta": math.inf}, ""),
    ("llama", {"rope_scaling": "linear"}, "wrong kind"),
    ("llama", {"hidden_size": None}, "hidden_size"),
    ("gpt2", {"activation_function": "relu"}, ""),
    ("gpt2", {"n_inner": 64}, "128"),
    ("gpt2", {"add_cross_attention": True}, ""),
    ("gpt2", {"tie_word_embeddings": False}, ""),
]


def test_options_that_the_model_lacks_are_refused_by_name(tmp_path):
    for kind, changes, fact in REFUSED:
        options = {**(GPT2 if kind == "gpt2" else LLAMA), "model_type": kind, **changes}
        (tmp_path / "config.json").write_text(json.dumps(options))
        names = gpt2_hf.PRETRAINED if kind == "gpt2" else llama_hf.PRETRAINED
        ((option, value),) = list(changes.items())[:1]
        facts = tmp_path / "config.json", fact or f"{option}={value!r}"
        refuses(functools.partial(pretrained_fields, tmp_path, names), *facts)
    config = dataclasses.replace(llama.PRESETS["llama-tiny"], qkv_bias=True, qk_norm=True)
    refuses(lambda: llama_hf.config_from_fields(config, 64), "no architecture")


def test_configurations_of_transformers_4_are_read():
    """As published with Llama 3.1 8B, Llama 2 7B and Mistral 7B v0.1 (shortened)."""
    published = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    llama31 = {**published, **sizes, "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5}
    llama31 |= {"rope_scaling": rope, "rope_theta": 500000.0, "attention_bias": False, "pretraining_tp": 1}
    fields = llama_hf.fields_from_config(llama31)
    assert dataclasses.replace(llama.PRESETS["llama-8b"], head_dim=128) == llama.LlamaConfig(**fields)

    llama2 = {**published, **sizes, "intermediate_size": 11008, "rope_scaling": None}
    fields = llama_hf.fields_from_config(llama2)
    found = [fields[name] for name in ("num_kv_heads", "rope_theta", "norm_eps", "head_dim")]
    assert found == [32, 1e4, 1e-6, 128]

    mistral = {**llama2, "model_type": "mistral", "intermediate_size": 14336}
    fields = llama_hf.fields_from_config(mistral)
    assert (fields["num_kv_heads"], fields["local_window_size"]) == (8, 4096)
    assert llama_hf.fields_from_config({**mistral, "sliding_window": None})["local_window_size"] is None


def test_marks_in_published_configurations_are_passed_over():
    """Of GPT-2 medium and XL, DistilGPT2, Llama 1, SmolLM and Unsloth."""
    gpt2_marks = {"n_ctx": 40, "n_special": 0, "predict_special_tokens": True, "id2label": {"0": "LABEL_0"}}
    llama_marks = {"max_sequence_length": 2048, "rope_interleaved": False, "unsloth_fixed": True}
    assert gpt2_hf.fields_from_config({"model_type": "gpt2", **GPT2, **gpt2_marks})["vocab_size"] == VOCAB
    assert llama_hf.fields_from_config({"model_type": "llama", **LLAMA, **llama_marks})["vocab_size"] == VOCAB


def test_every_preset_survives_its_configuration():
    for module, hf in ((llama, llama_hf), (gpt2, gpt2_hf)):
        for name, config in module.PRESETS.items():
            fields = hf.fields_from_config(hf.config_from_fields(config, 1024))
            ours = dataclasses.asdict(config) | ({"head_dim": config.head_size} if module is llama else {})
            assert dataclasses.asdict(dataclasses.replace(config, **fields)) == ours, name
