"""Image files as tensors, by Pillow."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gonio.compare.task import Split
from gonio.errors import InvalidArgumentError, MissingExtraError, UnreadableFileError

__all__ = ["Labelled", "load_folder", "to_tensor"]

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_SIZE = 64  # pixels, where the images differ in size
_SPLITS = ("train", "val", "test")
_AT_MOST = 2 * 1024**3  # bytes as float32; every run holds them


@dataclass(frozen=True)
class Labelled:
    """Images of one size with their class numbers.

    Shape:
        - ``images``: (N, C, H, W) in [0, 1]; ``labels``: (N,).
    """

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, images: Sequence[Tensor], labels: Sequence[int]) -> Labelled:
        """Stacked; sizes that differ are scaled and cut to 64 × 64, and grey becomes colour where some have it."""
        channels = max(image.shape[0] for image in images)
        shaped = [image.expand(channels, -1, -1) for image in images]
        if len({image.shape for image in shaped}) > 1:
            shaped = [_cut(image) for image in shaped]
        return cls(torch.stack(shaped), torch.tensor(labels))

    def split(self, index: Tensor) -> Split:
        """Some of them."""
        return Split(self.images[index], self.labels[index])


def to_tensor(image: Any) -> Tensor:
    """A Pillow image as (C, H, W) in [0, 1]: one channel if it is grey, else three."""
    pixels = np.array(image if image.mode == "L" else image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1).contiguous()


def load_folder(root: Path) -> list[Labelled]:
    """The images below `root`, in one, two or three parts; see :func:`gonio.compare.tasks.image_folder`."""
    parts = [root / name for name in _SPLITS if (root / name).is_dir()]
    if len(parts) < 2 or parts[0].name != "train":
        parts = [root]
    listed = [_listing(part) for part in parts]
    classes = [name for name, _ in listed[0]]
    for part, found in zip(parts, listed, strict=True):
        if [name for name, _ in found] != classes:
            raise InvalidArgumentError(
                f"every split of {str(root)!r} needs the same class folders",
                f"{', '.join(classes)} in {parts[0].name} and {', '.join(name for name, _ in found)} in {part.name}",
                "Add the folders that are missing.",
            )
    return _alike([_load(found) for found in listed])


def _listing(part: Path) -> list[tuple[str, list[Path]]]:
    """The classes of one part, with their files, in the order of names."""
    folders = sorted(path for path in part.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(path.name, sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES)) for path in folders]
    found = [(name, files) for name, files in found if files]
    if len(found) < 2:
        raise InvalidArgumentError(
            f"{str(part)!r} needs a folder of images for each of at least two classes",
            f"{len(found)} such folders",
            f"Put the images of each class into a folder of its own ({', '.join(_SUFFIXES)}).",
        )
    return found


def _load(found: list[tuple[str, list[Path]]]) -> tuple[list[Tensor], list[int]]:
    pillow = _pillow()
    images: list[Tensor] = []
    labels: list[int] = []
    size = 0
    for label, (_, files) in enumerate(found):
        for path in files:
            images.append(_open(pillow, path))
            labels.append(label)
            size += 4 * images[-1].numel()
            if size > _AT_MOST:
                raise InvalidArgumentError(
                    f"the images must fit in {_AT_MOST >> 30} GiB, since every run holds them",
                    f"more than that at {str(path)!r}",
                    "Give fewer or smaller images.",
                )
    return images, labels


def _open(pillow: ModuleType, path: Path) -> Tensor:
    try:
        with pillow.open(path) as image:
            return to_tensor(image)
    except Exception as error:  # whatever a damaged file makes a decoder raise
        raise UnreadableFileError(str(path), f"{type(error).__name__}: {error}", "Replace or remove it.") from error


def _alike(parts: list[tuple[list[Tensor], list[int]]]) -> list[Labelled]:
    """All parts with the same size and channels."""
    everything = Labelled.of([i for images, _ in parts for i in images], [n for _, labels in parts for n in labels])
    counts = [len(labels) for _, labels in parts]
    cut = zip(everything.images.split(counts), everything.labels.split(counts), strict=True)
    return [Labelled(images, labels) for images, labels in cut]


def _cut(image: Tensor) -> Tensor:
    """Scaled so that the shorter side has 64 pixels, and cut to the middle of the longer."""
    height, width = image.shape[1:]
    scale = _SIZE / min(height, width)
    size = (max(_SIZE, round(height * scale)), max(_SIZE, round(width * scale)))
    scaled = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - _SIZE) // 2, (size[1] - _SIZE) // 2
    return scaled[:, top : top + _SIZE, left : left + _SIZE]


def _pillow() -> ModuleType:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise MissingExtraError("the task 'imagefolder'", "Pillow", "lab") from error
