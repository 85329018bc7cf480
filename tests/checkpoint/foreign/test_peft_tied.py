"""Tied embeddings beside adapters: PEFT unties what it replaces, unless both arrays are there and equal."""

import json

import numpy as np
import pytest
import torch

from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.foreign.merged import Merged, merge_peft
from jfsdp.checkpoint.foreign.peft import WEIGHTS, adapter_source, open_peft, read_loras
from jfsdp.checkpoint.foreign.pretrained import config_json, pretrained_fields, pretrained_source
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import read_whole
from jfsdp.modules.adapt import as_model
from tests.checkpoint.arrays import Arrays, arrays_of, assert_same_bits
from tests.checkpoint.foreign.test_peft import Adapted, change, rewrite, write_base
from tests.refusals import refuses, refusing

HEAD, PREFIX = "lm_head", "base_model.model."
EMBEDDING = {"llama, tied": ("embed.embedding", "model.embed_tokens"), "gpt2": ("wte.embedding", "transformer.wte")}


def table(seed=3):
    return np.random.default_rng(seed).normal(size=(37, 16)).astype(np.float32)


def changes(name):
    """Return what an adapter may do to one or both of the two."""
    module = EMBEDDING[name][1]
    low = {f"{PREFIX}{HEAD}.lora_A.weight": table()[:3], f"{PREFIX}{HEAD}.lora_B.weight": table(4)[:, :3]}
    return {
        "embedding": {f"{PREFIX}{module}.weight": table()},
        "head": {f"{PREFIX}{HEAD}.weight": table()},
        "apart": {f"{PREFIX}{module}.weight": table(), f"{PREFIX}{HEAD}.weight": table(4)},
        "lora": {name: np.ascontiguousarray(x[..., :16]) for name, x in low.items()},
    }


def changed(given, directory, name, kind):
    path = given.write(directory)
    change(path, modules_to_save=[EMBEDDING[name][1], HEAD])
    rewrite(path, arrays_of(SafetensorsSource(path / WEIGHTS)) | changes(name)[kind])
    return path


@pytest.mark.parametrize("name", EMBEDDING)
def test_a_trained_embedding_goes_out_as_embedding_and_head_and_comes_back(name, tmp_path):
    given, (leaf, module) = Adapted(name), EMBEDDING[name]
    given.parts[leaf] = table()
    adapter = open_peft(given.write(tmp_path / "adapter"))
    assert adapter.options["ensure_weight_tying"] is True
    assert adapter.options["modules_to_save"] == [HEAD, module]
    for theirs in (HEAD, module):
        np.testing.assert_array_equal(read_whole(adapter.source, f"{PREFIX}{theirs}.weight"), table())
    assert read_loras(adapter.path, given.names, given.leaves)[0].also == [leaf]
    found = adapter_source(adapter, given.names, given.adapters, given.leaves)
    np.testing.assert_array_equal(read_whole(found, leaf), table())
    # PEFT itself lists the embedding only.
    change(adapter.path, modules_to_save=[module])
    assert read_loras(adapter.path, given.names, given.leaves)[0].also == [leaf]
    change(adapter.path, ensure_weight_tying=False)
    refuses(lambda: open_peft(adapter.path), "lm_head.weight")


def test_an_untied_embedding_goes_out_alone(tmp_path):
    given = Adapted("llama")
    given.parts["embed.embedding"] = table()
    adapter = open_peft(given.write(tmp_path / "adapter"))
    assert adapter.options["ensure_weight_tying"] is False
    assert adapter.saved() == ["model.embed_tokens.weight"]


KINDS = [
    *(("llama, tied", kind) for kind in ("embedding", "head", "apart", "lora")),
    ("gpt2", "head"),
    ("gpt2", "lora"),
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_an_adapter_that_unties_is_refused_and_merged_into_weights_with_two_arrays(name, kind, tmp_path):
    given, module = Adapted(name), EMBEDDING[name][1]
    path = changed(given, tmp_path / "adapter", name, kind)
    for use in (
        lambda: read_loras(path, given.names, given.leaves),
        lambda: adapter_source(open_peft(path), given.names, given.adapters, given.leaves),
    ):
        refuses(use, module, HEAD, "ensure_weight_tying=True", "checkpoint merge")
    config = config_json(given.names, given.job.config, 64)
    base = given.base()
    write_safetensors(Arrays(base), tmp_path / "base", texts={"config.json": config})
    merge_peft(tmp_path / "base", path, tmp_path / "merged")
    found = arrays_of(SafetensorsSource(tmp_path / "merged"))
    old, new = base[f"{module}.weight"], changes(name)[kind]
    head = new.get(f"{PREFIX}{HEAD}.weight", old)
    if kind == "lora":
        head = old + 5 / 3 * new[f"{PREFIX}{HEAD}.lora_B.weight"] @ new[f"{PREFIX}{HEAD}.lora_A.weight"]
    np.testing.assert_allclose(found[f"{HEAD}.weight"], head, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[f"{module}.weight"], new.get(f"{PREFIX}{module}.weight", old))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    if name != "gpt2":  # the remedy: a run may begin from these
        job = given.job.with_config(**pretrained_fields(tmp_path / "merged", given.names))
        leaves = as_model(job.model).params
        source = pretrained_source(tmp_path / "merged", given.names, leaves, config=job.config)
        np.testing.assert_array_equal(read_whole(source, "lm_head.kernel"), found[f"{HEAD}.weight"].T)


def test_a_wrong_fan_in_fan_out_is_refused_by_name(tmp_path):
    """PEFT writes false where GPT-2's head is adapted too, which is not a Conv1D."""
    given = Adapted("gpt2")
    path = given.write(tmp_path / "adapter")
    change(path, fan_in_fan_out=False)
    with refusing("c_attn.weight", "fan_in_fan_out"):
        Merged(Arrays(given.base()), open_peft(path))


def test_a_merge_of_equal_arrays_stays_tied(tmp_path):
    given = Adapted("llama, tied")
    given.parts["embed.embedding"] = table()
    base = write_base(given, tmp_path / "base")
    merge_peft(base, given.write(tmp_path / "adapter"), tmp_path / "merged")
    found = arrays_of(SafetensorsSource(tmp_path / "merged"))
    assert found.keys() == given.base().keys()
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], table())
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_table_of_an_unknown_name_is_not_merged_into_a_base_without_a_head(tmp_path):
    given = Adapted("llama, tied")
    path = changed(given, tmp_path / "adapter", "llama, tied", "embedding")
    change(path, modules_to_save=["tok"])
    arrays = arrays_of(SafetensorsSource(path / WEIGHTS))
    rewrite(path, {name.replace("model.embed_tokens", "tok"): x for name, x in arrays.items()})
    base = {name.replace("model.embed_tokens", "tok"): x for name, x in given.base().items()}
    with refusing("tok.weight", "lm_head.weight", "merge_and_unload"):
        Merged(Arrays(base), open_peft(path))


def test_a_module_of_which_only_some_arrays_are_trained_is_not_written(tmp_path):
    given = Adapted("gpt2")
    given.parts["ln_f.scale"] = np.ones(16, np.float32)
    refuses(lambda: given.write(tmp_path / "adapter"), "ln_f.bias", "transformer.ln_f", "also=")
    given.parts["ln_f.bias"] = np.ones(16, np.float32)
    assert open_peft(given.write(tmp_path / "adapter")).options["modules_to_save"] == ["transformer.ln_f"]


def test_an_array_that_is_not_read_is_refused_with_its_own_reason(tmp_path):
    path = Adapted("llama").write(tmp_path / "adapter")
    arrays = arrays_of(SafetensorsSource(path / WEIGHTS))
    for name, remedy in (
        ("model.embed_tokens.lora_embedding_A", "modules_to_save"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "use_dora=False"),
        ("model.embed_tokens.weight", "save_embedding_layers=False"),
    ):
        rewrite(path, arrays | {f"{PREFIX}{name}": table()})
        refuses(lambda: open_peft(path), name, remedy)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
def test_an_adapter_that_torch_saved_is_read(wrapper, tmp_path):
    given = Adapted("llama")
    path = given.write(tmp_path / "adapter")
    arrays = arrays_of(open_peft(path).source)
    torch.save({f"{wrapper}{name}": torch.tensor(x) for name, x in arrays.items()}, path / "adapter_model.bin")
    (path / WEIGHTS).unlink()
    found = arrays_of(adapter_source(open_peft(path), given.names, given.adapters))
    assert_same_bits(found, given.parts)
    (path / "adapter_model.bin").unlink()
    refuses(lambda: open_peft(path), "adapter_model.safetensors")
