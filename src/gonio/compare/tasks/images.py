"""Tasks from folders of images and from torchvision's data sets, as far as they are on this machine."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gonio.compare.plan import Training
from gonio.compare.task import Split, Task
from gonio.compare.tasks.image_files import Labelled, load_folder, to_tensor
from gonio.compare.threat import Threat
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError
from gonio.models.library import unusable
from gonio.seeding import generator

__all__ = ["image_folder", "image_task", "torchvision_dataset"]

_SHARES = (0.6, 0.8)  # of each class, where the data have no splits of their own: up to here train, validation
_HELD_BACK = 0.15  # of the training images, where there is a test split alone
_LARGEST = 2 * 1024**3  # bytes of all images as float32; every run holds them

_NOTES = (
    "Nothing was tuned: learning rate and epochs are guesses for images in general. Tune them with --tune.",
    "Images are scaled to [0, 1] and standardised by the mean and standard deviation of the training images, "
    "channel by channel, in front of the model. There is no augmentation.",
)


def image_folder(path: str) -> Task:
    """The task `imagefolder:PATH`: one folder of images per class.

    PATH holds the folders `train`, `val` and `test` with the class folders in them, or `train` and one of
    the others (15 % of the training images then validate), or the class folders themselves (60 % of each
    class train, 20 % validate, 20 % test). Images of one size keep it; otherwise each is scaled and cut to
    64 × 64.

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
    """The task `torchvision:NAME` or `torchvision:NAME:ROOT`: a data set that is in ROOT, else in `data`.

    Nothing is downloaded. Any data set works that gives an image and a class number and takes `train=` or
    `split=`.

    Args:
        spec: what follows `torchvision:`.

    Raises:
        MissingExtraError: torchvision is not installed. NotApplicableError: it does not fit this torch.
        UnknownNameError: it has no such data set.
        InvalidArgumentError: the data are not there, or are not images with class numbers.
    """
    name, _, folder = spec.partition(":")
    datasets = _datasets(name)
    if name not in datasets.__all__:
        raise UnknownNameError("torchvision data set", name, datasets.__all__)
    found = _parts(getattr(datasets, name), name, Path(folder or "data"))
    return image_task(f"torchvision:{name}", found)


def image_task(name: str, found: Sequence[Labelled]) -> Task:
    """A classification task from one, two or three sets of images: all; train and test; train, validation, test."""
    classes = int(max(int(part.labels.max()) for part in found)) + 1
    train, validation, test = _three(found)
    mean, std = train.inputs.mean((0, 2, 3)), train.inputs.std((0, 2, 3)).clamp_min(1e-3)
    return Task(
        name=name,
        train=train,
        validation=validation,
        test=test,
        model="digits-cnn",
        sizes={"num_classes": classes, "in_channels": train.inputs.shape[1]},
        training=Training(epochs=10, batch_size=min(64, len(train)), lr=0.05),
        sesoi=1.0,
        standardize=(tuple(mean.tolist()), tuple(std.tolist())),
        threat=Threat(epsilon=8 / 255, low=0.0, high=1.0),
        notes=_NOTES,
    )


def _three(found: Sequence[Labelled]) -> list[Split]:
    if len(found) == 3:
        return [Split(part.images, part.labels) for part in found]
    first = found[0]
    if len(found) == 2:
        kept, held = _stratified(first.labels, (1 - _HELD_BACK,))
        return [first.split(kept), first.split(held), Split(found[1].images, found[1].labels)]
    return [first.split(index) for index in _stratified(first.labels, _SHARES)]


def _stratified(labels: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """Indices of consecutive shares of every class, drawn once and for all."""
    parts: list[list[Tensor]] = [[] for _ in range(len(shares) + 1)]
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator(0, "images", int(label)))]
        # one example at least for each of the later parts, as far as they go
        rest = zip(range(len(shares), 0, -1), shares, strict=True)
        cuts = [max(0, min(round(share * len(members)), len(members) - k)) for k, share in rest]
        for part, index in zip(parts, members.tensor_split(cuts), strict=True):
            part.append(index)
    return [torch.cat(part) for part in parts]


def _datasets(name: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the task 'torchvision:{name}'", "torchvision", "models") from error
    except Exception as error:  # installed, but for another torch: operators or symbols are missing
        raise unusable("torchvision", f"torchvision:{name}", error, kind="a task") from error


def _parts(kind: Any, name: str, root: Path) -> list[Labelled]:
    """The training and the test part, and the validation part where there is one."""
    known = inspect.signature(kind).parameters
    if "train" in known:
        return [_read(kind, name, root, {"train": flag}) for flag in (True, False)]
    if "split" not in known:
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs a training and a test part",
            "a data set that takes neither train= nor split=",
            "Build the task yourself and name it as file.py:factory.",
        )
    try:
        return [_read(kind, name, root, {"split": split}) for split in ("train", "val", "test")]
    except ValueError as error:  # torchvision's word for a split that it does not know
        if isinstance(error, InvalidArgumentError):
            raise
        return [_read(kind, name, root, {"split": split}) for split in ("train", "test")]


def _read(kind: Any, name: str, root: Path, which: dict[str, Any]) -> Labelled:
    """One part as tensors; nothing is downloaded."""
    try:
        part = kind(root, **which)
    except (RuntimeError, FileNotFoundError) as error:  # torchvision's words for data that are not there
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs its data in {str(root)!r}",
            f"{error}",
            f"Get them once with torchvision.datasets.{name}({str(root)!r}, download=True), or name the folder "
            f"that has them: torchvision:{name}:FOLDER.",
        ) from error
    return _tensors(part, name)


def _tensors(part: Any, name: str) -> Labelled:
    images, labels = [], []
    size = 0
    for image, label in (part[i] for i in range(len(part))):
        if not isinstance(label, int) or not hasattr(image, "convert"):
            raise InvalidArgumentError(
                f"the task 'torchvision:{name}' needs images with class numbers",
                f"a {type(image).__name__} and a {type(label).__name__}",
                "Build the task yourself and name it as file.py:factory.",
            )
        images.append(to_tensor(image))
        labels.append(label)
        size += images[-1].numel() * 4
        if size > _LARGEST:
            raise InvalidArgumentError(
                f"the images of 'torchvision:{name}' must fit in {_LARGEST >> 30} GiB, since every run holds them",
                f"more than that after {len(images)} of {len(part)}",
                "Build a task of fewer or smaller images yourself and name it as file.py:factory.",
            )
    return Labelled.of(images, labels)
