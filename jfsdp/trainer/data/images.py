"""Labelled images in memory, and their split into training and held-out ones."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

_DIGITS_MAX = 16
MAX_UNPACKED_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
"""Of a `.npz` file, half of this machine's memory: images are kept there."""


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What images to train on: plain fields, made for a command line.

    Attributes:
      data: "digits" (the 1797 handwritten digits of 8 x 8 that come with scikit-learn), or the path of a `.npz` file
        with arrays `images` [N H W C] (or [N H W]), uint8 or floating, and `labels` [N], integers from 0.
      eval_fraction: share of the images held out; 0 holds out none.
      split_seed: chooses which; apart from `seed`, so that runs with other seeds share the held-out images.
      seed: the order of the images.
    """

    data: str
    eval_fraction: float = 0.05
    split_seed: int = 0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: must be at least 0 and below 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: must be in 0..2**32-1")


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and labels, split in two.

    Attributes:
      config: what it was opened with.
      images: [N H W C], uint8 (given out as 0..1) or float32 (given out as they are).
      labels: [N] int32.
      train: indices [.] of the images to train on, ascending.
      eval: indices of those held out, ascending; empty if `eval_fraction` is 0.
      digest: hash over images and labels.
    """

    config: ImageConfig
    images: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    eval: np.ndarray
    digest: str

    @property
    def num_classes(self) -> int:
        """Return one more than the largest label."""
        return int(self.labels.max()) + 1

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.images.shape[1:]))
        return f"{len(self.images)} images of {shape} in {self.num_classes} classes"


def is_images(data: str) -> bool:
    """Tell whether `data` names images, by its name alone."""
    return data == "digits" or data.endswith(".npz")


def open_images(
    config: ImageConfig, *, shape: tuple[int, ...] | None = None, num_classes: int | None = None
) -> ImageData:
    """Load images and labels, and split them.

    Held out are those `round(eval_fraction * N)`, at least one, whose hash of index and `split_seed` is smallest. It
    depends on nothing else, so it is the same in every process.

    Memory: all images, in the dtype of the file. Moves no data to devices.

    Args:
      config: see `ImageConfig`.
      shape: H W C that the model takes; None: any.
      num_classes: of the model; None: any.

    Raises:
      ValueError: if the data cannot be had, are not what `ImageConfig` says, do not fit the model, or are too few to
        hold one out.
    """
    if not is_images(config.data):
        raise ValueError(
            f"data {config.data!r}: not images; pass 'digits', or a .npz file with arrays images and labels"
        )
    images, labels = _load_digits() if config.data == "digits" else _load_npz(Path(config.data).expanduser())
    if shape is not None and images.shape[1:] != tuple(shape):
        raise ValueError(
            f"data {config.data!r}: images are {list(images.shape[1:])} (H W C), and the model takes {list(shape)}; "
            "configure the model for these images, or choose other images"
        )
    if num_classes is not None and int(labels.max()) >= num_classes:
        raise ValueError(
            f"data {config.data!r}: labels go up to {labels.max()}, and the model has {num_classes} classes; give it "
            f"at least {labels.max() + 1}"
        )
    train, held_out = _split(len(images), config)
    return ImageData(config, images, labels, train, held_out, _digest(images, labels))


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "data 'digits' come with scikit-learn, which is not installed; pip install scikit-learn"
        ) from error
    digits = load_digits()
    images = (digits.images / _DIGITS_MAX).astype(np.float32)  # pyright: ignore[reportAttributeAccessIssue]
    return images[..., None], digits.target.astype(np.int32)  # pyright: ignore[reportAttributeAccessIssue]


def _load_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_UNPACKED_BYTES:
            raise ValueError(f"it unpacks to {size:,} bytes, and at most {MAX_UNPACKED_BYTES:,} are read")
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; name a .npz file with images and labels") from error
    except (KeyError, ValueError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a .npz file with plain arrays images and labels ({error})") from error
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
        raise ValueError(
            f"{path}: images {list(images.shape)} and labels {list(labels.shape)} are not [N H W C] (or [N H W]) and "
            "[N], with N at least 1"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(f"{path}: labels must be integers from 0; they are {labels.dtype}, from {labels.min()}")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"{path}: images are {images.dtype}; save them as uint8, or as floating numbers")
    with np.errstate(over="ignore"):
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
    bad = np.flatnonzero([not np.isfinite(image).all() for image in images])
    if bad.size:
        what = f"{bad.size:,} of {len(images):,} images hold values that are not finite as float32"
        raise ValueError(f"{path}: {what}, the first is image {bad[0]}; mend them, or leave them out")
    return images, labels.astype(np.int32)


def _split(num_images: int, config: ImageConfig) -> tuple[np.ndarray, np.ndarray]:
    if config.eval_fraction == 0:
        return np.arange(num_images), np.arange(0)
    num_eval = max(1, round(config.eval_fraction * num_images))
    if num_eval >= num_images:
        raise ValueError(
            f"data {config.data!r}: eval_fraction={config.eval_fraction} of {num_images} images leaves none to train "
            "on; lower it, or set it to 0"
        )
    keys = [hashlib.blake2b(f"{config.split_seed}:{i}".encode(), digest_size=8).digest() for i in range(num_images)]
    order = sorted(range(num_images), key=keys.__getitem__)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])


def _digest(images: np.ndarray, labels: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{images.shape} {images.dtype}".encode(), digest_size=12)
    digest.update(images.tobytes())
    digest.update(labels.tobytes())
    return digest.hexdigest()
