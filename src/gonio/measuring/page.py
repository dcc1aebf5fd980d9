"""Measurements as HTML: a page of its own, or the part that a notebook shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from gonio.geometry import random_angle_density
from gonio.measuring.columns import COLUMNS, Column
from gonio.measuring.page_parts import labelled, page, row, table, text
from gonio.measuring.screen import SIGNAL_TITLES, scale_sentence, signal_cells
from gonio.measuring.tensor import TensorMeasurement

if TYPE_CHECKING:
    from gonio.measuring.measurements import Measurements

__all__ = ["page_of"]


def page_of(measured: Measurements, *, whole: bool) -> str:
    """The measurements as one self-contained page, or (`whole=False`) as a fragment with its own style."""
    return page(f"Measurements of {measured.source}", _inner(measured), whole=whole)


def _inner(measured: Measurements) -> str:
    entries = sum(tensor.entries for tensor in measured.tensors)
    parts = [
        f"<h1>{text(measured.source)}</h1>\n",
        f'<p class="muted">{len(measured.layers)} layers, {entries:,} numbers. {text(measured.coverage)}</p>\n',
        *(f'<p class="muted">{text(note)}</p>\n' for note in measured.notes),
        _findings(measured),
        *_suppressed(measured),
    ]
    if measured.layers:
        parts += [_layers(measured.layers), _spectra(measured.layers), _explanations()]
    parts.append(_model(measured))
    others = [tensor for tensor in measured.tensors if tensor.status == "skipped" or tensor.notes]
    if others:
        parts.append(_notes(others))
    return "".join(parts)


def _findings(measured: Measurements) -> str:
    if not measured.findings:
        return "<p><strong>No findings.</strong></p>\n"
    titles = ("Code", "Tensor", "Found", "By chance", "What to do")
    head = "".join(f'<th scope="col">{t}</th>' for t in ("Level", *titles))
    rows = []
    for f in measured.findings:
        cells = labelled(titles, (f.code, f.path or "the model", f.found, f.chance, f.do))
        level = f.level if f.level in ("error", "warn", "info") else "info"
        rows.append(f'<tr><th scope="row" class="level {level}">{level}</th>{cells}</tr>')
    return table("<h2>Findings</h2>\n", "left", head, rows)


def _suppressed(measured: Measurements) -> list[str]:
    """How many findings were left out and which."""
    if measured.suppressed is None:
        return []
    said = [f'<p class="muted">{text(sentence)}</p>\n' for sentence in measured.suppressed.sentences]
    if not measured.suppressed.findings:
        return said
    items = []
    for finding in measured.suppressed.findings:
        what = f"{finding.path or 'the model'}: {finding.found}"
        items.append(f"<dt>{text(finding.code)}</dt><dd>{text(what)}</dd>")
    listed = "".join(items)
    return [*said, f"<details><summary>What was suppressed</summary><dl>{listed}</dl></details>\n"]


def _layers(layers: tuple[TensorMeasurement, ...]) -> str:
    """Norms and angles, with the histogram of each layer."""
    columns = [column for column in COLUMNS if not column.spectral]
    return _table(
        "<h2>Norms and angles</h2>\n", layers, columns, ("angles",), lambda tensor: f"<td>{_sparkline(tensor)}</td>"
    )


def _spectra(layers: tuple[TensorMeasurement, ...]) -> str:
    return _table("<h2>Spectra</h2>\n", layers, [column for column in COLUMNS if column.spectral], (), lambda _: "")


def _table(
    title: str,
    layers: tuple[TensorMeasurement, ...],
    columns: Sequence[Column[TensorMeasurement]],
    more: tuple[str, ...],
    last: Callable[[TensorMeasurement], str],
) -> str:
    """One row per layer, with what `last` makes of it at its end."""
    titles = ("layer", *(column.title for column in columns), *more)
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in titles)
    rows = []
    for tensor in layers:
        cells = "".join(f"<td>{text(column.cell(tensor))}</td>" for column in columns)
        rows.append(f'<tr><th scope="row">{text(tensor.path)}</th>{cells}{last(tensor)}</tr>')
    return table(title, "", head, rows)


def _model(measured: Measurements) -> str:
    """What is said on the model as a whole: movable scale, mixtures, signals."""
    made = [f"<p>{text(scale_sentence(measured.scale))}</p>\n"] if measured.scale is not None else []
    if measured.mixtures:
        made.append(_mixtures(measured.mixtures))
    if measured.signals:
        head = "".join(f'<th scope="col">{text(t)}</th>' for t in ("output of", *SIGNAL_TITLES))
        rows = [row(signal.path or signal.kind, signal_cells(signal)) for signal in measured.signals]
        made.append(table("<h2>Signal</h2>\n", "", head, rows))
    return "".join(made)


def _mixtures(mixtures: dict[str, dict[str, dict[str, float]]]) -> str:
    """The shares of the statistics in each switchable norm, as figures and as one bar each."""
    kinds = list(dict.fromkeys(kind for shares in mixtures.values() for share in shares.values() for kind in share))
    head = "".join(f'<th scope="col">{text(t)}</th>' for t in ("layer", "of", *kinds, "shares"))
    rows = []
    for path, shares in mixtures.items():
        for what, share in shares.items():
            cells = (text(what), *(f"{share.get(kind, 0):.2f}" for kind in kinds), _bar(share))
            body = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f'<tr><th scope="row">{text(path)}</th>{body}</tr>')
    return table("<h2>Switchable norms</h2>\n", "", head, rows)


def _bar(share: dict[str, float]) -> str:
    """Shares side by side, the first the darkest."""
    left, parts = 0.0, []
    for index, (kind, value) in enumerate(share.items()):
        box = f'x="{left:.1f}" y="6" width="{180 * value:.1f}" height="28"'
        title = f"<title>{text(f'{kind} {value:.2f}')}</title>"
        parts.append(f'<rect {box} fill="var(--fill)" fill-opacity="{0.9 / 2**index:.2f}">{title}</rect>')
        left += 180 * value
    label = text(", ".join(f"{kind} {value:.2f}" for kind, value in share.items()))
    drawn = "".join(parts)
    return f'<svg viewBox="0 0 180 40" preserveAspectRatio="none" role="img" aria-label="{label}">{drawn}</svg>'


def _explanations() -> str:
    items = "".join(f"<dt>{text(c.title)}</dt><dd>{text(c.explanation)}</dd>" for c in COLUMNS)
    curve = "the filters' angles from 0° to 180°; the line is the law of random directions"
    return (
        f"<details><summary>What the columns are</summary><dl>{items}<dt>angles</dt><dd>{curve}</dd></dl></details>\n"
    )


def _notes(tensors: list[TensorMeasurement]) -> str:
    titles = ("Shape", "Type", "Note")
    head = "".join(f'<th scope="col">{title}</th>' for title in ("Tensor", *titles))
    rows = []
    for t in tensors:
        note = "; ".join(part for part in (f"{t.status}: {t.reason}" if t.reason else "", *t.notes) if part)
        cells = labelled(titles, ("×".join(map(str, t.shape)), t.dtype, note))
        rows.append(f'<tr><th scope="row">{text(t.path)}</th>{cells}</tr>')
    return f"<details><summary>Notes on {len(tensors)} tensors</summary>{table('', 'left', head, rows)}</details>\n"


def _sparkline(tensor: TensorMeasurement) -> str:
    """The histogram of angles as a small filled curve, the random law as a line, on the same scale."""
    counts = tensor.angle_histogram
    if not counts or not tensor.pairs or not tensor.dim or tensor.dim < 2:
        return ""
    density = [count / tensor.pairs for count in counts]
    law = _law(tensor.dim)
    top = max(max(density), max(law)) * 1.05
    label = (
        f"angles {tensor.angle_mean:.1f} ± {tensor.angle_std:.1f} degrees, by chance 90 ± {tensor.angle_std_random:.1f}"
    )
    area, line = _path(density, top), _path(law, top)
    return (
        f'<svg viewBox="0 0 180 40" preserveAspectRatio="none" role="img" aria-label="{text(label)}">'
        f'<path d="M0 40{area}L180 40Z" fill="var(--fill)" fill-opacity=".45"/>'
        f'<path d="M0 40{line}" fill="none" stroke="var(--ink)" vector-effect="non-scaling-stroke"/></svg>'
    )


def _path(values: list[float] | tuple[float, ...], top: float) -> str:
    """SVG line commands through the middle of each bin, leaving out points on a straight line."""
    heights = [round(40 - 38 * value / top, 1) for value in values]
    points = []
    for i, y in enumerate(heights):
        flat = 0 < i < len(heights) - 1 and heights[i - 1] == y == heights[i + 1]
        if not flat:
            points.append(f"L{i + 0.5:g} {y:g}")
    return "".join(points)


@cache
def _law(dim: int) -> tuple[float, ...]:
    """Share of the random law in each degree."""
    fine = torch.deg2rad((torch.arange(1800, dtype=torch.float64) + 0.5) / 10)
    share = random_angle_density(fine, dim).view(180, 10).mean(1) * torch.pi / 180
    return tuple(share.tolist())
