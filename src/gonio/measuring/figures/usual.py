"""Where a figure lies among the layers of trained networks: beside its value for random weights, what is usual.

The bands are those of `usual.json`, which `benchmarks/usual_networks.py` makes of networks that packages ship and of
networks that it trains. A layer is held against the layers of its own kind, which shape and groups tell, and size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import inf, prod
from typing import Any, Literal

from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.reading.entry import FACTOR, LOW_RANK
from gonio.messages import Message, say

LEAST = 10  # architectures with layers of a kind and size: with fewer, what is usual is not known
PERCENTILES = (5, 25, 50, 75, 95)
SIZES = (8, 32, 128, 512, inf)  # of the smaller side of a matrix, up to
KINDS: Mapping[str, Message] = {
    "matrix": say("matrices (linear, embedding, 1×1)"),
    "kernel": say("kernels of convolutions"),
    "depthwise": say("kernels of depthwise convolutions"),
    "stacked": say("stacked matrices (groups, gates, experts)"),
}


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _full_rank(t: TensorMeasurement) -> int:
    return (t.groups or 1) * min(t.filters or 0, t.dim or 0)


FIGURES: Mapping[str, Callable[[TensorMeasurement], float | None]] = {
    "alignment": lambda t: t.alignment,
    "coherence": lambda t: t.coherence,
    "norm_spread": lambda t: _ratio(t.norm_std, t.norm_mean),
    "sigma_ratio": lambda t: _ratio(t.sigma_max, t.sigma_random),
    "effective_rank_share": lambda t: _ratio(t.effective_rank, _full_rank(t)),
    "spectrum_distance": lambda t: t.spectrum_distance,
    "spectrum_outlier_share": lambda t: t.spectrum_outlier_share,
    "orthogonality_defect": lambda t: t.orthogonality_defect,
}
"""The figures with bands, without unit. The z-score and the stable rank follow from them for a layer's own size."""


@dataclass(frozen=True)
class Usual:
    """A figure and the range from the 5th to the 95th percentile of layers of trained networks."""

    value: float
    low: float
    high: float

    @property
    def place(self) -> Literal["usual", "low", "high"]:
        """Within the range with its ends, below it or above it."""
        return "low" if self.value < self.low else "high" if self.value > self.high else "usual"

    def scaled(self, by: float, shift: float = 0.0) -> Usual:
        """The same statement on by · (value − shift)."""
        return Usual(*(by * (number - shift) for number in (self.value, self.low, self.high)))


@dataclass(frozen=True)
class Bands:
    """What is known of one kind and size: percentiles of each figure, and how much they rest on.

    Attributes:
        networks, architectures, layers: that have layers of this kind and size. Each architecture counts once.
    """

    networks: int
    architectures: int
    layers: int
    figures: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class UsualLayer:
    """A layer among those of trained networks.

    Attributes:
        kind: with the size, as :func:`kind_of` gives it.
        bands: None where too few networks have such layers.
        figures: those of :data:`FIGURES` that have a range, with `effective_rank` in the place of its share, and what
            follows from them: `alignment_z` and `stable_rank`.
    """

    kind: str
    bands: Bands | None
    figures: Mapping[str, Usual]

    @property
    def said(self) -> Message:
        """What the layer is held against, or why it is not."""
        what = described(self.kind)
        if self.bands is None:
            return say("Usual: not known; fewer than {n} architectures have {what}.", n=LEAST, what=what)
        return say(
            "Usual: from the 5th to the 95th percentile of {what}, in {networks} trained networks of {architectures} "
            "architectures.",
            what=what,
            networks=self.bands.networks,
            architectures=self.bands.architectures,
        )

    def exported(self, name: str) -> dict[str, Any]:
        """The entry of a tensor of this name in the JSON."""
        bands = self.bands
        return {
            "name": name,
            "kind": self.kind,
            "of": None if bands is None else {"networks": bands.networks, "architectures": bands.architectures},
            "figures": {figure: {"place": one.place, **asdict(one)} for figure, one in self.figures.items()},
        }


def kind_of(t: TensorMeasurement) -> str | None:
    """The kind and size of a measured layer, as `matrix 9 to 32`; None for a single filter and parts of adapters.

    A kernel of one position is a matrix. Filters that share no input are depthwise, other groups stacked. The size is
    that of the smaller side of one matrix, and of a depthwise convolution the length of a filter.
    """
    if t.status != "measured" or not t.filters or not t.dim or t.total_filters < 2 or t.kind in (FACTOR, LOW_RANK):
        return None
    if (t.groups or 1) > 1:
        name, size = ("depthwise", t.dim) if t.filters == 1 else ("stacked", min(t.filters, t.dim))
    else:
        name, size = "kernel" if prod(t.shape[2:]) > 1 else "matrix", min(t.filters, t.dim)
    at = next(i for i, most in enumerate(SIZES) if size <= most)
    if SIZES[at] == inf:
        return f"{name} above {SIZES[at - 1]}"
    return f"{name} {SIZES[at - 1] + 1 if at else 1} to {SIZES[at]}"


def described(kind: str) -> Message:
    """A kind and size in words.

    Example:
        >>> from gonio.measuring.figures.usual import described
        >>> described("kernel 9 to 32")
        'kernels of convolutions, smaller side 9 to 32'
    """
    name, *sizes = kind.split()
    if sizes[0] == "above":
        return say("{what}, smaller side above {size}", what=KINDS[name], size=sizes[1])
    return say("{what}, smaller side {low} to {high}", what=KINDS[name], low=sizes[0], high=sizes[2])


@cache
def known() -> Mapping[str, Bands]:
    """The bands of each kind and size of which enough architectures are known."""
    content: dict[str, Any] = json.loads(
        (resources.files("gonio.measuring.figures") / "usual.json").read_text(encoding="utf-8")
    )
    made = {kind: Bands(**row) for kind, row in content["kinds"].items()}
    return {kind: bands for kind, bands in made.items() if bands.architectures >= LEAST}


def usual(kind: str, figure: str, value: float) -> Usual | None:
    """A figure of :data:`FIGURES` beside its range in trained networks; None where that is not known.

    Args:
        kind: as :func:`kind_of` gives it.

    Example:
        >>> from gonio.measuring.figures.usual import usual
        >>> usual("kernel 9 to 32", "alignment", 1000.0).place
        'high'
    """
    bands = known().get(kind)
    found: Sequence[float] | None = None if bands is None else bands.figures.get(figure)
    return None if found is None else Usual(value, found[0], found[-1])


def usual_of(t: TensorMeasurement) -> UsualLayer | None:
    """A measured layer among those of trained networks; None for a tensor that is of no kind.

    The range of the z-score is that of the alignment, which the layer's own size turns into standard deviations; the
    range of the stable rank is that of σ/σ₀, because stable rank over its value for random weights is (σ₀/σ)².

    Example:
        >>> from gonio.measuring.figures.usual import usual_of
        >>> row = gonio.measure(nn.Linear(64, 48))["weight"]
        >>> found = usual_of(row)
        >>> found.kind, found.figures["alignment"].value == row.alignment, "stable_rank" in found.figures
        ('matrix 33 to 128', True, True)
    """
    kind = kind_of(t)
    if kind is None:
        return None
    values = {name: value for name, of in FIGURES.items() if (value := of(t)) is not None}
    found = {name: one for name, value in values.items() if (one := usual(kind, name, value)) is not None}
    if (aligned := found.get("alignment")) and t.alignment_z is not None and aligned.value != 1:
        found["alignment_z"] = aligned.scaled(t.alignment_z / (aligned.value - 1), 1.0)
    if (share := found.pop("effective_rank_share", None)) is not None:
        found["effective_rank"] = share.scaled(_full_rank(t))
    if (ratio := found.get("sigma_ratio")) and t.stable_rank and t.stable_rank_random:
        ends = (t.stable_rank_random / end**2 for end in (ratio.high, ratio.low))
        found["stable_rank"] = Usual(t.stable_rank, *ends)
    return UsualLayer(kind, known().get(kind), found)
