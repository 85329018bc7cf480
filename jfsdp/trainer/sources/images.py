"""Labelled images as the data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jfsdp.trainer.data import (
    DataIterator,
    ImageConfig,
    make_image_eval_iterator,
    make_image_train_iterator,
    open_images,
)
from jfsdp.trainer.data.images import is_images
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.tokens import token_options


class ImageSource:
    """Images and labels, a row each; see `jfsdp.trainer.sources.source.Source`."""

    item, makes_text = "image", False
    counted, num_rows = "image", 1

    def __init__(self, config: TrainConfig, job: Job, row_items: int):
        images = ImageConfig(config.data, eval_fraction=config.eval_fraction, seed=config.seed)
        shape = tuple(job.batch(1, row_items)["images"].shape[1:])
        self.data = open_images(images, shape=shape, num_classes=job.num_classes)
        self.levels: dict[str, float] = {}

    @classmethod
    def check(cls, config: TrainConfig, job: Job) -> int:
        """Refuse a job that is not trained on images, data that are none, and options for tokens; return 1."""
        batch = job.batch(1, 1)
        if job.num_classes is None or not isinstance(batch, Mapping) or not {"images", "labels"} <= batch.keys():
            raise ValueError(
                f"job {job.name!r} does not take batches of images and labels (with num_classes), which is what its "
                "field `data`, 'images', says"
            )
        if not is_images(config.data):
            raise ValueError(
                f"job {job.name!r} takes images, and data {config.data!r} are none; pass --data digits, or a .npz file "
                "with arrays images and labels"
            )
        if options := token_options(config):
            raise ValueError(f"job {job.name!r} takes images: {', '.join(options)} mean nothing for it; leave them out")
        return 1

    @property
    def num_eval(self) -> int:
        return len(self.data.eval)

    def describe(self, theirs: Mapping[str, Any]) -> str:
        return str(self.data)

    def describe_batch(self, rows: int) -> str:
        return f"{rows} images"

    def measure(self) -> None:
        return None

    def decides(self) -> dict[str, Any]:
        return {"data (digest)": self.data.digest, "eval_fraction": self.data.config.eval_fraction}

    def train_batches(self, **share: int) -> DataIterator:
        return make_image_train_iterator(self.data, **share)

    def eval_batches(self, **share: int) -> DataIterator:
        return make_image_eval_iterator(self.data, **share)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def sample(self, model: Any, state: Any) -> list[str]:
        raise ValueError("a model for images writes no text")
