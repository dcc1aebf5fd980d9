"""A byte-level language model's task: the source text of Python's own standard library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gonio.compare.planning.plan import Training
from gonio.compare.tasks.task import Metric, Split, Task
from gonio.errors import InvalidArgumentError

_CONTEXT = 128  # bytes
_WINDOWS = {"train": 1024, "validation": 256, "test": 512}
_PER_FILE = 32  # windows at most, so that no single file is most of a split
_LEAST_BYTES = 4096  # smaller files are mostly headers

_NOTES = (
    "The text is the source of the standard library of the Python that runs: another Python version has another "
    "text, another digest of the data, and other scores.",
    "The splits are by file, and a file's split and order follow from the hash of its name.",
    "Learning rate and epochs were tuned for the baseline alone, by the validation score on seeds that a study "
    "does not use. The recipes run with the baseline's values and their own default strengths, unless the study "
    "tunes them.",
)


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


def bytes_() -> Task:
    """Windows of 128 bytes of Python source: 131 kB to train on, 33 kB to validate, 66 kB to test.

    Lower is better. A diverged model scores 8 bits (a uniform guess), or as the worst run of the study if that
    is worse.

    Raises:
        InvalidArgumentError: this Python has no standard library as source, or too little of it.

    Example:
        >>> task = gonio.compare.tasks.bytes_()
        >>> task.train.inputs.shape, task.metric.direction
        (torch.Size([1024, 128]), 'min')
        >>> bytes(task.test.inputs[0, 1:].tolist()) == bytes(task.test.targets[0, :-1].tolist())
        True
    """
    texts = _texts(Path(sysconfig.get_paths()["stdlib"]))
    train, validation, test = (_windows(texts[name], count) for name, count in _WINDOWS.items())
    return Task(
        name="bytes",
        train=train,
        validation=validation,
        test=test,
        model="byte-transformer",
        sizes={"num_classes": 256},
        training=Training(epochs=4, batch_size=16, lr=3e-3, optimizer="adamw", weight_decay=0.01),
        sesoi=0.02,
        metric=BITS_PER_BYTE,
        loss=next_byte_loss,
        recipes=("orthogonal-init", "decoupled-tanh-linear", "self-orthogonality-linear", "scale-shift"),
        notes=_NOTES,
    )


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


def _windows(texts: list[bytes], count: int) -> Split:
    """The first windows of each file in turn, each with the byte that follows."""
    pieces: list[bytes] = []
    for text in texts:
        last = min(len(text) - 1, _PER_FILE * _CONTEXT)
        pieces += [text[at : at + _CONTEXT + 1] for at in range(0, last - _CONTEXT + 1, _CONTEXT)]
    if len(pieces) < count:
        raise InvalidArgumentError(
            f"the task 'bytes' needs {count} windows of {_CONTEXT} bytes from one split of the standard library",
            f"{len(pieces)}",
            "Use a Python whose standard library is installed as source files.",
        )
    ids = torch.tensor([list(piece) for piece in pieces[:count]])
    return Split(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
