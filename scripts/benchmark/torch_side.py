"""Contenders in PyTorch: the exported model under FSDP2, according to PyTorch's documentation.

- `fully_shard` on each decoder layer and then on the model, with `MixedPrecisionPolicy(param_dtype, reduce_dtype)` and
  the default of `reshard_after_forward` (the FSDP2 tutorial).
- Remat: `checkpoint_wrapper`, non-reentrant, around each decoder layer and inside its `fully_shard`, and
  `torch.compile` of each layer with its wrapper (torchtitan).
- AdamW with `fused=True` on every device, which is the fastest according to its documentation, also on CPUs.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jfsdp.extras import load

torch: Any = load("torch", "bench")


class TorchContender:
    """One process of a contender: its shard of the model, its optimizer, and its rows of the batches.

    Args:
      name: name of the contender.
      case: the result of `write_for_torch`, with `batches`, `platform`, `rendezvous` (a file that does not exist yet)
        and `timeout`.
      rank, world: number of the process, and of all processes.

    Raises:
      ValueError: for fewer GPUs than processes.
    """

    def __init__(self, name: str, case: Mapping[str, Any], rank: int, world: int):
        self._case, self._is_cuda, self._world = case, case["platform"] == "cuda", world
        if self._is_cuda and torch.cuda.device_count() < world:
            raise ValueError(f"--devices {world}: PyTorch sees {torch.cuda.device_count()} GPUs; lower it")
        self._device = torch.device("cuda", rank) if self._is_cuda else torch.device("cpu")
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            torch.set_float32_matmul_precision("high")  # TF32, like JAX on GPUs
        _join(case, rank, world, self._device if self._is_cuda else None)
        self._next = itertools.cycle(_read_batches(case["batches"], rank, world))
        model = _load_model(case)
        groups = _groups(model, case["decays"])
        layers = _layers(model)
        if case["remat"] == "full":
            layers = _checkpointed(model, layers)
        if name.endswith("-compile"):
            for layer in layers:
                layer.compile()
        groups = _shard(model, layers, groups, case, self._device)
        self._model = model.to(self._device)
        self._params = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            groups, lr=case["lr"], betas=tuple(case["betas"]), eps=case["eps"], fused=True
        )

    def steps(self, count: int) -> dict[str, Any]:
        """Run steps, wait for each, and return seconds and the losses over all rows."""
        torch.distributed.barrier()
        seconds, losses = [], []
        for _ in range(count):
            batch, start = next(self._next), time.perf_counter()
            loss = self._step(*(array.to(self._device) for array in batch))
            if self._is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
        return {"seconds": seconds, "losses": [self._mean(loss) for loss in losses]}

    def memory(self, *, is_first: bool) -> dict[str, int]:
        """Return memory peaks in bytes; `reserved` is the memory reserved by PyTorch's allocator."""
        del is_first
        if not self._is_cuda:
            return {}
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def _step(self, tokens: Any, targets: Any) -> Any:
        logits = self._model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if self._case["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._case["max_grad_norm"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _mean(self, loss: Any) -> float:
        torch.distributed.all_reduce(loss)
        return loss.item() / self._world


def _join(case: Mapping[str, Any], rank: int, world: int, device: Any) -> None:
    """Initialize the process group of this host: NCCL on GPUs, else gloo over the loopback."""
    import datetime

    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo" if device is None else "nccl",
        init_method=f"file://{case['rendezvous']}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=case["timeout"]),
        device_id=device,
    )


def _read_batches(path: str, rank: int, world: int) -> list[tuple[Any, Any]]:
    """Read this process's rows of each batch. Layout: [B T] -> [B/world T] int64."""
    with np.load(path) as arrays:
        numbers = sorted({int(name.partition("/")[0]) for name in arrays})
        parts = [
            [np.split(arrays[f"{number}/{what}"], world)[rank].astype(np.int64) for what in ("tokens", "targets")]
            for number in numbers
        ]
    return [(torch.from_numpy(tokens), torch.from_numpy(targets)) for tokens, targets in parts]


def _load_model(case: Mapping[str, Any]) -> Any:
    """Load the exported model in float32 for training, without dropout."""
    transformers = load("transformers", "bench")

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(case["checkpoint"])
    for name in [name for name in config.to_dict() if "dropout" in name or name.endswith("_pdrop")]:
        setattr(config, name, 0.0)
    make = transformers.AutoModelForCausalLM.from_pretrained
    model = make(case["checkpoint"], config=config, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def _layers(model: Any) -> list[Any]:
    """Return the decoder layers, the modules in transformers' `_no_split_modules`."""
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def _groups(model: Any, decays: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, by weight decay."""
    groups: dict[float, list[Any]] = {}
    for name, param in model.named_parameters():
        groups.setdefault(decays[name], []).append(param)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def _checkpointed(model: Any, layers: list[Any]) -> list[Any]:
    """Wrap each layer in activation checkpointing. Return the wrapped layers."""
    wrapper = load("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "bench")
    wanted = set(layers)
    wrapper.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda layer: wrapper.checkpoint_wrapper(layer, preserve_rng_state=False),
        check_fn=lambda module: module in wanted,
    )
    return [module for module in model.modules() if isinstance(module, wrapper.CheckpointWrapper)]


def _shard(
    model: Any, layers: list[Any], groups: list[dict[str, Any]], case: Mapping[str, Any], device: Any
) -> list[dict[str, Any]]:
    """Shard each layer and the rest with FSDP2. Return the parameter groups with sharded parameters."""
    fsdp = load("torch.distributed.fsdp", "bench")
    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    policy = fsdp.MixedPrecisionPolicy(dtypes[case["param_dtype"]], dtypes[case["reduce_dtype"]])
    decays = {id(param): group["weight_decay"] for group in groups for param in group["params"]}
    named = [decays[id(param)] for param in model.parameters()]
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    reshard = case["reshard_after_forward"]
    more = {} if reshard is None else {"reshard_after_forward": reshard}
    for layer in layers:
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy, **more)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    sharded: dict[float, list[Any]] = {}
    for decay, param in zip(named, model.parameters(), strict=True):
        sharded.setdefault(decay, []).append(param)
    return [{"params": params, "weight_decay": decay} for decay, params in sharded.items()]
