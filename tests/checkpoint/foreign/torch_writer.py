"""Run by tests as one of two processes that shard a PyTorch model with FSDP2 and save it every way.

    python torch_writer.py DIRECTORY RANK

They write `dcp/` (sharded), `whole.pt` (consolidated), `shard0.pt` (what one process holds) and `expected.npz` (what
the model held before it was sharded).
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


class Net(nn.Module):
    """Dims that two processes split unevenly, one that leaves the second with nothing, a tied weight, a counter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6, dtype=torch.bfloat16)])
        self.gate = nn.Linear(6, 1)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(41))


def expected(model: nn.Module) -> dict[str, np.ndarray]:
    """The weights in a form that numpy can write: bfloat16 as the int16 below it."""
    return {
        name: (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().copy()
        for name, x in model.state_dict().items()
    }


def run(root: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    model = Net()
    if rank == 0:
        np.savez(root / "expected.npz", **expected(model))  # pyright: ignore[reportArgumentType]
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    shards = get_model_state_dict(model)
    save({"model": shards, "optimizer": {"lr": 1e-3}, "step": 3}, checkpoint_id=root / "dcp")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save({"model": whole, "step": 3}, root / "whole.pt")
        torch.save(shards, root / "shard0.pt")
    dist.barrier()  # who leaves early takes its end of the connections along
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
