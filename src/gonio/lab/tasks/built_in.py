"""Tasks by name, and the built-in ones, whose data are on every machine: digits, clouds of points, Python's source."""

from __future__ import annotations

import hashlib
import math
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from gonio.errors import InvalidArgumentError, UnknownNameError, import_extra, with_article
from gonio.lab.plan import AttackConfig, TrainingConfig
from gonio.lab.tasks.images import (
    cifar10,
    fashion_mnist,
    fashion_mnist_full,
    image_folder,
    moved,
    stratified,
    torchvision_dataset,
)
from gonio.lab.tasks.metric import Metric
from gonio.lab.tasks.task import Split, Task, seeded
from gonio.models.by_name import folders_of, is_user_code, load_function
from gonio.seeding import generator

_TUNED = (
    "Learning rate and epochs were tuned for the baseline alone, by the validation score on seeds that a study "
    "does not use. The recipes run with the baseline's values and their own default strengths, unless the study "
    "tunes them."
)


SOURCES: dict[str, Callable[[str], Task]] = {
    "cifar10:FOLDER": cifar10,
    "fashion-mnist:FOLDER": fashion_mnist,
    "fashion-mnist-full:FOLDER": fashion_mnist_full,
    "text:FILE": lambda path: text(path),
    "torchvision:NAME:FOLDER": torchvision_dataset,
    "imagefolder:FOLDER": image_folder,
}
BUILT_IN: dict[str, Callable[[], Task]] = {}
"""The factory of each built-in task, by name."""


def built_in(factory: Callable[[], Task]) -> Callable[[], Task]:
    """Register a factory under its own name, with hyphens."""
    BUILT_IN[factory.__name__.rstrip("_").replace("_", "-")] = factory
    return factory


def resolve(spec: str) -> Task:
    """The task with a name.

    Args:
        spec: a built-in name; `torchvision:NAME` or `torchvision:NAME:FOLDER`, a data set of torchvision in
            FOLDER or in `data`; `imagefolder:FOLDER`; `cifar10:FOLDER`; `fashion-mnist:FOLDER`, a part of it at half
            the size, or `fashion-mnist-full:FOLDER`; `text:FILE`; or `file.py:factory`, where the factory takes no
            arguments and returns a :class:`~gonio.lab.Task`; the global generators are seeded while it is called, so
            that every process gets the same data.

    Raises:
        UnknownNameError: no such task; gives the closest names.
        InvalidArgumentError: the file, function or data are missing, or the factory returns no task.
        MissingExtraError: a package that the task needs is not installed.

    Example:
        >>> len(gonio.lab.tasks.resolve("digits").train)
        200
    """
    if is_user_code(spec):
        with seeded(0):
            task = load_function(spec)()
        if not isinstance(task, Task):
            raise InvalidArgumentError(
                f"{spec!r} must build a task", with_article(type(task).__name__), "Return a gonio.lab.Task."
            )
        return task
    source, _, rest = spec.partition(":")
    for form, make in SOURCES.items():
        if rest and form.startswith(f"{source}:"):
            return make(rest)
    if spec not in BUILT_IN:
        raise UnknownNameError("task", spec, [*BUILT_IN, *SOURCES, "file.py:factory"], do=_data_set(spec))
    return BUILT_IN[spec]()


def _data_set(name: str) -> str:
    """The data set of torchvision that a name may stand for; the package is read and not imported."""
    for folder in folders_of("torchvision"):
        listed = folder / "datasets" / "__init__.py"
        names = re.findall(r'^ +"(\w+)",$', listed.read_text(encoding="utf-8"), flags=re.M) if listed.is_file() else []
        for each in names:
            if each.casefold() == name.casefold():
                return f"Did you mean torchvision:{each}:FOLDER, with the folder that holds its files?"
    return ""


# --- digits ---------------------------------------------------------------------------------------------


@built_in
def digits() -> Task:
    """Ten classes of 8 × 8 images (1,797 by 43 writers); 200 to train on, 400 to validate, 1,197 to test.

    The full set is learnt to 99 %, where no method can show anything. With 20 labelled images per class
    the baseline stays below that, and the large test split keeps the noise of the score low.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Example:
        >>> task = gonio.lab.tasks.digits()
        >>> task.train.inputs.shape, len(task.validation), len(task.test)
        (torch.Size([200, 1, 8, 8]), 400, 1197)

    References:
        E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998: its test part, as shipped in scikit-learn.
    """
    datasets = import_extra("sklearn.datasets", "the task 'digits'", package="scikit-learn", extra="lab")
    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # 17 grey levels, 0 to 16
    labels = torch.tensor(data.target)
    parts = stratified(labels, "digits", lambda _: (20, 60))  # of each class: 20, 40, the rest
    train, validation, test = (Split(images[index], labels[index]) for index in parts)
    return Task(
        name="digits",
        train=train,
        validation=validation,
        test=test,
        model="digits-cnn",
        sizes={"num_classes": 10, "in_channels": 1},
        training=TrainingConfig(epochs=40, batch_size=25, lr=0.05),
        sesoi=1.0,
        augment=shifted,
        threat=AttackConfig(epsilon=0.1, low=0.0, high=1.0),  # a tenth of white: PGD misleads about two in three
        notes=(
            "Few labels on purpose: 20 training images per class of the 1,797. With all of them the baseline has "
            "nothing left to improve. The rest validates (40 per class) and tests (about 120 per class).",
            "Learning rate and epochs were tuned for the baseline alone: 6 rates (0.005 to 0.2) × 40 and 60 epochs, "
            "4 seeds each that the study does not use, by the validation score of the last epoch. The recipes run "
            "with the baseline's values and their own default strengths; with tuning they might do better.",
        ),
    )


def shifted(images: Tensor, generator: Generator) -> Tensor:
    """Each image moved by −1, 0 or 1 pixels in both directions, padded with zeros.

    Shape:
        - ``images``: (N, C, H, W); output: the same.
    """
    return moved(images, 1, generator)


# --- points ---------------------------------------------------------------------------------------------

_POINTS = 96
_NOISE, _AUGMENTED_NOISE = 0.04, 0.02  # standard deviation, where the solids have radius about 1
_STRETCH = 0.3  # each axis by a factor between 1 − and 1 +
Profile = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Solid:
    """The solid of revolution, or of a regular polygon, around the z axis.

    Attributes:
        profile: corners (r, z) of a polyline, r ≥ 0.
        sides: of the polygon, whose corners have radius r; None: a circle.
    """

    profile: Profile
    sides: int | None = None

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Points that are uniform on the surface, of shape (count, 3)."""
        corners = torch.tensor(self.profile, dtype=torch.float64)
        first, last = corners[:-1], corners[1:]
        piece = torch.multinomial(self._areas(first, last), count, replacement=True, generator=generator)
        start, end = first[piece], last[piece]
        # A ring's area is proportional to its radius, so along a piece the square of the radius is uniform.
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        radius = (start[:, 0] ** 2 + share * (end[:, 0] ** 2 - start[:, 0] ** 2)).sqrt()
        wide = end[:, 0] - start[:, 0]
        along = torch.where(wide.abs() > 1e-9, (radius - start[:, 0]) / wide, share)
        height = start[:, 1] + along * (end[:, 1] - start[:, 1])
        return torch.cat([radius[:, None] * self._outline(count, generator), height[:, None]], 1).float()

    def _areas(self, first: Tensor, last: Tensor) -> Tensor:
        """Area of each piece, up to one common factor."""
        inner = 1.0 if self.sides is None else math.cos(math.pi / self.sides)  # middle of a side over its corner
        slant = ((inner * (last[:, 0] - first[:, 0])) ** 2 + (last[:, 1] - first[:, 1]) ** 2).sqrt()
        return (first[:, 0] + last[:, 0]) * slant

    def _outline(self, count: int, generator: Generator) -> Tensor:
        """Points on the circle or polygon of radius 1."""
        turn = torch.rand(count, generator=generator, dtype=torch.float64)
        if self.sides is None:
            return torch.stack([(2 * math.pi * turn).cos(), (2 * math.pi * turn).sin()], 1)
        side, part = (turn * self.sides).floor(), (turn * self.sides).frac()[:, None]
        corner, following = (
            torch.stack([angle.cos(), angle.sin()], 1)
            for angle in (2 * math.pi * (side + k) / self.sides for k in (0, 1))
        )
        return corner + part * (following - corner)


def _arc(count: int, *, centre: float = 0.0, radius: float = 1.0, turns: float = 0.5) -> Profile:
    """A circular arc in the half-plane, from the bottom upwards, as a polyline."""
    angles = [2 * math.pi * turns * i / count - math.pi / 2 for i in range(count + 1)]
    return tuple((max(0.0, centre + radius * math.cos(a)), radius * math.sin(a)) for a in angles)


_BARREL = ((0.0, -0.8), (1.0, -0.8), (1.0, 0.8), (0.0, 0.8))
_SPIKE = ((0.0, -0.7), (1.0, -0.7), (0.0, 0.9))
_BOWL = _arc(16, turns=0.25)

SOLIDS = {
    "sphere": Solid(_arc(32)),
    "capsule": Solid(tuple((r, z - 0.5) for r, z in _BOWL) + tuple((r, 0.5 - z) for r, z in reversed(_BOWL))),
    "torus": Solid(_arc(32, centre=1.0, radius=0.4, turns=1.0)),
    "cylinder": Solid(_BARREL),
    "cone": Solid(_SPIKE),
    "cube": Solid(((0.0, -0.75), (1.0, -0.75), (1.0, 0.75), (0.0, 0.75)), sides=4),
    "prism": Solid(_BARREL, sides=3),
    "pyramid": Solid(_SPIKE, sides=4),
    "tetrahedron": Solid(_SPIKE, sides=3),
    "octahedron": Solid(((0.0, -1.0), (1.0, 0.0), (0.0, 1.0)), sides=4),
}


@built_in
def points() -> Task:
    """Ten solids as clouds of 96 points: 400 to train on, 400 to validate, 1,200 to test.

    The solids are stretched along their axes and turned about the upright one, and the points are noisy, so
    that the baseline makes mistakes. During training each cloud is turned again in every epoch, with fresh noise.

    Example:
        >>> task = gonio.lab.tasks.points()
        >>> task.train.inputs.shape, len(task.validation), len(task.test)
        (torch.Size([400, 3, 96]), 400, 1200)

    References:
        The field of Z. Zhang et al., "Self-Orthogonality Module", WACV 2020, arXiv 2001.01275, which
        classifies point clouds of ModelNet40.
    """
    return Task(
        name="points",
        train=_clouds(40, "train"),
        validation=_clouds(40, "validation"),
        test=_clouds(120, "test"),
        model="pointnet",
        sizes={"num_classes": len(SOLIDS), "in_channels": 3},
        training=TrainingConfig(epochs=25, batch_size=20, lr=0.02),
        sesoi=1.0,
        augment=turned,
        threat=AttackConfig(epsilon=0.02),
        recipes=("orthogonal-init", "switchable-norm-1d", "decoupled-tanh-1d", "self-orthogonality-1d", "scale-shift"),
        notes=(
            f"Generated data: {_POINTS} points from the surface of one of {len(SOLIDS)} solids, stretched by up to "
            f"{_STRETCH:.0%} along each axis, turned about the upright axis, with noise of {_NOISE:g} of the radius. "
            "A method that helps here need not help on scans of real objects.",
            _TUNED,
        ),
    )


def turned(clouds: Tensor, generator: Generator) -> Tensor:
    """Each cloud of shape (3, P) turned about the upright axis, with fresh noise."""
    rotated = random_turns(len(clouds), generator) @ clouds
    return rotated + _AUGMENTED_NOISE * torch.randn(clouds.shape, generator=generator)


def random_turns(count: int, generator: Generator) -> Tensor:
    """Rotation matrices about the z axis, by uniformly random angles, of shape (count, 3, 3)."""
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(count)
    rows = ((cos, -sin, zero), (sin, cos, zero), (zero, zero, zero + 1))
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def _clouds(count: int, split: str) -> Split:
    """`count` clouds of each solid; the solids alternate."""
    draws = [generator(0, "points", split, name) for name in SOLIDS]
    clouds = torch.stack(
        [_placed(s.sample(count * _POINTS, d), count, d) for s, d in zip(SOLIDS.values(), draws, strict=True)], 1
    )
    return Split(clouds.flatten(0, 1), torch.arange(len(SOLIDS)).repeat(count))


def _placed(surface: Tensor, count: int, draw: Generator) -> Tensor:
    """Clouds of points of one solid: stretched, turned, with noise, centred, and scaled to radius 1."""
    clouds = surface.view(count, _POINTS, 3).mT
    stretch = 1 + _STRETCH * (2 * torch.rand(count, 3, 1, generator=draw) - 1)
    clouds = random_turns(count, draw) @ (clouds * stretch)
    clouds = clouds + _NOISE * torch.randn(clouds.shape, generator=draw)
    clouds = clouds - clouds.mean(2, keepdim=True)
    return clouds / clouds.norm(dim=1, keepdim=True).amax(2, keepdim=True)


# --- bytes ----------------------------------------------------------------------------------------------

_CONTEXT = 128  # bytes
_WINDOWS = {"train": 1024, "validation": 256, "test": 512}
_PER_FILE = 32  # windows at most, so that no single file is most of a split
_LEAST_BYTES = 4096  # smaller files are mostly headers


def bits_per_byte(outputs: Tensor, targets: Tensor) -> float:
    r"""Mean of :math:`-\log_2 p` of the next byte; a uniform guess has 8.

    Shape:
        - ``outputs``: (N, L, 256); ``targets``: (N, L).
    """
    total = sum(
        F.cross_entropy(logits.flatten(0, 1).double(), ids.flatten(), reduction="sum").item()
        for logits, ids in zip(outputs.split(32), targets.split(32), strict=True)
    )
    return total / targets.numel() / math.log(2)


BITS_PER_BYTE = Metric("bits per byte", bits_per_byte, "min", "bits", 8.0)


def next_byte_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next byte, in nats, over all positions."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@built_in
def bytes_() -> Task:
    """Windows of 128 bytes of Python source: 131 kB to train on, 33 kB to validate, 66 kB to test.

    Lower is better. A diverged model scores 8 bits (a uniform guess), or as the worst run of the study if that
    is worse.

    Raises:
        InvalidArgumentError: this Python has no standard library as source, or too little of it.

    Example:
        >>> task = gonio.lab.tasks.bytes_()
        >>> task.train.inputs.shape, task.metric.direction
        (torch.Size([1024, 128]), 'min')
        >>> bytes(task.test.inputs[0, 1:].tolist()) == bytes(task.test.targets[0, :-1].tolist())
        True
    """
    texts = _texts(Path(sysconfig.get_paths()["stdlib"]))
    splits = [_windows(texts[name], count) for name, count in _WINDOWS.items()]
    training = TrainingConfig(epochs=4, batch_size=16, lr=3e-3, optimizer="adamw", weight_decay=0.01)
    notes = (
        "The text is the source of the standard library of the Python that runs: another Python version has "
        "another text, another digest of the data, and other scores.",
        "The splits are by file, and a file's split and order follow from the hash of its name.",
        _TUNED,
    )
    return _next_byte("bytes", splits, training, notes)


def _next_byte(name: str, splits: Sequence[Sequence[bytes]], training: TrainingConfig, notes: tuple[str, ...]) -> Task:
    """The task of the byte that follows in windows, which are one byte longer than its inputs."""
    ids = (torch.tensor([list(window) for window in windows]) for windows in splits)
    train, validation, test = (Split(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids)
    return Task(
        name=name,
        train=train,
        validation=validation,
        test=test,
        model="byte-transformer",
        sizes={"num_classes": 256},
        training=training,
        sesoi=0.02,
        metric=BITS_PER_BYTE,
        loss=next_byte_loss,
        recipes=("orthogonal-init", "decoupled-tanh-linear", "self-orthogonality-linear", "scale-shift"),
        notes=notes,
    )


_MOST_TEXT = 64 * 1024**2  # bytes of a file that are read
_SHARES = (0.9, 0.95)  # of the file: up to here train, validation


def text(path: str) -> Task:
    """The task `text:FILE`: the next byte of a text; its first 90 % train, 5 % validate, 5 % test, in windows of 128.

    Raises:
        InvalidArgumentError: there is no such file, or it is too short.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        ...     _ = file.write(b"To be, or not to be. " * 1000)
        ...     file.flush()
        ...     task = gonio.lab.tasks.resolve(f"text:{file.name}")
        >>> task.train.inputs.shape, task.metric.unit
        (torch.Size([147, 128]), 'bits')
    """
    file = Path(path)
    if not file.is_file():
        raise InvalidArgumentError(f"the task 'text:{path}' needs a file of text", "no such file", "Name one.")
    with file.open("rb") as opened:
        raw = opened.read(_MOST_TEXT)
    ends = [0, *(int(share * len(raw)) for share in _SHARES), len(raw)]
    splits = [_pieces(raw[start:end]) for start, end in pairwise(ends)]
    if min(map(len, splits)) < 2:
        needs = f"the task 'text:{path}' needs two windows of {_CONTEXT} bytes in 5 % of the file"
        raise InvalidArgumentError(needs, f"{len(raw)} bytes", "Use a longer text.")
    training = TrainingConfig(epochs=8, batch_size=16, lr=2e-3, optimizer="adamw", weight_decay=0.01, warm_up=0.5)
    notes = (f"{len(splits[0]):,} windows of {_CONTEXT} bytes train.",)
    return _next_byte(f"text:{file.name}", splits, training, notes)


def _pieces(raw: bytes) -> list[bytes]:
    """Windows one after the other, each with the byte that follows."""
    return [raw[at : at + _CONTEXT + 1] for at in range(0, len(raw) - _CONTEXT, _CONTEXT)]


def _texts(folder: Path) -> Mapping[str, list[bytes]]:
    """The files of each split; one in ten validates and one in five tests."""
    texts: dict[str, list[bytes]] = {name: [] for name in _WINDOWS}
    for path in sorted(folder.glob("*.py"), key=lambda path: _number(path.name)):
        if path.stat().st_size >= _LEAST_BYTES:
            tenth = _number(path.name) % 10
            split = "validation" if tenth == 0 else "test" if tenth < 3 else "train"
            # line ends depend on the editor and the version-control system
            texts[split].append(path.read_bytes().replace(b"\r\n", b"\n"))
    return texts


def _number(name: str) -> int:
    """The same for a file of this name on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _windows(texts: list[bytes], count: int) -> list[bytes]:
    """The first windows of each file in turn, each with the byte that follows."""
    pieces: list[bytes] = []
    for text in texts:
        pieces += _pieces(text[: _PER_FILE * _CONTEXT + 1])
    if len(pieces) < count:
        raise InvalidArgumentError(
            f"the task 'bytes' needs {count} windows of {_CONTEXT} bytes from one split of the standard library",
            f"{len(pieces)}",
            "Use a Python whose standard library is installed as source files.",
        )
    return pieces[:count]
