"""Checkpoints and layouts: save, restore, pretrained weights, resharding, whole arrays."""

from typing import TYPE_CHECKING

from jfsdp.lazy import attach

if TYPE_CHECKING:
    from jfsdp.checkpoint.foreign.pretrained import load_pretrained as load_pretrained
    from jfsdp.checkpoint.manager import Checkpointer as Checkpointer
    from jfsdp.checkpoint.snapshot import Snapshots as Snapshots
    from jfsdp.checkpoint.store import restore as restore
    from jfsdp.checkpoint.store import save as save
    from jfsdp.train.gather_leaf import gather_leaf as gather_leaf
    from jfsdp.train.replicas import compare_replicas as compare_replicas
    from jfsdp.train.reshard import reshard as reshard

__getattr__, __dir__, __all__ = attach(__name__, __file__)
