"""Tasks from folders of images, torchvision's data sets and Fashion-MNIST's files, if they are on this machine.

Few images are read into memory once; many are decoded when they are needed, by the loading processes of each run.
"""

from __future__ import annotations

import gzip
import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from gonio.errors import (
    InvalidArgumentError,
    MissingExtraError,
    UnknownNameError,
    UnreadableFileError,
    import_extra,
    with_article,
)
from gonio.lab.plan import AttackConfig, TrainingConfig
from gonio.lab.tasks.task import Examples, ItemSet, Split, Task
from gonio.seeding import generator
from gonio.surgery.configured import unusable

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
    try:
        datasets = import_extra(
            "torchvision.datasets", f"the task 'torchvision:{name}'", package="torchvision", extra="models"
        )
    except MissingExtraError:
        raise
    except Exception as error:  # installed, but for another torch
        raise unusable("torchvision", f"torchvision:{name}", error, action="load the task") from error
    if name not in datasets.__all__:
        raise UnknownNameError("torchvision data set", name, datasets.__all__)
    return image_task(f"torchvision:{name}", _parts(getattr(datasets, name), name, Path(folder or "data")))


def image_task(name: str, parts: Sequence[Images]) -> Task:
    """A classification task from one, two or three parts: all; train and test; train, validation, test."""
    found: Sequence[Examples] = _in_memory(parts)
    if not found:  # in the shape that :func:`_stacked` gives some of them
        probed = [part.load(index) for part in parts for index in part.probed]
        shape = tuple(_stacked(probed, torch.zeros(len(probed))).inputs.shape[1:])
        found = [ItemSet(replace(part, shape=shape)) for part in parts]
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
        sizes={"num_classes": max(int(part.targets.max()) for part in found) + 1, "in_channels": inputs.shape[1]},
        training=TrainingConfig(epochs=10, batch_size=min(64, len(train)), lr=0.05),
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


def _three(found: Sequence[Examples]) -> list[Examples]:
    if len(found) == 3:
        return list(found)
    first, *rest = found
    shares = (1 - _HELD_BACK,) if rest else _SHARES

    def cuts(count: int) -> list[int]:
        """At least one example is for each of the later parts, as long as there are enough."""
        later = zip(range(len(shares), 0, -1), shares, strict=True)
        return [max(0, min(round(share * count), count - k)) for k, share in later]

    indices = stratified(first.targets, "images", cuts)
    if isinstance(first, ItemSet):
        return [*(ItemSet(first.dataset.subset(index)) for index in indices), *rest]  # type: ignore[attr-defined]
    return [*(Split(*first.take(index)) for index in indices), *rest]  # type: ignore[arg-type]


def stratified(labels: Tensor, name: str, cuts: Callable[[int], Sequence[int]]) -> list[Tensor]:
    """Indices of the parts into which every class is cut, always the same ones.

    Args:
        name: of the stream of random numbers that puts each class in order.
        cuts: where a class of so many examples is cut.
    """
    classes: list[tuple[Tensor, ...]] = []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator(0, name, int(label)))]
        classes.append(members.tensor_split(tuple(cuts(len(members)))))
    return [torch.cat(parts) for parts in zip(*classes, strict=True)]


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
    made = []
    for found in listed:
        files = [path for _, paths in found for path in paths]
        labels = torch.tensor([label for label, (_, paths) in enumerate(found) for _ in paths])
        made.append(Images(files, _decoded, torch.arange(len(files)), labels))
    return made


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


def _decoded(files: Sequence[Path], index: int) -> Tensor:
    pillow = import_extra("PIL.Image", "the task 'imagefolder'", package="Pillow", extra="lab")
    try:
        with pillow.open(files[index]) as image:
            return to_tensor(image)
    except Exception as error:  # a decoder may raise anything on a damaged file
        why = f"{type(error).__name__}: {error}"
        raise UnreadableFileError(str(files[index]), why, "Replace or remove it.") from error


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
    scaled = F.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width]


# --- torchvision ------------------------------------------------------------------------------------


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
    image, label = part[0]
    if not isinstance(label, int) or not hasattr(image, "convert"):
        found = f"{with_article(type(image).__name__)} and {with_article(type(label).__name__)}"
        raise InvalidArgumentError(f"the task 'torchvision:{name}' needs images with class numbers", found, _BUILD)
    # what torchvision calls them; a data set without them is read once for its labels
    labels = getattr(part, "targets", None)
    targets = torch.as_tensor([part[i][1] for i in range(len(part))] if labels is None else labels)
    return Images(part, _of_data_set, torch.arange(len(part)), targets)


def _of_data_set(part: Any, index: int) -> Tensor:
    return to_tensor(part[index][0])


# --- Fashion-MNIST ----------------------------------------------------------------------------------

_FASHION_TRAIN, _FASHION_VALIDATION, _FASHION_TEST = 3000, 1000, 4000  # images; each class has about a tenth
FASHION_FOLDER = "data/FashionMNIST/raw"  # where torchvision's download leaves the files
_MAGIC = {1: (0, 0, 8, 1), 3: (0, 0, 8, 3)}  # of labels and of images, by number of dimensions


def fashion_mnist(folder: str = FASHION_FOLDER) -> Task:
    """The task `fashion-mnist:FOLDER`: ten classes of 14 × 14 images from the four official files, packed or not.

    Raises:
        InvalidArgumentError: a file is missing. UnreadableFileError: it is not in IDX format.

    References:
        H. Xiao et al., "Fashion-MNIST", 2017, arXiv 1708.07747.
    """
    images, labels, tested, answers = _fashion_files(folder)
    order = torch.randperm(len(labels), generator=generator(0, "fashion-mnist"))
    train, validation = order[: _FASHION_TRAIN + _FASHION_VALIDATION].tensor_split((_FASHION_TRAIN,))
    return Task(
        name="fashion-mnist",
        train=_halved(images[train], labels[train]),
        validation=_halved(images[validation], labels[validation]),
        test=_halved(tested[:_FASHION_TEST], answers[:_FASHION_TEST]),
        model="digits-cnn",
        sizes={"num_classes": 10, "in_channels": 1},
        training=TrainingConfig(epochs=10, batch_size=50, lr=0.05),
        sesoi=0.5,
        threat=AttackConfig(epsilon=0.05, low=0.0, high=1.0),
        notes=(
            "3,000 of the 60,000 training images train, 1,000 others validate, and 4,000 of the test images test, "
            "always the same ones. Images are averaged over 2 × 2 pixels to 14 × 14, in [0, 1].",
        ),
    )


def fashion_mnist_full(folder: str) -> Task:
    """The task `fashion-mnist-full:FOLDER`: all 28 × 28 images; 55,000 train, 5,000 validate and 10,000 test.

    Raises:
        InvalidArgumentError: a file is missing. UnreadableFileError: it is not in IDX format.

    References:
        H. Xiao et al., "Fashion-MNIST", 2017, arXiv 1708.07747.
    """
    images, labels, tested, answers = _fashion_files(folder)
    order = torch.randperm(len(labels), generator=generator(0, "fashion-mnist-full"))
    validation, train = order.tensor_split((len(labels) // 12,))
    return Task(
        name="fashion-mnist-full",
        train=_whole(images[train, None], labels[train]),
        validation=_whole(images[validation, None], labels[validation]),
        test=_whole(tested[:, None], answers),
        model="digits-cnn",
        sizes={"num_classes": 10, "in_channels": 1},
        training=TrainingConfig(epochs=10, batch_size=128, lr=0.05),
        sesoi=0.25,
        standardize=((0.286,), (0.353,)),
        threat=AttackConfig(epsilon=0.05, low=0.0, high=1.0),
        notes=("All images of Fashion-MNIST at their own size; a twelfth of the training images validates.",),
    )


def _fashion_files(folder: str) -> list[Tensor]:
    """Images and labels of the training and of the test part."""
    parts = ((part, kind) for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return [_numbers(folder, f"{part}-{kind}-ubyte") for part, kind in parts]


def _whole(images: Tensor, labels: Tensor) -> Split:
    return Split(images.float() / 255, labels.long())


# --- CIFAR-10 ---------------------------------------------------------------------------------------

_CIFAR = 3 * 32 * 32  # bytes of an image behind its label
_MOST_IMAGES = 50_000  # of one file


def cifar10(folder: str) -> Task:
    """The task `cifar10:FOLDER`: 32 × 32 colour images from the binary version, flipped and cropped while they train.

    Reads every `data_batch_N.bin`, of which a twelfth of the images validates, and `test_batch.bin`; as many as are
    there.

    Raises:
        InvalidArgumentError: a file is missing. UnreadableFileError: it is not in the binary layout.

    References:
        A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    files = sorted(Path(folder).glob("data_batch_*.bin"))
    if not files or not (Path(folder) / "test_batch.bin").is_file():
        raise InvalidArgumentError(
            f"the task 'cifar10:{folder}' needs data_batch_1.bin and test_batch.bin", f"{len(files)} training files",
            "Download the binary version of CIFAR-10, and name its folder.",
        )  # fmt: skip
    parts = [_cifar_file(path) for path in files]
    images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    order = torch.randperm(len(labels), generator=generator(0, "cifar10"))
    validation, train = order.tensor_split((max(1, len(labels) // 12),))
    return Task(
        name="cifar10",
        train=_whole(images[train], labels[train]),
        validation=_whole(images[validation], labels[validation]),
        test=_whole(*_cifar_file(Path(folder) / "test_batch.bin")),
        model="resnet20",
        sizes={"num_classes": 10, "in_channels": 3},
        training=TrainingConfig(epochs=30, batch_size=128, lr=0.1, decay="weights"),
        sesoi=0.5,
        augment=flipped_and_cropped,
        standardize=((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
        threat=AttackConfig(epsilon=8 / 255, low=0.0, high=1.0),
        notes=(f"{len(train):,} images train, of the 50,000 of the whole data set less a twelfth that validates.",),
    )


def _cifar_file(path: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels of one file of the binary version."""
    size = path.stat().st_size
    raw = np.fromfile(path, np.uint8, count=min(size, _MOST_IMAGES * (1 + _CIFAR)))
    if not size or size % (1 + _CIFAR) or size > len(raw) or int(raw[:: 1 + _CIFAR].max()) > 9:
        why = f"{size} bytes are not whole images of {1 + _CIFAR} bytes with labels from 0 to 9"
        raise UnreadableFileError(str(path), why, "Download it again.")
    rows = torch.from_numpy(raw.reshape(-1, 1 + _CIFAR))
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def flipped_and_cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored with probability one half, and moved by up to 4 pixels in both directions, over zeros.

    Shape:
        - ``images``: (N, C, H, W); output: the same.
    """
    mirrored = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return moved(torch.where(mirrored[:, None, None, None], images.flip(3), images), 4, generator)


def moved(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each image moved by at most so many pixels in both directions, over zeros; drawn on the CPU.

    Shape:
        - ``images``: (N, C, H, W), on any device; output: the same.
    """
    count, _, height, width = images.shape
    down, right = torch.randint(0, 2 * most + 1, (2, count), generator=generator).to(images.device)
    padded = F.pad(images, (most, most, most, most))
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    which = torch.arange(count, device=images.device)[:, None, None]
    return padded.movedim(1, -1)[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


# --- files ------------------------------------------------------------------------------------------


def _halved(images: Tensor, labels: Tensor) -> Split:
    return Split(F.avg_pool2d(images[:, None].float() / 255, 2), labels.long())


def _numbers(folder: str, name: str) -> Tensor:
    """One IDX file of bytes, with or without `.gz`."""
    packed, plain = Path(folder) / f"{name}.gz", Path(folder) / name
    if not packed.is_file() and not plain.is_file():
        raise InvalidArgumentError(
            f"the task 'fashion-mnist:{folder}' needs the file {name}.gz", "no such file",
            "Download the four files, e.g. by torchvision.datasets.FashionMNIST('data', download=True), which puts "
            "them into data/FashionMNIST/raw, and name their folder with --data.",
        )  # fmt: skip
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
        sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4).tolist()
        if tuple(raw[:4]) != _MAGIC[raw[3]]:
            raise ValueError("another type of numbers")
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy())
    except (OSError, ValueError, KeyError, IndexError, EOFError, zlib.error) as error:
        raise UnreadableFileError(
            f"{folder}/{name}", f"it is not an IDX file: {error}", "Download it again."
        ) from error
