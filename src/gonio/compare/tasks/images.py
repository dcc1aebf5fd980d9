"""Tasks from folders of images and from torchvision's data sets, if they are on this machine.

Few images are read into memory once; many are decoded when they are needed, by the loading processes of each run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gonio.compare.planning.plan import AttackConfig, Training
from gonio.compare.tasks.task import Examples, ItemSet, Split, Task
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError, UnreadableFileError
from gonio.models.by_name import unusable
from gonio.seeding import generator

_SHARES = (0.6, 0.8)  # of each class, for data without splits: up to here train, validation
_HELD_BACK = 0.15  # of the training images, for data with a test split alone
_IN_MEMORY = 256 * 1024**2  # bytes of all images as float32, up to which every run holds them in memory
_PROBED = 64  # images of each part that decide the shape of all, if they are not in memory
_AVERAGED = 1000  # training images whose mean and standard deviation standardise, if they are not in memory
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


def image_task(name: str, parts: Sequence[Images]) -> Task:
    """A classification task from one, two or three parts: all; train and test; train, validation, test."""
    found = _in_memory(parts) or _streamed(parts)
    train, validation, test = _three(found)
    step = max(1, len(train) // _AVERAGED) if isinstance(train, ItemSet) else 1
    seen = train.take(range(0, len(train), step))
    inputs = seen[0]
    mean, std = inputs.mean((0, 2, 3)), inputs.std((0, 2, 3)).clamp_min(1e-3)
    return Task(
        name=name,
        train=train,
        validation=validation,
        test=test,
        model="digits-cnn",
        sizes={
            "num_classes": max(int(part.targets.max()) for part in found) + 1,
            "in_channels": inputs.shape[1],
        },
        training=Training(epochs=10, batch_size=min(64, len(train)), lr=0.05),
        sesoi=1.0,
        standardize=(tuple(mean.tolist()), tuple(std.tolist())),
        threat=AttackConfig(epsilon=8 / 255, low=0.0, high=1.0),
        notes=_NOTES,
    )


def _in_memory(parts: Sequence[Images]) -> list[Split]:
    """The images as tensors; none if they are too many."""
    probed = [part.load(index) for part in parts for index in part.probed]
    if sum(map(len, parts)) * sum(4 * image.numel() for image in probed) / len(probed) > _IN_MEMORY:
        return []
    images = [part.load(index) for part in parts for index in range(len(part))]
    everything = _stacked(images, torch.cat([part.targets for part in parts]))
    counts = [len(part) for part in parts]
    split = zip(everything.inputs.split(counts), everything.targets.split(counts), strict=True)
    return [Split(inputs, targets) for inputs, targets in split]


def _streamed(parts: Sequence[Images]) -> list[Split]:
    """The images of all parts in the shape that :func:`_stacked` gives some of them."""
    probed = [part.load(index) for part in parts for index in part.probed]
    shape = tuple(_stacked(probed, torch.zeros(len(probed))).inputs.shape[1:])
    return [ItemSet(replace(part, shape=shape)) for part in parts]  # type: ignore[misc]


def _three(found: Sequence[Examples]) -> list[Examples]:
    if len(found) == 3:
        return list(found)
    first, *rest = found
    shares = (1 - _HELD_BACK,) if rest else _SHARES
    return [*(_subset(first, index) for index in _stratified(first.targets, shares)), *rest]


def _subset(examples: Examples, index: Tensor) -> Examples:
    if isinstance(examples, ItemSet):
        return ItemSet(examples.dataset.subset(index))  # type: ignore[attr-defined]
    return Split(*examples.take(index))  # type: ignore[arg-type]


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


def load_folder(root: Path) -> list[Images]:
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
    return [_images_of(found) for found in listed]


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


@dataclass(frozen=True)
class Images(Dataset[Any]):
    """Images of one part, each decoded when it is read.

    Attributes:
        source: the files, or a data set of torchvision.
        decode: maps the source and an index to an image (C, H, W) in [0, 1].
        indices: of the images of this part in the source.
        targets: their class numbers.
        shape: into which each image is brought; empty: as it is.
    """

    source: Any
    decode: Callable[[Any, int], Tensor]
    indices: Tensor
    targets: Tensor
    shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.load(index)
        if self.shape and image.shape != self.shape:
            image = _cropped(image.expand(self.shape[0], -1, -1), *self.shape[1:])
        return image, int(self.targets[index])

    @property
    def probed(self) -> range:
        """The indices of some images, evenly spaced."""
        return range(0, len(self), max(1, len(self) // _PROBED))

    def load(self, index: int) -> Tensor:
        """One image in its own shape."""
        return self.decode(self.source, int(self.indices[index]))

    def subset(self, index: Tensor) -> Images:
        """The images with these indices."""
        return replace(self, indices=self.indices[index], targets=self.targets[index])


def _images_of(found: list[tuple[str, list[Path]]]) -> Images:
    files = [path for _, paths in found for path in paths]
    labels = torch.tensor([label for label, (_, paths) in enumerate(found) for _ in paths])
    return Images(files, _decoded, torch.arange(len(files)), labels)


def _decoded(files: Sequence[Path], index: int) -> Tensor:
    try:
        pillow = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise MissingExtraError("the task 'imagefolder'", "Pillow", "lab") from error
    return _open(pillow, files[index])


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


def _stacked(images: Sequence[Tensor], labels: Tensor) -> Split:
    """Images of one size: others are scaled and cropped to 64 × 64, and grey becomes colour if some images have it."""
    channels = max(image.shape[0] for image in images)
    shaped = [image.expand(channels, -1, -1) for image in images]
    if len({image.shape for image in shaped}) > 1:
        shaped = [_cropped(image) for image in shaped]
    return Split(torch.stack(shaped), labels)


def _cropped(image: Tensor, height: int = _SIZE, width: int = _SIZE) -> Tensor:
    """Scaled until it covers the size, then cropped at the centre."""
    scale = max(height / image.shape[1], width / image.shape[2])
    size = (max(height, round(image.shape[1] * scale)), max(width, round(image.shape[2] * scale)))
    scaled = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width]


# --- torchvision ------------------------------------------------------------------------------------


def _datasets(name: str) -> ModuleType:
    try:
        return importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the task 'torchvision:{name}'", "torchvision", "models") from error
    except Exception as error:  # installed, but for another torch
        raise unusable("torchvision", f"torchvision:{name}", error, kind="a task") from error


def _parts(kind: Any, name: str, root: Path) -> list[Images]:
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


def _read(kind: Any, name: str, root: Path, **which: bool | str) -> Images:
    """One part; nothing is downloaded."""
    try:
        part = kind(root, **which)
    except (RuntimeError, FileNotFoundError) as error:  # torchvision raises them for missing data
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs its data in {str(root)!r}",
            f"{error}",
            f"Get them once with torchvision.datasets.{name}({str(root)!r}, download=True), or name the folder "
            f"that has them: torchvision:{name}:FOLDER.",
        ) from error
    _check_item(part[0], name)
    # what torchvision calls them; a data set without them is read once for its labels
    labels = getattr(part, "targets", None)
    targets = torch.as_tensor([part[i][1] for i in range(len(part))] if labels is None else labels)
    return Images(part, _of_data_set, torch.arange(len(part)), targets)


def _of_data_set(part: Any, index: int) -> Tensor:
    return to_tensor(part[index][0])


def _check_item(item: Any, name: str) -> None:
    image, label = item
    if not isinstance(label, int) or not hasattr(image, "convert"):
        raise InvalidArgumentError(
            f"the task 'torchvision:{name}' needs images with class numbers",
            f"a {type(image).__name__} and a {type(label).__name__}",
            _BUILD,
        )
