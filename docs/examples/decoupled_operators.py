"""Draw every magnitude function, every angular activation and their operators over the plane, into docs/images.

    python docs/examples/decoupled_operators.py

Needs the extra `lab`. The same versions draw the same files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from gonio.nn import angular, magnitude
from gonio.plots import on_plane

MAGNITUDES = {name: getattr(magnitude, name)() for name in magnitude.__all__ if name != "Magnitude"}
# without RectifiedCosine, which is the upper half of Cosine
ANGULAR = {name: getattr(angular, name)() for name in ("Cosine", "Linear", "Sigmoid", "SquaredCosine")}
BANDS = mpl.colormaps["RdBu_r"].resampled(17)  # whose edges are level lines
IMAGES = Path(__file__).parents[1] / "images"


def curves() -> Figure:
    """h over the norm and g over the angle: the methods `plot` of one class after the other."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots(3, 4).flatten()
    for ax, part in zip(axes, (*MAGNITUDES.values(), *ANGULAR.values()), strict=False):
        part.plot(ax)
        ax.set_title(type(part).__name__)
        if isinstance(part, magnitude.Magnitude):
            ax.set_ylim(bottom=0)
    axes[len(MAGNITUDES) + len(ANGULAR)].set_axis_off()
    return figure


def planes() -> Figure:
    """h·g for a filter along the first axis, each pair on a colour scale of its own."""
    figure = Figure(figsize=(7.5, 11.5), layout="constrained")
    grid = figure.subplots(len(MAGNITUDES), len(ANGULAR))
    for row, (h, one) in zip(grid, MAGNITUDES.items(), strict=True):
        for ax, (g, other) in zip(row, ANGULAR.items(), strict=True):
            plane = on_plane(one, other, reach=3.0).numpy()
            edge = float(abs(plane).max())
            ax.imshow(
                plane, extent=(-3, 3, -3, 3), origin="lower", cmap=BANDS, interpolation="nearest", vmin=-edge, vmax=edge
            )
            ax.set(xticks=[-3, 0, 3], yticks=[-3, 0, 3], title=f"{h}\n{g}, up to {edge:.2g}")
            ax.title.set_fontsize(8)
            ax.tick_params(labelsize=7)
    return figure


def main(folder: Path) -> None:
    # fixed identifiers and no date: the same drawing is the same file
    with mpl.rc_context({"svg.hashsalt": "gonio", "svg.fonttype": "path", "font.size": 9}):
        curves().savefig(folder / "decoupled-curves.svg", metadata={"Date": None})
        planes().savefig(folder / "decoupled-planes.png", metadata={"Software": None}, dpi=70)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
