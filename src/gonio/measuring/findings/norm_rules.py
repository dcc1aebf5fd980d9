"""The rule on the channels of norms: gains that are 0 beside others, so that an output is constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.measuring.figures.tensor import LISTED
from gonio.measuring.findings.rules import Finding, FindingRule, findings_by, named, rule
from gonio.measuring.reading.entry import TensorEntry, numbers_of
from gonio.messages import say

NEGLIGIBLE = 1e-6  # of the mean gain: the channel adds less than the rounding of float32 to its shift

Read = Callable[[], Tensor | None]
Vectors = Mapping[str, tuple[tuple[int, ...] | None, Read]]


@dataclass(frozen=True)
class ConstantChannels:
    """The channels of one norm whose output is their shift.

    Attributes:
        channels: the first thousand of their indices. `count`, `total`: of them, and of all channels.
        zero: whether gains and shifts of all of them are exactly 0.
    """

    path: str
    channels: tuple[int, ...]
    count: int
    total: int
    zero: bool


CHANNEL_RULES: dict[str, FindingRule[ConstantChannels]] = {}


@rule("G106", CHANNEL_RULES, harmless=lambda norm: not norm.zero)
def _constant_channels(norm: ConstantChannels) -> str | None:
    told = {
        "count": norm.count,
        "total": norm.total,
        "channels": named([str(channel) for channel in norm.channels], norm.count),
    }
    if norm.zero:
        return say(
            "gain and shift of {count} of {total} channels are 0, unlike those of the others: {channels}", **told
        )
    return say(
        "the gain of {count} of {total} channels is 0 or below {NEGLIGIBLE:g} of the mean one, so that their output is "
        "their shift: {channels}",
        NEGLIGIBLE=NEGLIGIBLE,
        **told,
    )


def of_entries(entries: Iterable[TensorEntry]) -> list[Finding]:
    """The findings on the norms of a model or checkpoint."""
    own = (entry for entry in entries if entry.role not in ("unknown", "part"))
    return of_norms({entry.name: (entry.shape, entry.read) for entry in own})


def of_norms(tensors: Vectors) -> list[Finding]:
    """The findings on the norms among some tensors: on each vector `weight` beside a vector `bias` of its length.

    Gains without a shift are not judged: RMS norms of some families store a gain minus 1.

    Args:
        tensors: the shape of each by its name, and a function that reads it.
    """
    return findings_by(CHANNEL_RULES, ((norm, norm.path) for norm in _constant_in(tensors)))


def _constant_in(tensors: Vectors) -> Iterator[ConstantChannels]:
    for name, (shape, read) in tensors.items():
        path, _, last = name.rpartition(".")
        held = tensors.get(f"{path}.bias" if path else "bias")
        if last != "weight" or shape is None or len(shape) != 1 or shape[0] < 2 or held is None or held[0] != shape:
            continue
        gains, shifts = _numbers(read), _numbers(held[1])
        if gains is None or shifts is None:
            continue
        small = gains.abs() <= NEGLIGIBLE * gains.abs().mean()
        if bool(small.all()) or not bool(torch.isfinite(gains.sum())):  # all are 0: training may start there
            continue
        zero = (gains == 0) & (shifts == 0)
        for found, exactly in ((zero, True), (small & ~zero, False)):
            if count := int(found.sum()):
                channels = tuple(found.nonzero().flatten()[:LISTED].tolist())
                yield ConstantChannels(path, channels, count, len(gains), exactly)


def _numbers(read: Read) -> Tensor | None:
    """The values in float64; None for those that are not read, which the tensor's own row says."""
    try:
        tensor = read()
        found = None if tensor is None else numbers_of(tensor).tensor
        return None if found is None else found.double().cpu()
    except Exception:  # reading a weight runs the model's own code, which may raise anything
        return None
