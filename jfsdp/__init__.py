"""Fully Sharded Data Parallel for JAX: the public names, imported on first use.

Other public names are in `jfsdp.checkpoint`, `jfsdp.optim`, `jfsdp.peft`, `jfsdp.plan` and `jfsdp.trainer`.
"""

from typing import TYPE_CHECKING

from jfsdp.lazy import attach

if TYPE_CHECKING:
    from jfsdp import checkpoint as checkpoint
    from jfsdp import optim as optim
    from jfsdp import peft as peft
    from jfsdp import plan as plan
    from jfsdp import trainer as trainer
    from jfsdp.context.attention import attention as attention
    from jfsdp.context.attention import over_context as over_context
    from jfsdp.context.rows import positions as positions
    from jfsdp.context.rows import whole_rows as whole_rows
    from jfsdp.engine.driver.schedule import Prefetch as Prefetch
    from jfsdp.engine.pipeline.schedule import Schedule as Schedule
    from jfsdp.float8 import float8_dot_general as float8_dot_general
    from jfsdp.layout.lora import LoRA as LoRA
    from jfsdp.layout.mesh import make_abstract_mesh as make_abstract_mesh
    from jfsdp.layout.mesh import make_mesh as make_mesh
    from jfsdp.layout.placements import Ignore as Ignore
    from jfsdp.layout.placements import Replicate as Replicate
    from jfsdp.layout.placements import Shard as Shard
    from jfsdp.layout.placements import placements as placements
    from jfsdp.layout.policy import UNIT_INPUT as UNIT_INPUT
    from jfsdp.layout.policy import OffloadPolicy as OffloadPolicy
    from jfsdp.layout.policy import SaveNames as SaveNames
    from jfsdp.layout.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from jfsdp.layout.strategy import Split as Split
    from jfsdp.layout.strategy import Strategy as Strategy
    from jfsdp.layout.units import Unit as Unit
    from jfsdp.layout.units import by_size as by_size
    from jfsdp.layout.wire import Wire as Wire
    from jfsdp.layout.wrapped import lora as lora
    from jfsdp.layout.wrapped import quantize as quantize
    from jfsdp.moe import experts as experts
    from jfsdp.moe import sum_over_devices as sum_over_devices
    from jfsdp.proof.prove import prove as prove
    from jfsdp.train.fully_shard import fully_shard as fully_shard
    from jfsdp.train.sharded import ShardedModel as ShardedModel
    from jfsdp.train.state import TrainState as TrainState
    from jfsdp.train.step.loss import Loss as Loss
    from jfsdp.train.step.loss import Max as Max
    from jfsdp.train.step.loss import Mean as Mean

__version__ = "1.0.0.dev0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
