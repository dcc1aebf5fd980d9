"""Matplotlib figures as small, deterministic SVG that takes its colours from the page's style sheet.

Every colour is drawn as a marker value and afterwards replaced by a CSS variable, so that one SVG
reads well on a light page, a dark page and on paper. No pyplot, no global state: the settings are
in force only inside :func:`drawing`.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gonio.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "drawing", "figure", "inline", "panel"]

# Marker value → CSS variable. The variables themselves (Okabe–Ito, light and dark) are in style.css.
COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "rule": "#030303",
    "base": "#040404",
    "band": "#050505",
    "paper": "#060606",
    "c1": "#070707",
    "c2": "#080808",
    "c3": "#090909",
    "c4": "#0a0a0a",
    "c5": "#0b0b0b",
    "c6": "#0c0c0c",
    "c7": "#0d0d0d",
}
_VARIABLES = {value: f"var(--{name})" for name, value in COLORS.items()}
_STYLED = re.compile(r"\b(fill|stroke): (#0[0-9a-d]0[0-9a-d]0[0-9a-d])\b")
_TAG = re.compile(r"<[^<>]*>")
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "gonio",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 12.0,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "axes.linewidth": 0.8,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["muted"],
    "axes.titlecolor": COLORS["ink"],
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["rule"],
    "ytick.color": COLORS["rule"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
# matplotlib's settings are one dictionary per process; two reports drawn at once must take turns.
_TURN = threading.RLock()


@contextmanager
def drawing() -> Iterator[None]:
    """The settings of every figure, in force only inside the block; nothing outside it changes."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("The report page", "matplotlib", "lab") from error
    with _TURN, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser has fonts for names that matplotlib's own font cannot show.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure measured in CSS pixels: one SVG unit is one pixel at full size."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width / 72.0, height / 72.0), dpi=72)
    made.patch.set_alpha(0.0)
    return made


def panel(made: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes with margins in pixels from each edge of the figure, so that panels align across figures."""
    width, height = (float(size) * 72.0 for size in made.get_size_inches())
    box = (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    axes: Axes = made.add_axes(box)
    axes.patch.set_alpha(0.0)
    return axes


def inline(made: Figure, *, name: str, label: str, css: str = "") -> str:
    """The figure as an `<svg>` element for an HTML page.

    Args:
        name: prefix of every id, unique on the page.
        label: what the figure shows, for readers who do not see it.
        css: classes of the element.
    """
    from markupsafe import escape

    buffer = io.StringIO()
    made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    body = text[text.index("<svg") : text.rindex("</svg>")]
    body = re.sub(
        r"<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>",
        "",
        body[body.index(">") + 1 :],
        flags=re.DOTALL,
    )
    body = _TAG.sub(lambda tag: _restyle(tag.group(), name), body)
    width, height = (round(float(size) * 72.0) for size in made.get_size_inches())
    body = re.sub(r"\s*\n\s*", "\n", body)
    return (
        f'<svg class="{escape(css)}" role="img" aria-label="{escape(label)}" width="{width}" '
        f'height="{height}" '
        f'viewBox="0 0 {width} {height}" style="--w:{width}px">{body}</svg>'
    )


def _restyle(tag: str, name: str) -> str:
    """One tag with page colours and page-unique ids, and without what the style sheet says anyway.

    Only tags come here, never text nodes: a layer may be called `fill: #010101`.
    """
    tag = _STYLED.sub(lambda m: f"{m[1]}: {_VARIABLES.get(m[2], m[2])}", tag)
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag).replace("font-family: 'DejaVu Sans'; ", "")
    tag = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", tag)
    return tag.replace("xlink:href", "href")
