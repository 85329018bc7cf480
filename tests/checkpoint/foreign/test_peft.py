"""Adapters in PEFT's format: written and read, merged into weights and taken out of them, against numpy."""

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.checkpoint.convert import convert
from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.foreign.mapping import Exported
from jfsdp.checkpoint.foreign.merged import Merged, merge_peft
from jfsdp.checkpoint.foreign.peft import (
    CONFIG,
    WEIGHTS,
    adapter_map,
    adapter_source,
    open_peft,
    read_loras,
    write_peft,
)
from jfsdp.checkpoint.foreign.pretrained import load_pretrained
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import read_whole
from jfsdp.cli import main
from jfsdp.layout.lora import MAGNITUDE, A, B, find_adapters
from jfsdp.modules.adapt import as_model
from jfsdp.modules.adapted import merge
from jfsdp.trainer.job import load_job
from tests.checkpoint.arrays import Arrays, arrays_of, assert_same_bits
from tests.options import config_of
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard

SIZES = ("dim=16", "num_layers=2", "num_heads=2", "vocab_size=37")
LLAMA, GPT2 = ("llama-tiny", (*SIZES, "num_kv_heads=1", "ffn_dim=24")), ("gpt2-tiny", (*SIZES, "num_positions=24"))
MODELS = {
    "llama": (*LLAMA, True),
    "llama, listed": (*LLAMA, False),
    "llama, tied": (LLAMA[0], (*LLAMA[1], "tied=true"), True),
    "gpt2": (*GPT2, True),
    "gpt2, listed": (*GPT2, False),
}
TARGETS = {
    "llama-tiny": ["**.q_proj.kernel", "**.mlp.down_proj.kernel"],
    "gpt2-tiny": ["**.c_attn.kernel", "**.c_fc.kernel"],
}
FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "dropout": {"dropout": 0.25},
}
FROZEN = jfsdp.MixedPrecisionPolicy(frozen_dtype="bfloat16")
QUERY = {"llama": "model.layers.{}.self_attn.q_proj", "gpt2": "transformer.h.{}.attn.c_attn"}


class Adapted:
    """A job with adapters of random values."""

    def __init__(self, name, *loras, seed=0, **options):
        model, fields, stacked = MODELS[name]
        self.job = load_job(model, None).with_config(**config_of((*fields, f"stacked={stacked}")))
        self.names = self.job.pretrained
        self.leaves = as_model(self.job.model).params
        self.loras = loras or [jfsdp.LoRA(**({"targets": TARGETS[model], "rank": 3, "alpha": 5.0} | options))]
        self.adapters = self.find(self.loras)
        rng = np.random.default_rng(seed)
        shapes = {one.name(part): one.part_shape(part) for one in self.adapters.values() for part in one.parts}
        self.parts = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}

    def find(self, loras):
        stacked = {path: int(self.job.config.stacked and path.startswith(("layers.", "h."))) for path in self.leaves}
        return find_adapters(loras, self.leaves, stacked, {})

    def write(self, directory, **options):
        write_peft(Arrays(self.parts), directory, self.names, self.adapters, self.leaves, **options)
        return directory

    def base(self, dtype="float32"):
        """Return weights of the model under the names of Hugging Face."""
        rng = np.random.default_rng(1)
        ours = {path: rng.normal(size=leaf.shape).astype(jnp.dtype(dtype)) for path, leaf in self.leaves.items()}
        exported = Exported(Arrays(ours), self.names)
        return {name: read_whole(exported, name) for name in exported.arrays}


def two():
    return jfsdp.make_mesh(devices=jax.devices()[:2])


def change(directory, **options):
    """Change what the configuration says; None takes an option away."""
    file = directory / CONFIG
    found = json.loads(file.read_text()) | options
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def rewrite(directory, arrays):
    """Replace the arrays of an adapter."""
    (directory / WEIGHTS).unlink()
    write_safetensors(Arrays(arrays), directory / "new", weights=WEIGHTS, allow_nonfinite=True)
    (directory / "new" / WEIGHTS).rename(directory / WEIGHTS)
    (directory / "new").rmdir()


def check_written(given, directory):
    """Write, and read the same; return the adapter."""
    adapter = open_peft(given.write(directory, base="some/base"))
    assert given.find(read_loras(adapter.path, given.names, given.leaves)) == given.adapters
    assert_same_bits(arrays_of(adapter_source(adapter, given.names, given.adapters)), given.parts)
    assert (adapter.options["base_model_name_or_path"], adapter.options["peft_type"]) == ("some/base", "LORA")
    return adapter


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_has_the_names_and_shapes_of_peft_and_is_read_as_it_was(name, tmp_path):
    given, kind = Adapted(name, dora=True), name.partition(",")[0]
    adapter = check_written(given, tmp_path / "adapter")
    assert [file.name for file in sorted((tmp_path / "adapter").iterdir())] == [CONFIG, WEIGHTS]
    theirs = f"base_model.model.{QUERY[kind].format(1)}"
    ours = {"llama": "layers{}.attn.q_proj.kernel", "gpt2": "h{}.attn.c_attn.kernel"}[kind]
    is_listed = not given.job.config.stacked
    path = ours.format({"llama": ".1", "gpt2": "_1"}[kind] if is_listed else "")
    a, b, norms = (given.parts[f"{path}.{part}"][() if is_listed else 1] for part in (A, B, MAGNITUDE))
    for end, value in {"lora_A.weight": a.T, "lora_B.weight": b.T, "lora_magnitude_vector": norms}.items():
        np.testing.assert_array_equal(read_whole(adapter.source, f"{theirs}.{end}"), value)
    assert adapter.options["fan_in_fan_out"] == (kind == "gpt2")
    if name == "llama":
        for form, options in FORMS.items():
            check_written(Adapted(name, **options), tmp_path / form)


def test_ranks_and_alphas_of_single_leaves_are_patterns(tmp_path):
    q, k, v = (
        jfsdp.LoRA(targets=f"**.{name}_proj.kernel", rank=r, alpha=a)
        for name, r, a in [("q", 2, 4), ("k", 2, 6), ("v", 4, 6)]
    )
    given = Adapted("llama", q, k, v)
    adapter = open_peft(given.write(tmp_path / "adapter"))
    assert adapter.options["r"] == 2 and set(adapter.options["rank_pattern"].values()) == {4}
    assert given.find(read_loras(adapter.path, given.names, given.leaves)) == given.adapters
    scales = {weight.split(".")[-2]: adapter.scale(weight) for weight in adapter.weights()}
    assert scales == {"q_proj": 2, "k_proj": 3, "v_proj": 1.5}


def test_a_pattern_of_alpha_is_a_regular_expression_of_the_modules_name(tmp_path):
    given = Adapted("llama")
    path = given.write(tmp_path / "adapter")
    change(path, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 7, "down_proj": 9, "proj": 11, "q_pro": 13})
    adapter = open_peft(path)
    assert {weight.split(".", 2)[2]: adapter.alpha(weight) for weight in adapter.weights()} == {
        "0.self_attn.q_proj.weight": 5,
        "1.self_attn.q_proj.weight": 7,
        "0.mlp.down_proj.weight": 9,
        "1.mlp.down_proj.weight": 9,
    }
    with refusing("layers.attn.q_proj.kernel"):
        read_loras(adapter.path, given.names, given.leaves)
    listed = Adapted("llama, listed")
    alphas = {path: one.alpha for path, one in listed.find(read_loras(path, listed.names, listed.leaves)).items()}
    assert alphas["layers.0.attn.q_proj.kernel"] == 5 and alphas["layers.1.attn.q_proj.kernel"] == 7


WORDS = {
    "whole stacks": ("llama", "**.attn.q_proj.kernel", ["q_proj"]),
    "a word of others too": ("gpt2", "**.attn.c_proj.kernel", [f"transformer.h.{i}.attn.c_proj" for i in range(2)]),
    "every module of a word": ("gpt2", "**.c_proj.kernel", ["c_proj"]),
    "one layer": ("llama, listed", "layers.1.attn.q_proj.kernel", ["model.layers.1.self_attn.q_proj"]),
}


def test_target_modules_choose_what_is_adapted_and_nothing_else(tmp_path):
    for case, (name, targets, words) in WORDS.items():
        path = Adapted(name, targets=targets).write(tmp_path / case)
        assert json.loads((path / CONFIG).read_text())["target_modules"] == words, case
    loras = [jfsdp.LoRA(targets=f"layers.{i}.attn.q_proj.kernel", rank=2 + i, alpha=4.0) for i in range(2)]
    given, stacked = Adapted("llama, listed", *loras), Adapted("llama")
    adapter = open_peft(given.write(tmp_path / "layers differ"))
    assert given.find(read_loras(adapter.path, given.names, given.leaves)) == given.adapters
    refuses(lambda: read_loras(adapter.path, stacked.names, stacked.leaves), "layers.attn.q_proj.kernel")


def test_arrays_of_heads_are_matrices_there(tmp_path):
    leaves = {"query": jax.ShapeDtypeStruct((6, 2, 4), "float32"), "out": jax.ShapeDtypeStruct((2, 4, 6), "float32")}
    names = {"rules": [("query", "q.weight", "d h k -> (h k) d"), ("out", "o.weight", "h k d -> d (h k)")]}
    lora = jfsdp.LoRA(targets={"query": 1, "out": 2}, rank=3, dora=True)
    adapters = find_adapters([lora], leaves, dict.fromkeys(leaves, 0), {})
    rng = np.random.default_rng(0)
    shapes = {one.name(part): one.part_shape(part) for one in adapters.values() for part in one.parts}
    parts: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights = {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in leaves.items()}
    write_peft(Arrays(parts), tmp_path / "adapter", names, adapters, leaves)
    adapter = open_peft(tmp_path / "adapter")
    assert_same_bits(arrays_of(adapter_source(adapter, names, adapters)), parts)
    found = find_adapters(read_loras(adapter.path, names, leaves), leaves, dict.fromkeys(leaves, 0), {})
    assert {path: one.num_in for path, one in found.items()} == {"query": 1, "out": 2}
    merged = arrays_of(Merged(Exported(Arrays(weights), names), adapter))
    ours = {path: merge(jnp.asarray(weights[path]), one, parts) for path, one in adapters.items()}
    np.testing.assert_allclose(merged["q.weight"], ours["query"].reshape(6, 8).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merged["o.weight"], ours["out"].reshape(8, 6).T, rtol=1e-5, atol=1e-5)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"lora_alpha": None}, "configuration of a LoRA"),
    ({"lora_alpha": "many"}, "configuration of a LoRA"),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"bias": "all"}, "bias='all'"),
    ({"use_dora": True}, "lora_magnitude_vector"),
]


@pytest.fixture
def given(tmp_path):
    """A Llama's adapter, and its directory."""
    given = Adapted("llama")
    return given, given.write(tmp_path / "adapter")


def test_options_that_are_not_available_are_refused_by_name_and_those_that_are_off_are_read(given):
    plain = json.loads((given[1] / CONFIG).read_text())
    for options, fact in OPTIONS:
        change(given[1], **options)
        refuses(lambda: open_peft(given[1]), fact)
        (given[1] / CONFIG).write_text(json.dumps(plain))
    off = {"use_qalora": False, "bias": "none", "lora_bias": False, "megatron_config": None, "eva_config": {}}
    chooses = {"exclude_modules": ["lm_head"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}
    change(given[1], init_lora_weights="gaussian", loftq_config={}, **off, **chooses)
    assert open_peft(given[1]).rank("model.layers.0.self_attn.q_proj.weight") == 3


def test_what_is_no_adapter_and_missing_and_unknown_arrays_are_refused_by_name(given, tmp_path):
    refuses(lambda: open_peft(tmp_path), tmp_path, CONFIG)
    arrays = arrays_of(open_peft(given[1]).source)
    name = f"base_model.model.{QUERY['llama'].format(0)}.lora_B.weight"
    for changed, facts in (
        ({other: value for other, value in arrays.items() if other != name}, [name, "missing"]),
        (arrays | {"base_model.model.lm_head.weight": arrays[name]}, ["lm_head.weight", "save_embedding_layers=False"]),
        ({}, ["pass a LoRA adapter"]),
    ):
        rewrite(given[1], changed)
        refuses(lambda: open_peft(given[1]), *facts)
    (given[1] / CONFIG).write_text("{")
    refuses(lambda: open_peft(given[1]), CONFIG)


def test_an_adapter_of_another_base_is_refused(given):
    adapted, path = given
    change(path, base_model_name_or_path="their/base")
    adapter, leaves, gpt2 = open_peft(path), dict(adapted.leaves), Adapted("gpt2")
    longer = {name: jax.ShapeDtypeStruct((3, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
    wider = leaves | {"layers.attn.q_proj.kernel": jax.ShapeDtypeStruct((2, 16, 32), "float32")}
    for names, given_leaves, facts in (
        (gpt2.names, gpt2.leaves, ["q_proj.weight", "their/base"]),
        (adapted.names, longer, ["q_proj.kernel", "2 of 3", "stacked=false"]),
        (adapted.names, wider, ["q_proj.weight", "[16, 16]", "[32, 16]", "their/base"]),
    ):
        refuses(functools.partial(read_loras, path, names, given_leaves), *facts)
    for other, facts in (
        (Adapted("llama", rank=2), ["lora_A.weight", "[3, 16]", "[2, 16]"]),
        (Adapted("llama", dora=True), ["lora_magnitude_vector"]),
        (Adapted("llama", alpha=6.0), ["q_proj.kernel", "scale"]),
    ):
        refuses(functools.partial(adapter_source, adapter, adapted.names, other.adapters), *facts)


def test_what_peft_cannot_say_is_not_written(tmp_path):
    kinds: list[dict[str, Any]] = [{"dora": True}, {"dropout": 0.1}]
    for options in kinds:
        loras = [jfsdp.LoRA("**.q_proj.kernel", rank=2), jfsdp.LoRA("**.k_proj.kernel", rank=2, **options)]
        mixed = Adapted("llama", *loras)
        refuses(lambda mixed=mixed: mixed.write(tmp_path / "adapter"), "use_dora", "lora_dropout")
    given = Adapted("llama")
    for rule in (("**.other", "other.weight"), ("layers.{i}.attn.q_proj.kernel", "q.{i}.weight", "in out -> (in out)")):
        adapters = {"layers.attn.q_proj.kernel": next(iter(given.adapters.values()))}
        refuses(lambda rule=rule, adapters=adapters: adapter_map({"rules": [rule]}, adapters), "q_proj.kernel")
    assert not list(tmp_path.iterdir())
    given.write(tmp_path / "adapter")
    refuses(lambda: given.write(tmp_path / "adapter"), "adapter", "exists")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_state_begins_with_exactly_these_arrays_and_is_exported_as_them(name, tmp_path):
    given = Adapted(name, dora=True, dropout=0.5)
    base = given.base("bfloat16")
    write_safetensors(Arrays(base), tmp_path / "base")
    path = given.write(tmp_path / "adapter", base="some/base")
    options: dict[str, Any] = {"mesh": two(), "units": given.job.units, "min_size": 8}
    plain = fully_shard(given.job.model, **options)
    loras = read_loras(path, given.names, plain)
    model = fully_shard(given.job.model, lora=loras, mp_policy=FROZEN, **options)
    state = load_pretrained(tmp_path / "base", model, optax.sgd(1.0), given.names, adapter=path)
    exported = Exported(Arrays({path: np.asarray(state.params[path]) for path in given.leaves}), given.names)
    assert_same_bits(arrays_of(exported), base)
    assert_same_bits({path: np.asarray(state.params[path]) for path in given.parts}, given.parts)
    jfsdp.peft.export_peft(model, state, tmp_path / "again", given.names, base="some/base")
    assert_same_bits(arrays_of(open_peft(tmp_path / "again").source), arrays_of(open_peft(path).source))
    assert (tmp_path / "again" / CONFIG).read_text() == (path / CONFIG).read_text()
    if name == "gpt2":
        return
    fresh = load_pretrained(tmp_path / "base", model, optax.sgd(1.0), given.names)
    assert not any(np.asarray(x).any() for path, x in fresh.params.items() if path.endswith(B))
    tx = optax.sgd(1.0)
    refuses(
        lambda: load_pretrained(tmp_path / "base", plain, tx, given.names, adapter=path),
        path,
        "the model has no adapters",
    )
    refuses(lambda: jfsdp.peft.export_peft(plain, state, tmp_path / "none", given.names), "no adapters")
    jfsdp.checkpoint.save(tmp_path / "ours", plain.init(tx))
    refuses(lambda: load_pretrained(tmp_path / "ours", model, tx, adapter=path), "mapping of names")


def sums(given, base, form, sign=1):
    """Return every weight with its adapter, in float32; their weights are [out, in], but those of GPT-2."""
    named = Exported(Arrays(given.parts), adapter_map(given.names, given.adapters))
    parts = arrays_of(named)
    scale = 5 / (math.sqrt(3) if form == "rslora" else 3)
    is_gpt2 = "transformer.wte.weight" in base
    found = {}
    for name, value in base.items():
        a, b, norms = (
            parts.get(f"base_model.model.{name.removesuffix('.weight')}.{end}")
            for end in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        if a is None or b is None:
            continue
        whole = value.astype(np.float32)
        whole = (whole.T if is_gpt2 else whole) + sign * scale * b @ a
        if norms is not None:
            whole = norms[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)
        found[name] = whole.T if is_gpt2 else whole
    return found


ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}
MERGED = [*(("llama", form, "float32") for form in FORMS), ("gpt2", "dora", "float32"), ("gpt2", "lora", "bfloat16")]


@pytest.mark.parametrize(("name", "form", "dtype"), MERGED)
def test_merged_weights_are_the_sums_and_all_else_is_as_it_was(name, form, dtype, tmp_path):
    given = Adapted(name, **FORMS[form])
    base, prefix = given.base(dtype), "transformer." if dtype == "bfloat16" else ""  # the first word may be left out
    adapter = open_peft(given.write(tmp_path / "adapter"))
    merged = Merged(Arrays({path.removeprefix(prefix): x for path, x in base.items()}), adapter)
    found, wanted = arrays_of(merged), {path.removeprefix(prefix): x for path, x in sums(given, base, form).items()}
    base = {path.removeprefix(prefix): x for path, x in base.items()}
    assert len(wanted) == 4
    assert_same_bits(*({path: x for path, x in one.items() if path not in wanted} for one in (found, base)))
    close = functools.partial(np.testing.assert_allclose, rtol=ROUNDING[dtype], atol=1e-5)
    for path, value in wanted.items():
        assert found[path].dtype == base[path].dtype
        close(found[path].astype(np.float32), value, err_msg=path)
        rows, columns = base[path].shape
        for index in [(slice(2, 7), slice(0, columns)), (slice(0, rows), slice(3, 5)), (slice(1, 4), slice(5, 9))]:
            close(merged.read(path, index).astype(np.float32), found[path][index].astype(np.float32))


def write_base(given, directory, dtype="float32", **options):
    """Write weights with what stands beside them in a directory of Hugging Face."""
    write_safetensors(Arrays(given.base(dtype)), directory, texts={"config.json": {"a": 1}}, **options)
    (directory / "tokenizer.model").write_bytes(b"\x00\xff")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    return directory


def test_a_merged_directory_has_the_other_files_and_is_unmerged_again(monkeypatch, tmp_path):
    given = Adapted("llama")
    base, adapter = write_base(given, tmp_path / "base", max_shard_bytes=4000), given.write(tmp_path / "adapter")
    monkeypatch.setattr("jfsdp.checkpoint.foreign.export.PIECE_BYTES", 256)
    written = merge_peft(base, adapter, tmp_path / "merged", max_shard_bytes=9000)
    assert len(written.files) > 2
    beside = {file.name for file in (tmp_path / "merged").iterdir()} - set(written.files)
    assert beside == {"config.json", "tokenizer.model", "model.safetensors.index.json"}
    assert (tmp_path / "merged" / "tokenizer.model").read_bytes() == b"\x00\xff"
    found = arrays_of(SafetensorsSource(tmp_path / "merged"))
    for path, value in arrays_of(Merged(Arrays(given.base()), open_peft(adapter))).items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6)  # bits are those of a product of pieces
    merge_peft(tmp_path / "merged", adapter, tmp_path / "back", sign=-1)
    back = arrays_of(SafetensorsSource(tmp_path / "back"))
    for path, value in given.base().items():
        np.testing.assert_allclose(back[path], value, atol=3e-6)


def test_a_checkpoint_that_no_run_wrote_is_exported_too_and_the_averages_of_its_adapters(tmp_path, capsys):
    given = Adapted("llama")
    model = fully_shard(given.job.model, mesh=two(), units=given.job.units, lora=given.loras)
    state = model.init(optax.chain(optax.sgd(1.0), jfsdp.optim.track_ema(0.9)))
    jfsdp.peft.export_peft(model, state, tmp_path / "average", given.names)
    moved = {
        name: jax.device_put(np.asarray(x) + 1, x.sharding) if name.endswith((A, B)) else x
        for name, x in state.params.items()
    }
    state = dataclasses.replace(state, params=moved)
    jfsdp.peft.export_peft(model, state, tmp_path / "newest", given.names)
    jfsdp.checkpoint.save(tmp_path / "saved", state, frozen=False)
    options = ["--model", "llama-tiny", "--model-config", *LLAMA[1], "stacked=true"]
    for name, more in (("newest", []), ("average", ["--ema"])):
        command = ["checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / f"our {name}"), *more]
        assert main([*command, *options]) == 0, capsys.readouterr().err
        for file in (CONFIG, WEIGHTS):
            assert (tmp_path / f"our {name}" / file).read_bytes() == (tmp_path / name / file).read_bytes()
    convert(tmp_path / "saved", tmp_path / "list", unstack="layers")
    assert main(["checkpoint", "export", str(tmp_path / "list"), str(tmp_path / "no"), *options]) == 2
    assert "layers.attn.q_proj.kernel.lora_a" in capsys.readouterr().err


def test_what_was_trained_as_it_is_goes_with_the_adapter(tmp_path):
    given = Adapted("llama")
    base = write_base(given, tmp_path / "base")
    also = ["layers.attn_norm.scale", "lm_head.kernel"]
    options: dict[str, Any] = {"mesh": two(), "units": given.job.units, "min_size": 8}
    lora = jfsdp.LoRA(targets=TARGETS["llama-tiny"], rank=3, also=also)
    model = fully_shard(given.job.model, lora=lora, **options)
    state = load_pretrained(base, model, optax.sgd(1.0), given.names)
    state = dataclasses.replace(state, params={n: x + 1 if n in also else x for n, x in state.params.items()})
    jfsdp.peft.export_peft(model, state, tmp_path / "adapter", given.names)
    adapter = open_peft(tmp_path / "adapter")
    assert adapter.options["modules_to_save"] == [
        "lm_head",
        *(f"model.layers.{layer}.input_layernorm" for layer in range(2)),
    ]
    np.testing.assert_array_equal(
        read_whole(adapter.source, "base_model.model.lm_head.weight"), np.asarray(state.params["lm_head.kernel"]).T
    )

    loras = read_loras(tmp_path / "adapter", given.names, fully_shard(given.job.model, **options))
    assert loras[0].also == also
    again = fully_shard(given.job.model, lora=loras, **options)
    found = load_pretrained(base, again, optax.sgd(1.0), given.names, adapter=tmp_path / "adapter")
    for name, x in state.params.items():
        np.testing.assert_array_equal(found.params[name], x, err_msg=name)

    merge_peft(base, tmp_path / "adapter", tmp_path / "merged")
    merged = arrays_of(SafetensorsSource(tmp_path / "merged"))
    np.testing.assert_array_equal(merged["lm_head.weight"], np.asarray(state.params["lm_head.kernel"]).T)
    with refusing("input_layernorm.weight"):
        Merged(SafetensorsSource(tmp_path / "merged"), adapter, sign=-1)


def test_whole_arrays_that_do_not_fit_are_refused_by_name(given):
    """PEFT compares the ends of names as text: `norm` chooses input_layernorm too."""
    adapted, path = given
    arrays = arrays_of(open_peft(path).source)
    norms = {f"base_model.model.model.layers.{i}.input_layernorm.weight": np.ones(16, np.float32) for i in range(2)}
    change(path, modules_to_save=["norm"])
    rewrite(path, arrays | norms)
    (lora,) = read_loras(path, adapted.names, adapted.leaves)
    assert lora.also == ["layers.attn_norm.scale"]
    for changed, facts in (
        (dict([*norms.items()][:1]), ["layers.attn_norm.scale", "1 of 2", "(modules_to_save)"]),
        ({name: np.ones(8, np.float32) for name in norms}, ["input_layernorm.weight", "[8]", "[16]"]),
    ):
        rewrite(path, arrays | changed)
        refuses(lambda: read_loras(path, adapted.names, adapted.leaves), *facts)
    change(path, modules_to_save=["norms"])
    refuses(lambda: open_peft(path), "input_layernorm.weight")


def test_nothing_is_left_of_a_merge_that_fails(given, tmp_path):
    adapted, path = given
    base = write_base(adapted, tmp_path / "base")
    other = {name: x[..., :8] for name, x in adapted.base().items()}
    write_safetensors(Arrays(other), tmp_path / "narrow")
    write_safetensors(Arrays({name: x for name, x in other.items() if ".1." not in name}), tmp_path / "short")
    arrays = arrays_of(open_peft(path).source)
    before = set(tmp_path.iterdir())
    for wrong in ("narrow", "short"):
        refuses(lambda wrong=wrong: merge_peft(tmp_path / wrong, path, tmp_path / "out"), "model.layers")
    rewrite(path, {name: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x) for name, x in arrays.items()})
    refuses(lambda: merge_peft(base, path, tmp_path / "out"), "finite")
    refuses(lambda: merge_peft(base, path, base), base, "exists")
    assert set(tmp_path.iterdir()) == before
    name = f"{QUERY['llama'].format(0)}.weight"
    for dtype in ("uint8", "int8", "float8_e4m3fn"):
        quantized = adapted.base() | {name: np.zeros((128, 1), jnp.dtype(dtype))}
        with refusing("q_proj.weight", dtype, "float32"):
            Merged(Arrays(quantized), open_peft(path))
    dora = Adapted("llama", dora=True).write(tmp_path / "dora")
    refuses(lambda: merge_peft(base, dora, tmp_path / "out", sign=-1), "DoRA")


def test_the_command_merges_unmerges_and_compares(given, tmp_path, capsys):
    adapted, path = given
    base, merged, out = write_base(adapted, tmp_path / "base"), tmp_path / "merged", tmp_path / "out"

    def call(*args):
        status = main(["checkpoint", *map(str, args)])
        return status, *capsys.readouterr()

    status, said, _ = call("merge", base, path, merged, "--json")
    assert (status, json.loads(said)["to"]) == (0, str(merged))
    assert call("unmerge", merged, path, tmp_path / "back", "--max-shard-gb", "1e-5")[0] == 0
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    status, said, _ = call("diff", path, Adapted("llama", seed=1).write(tmp_path / "other"))
    assert status == 4 and "self_attn.q_proj.lora_A.weight" in said and call("diff", path, path)[0] == 0
    for args, fact in [
        (("merge", base, tmp_path, out), CONFIG),
        (("merge", path, path, out), "safetensors"),
        (("unmerge", base, path, out, "--max-shard-gb", "0"), "--max-shard-gb 0"),
    ]:
        status, said, err = call(*args)
        assert (status, said) == (2, "") and fact in err and "Traceback" not in err
