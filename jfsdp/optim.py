"""Additions to optax: moments in low precision, averages, alternating optimizers, the loss scale of float16."""

from jfsdp.layout.loss_scale import LossScale
from jfsdp.train.update.alternate import alternate
from jfsdp.train.update.ema import track_ema, with_ema
from jfsdp.train.update.low_precision import low_precision_state
from jfsdp.train.update.matrices import by_matrix

__all__ = ["LossScale", "alternate", "by_matrix", "low_precision_state", "track_ema", "with_ema"]
