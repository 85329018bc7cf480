"""Other units for a job, to compare by plans: `jfsdp plan --factory wrapping:halves --nodes 8` in this directory."""

import dataclasses

import jfsdp


def halves() -> jfsdp.trainer.Job:
    """Make attention and MLP of a layer a unit each."""
    return dataclasses.replace(jfsdp.trainer.find_job("llama-8b"), units=["layers.attn", "layers.mlp"])


def none() -> jfsdp.trainer.Job:
    """Leave all weights to the root unit."""
    return dataclasses.replace(jfsdp.trainer.find_job("llama-8b"), units=[])
