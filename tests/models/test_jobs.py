"""Every model and job of `models/`: published parameter counts, decay, gradients, and configurations that cannot be."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import optax
import pytest

from jfsdp.modules.adapt import as_model
from jfsdp_models import gpt2, llama, optimizers, vit, vit_config  # pyright: ignore[reportMissingImports]
from tests.refusals import refuses
from tests.sharding import fully_shard

JOBS = llama.JOBS | gpt2.JOBS
VITS = vit_config.PRESETS | {
    "mean": dataclasses.replace(vit_config.PRESETS["vit-s16"], pool="mean"),
    "batch norm": dataclasses.replace(vit_config.PRESETS["vit-s16"], norm="batch"),
}
MODELS = {name: (job["config"], job["model"]) for name, job in JOBS.items()}
MODELS |= {name: (config, functools.partial(vit.ViT, config)) for name, config in VITS.items()}
# openai/gpt-2 gives them rounded, and wrong for the first two in its first README (117M, 345M); ViTs are as timm counts
# them (vit_*_patch16_224), with class token and a head of 1000 classes.
PUBLISHED_PARAMS = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "vit-s16": 22_050_664,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_the_published_ones_and_those_of_the_config(name):
    config, source = MODELS[name]
    leaves = as_model(source).params.values()
    counted = sum(math.prod(x.shape) for x in leaves)
    assert counted == config.num_params == PUBLISHED_PARAMS.get(name, counted)
    assert {x.dtype for x in leaves} == {jnp.dtype("float32")}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "ends", "per_layer"),
    [("llama-tiny", {"qkv_bias": True, "qk_norm": True}, 1, 7), ("gpt2-tiny", {}, 2, 8)],
)
def test_decay_spares_norms_and_biases_in_both_storage_forms(name, options, ends, per_layer, stacked):
    params = as_model(JOBS[name]["configure"](num_layers=3, stacked=stacked, **options)["model"]).params
    spared = {name for name, decays in optimizers.decay_mask(params).items() if not decays}
    assert spared == {name for name in params if name.endswith((".scale", ".bias"))}
    assert len(spared) == ends + per_layer * (1 if stacked else 3)


@pytest.mark.parametrize("name", JOBS)
def test_every_job_traces_a_loss_and_its_gradient(name):
    job, tx = JOBS[name]["configure"](num_layers=2), optax.sgd(0.1)
    assert (job["config"].num_layers, job["vocab_size"]) == (2, job["config"].vocab_size)
    model = fully_shard(job["model"], units=job["units"], placements=job["placements"])
    for packed in (False, True):
        model.train_step(job["loss"], tx, program="xla").trace(
            model.abstract_state(tx), job["batch"](8, 16, packed=packed)
        )


LLAMA = dataclasses.replace(llama.PRESETS["llama-tiny"], num_heads=4)
GPT2 = dataclasses.replace(gpt2.PRESETS["gpt2-tiny"], num_heads=4)
VIT = dataclasses.replace(vit_config.PRESETS["vit-s16"], image_size=8, patch_size=4, dim=32, num_heads=4)


@pytest.mark.parametrize(
    ("config", "changes", "facts"),
    [
        (LLAMA, {"num_kv_heads": 3}, ("num_heads=4", "[1, 2, 4]")),
        (LLAMA, {"dim": 33}, ("num_heads=4", "head_dim=")),
        (LLAMA, {"head_dim": 7}, ("even",)),
        (LLAMA, {"documents_per_row": 1}, ("from 2", "None")),
        (LLAMA, {"loss_chunk": 0}, ("from 1",)),
        (LLAMA, {"num_layers": 0}, ("1 to 4,096",)),
        (LLAMA, {"num_layers": 1e9}, ("a whole number",)),
        (LLAMA, {"num_heads": 10**9, "head_dim": 8}, ("65,536",)),
        (LLAMA, {"vocab_size": 10**12}, ("2,147,483,647",)),
        (LLAMA, {"norm_eps": math.inf}, ("finite",)),
        (LLAMA, {"local_window_size": 0}, ("at least 1", "None")),
        (LLAMA, {"attention": "flash"}, ("'cudnn'",)),
        (GPT2, {"dim": 33}, ("num_heads=4",)),
        (GPT2, {"num_positions": 0}, ("from 1",)),
        (GPT2, {"dropout": 1.0}, ("below 1",)),
        (GPT2, {"attention_dropout": -0.1}, ("at least 0",)),
        (GPT2, {"stacked": "no"}, ("True or False",)),
        (GPT2, {"attention": "flash"}, ("'cudnn'",)),
        (VIT, {"patch_size": 3}, ("image_size=8",)),
        (VIT, {"dim": 33}, ("num_heads=4",)),
        (VIT, {"norm": "group"}, ("'layer'", "'batch'")),
        (VIT, {"pool": "max"}, ()),
        (VIT, {"dropout": 1.5}, ("below 1",)),
        (VIT, {"num_classes": 0}, ("from 1",)),
    ],
)
def test_a_bad_config_names_field_value_and_remedy(config, changes, facts):
    (field, value), *_ = changes.items()
    refuses(lambda: dataclasses.replace(config, **changes), type(config).__name__, f"{field}={value!r}", *facts)
