"""Tasks from folders of images and from torchvision's data sets, if they are on this machine."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gonio.compare.planning.plan import AttackConfig, Training
from gonio.compare.tasks.task import Split, Task
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError, UnreadableFileError
from gonio.models.libraries import unusable
from gonio.seeding import generator

_SHARES = (0.6, 0.8)  # of each class, for data without splits: up to here train, validation
_HELD_BACK = 0.15  # of the training images, for data with a test split alone
_LARGEST = 2 * 1024**3  # bytes of all images as float32; every run holds them in memory
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_SIZE = 64  # pixels, if the images differ in size
_SPLITS = ("train", "val", "test")
_BUILD = "Build the task yourself and name it as file.py:factory."

_NOTES = (
    "The default learning rate and number of epochs are guesses for images in general. They run unless the study "
    "tunes the learning rate (--tune) or names others.",
    "Images are scaled to [0, 1] and standardised by the mean and standard deviation of the training images, "
    "channel by channel, in front of the model. There is no augmentation.",
)


def image_folder(path: str) -> Task:
    """The task `imagefolder:PATH`: one folder of images per class.

    PATH contains the folders `train`, `val` and `test` with the class folders in them, or `train` and one of
    the others (15 % of the training images then validate), or the class folders themselves (60 % of each
    class train, 20 % validate, 20 % test). Images of different sizes are scaled and cropped to 64 × 64.

    Raises:
        InvalidArgumentError: there is no such folder, it holds no images, or the splits differ in classes.
        MissingExtraError: Pillow is not installed.
    """
    root = Path(path)
    if not root.is_dir():
        raise InvalidArgumentError(
            f"the task 'imagefolder:{path}' needs a folder of images", f"no folder {str(root.absolute())!r}",
            "Write imagefolder:PATH with one folder per class in PATH.",
        )  # fmt: skip
    return image_task(f"imagefolder:{root.name}", load_folder(root))


def torchvision_dataset(spec: str) -> Task:
    """The task `torchvision:NAME` or `torchvision:NAME:ROOT`: a data set in the folder ROOT, by default `data`.

    Nothing is downloaded. Any data set works whose items are an image and a class number and which takes
    `train=` or `split=`.

    Args:
        spec: the text after `torchvision:`.

    Raises:
        MissingExtraError: torchvision is not installed. NotApplicableError: it does not fit this torch.
        UnknownNameError: it has no such data set.
        InvalidArgumentError: the data are not there, or are not images with class numbers.
    """
    name, _, folder = spec.partition(":")
    datasets = _datasets(name)
    if name not in datasets.__all__:
        raise UnknownNameError("torchvision data set", name, datasets.__all__)
    return image_task(f"torchvision:{name}", _parts(getattr(datasets, name), name, Path(folder or "data")))


def image_task(name: str, found: Sequence[Split]) -> Task:
    """A classification task from one, two or three sets of images: all; train and test; train, validation, test."""
    train, validation, test = _three(found)
    mean, std = train.inputs.mean((0, 2, 3)), train.inputs.std((0, 2, 3)).clamp_min(1e-3)
    return Task(
        name=name,
        train=train,
        validation=validation,
        test=test,
        model="digits-cnn",
        sizes={
            "num_classes": max(int(part.targets.max()) for part in found) + 1,
            "in_channels": train.inputs.shape[1],
        },
        training=Training(epochs=10, batch_size=min(64, len(train)), lr=0.05),
        sesoi=1.0,
        standardize=(tuple(mean.tolist()), tuple(std.tolist())),
        threat=AttackConfig(epsilon=8 / 255, low=0.0, high=1.0),
        notes=_NOTES,
    )


def _three(found: Sequence[Split]) -> list[Split]:
    if len(found) == 3:
        return list(found)
    first, *rest = found
    shares = (1 - _HELD_BACK,) if rest else _SHARES
    parts = [Split(first.inputs[index], first.targets[index]) for index in _stratified(first.targets, shares)]
    return [*parts, *rest]


def _stratified(labels: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """Indices of consecutive shares of every class, always the same ones."""
    parts: list[list[Tensor]] = [[] for _ in range(len(shares) + 1)]
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator(0, "images", int(label)))]
        # at least one example for each of the later parts, as long as there are enough
        rest = zip(range(len(shares), 0, -1), shares, strict=True)
        cuts = [max(0, min(round(share * len(members)), len(members) - k)) for k, share in rest]
        for part, index in zip(parts, members.tensor_split(cuts), strict=True):
            part.append(index)
    return [torch.cat(part) for part in parts]


# --- files of images --------------------------------------------------------------------------------


def load_folder(root: Path) -> list[Split]:
    """The images below `root`, in one, two or three parts; see :func:`image_folder`."""
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
    loaded = [_load(found) for found in listed]
    everything = _stacked([i for images, _ in loaded for i in images], [n for _, labels in loaded for n in labels])
    counts = [len(labels) for _, labels in loaded]
    split = zip(everything.inputs.split(counts), everything.targets.split(counts), strict=True)
    return [Split(images, labels) for images, labels in split]


def _listing(part: Path) -> list[tuple[str, list[Path]]]:
    """The classes of one part, with their files, sorted by name."""
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
    try:
        pillow = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise MissingExtraError("the task 'imagefolder'", "Pillow", "lab") from error
    files = [(path, label) for label, (_, paths) in enumerate(found) for path in paths]
    return _limited((_open(pillow, path), label) for path, label in files)


def _open(pillow: ModuleType, path: Path) -> Tensor:
    try:
        with pillow.open(path) as image:
            return to_tensor(image)
    except Exception as error:  # a decoder may raise anything on a damaged file
        raise UnreadableFileError(str(path), f"{type(error).__name__}: {error}", "Replace or remove it.") from error


def to_tensor(image: Any) -> Tensor:
    """A Pillow image as (C, H, W) in [0, 1]: one channel if it is grey, else three."""
    pixels = np.array(image if image.mode == "L" else image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1).contiguous()


def _limited(pairs: Iterable[tuple[Tensor, int]]) -> tuple[list[Tensor], list[int]]:
    """Images and labels, as long as they fit in memory."""
    images: list[Tensor] = []
    labels: list[int] = []
    size = 0
    for image, label in pairs:
        images.append(image)
        labels.append(label)
        size += 4 * image.numel()
        if size > _LARGEST:
            raise InvalidArgumentError(
                f"the images must fit in {_LARGEST >> 30} GiB, since every run holds them in memory",
                f"more than that after {len(images)} images",
                "Use fewer or smaller images, or build the task yourself and name it as file.py:factory.",
            )
    return images, labels


def _stacked(images: Sequence[Tensor], labels: Sequence[int]) -> Split:
    """Images of one size: others are scaled and cropped to 64 × 64, and grey becomes colour if some images have it."""
    channels = max(image.shape[0] for image in images)
    shaped = [image.expand(channels, -1, -1) for image in images]
    if len({image.shape for image in shaped}) > 1:
        shaped = [_cropped(image) for image in shaped]
    return Split(torch.stack(shaped), torch.tensor(labels))


def _cropped(image: Tensor) -> Tensor:
    """Scaled so that the shorter side has 64 pixels, then cropped at the centre of the longer."""
    height, width = image.shape[1:]
    scale = _SIZE / min(height, width)
    size = (max(_SIZE, round(height * scale)), max(_SIZE, round(width * scale)))
    scaled = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - _SIZE) // 2, (size[1] - _SIZE) // 2
    return scaled[:, top : top + _SIZE, left : left + _SIZE]


# --- torchvision ------------------------------------------------------------------------------------


def _datasets(name: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the task 'torchvision:{name}'", "torchvision", "models") from error
    except Exception as error:  # installed, but for another torch
        raise unusable("torchvision", f"torchvision:{name}", error, kind="a task") from error


def _parts(kind: Any, name: str, root: Path) -> list[Split]:
    """The training and the test part, and the validation part if there is one."""
    known = inspect.signature(kind).parameters
    if "train" in known:
        return [_read(kind, name, root, train=flag) for flag in (True, False)]
    if "split" not in known:
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs a training and a test part",
            "a data set that takes neither train= nor split=",
            _BUILD,
        )
    try:
        return [_read(kind, name, root, split=split) for split in _SPLITS]
    except InvalidArgumentError:
        raise
    except ValueError:  # torchvision raises it for an unknown split
        return [_read(kind, name, root, split=split) for split in ("train", "test")]


def _read(kind: Any, name: str, root: Path, **which: bool | str) -> Split:
    """One part as tensors; nothing is downloaded."""
    try:
        part = kind(root, **which)
    except (RuntimeError, FileNotFoundError) as error:  # torchvision raises them for missing data
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs its data in {str(root)!r}",
            f"{error}",
            f"Get them once with torchvision.datasets.{name}({str(root)!r}, download=True), or name the folder "
            f"that has them: torchvision:{name}:FOLDER.",
        ) from error
    return _stacked(*_limited(_pair(part[index], name) for index in range(len(part))))


def _pair(item: Any, name: str) -> tuple[Tensor, int]:
    image, label = item
    if not isinstance(label, int) or not hasattr(image, "convert"):
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs images with class numbers",
            f"a {type(image).__name__} and a {type(label).__name__}",
            _BUILD,
        )
    return to_tensor(image), label
