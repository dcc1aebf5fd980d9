"""Fashion-MNIST from its official files in a folder, small enough for many runs on a CPU."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gonio.compare.planning.plan import AttackConfig, Training
from gonio.compare.tasks.task import Split, Task
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.seeding import generator

_TRAIN, _VALIDATION, _TEST = 3000, 1000, 4000  # images; each class has about a tenth
_DEFAULT = "data/FashionMNIST/raw"  # where torchvision's download leaves the files
_MAGIC = {1: (0, 0, 8, 1), 3: (0, 0, 8, 3)}  # of labels and of images, by number of dimensions

_NOTES = (
    "3,000 of the 60,000 training images train, 1,000 others validate, and 4,000 of the test images test, always the "
    "same ones. Images are averaged over 2 × 2 pixels to 14 × 14, in [0, 1].",
)


def fashion_mnist(folder: str = _DEFAULT) -> Task:
    """The task `fashion-mnist:FOLDER`: ten classes of 14 × 14 images from the four official files, packed or not.

    Raises:
        InvalidArgumentError: a file is missing. UnreadableFileError: it is not in IDX format.

    References:
        H. Xiao et al., "Fashion-MNIST", 2017, arXiv 1708.07747.
    """
    images, labels = _read(folder, "train-images-idx3-ubyte"), _read(folder, "train-labels-idx1-ubyte")
    order = torch.randperm(len(labels), generator=generator(0, "fashion-mnist"))
    train, validation = order[:_TRAIN], order[_TRAIN : _TRAIN + _VALIDATION]
    tested = _split(_read(folder, "t10k-images-idx3-ubyte")[:_TEST], _read(folder, "t10k-labels-idx1-ubyte")[:_TEST])
    return Task(
        name="fashion-mnist",
        train=_split(images[train], labels[train]),
        validation=_split(images[validation], labels[validation]),
        test=tested,
        model="digits-cnn",
        sizes={"num_classes": 10, "in_channels": 1},
        training=Training(epochs=10, batch_size=50, lr=0.05),
        sesoi=0.5,
        threat=AttackConfig(epsilon=0.05, low=0.0, high=1.0),
        notes=_NOTES,
    )


def _split(images: Tensor, labels: Tensor) -> Split:
    return Split(F.avg_pool2d(images[:, None].float() / 255, 2), labels.long())


def _read(folder: str, name: str) -> Tensor:
    """One IDX file of bytes, with or without `.gz`."""
    packed, plain = Path(folder) / f"{name}.gz", Path(folder) / name
    if not packed.is_file() and not plain.is_file():
        raise InvalidArgumentError(
            f"the task 'fashion-mnist:{folder}' needs the file {name}.gz", "no such file",
            "Download the four files of Fashion-MNIST, and name their folder with --data.",
        )  # fmt: skip
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
        sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4).tolist()
        if tuple(raw[:4]) != _MAGIC[raw[3]]:
            raise ValueError("another type of numbers")
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy())
    except (OSError, ValueError, KeyError, IndexError, EOFError) as error:
        raise UnreadableFileError(
            f"{folder}/{name}", f"it is not an IDX file: {error}", "Download it again."
        ) from error
