"""What is usual for trained networks, on the page of a measurement and below the table of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gonio.escaping import plain
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.figures.usual import Usual, UsualLayer, described, known, usual_of
from gonio.messages import Message, counted, joined, say
from gonio.pages.tables import number, signed

_NAMED = 3  # layers that the sentence names for one figure; of more it has their number
_SENTENCE = ("alignment", "sigma", "norm_range")  # columns of the sentence: one each of angles, spectrum and norms


_FORMS: Mapping[str, Callable[[float], str]] = {"alignment_z": signed, "spectrum_outliers": "{:.0%}".format}
_FIGURES = {"norm_range": "norm_spread", "sigma": "sigma_ratio", "spectrum_outliers": "spectrum_outlier_share"}
_ALIGN, _SIGMA, _SPREAD = say("align"), say("σ/σ₀"), say("spread of norms")
_FROM: Mapping[str, tuple[str, Message]] = {  # of a column, the figure with bands from which its range follows
    "alignment": ("alignment", _ALIGN),
    "alignment_z": ("alignment", _ALIGN),
    "coherence": ("coherence", say("coher.")),
    "norm_range": ("norm_spread", _SPREAD),
    "sigma": ("sigma_ratio", _SIGMA),
    "stable_rank": ("sigma_ratio", _SIGMA),
    "effective_rank": ("effective_rank_share", say("share of the full rank")),
    "spectrum_distance": ("spectrum_distance", say("bulk")),
    "spectrum_outliers": ("spectrum_outlier_share", say("share of ‖W‖²")),
    "orthogonality_defect": ("orthogonality_defect", say("orth.")),
}


@dataclass(frozen=True)
class Kinds:
    """What a page shows of all layers: the sentence of each kind once, and of each layer its kind and its cells.

    Attributes:
        sentences: by kind. `of`: the kind of a layer by its name.
        cells: by the layer's name and that of a column: lower end, upper end, place and, of a column that shows another
            number, that figure, separated by a bar.
    """

    sentences: Mapping[str, Message]
    of: Mapping[str, str]
    cells: Mapping[str, Mapping[str, str]]


def kinds_of(layers: Iterable[TensorMeasurement]) -> Kinds:
    """What a page shows beside the figures of these layers."""
    found = {t.name: layer for t in layers if (layer := usual_of(t)) is not None}
    return Kinds(
        {layer.kind: layer.said for layer in found.values()},
        {name: layer.kind for name, layer in found.items()},
        {name: _cells(layer) for name, layer in found.items()},
    )


def _cells(layer: UsualLayer) -> dict[str, str]:
    figures = {column: layer.figures.get(_FIGURES.get(column, column)) for column in _FROM}
    return {column: cell(column, one) for column, one in figures.items() if one is not None}


def cell(column: str, found: Usual) -> str:
    """The ends of a range and where the figure lies, for the script of a page."""
    form = _FORMS.get(column, lambda value: number(value, 2))
    shown = f"|{number(found.value, 2)}" if column == "norm_range" else ""
    return f"{form(found.low)}|{form(found.high)}|{found.place}{shown}"


def beside_trained(layers: Sequence[TensorMeasurement]) -> Message:
    """In how many of these layers a figure is outside the usual range, and in which; what is not known is said.

    Example:
        >>> from gonio.measuring.showing.usual import beside_trained
        >>> m = gonio.measure({"a.weight": torch.ones(40, 40) + torch.eye(40)})
        >>> beside_trained(m.layers)[:104]
        'Beside trained networks (5 % of their layers lie on each side): align unusually high in 1 of 1 layer (a)'
    """
    found = {t.path: layer for t in layers if (layer := usual_of(t)) is not None}
    held = {path: layer for path, layer in found.items() if layer.bands is not None}
    if not held:
        return say("Beside trained networks: not known for layers of these kinds and sizes.")
    parts = [
        said
        for column in _SENTENCE
        for place in ("low", "high")
        if (said := _outside(column, place, held, len(layers))) is not None
    ]
    parts = parts or [say("{figures} are usual", figures=joined([_FROM[c][1] for c in _SENTENCE], last=" and "))]
    if len(held) < len(layers):
        parts.append(
            say("not known for {n} of {every}", n=len(layers) - len(held), every=counted(len(layers), "layer"))
        )
    return say("Beside trained networks (5 % of their layers lie on each side): {parts}.", parts=joined(parts, "; "))


def _outside(column: str, place: str, held: Mapping[str, UsualLayer], every: int) -> Message | None:
    """Which layers have a figure on this side of the range; None if no layer has."""
    figure = _FIGURES.get(column, column)
    paths = [plain(path) for path, one in held.items() if figure in one.figures and one.figures[figure].place == place]
    if not paths:
        return None
    values = {"figure": _FROM[column][1], "n": len(paths), "every": counted(every, "layer")}
    if place == "low":
        said = say("{figure} unusually low in {n} of {every}", **values)
    else:
        said = say("{figure} unusually high in {n} of {every}", **values)
    return said if len(paths) > _NAMED else say("{said} ({paths})", said=said, paths=joined(paths))


def explained(column: str) -> list[Message]:
    """One line for each kind and size: the usual range of the figure with bands that this column follows from."""
    if column not in _FROM:
        return []
    figure, title = _FROM[column]
    return [
        say(
            "usual in trained networks, {kind}: {figure} {low} to {high}",
            kind=described(kind),
            figure=title,
            low=number(ends[0], 2),
            high=number(ends[-1], 2),
        )
        for kind, bands in known().items()
        if (ends := bands.figures.get(figure))
    ]
