"""The training script's options, jobs, data, loop and metrics."""

from typing import TYPE_CHECKING

from jfsdp.lazy import attach

if TYPE_CHECKING:
    from jfsdp.trainer.job import Job as Job
    from jfsdp.trainer.job import find_job as find_job
    from jfsdp.trainer.preferences import preference_loss as preference_loss

__getattr__, __dir__, __all__ = attach(__name__, __file__)
