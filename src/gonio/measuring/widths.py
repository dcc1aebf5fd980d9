"""`widths`: how activations, gradients and the changes by training scale with the width of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, floor, isfinite, log2, sqrt
from statistics import NormalDist, linear_regression, mean, pvariance
from typing import Any, ClassVar

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gonio.errors import InvalidArgumentError
from gonio.escaping import json_data, plain
from gonio.measuring.findings.rules import Finding, FindingRule, findings_by, markdown_findings, render_findings, rule
from gonio.measuring.showing.page import More, layer_map, render
from gonio.measuring.showing.table import Column, PagedTable, markdown_table, tensor_table
from gonio.messages import joined, say
from gonio.pages.charts import LEVELS, Lane
from gonio.pages.picture import Axis, Dots, Line, Mark, Picture, spark, svg
from gonio.pages.tables import number
from gonio.surgery import sites
from gonio.surgery.equivalent import call, first_input

TOLERANCE = 0.25  # of an exponent, in which small widths and few steps are not told from 0

PROMISED = {"activation": (0.0, -0.5), "gradient": (-1.0, 0.0), "change": (0.0, 0.0)}  # of a layer, of the last one
FIGURES = {
    "activation": (say("output"), say("RMS of each layer's output at initialisation")),
    "gradient": (say("gradient"), say("RMS of the gradient at each layer's output, at initialisation")),
    "change": (say("change"), say("RMS of the change of each layer's output by training")),
}
RULE = {"activation": "G601", "gradient": "", "change": "G602"}  # that judges the figure

Loss = Callable[[Any, Any], Tensor]
Values = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class WidthScaling:
    r"""One layer's exponents a of :math:`\text{RMS} \propto n^a` with the width n, each with its 95 % interval.

    Attributes:
        activation: of its output at initialisation; `activation_interval`: (low, high). Of a last linear layer of
            RMS(W) √fan_in RMS(x), as for weights of random signs: a few outputs alone vary too much.
        gradient: of the gradient of the loss at its output, at initialisation.
        change: of the change of its output on the same batch after the steps of training.
        last: whether it is the model's last layer, whose output at initialisation has to shrink with the width.
        activation_rms, gradient_rms, change_rms: to which the lines are fitted: for each width that of each seed, None
            where it is not finite.
    """

    name: str
    path: str
    activation: float | None
    activation_interval: tuple[float, float] | None
    gradient: float | None
    gradient_interval: tuple[float, float] | None
    change: float | None
    change_interval: tuple[float, float] | None
    last: bool = False
    activation_rms: Values = ()
    gradient_rms: Values = ()
    change_rms: Values = ()

    def __repr__(self) -> str:
        exponents = ", ".join(f"{name} {number(getattr(self, name))}" for name in PROMISED)
        return f"<{plain(self.path)}: exponents of the width: {exponents}>"

    def promised(self, figure: str) -> float:
        """The exponent of a figure of this layer under μP [1, table 14]."""
        return PROMISED[figure][self.last]


def _fit(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return "–"
    return f"{value:+.2f} ± {(interval[1] - interval[0]) / 2:.2f}".replace("-", "−")


C = Column[WidthScaling]
COLUMNS: tuple[Column[WidthScaling], ...] = (
    C("activation", "output", "exponent of its RMS at initialisation", 13,
      lambda s: _fit(s.activation, s.activation_interval)),
    C("gradient", "gradient", "exponent of the RMS of the gradient there", 13,
      lambda s: _fit(s.gradient, s.gradient_interval)),
    C("change", "change", "exponent of the RMS of the change of the output after training", 13,
      lambda s: _fit(s.change, s.change_interval)),
)  # fmt: skip


def _beyond(interval: tuple[float, float] | None) -> int:
    """1 if the whole interval is above the tolerance, −1 if below, else 0."""
    if interval is None:
        return 0
    return int(interval[0] > TOLERANCE) - int(interval[1] < -TOLERANCE)


WIDTH_RULES: dict[str, FindingRule[WidthScaling]] = {}


@rule("G601", WIDTH_RULES)
def _initial(s: WidthScaling) -> str | None:
    interval = s.activation_interval
    if interval is None or not (interval[0] > -TOLERANCE if s.last else _beyond(interval)):
        return None
    fit = _fit(s.activation, s.activation_interval)
    return say("its output scales as width^{fit} at initialisation", fit=fit)


@rule("G602", WIDTH_RULES)
def _trained(s: WidthScaling) -> str | None:
    if not _beyond(s.change_interval):
        return None
    fit = _fit(s.change, s.change_interval)
    return say("the change of its output by training scales as width^{fit}", fit=fit)


@dataclass(frozen=True, repr=False)
class Widths(PagedTable[WidthScaling]):
    """The exponents of every layer: a mapping from paths to rows.

    Attributes:
        sizes: the widths. `seeds`: models of each. `steps`: of training.
        findings: exponents that are not 0, and should be.

    Example:
        >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
        >>> gonio.measuring.widths(lambda n: nn.Sequential(nn.Linear(4, n), nn.Linear(n, 3)), (8, 16), batch)
        <Widths of 2 layers at 8, 16>
    """

    ROW: ClassVar = WidthScaling

    sizes: tuple[int, ...]
    seeds: int
    steps: int
    tensors: tuple[WidthScaling, ...]
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        return {"schema": "gonio.widths/1", **json_data(self)}

    def to_markdown(self) -> str:
        """The table of exponents."""
        said, table = markdown_findings(self.findings), markdown_table("layer", self.tensors, COLUMNS)
        return "\n".join([*said, *table, ""])

    def _page(self, *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
        """Charts over the width, exponents over depth, findings, and a table of layers."""
        shown = layer_map(self.tensors, self.findings, [_lane(figure, self.tensors) for figure in FIGURES])
        charts = [(*FIGURES[figure], *_chart(figure, self, shown.codes)) for figure in FIGURES]
        return render(
            "widths.html.j2",
            whole=whole,
            w=self,
            columns=COLUMNS,
            more=tuple(_column(figure, self.sizes) for figure in FIGURES),
            charts=[chart for chart in charts if chart[2]],
            map=shown,
            made=made,
        )

    def __repr__(self) -> str:
        return f"<Widths of {len(self.tensors)} layers at {', '.join(map(str, self.sizes))}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        sizes = ", ".join(map(str, self.sizes))
        said = f"Exponents of the width ({sizes}; {self.seeds} seeds, {self.steps} steps); 0: independent of the width"
        yield Text(said, style="bold")
        yield Text("")
        yield from render_findings(self.findings)
        flagged = {finding.path for finding in self.findings}
        kept = [column.name for column in COLUMNS]
        yield tensor_table("layer", self.tensors, COLUMNS, kept, options.max_width, flagged=flagged)


def widths(
    factory: Callable[[int], nn.Module],
    sizes: Sequence[int],
    batch: tuple[Any, Any],
    *,
    loss: Loss = nn.functional.cross_entropy,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    steps: int = 4,
    seeds: int = 4,
) -> Widths:
    r"""Exponents of activations, gradients and changes by training over the width of a model.

    Models of each width are built `seeds` times and trained for some steps on one batch. For each layer with weights a
    line is fitted to :math:`\log \text{RMS}` over :math:`\log n`; its slope is the exponent, with a 95 % interval from
    the scatter over seeds. Where all are 0, hyper-parameters transfer from a narrow model to a wide one.

    Args:
        factory: builds a model of a width, with other random weights at each call.
        sizes: widths, at least two; spread over a factor of 4 or more.
        batch: (inputs, targets).
        loss: of (outputs, targets).
        optimizer: makes the optimizer of a model; None for Adam with a learning rate of 0.001 and one group.
        steps: of training, on the same batch.
        seeds: models of each width, at least 2.

    Raises:
        InvalidArgumentError: for fewer than two widths or seeds, or if the models have no layer with weights in common.

    Example:
        >>> def factory(n):
        ...     return nn.Sequential(nn.Linear(16, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 4))
        >>> batch = torch.randn(32, 16), torch.randint(4, (32,))
        >>> found = gonio.measuring.widths(factory, (64, 256, 1024), batch)
        >>> abs(found["0"].activation) < 0.2, found["2"].change > 0.5  # one rate for all layers: hidden changes grow
        (True, True)

    References: [1] G. Yang et al., "Tensor programs V: tuning large neural networks via zero-shot hyperparameter
        transfer", 2022, arXiv 2203.03466, appendix D.1.
    """
    if len(set(sizes)) < 2 or seeds < 2 or steps < 1:
        raise InvalidArgumentError(
            "widths() needs two widths, two seeds and one step at least",
            f"{len(set(sizes))} widths, {seeds} seeds, {steps} steps",
            "Use for example (64, 128, 256) and 4 seeds.",
        )
    make = optimizer or (lambda model: torch.optim.Adam(model.parameters(), lr=1e-3))
    runs = [(size, _run(factory(size), batch, loss, make, steps)) for size in sizes for _ in range(seeds)]
    paths = [path for path in runs[0][1] if all(path in found for _, found in runs)]
    if not paths:
        raise InvalidArgumentError("widths() compares layers by path", "none in common", "Name layers alike.")
    rows = tuple(_scaling(path, runs, last=path == paths[-1]) for path in paths)
    found = findings_by(WIDTH_RULES, ((row, row.path) for row in rows))
    return Widths(tuple(dict.fromkeys(sizes)), seeds, steps, rows, tuple(found))


_Sizes = dict[str, tuple[float, float, float]]  # of each layer


def _run(model: nn.Module, batch: tuple[Any, Any], loss: Loss, make: Any, steps: int) -> _Sizes:
    """RMS of the output, of its gradient and of its change, of each layer with weights in the order of the calls."""
    inputs, targets = batch
    layers = {
        s.module: s.path
        for s in sites(model)
        if any(p is not None and p.ndim > 1 for p in s.module._parameters.values())
    }
    outputs: dict[str, Tensor] = {}
    expected: dict[str, float] = {}

    def keep(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        leaf = next((t for t in tree_leaves(output) if isinstance(t, Tensor)), None)
        if leaf is not None and layers[module] not in outputs:
            if leaf.requires_grad:
                leaf.retain_grad()
            outputs[layers[module]] = leaf
            if isinstance(module, nn.Linear):
                size = _rms(module.weight.detach()) * sqrt(module.in_features)
                size *= _rms(first_input(arguments, keywords).detach())
                expected.setdefault(layers[module], size)

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    try:
        trainer = make(model)
        for step in range(steps + 1):
            outputs.clear()
            trainer.zero_grad()
            value = loss(call(model, inputs), targets)
            if step == 0:
                value.backward()
                first = {path: leaf.detach().clone() for path, leaf in outputs.items() if not _around(path, outputs)}
                gradients = {path: _rms(leaf.grad) if leaf.grad is not None else 0.0 for path, leaf in outputs.items()}
                trainer.step()
            elif step < steps:
                value.backward()
                trainer.step()
    finally:
        for handle in handles:
            handle.remove()
    last = next(reversed(first), "")
    return {
        path: (
            expected.get(path, _rms(old)) if path == last else _rms(old),
            gradients[path],
            _rms(outputs[path].detach() - old),
        )
        for path, old in first.items()
        if path in outputs
    }


def _around(path: str, others: Collection[str]) -> bool:
    """Whether a module with weights of its own is around another one: a model with a position added to its input."""
    return any(other != path and (not path or other.startswith(f"{path}.")) for other in others)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _scaling(path: str, runs: Sequence[tuple[int, _Sizes]], *, last: bool) -> WidthScaling:
    values: dict[str, Any] = {}
    for i, figure in enumerate(PROMISED):
        points = [(size, found[path][i]) for size, found in runs]
        values[figure], values[f"{figure}_interval"] = _exponent(points)
        values[f"{figure}_rms"] = _by_size(points)
    return WidthScaling(name=path, path=path, last=last, **values)


def _by_size(points: Sequence[tuple[int, float]]) -> Values:
    by_size: dict[int, list[float | None]] = {}
    for size, value in points:
        by_size.setdefault(size, []).append(value if isfinite(value) else None)
    return tuple(map(tuple, by_size.values()))


def _exponent(points: Sequence[tuple[int, float]]) -> tuple[float | None, tuple[float, float] | None]:
    """Slope in logarithms by least squares with its 95 % interval; None where a value is 0 or not finite."""
    if any(not 0 < value < float("inf") for _, value in points):
        return None, None
    x, y = [log2(size) for size, _ in points], [log2(value) for _, value in points]
    slope, start = linear_regression(x, y)
    left = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    freedom, spread = len(points) - 2, len(points) * pvariance(x)
    half = _student(freedom) * sqrt(left / freedom / spread)
    return slope, (slope - half, slope + half)


def _student(freedom: int) -> float:
    """0.975 quantile of Student's law, by its expansion about the normal one: 2 % too small for 4 degrees."""
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


# --- the page: each figure over the width, beside the power of it that μP promises ------------------------------------


def _lane(figure: str, layers: Sequence[WidthScaling]) -> Lane:
    values = [getattr(layer, figure) for layer in layers]
    promised = [None if v is None else layer.promised(figure) for v, layer in zip(values, layers, strict=True)]
    note = say("exponent of the width with its 95 % interval; dashed: promised by μP")
    return Lane(FIGURES[figure][0], note, values, [getattr(t, f"{figure}_interval") for t in layers], promised,
                scale="linear")  # fmt: skip


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:+.2f}".replace("-", "−")


def _chart(figure: str, found: Widths, codes: Mapping[str, Sequence[tuple[str, str, str]]]) -> tuple[Any, str]:
    """Lines through 1 at the smallest width, so that layers of any size share a chart; and its numbers in words."""
    layers = [layer for layer in found.tensors if getattr(layer, figure) is not None]
    if not layers:
        return "", ""
    least, ratio = min(found.sizes), max(found.sizes) / min(found.sizes)
    slopes = [getattr(layer, figure) for layer in layers]
    whose = {
        t.promised(figure): say("for the last layer") if t.last else say("for the others") for t in found.tensors[::-1]
    }
    ends = [least, least * ratio]
    marks: list[Mark] = []
    for layer, slope in zip(layers, slopes, strict=True):
        level = next((level for code, level, _ in codes.get(layer.path, ()) if code == RULE[figure]), "")
        marks.append(Line(ends, [1.0, ratio**slope], LEVELS[level][0], 2.5 if level else 1.5))
    marks += [Line(ends, [1.0, ratio**slope], "ink", 1.0, dash=True) for slope in whose]
    powers = [0.0, *(slope * log2(ratio) for slope in (*slopes, *whose))]
    step = max(1, ceil(max(map(abs, powers)) / 3))  # octaves between ticks
    bottom = step * floor(min(powers) / step)
    top = max(step * ceil(max(powers) / step), bottom + step)
    up = tuple((2.0**at, str(Fraction(2) ** at)) for at in range(bottom, top + 1, step))
    x = Axis(least, least * ratio, say("width"), log=True, ticks=tuple((size, f"{size}") for size in found.sizes))
    y = Axis(2.0**bottom, 2.0**top, log=True, ticks=up, grid=True)
    fitted = joined(list(dict.fromkeys((_signed(min(slopes)), _signed(max(slopes))))), last=" to ")
    promised = joined([say("{power} {whose}", power=_signed(a), whose=who) for a, who in whose.items()])
    promised = promised if len(whose) > 1 else joined([_signed(*whose)])
    said = say("fitted exponents {fitted}; promised {promised}", fitted=fitted, promised=promised)
    title = say("{figure} over the width: {said}", figure=FIGURES[figure][0], said=said)
    return svg(Picture(title, x, y, tuple(marks), height=210), width=330), said


def _column(figure: str, sizes: Sequence[int]) -> More:
    title, note = FIGURES[figure]
    explanation = say(
        "{note} over the width, both logarithmic: ticks: models; thick: fitted; thin: promised", note=note
    )
    return say("{figure} over width", figure=title), explanation, "spark", partial(_spark, figure, sizes)


def _spark(figure: str, sizes: Sequence[int], layer: WidthScaling) -> Any:
    """The figure of each model as a dot, the fitted line, and one of the promised exponent through the same middle."""
    slope, values = getattr(layer, figure), getattr(layer, f"{figure}_rms")
    points = [(log2(n), log2(v)) for n, of in zip(sizes, values, strict=False) for v in of if v and isfinite(v)]
    if slope is None or not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ends, promise = [log2(min(sizes)), log2(max(sizes))], layer.promised(figure)
    fitted, promised = ([mean(ys) + power * (end - mean(xs)) for end in ends] for power in (slope, promise))
    low, high = min(ys + fitted + promised), max(ys + fitted + promised)
    exponents = {"fitted": _signed(slope), "promised": _signed(promise)}
    title = say("{figure}: fitted exponent {fitted}, promised {promised}", figure=FIGURES[figure][0], **exponents)
    marks = (Line(ends, promised, "ink", 1.0), Line(ends, fitted), Dots(xs, ys, radius=3.0))
    axes = Axis(ends[0] - 0.1, ends[1] + 0.1), Axis(low, max(high, low + 1.0))
    return spark(
        Picture(title, *axes, marks, ends=say("{low}|width, logarithmic|{high}", low=min(sizes), high=max(sizes)))
    )
