"""Weights of others read straight into codes: each device reads its part, and the bits are those of the whole."""

import jax
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.checkpoint.foreign.export import export_safetensors
from jfsdp.checkpoint.foreign.pretrained import config_json
from jfsdp.checkpoint.source import Encoded, read_whole
from jfsdp.layout.codec import CODECS
from jfsdp.modules.adapt import as_model
from tests.checkpoint.arrays import Arrays
from tests.sharding import fully_shard

JOB = jfsdp.trainer.find_job("llama-tiny").with_config(dim=128, ffn_dim=192, num_layers=2, num_heads=4, num_kv_heads=2)
QUANTIZED = {"**.attn.*_proj.kernel": "nf4", "**.up_proj.kernel": "int8"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("coded") / "hf", np.random.default_rng(0)
    values = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in as_model(JOB.model).params.items()}
    config = config_json(JOB.pretrained, JOB.config, 64)
    export_safetensors(Arrays(values), path, JOB.pretrained, config=config)
    return path, values


def test_what_is_read_is_the_encoding_of_the_whole(weights):
    path, values = weights
    mesh = jfsdp.make_mesh(fsdp=3, devices=jax.devices()[:3])
    options = {"mesh": mesh, "units": JOB.units, "min_size": 0}
    lora = jfsdp.LoRA(["**.attn.*_proj.kernel"], rank=2, dora=True)
    model = fully_shard(JOB.model, lora=lora, quantized=QUANTIZED, **options)
    state = jfsdp.checkpoint.load_pretrained(path, model, optax.sgd(1.0), JOB.pretrained, config=JOB.config)
    for name, codec in model.model.codecs.items():
        codes, scales = CODECS[codec.name].encode(values[name], np)
        np.testing.assert_array_equal(np.asarray(jfsdp.checkpoint.gather_leaf(state, name)), codes, err_msg=name)
        np.testing.assert_array_equal(
            np.asarray(jfsdp.checkpoint.gather_leaf(state, f"{name}.scales")), scales, err_msg=name
        )
    assert len(model.model.codecs) == 5
    name = "layers.attn.q_proj.kernel"
    decoded = CODECS["nf4"].decode(*CODECS["nf4"].encode(values[name])).astype(np.float32)
    norms = np.asarray(jfsdp.checkpoint.gather_leaf(state, f"{name}.lora_magnitude"))
    np.testing.assert_allclose(norms, np.linalg.norm(np.asarray(decoded), axis=-2), rtol=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_any_slice_of_codes_and_scales_is_that_of_the_whole(codec):
    values = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    source = Encoded(Arrays({"w": values, "other": values}), {"w": CODECS[codec]})
    assert list(source.arrays) == ["w", "other", "w.scales"]
    for name in source.arrays:
        whole = read_whole(source, name)
        size = whole.shape[1]
        for start, stop in ((0, size), (1, size), (size // 2, size // 2 + 1), (size - 1, size)):
            part = source.read(name, (slice(2, 4), slice(start, stop)))
            np.testing.assert_array_equal(part, whole[2:4, start:stop])
