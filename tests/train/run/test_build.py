import dataclasses

import pytest

from jfsdp.train.run.build import build, make_schedule
from jfsdp.train.run.config import TrainConfig

CONFIG = TrainConfig(model="llama-tiny", model_config=("dim=16", "num_layers=1"), steps=100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama-9b"}, "model 'llama-9b' is unknown; the models are .*llama-tiny"),
        ({"model": None}, "exactly one of --model NAME and --factory"),
        ({"strategy": "zero9"}, "strategy 'zero9' is unknown; the strategies are ddp, .*full_shard"),
        ({"param_dtype": "int4"}, "param_dtype 'int4' is not one of float32, bfloat16"),
        ({"mesh": "fdsp=8"}, "mesh axis 'fdsp' is unknown; the axes are .*fsdp"),
        ({"mesh": "fsdp=3", "simulate_devices": 8}, "there are 8.*--simulate-devices 8"),
        ({"engine": "magic"}, "engine 'magic' is unknown"),
        ({"remat": "some"}, "remat 'some' is unknown; use none, full"),
        ({"model_config": ("width=3",)}, "unexpected keyword argument 'width'; its fields are .*dim"),
        ({"model_config": ("dim",)}, "model-config 'dim' is not KEY=VALUE"),
        ({"batch_per_device": 3, "accumulate": 2}, r"batch_per_device=3 \(24 rows on 8 data shards\) cannot be cut"),
        ({"warmup": 100}, "warmup=100 must be at least 0 and below decay_steps=100"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be positive"),
        ({"steps": 0}, "must be at least 1"),
        ({"profile": "3"}, "--profile '3' is not START:STOP"),
        (
            {"factory": "tests.train.run.test_build:image_job", "model": None, "model_config": ()},
            "does not take batches of tokens and targets",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_memory_is_used(changes, words):
    with pytest.raises(ValueError, match=words):
        build(dataclasses.replace(CONFIG, **changes), {})


def image_job():
    import optax

    return {"model": None, "loss": None, "batch": lambda b, t: {"image": b}, "units": [], "optimizer": optax.sgd}


def test_a_prolonged_run_keeps_the_schedule_that_it_began_with():
    parts = build(dataclasses.replace(CONFIG, steps=200), {"decides": {"decay_steps": 100}})
    assert parts.decides["decay_steps"] == 100 and parts.decides["warmup"] == 5


def test_the_schedule_rises_to_the_peak_and_falls_to_the_floor():
    schedule = make_schedule(1.0, 4, 20, 0.1)
    assert [round(float(schedule(n)), 6) for n in (0, 1, 4, 20, 99)] == [0.2, 0.4, 1.0, 0.1, 0.1]


def test_a_false_field_of_the_model_is_false():
    parts = build(dataclasses.replace(CONFIG, model_config=(*CONFIG.model_config, "stacked=false")), {})
    assert "layers.0.attn.q_proj.kernel" in parts.model.layout.by_path
    with pytest.raises(ValueError, match=r"LlamaConfig.stacked='no' must be True or False"):
        build(dataclasses.replace(CONFIG, model_config=(*CONFIG.model_config, "stacked=no")), {})
