"""The results as one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gonio import pages
from gonio.escaping import plain
from gonio.lab.judging.results import Results
from gonio.lab.plan import BASELINE
from gonio.lab.showing import tables
from gonio.lab.showing.figures import Layer, angle_chart, cost_chart, forest, layers, learning_curves, norm_chart
from gonio.lab.showing.tables import Scale, attacks, costs, evidence, further, hidden_gradients, tuning

if TYPE_CHECKING:
    from jinja2 import Environment

_SHOWN_LAYERS = 16  # with 6 recipes about 25 kB each


def html(results: Results) -> str:
    """The comparison as one self-contained page.

    Verdicts, effects, costs, learning curves, angles and norms of the layers, the changes of each recipe, and
    everything that is needed to repeat the study. The page loads nothing, runs only its own script (with a content
    security policy), is complete without it, and follows the reader's light or dark setting. The same results give
    the same bytes.

    Names, errors and notes come from other people's files: every value is escaped, without control and
    bidirectional characters, home directories and credentials in URLs.

    Raises:
        MissingExtraError: if matplotlib is not installed.

    Example:
        >>> page = gonio.lab.showing.html(gonio.lab.showing.example())
        >>> "decoupled-tanh helps" in page, "http:" in page, len(page) < 200_000
        (True, False, True)
    """
    colors = {effect.recipe: f"c{i % 7 + 1}" for i, effect in enumerate(results.effects)}
    page = {
        "results": results,
        "plan": results.plan,
        "scale": Scale.of(results),
        "colors": {BASELINE: "base"} | colors,
        "evidence": evidence(results),
        "further": further(results),
        "costs": costs(results),
        "tuning": tuning(results),
        "attacks": attacks(results),
        "hidden_gradients": hidden_gradients(results),
        "forest_wide": forest(results, colors, narrow=False),
        "forest_narrow": forest(results, colors, narrow=True),
        "time_chart": cost_chart(results, colors, "step_time"),
        "memory_chart": cost_chart(results, colors, "memory"),
        "curves": learning_curves(results, colors),
        **_layer_figures(results, {BASELINE: "base"} | colors),
    }
    return environment().get_template("page.html.j2").render(page, whole=True)


def _layer_figures(results: Results, colors: dict[str, str]) -> dict[str, Any]:
    """The layers that a recipe changed most, in the order of the model, each with its two charts."""
    found = layers(results.runs)
    kept = sorted(found, key=lambda layer: -layer.moved)[:_SHOWN_LAYERS]

    def charts(i: int, layer: Layer) -> tuple[Layer, Any, Any]:
        named = {recipe: color for recipe, color in colors.items() if recipe in layer.recipes}
        recipes = {recipe: color for recipe, color in named.items() if recipe != BASELINE}
        return layer, angle_chart(layer, recipes, name=f"a{i}"), norm_chart(layer, named, name=f"n{i}")

    shown = [layer for layer in found if any(layer is one for one in kept)]
    return {"layers": [charts(i, layer) for i, layer in enumerate(shown)], "all_layers": len(found)}


def write_html(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the page of :func:`html` to a file, atomically.

    Returns:
        The path.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> gonio.lab.showing.write_html(gonio.lab.showing.example(), folder / "page.html").name
        'page.html'
        >>> [path.name for path in folder.iterdir()]
        ['page.html']
    """
    return write_text(html(results), path)


def write_text(content: str, path: str | os.PathLike[str]) -> Path:
    """Write to a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:80]}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0o022)  # mkstemp ignores it, and reading it requires setting it
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


@cache
def environment() -> Environment:
    """The templates of all pages, with the words, colours and recipes that pages of studies show."""
    from markupsafe import Markup

    def key(color: str, *, dotted: bool = False) -> Markup:
        """The line with the colour of a recipe; decoration, the name stands beside it."""
        dash = Markup(' stroke-dasharray="2 2"') if dotted else ""
        return Markup(
            '<svg class="key" viewBox="0 0 24 10" aria-hidden="true"><line x1="1" y1="5" x2="23" y2="5" '
            'stroke="var(--{})" stroke-width="{}"{}/></svg>'
        ).format(plain(color), "2" if dotted else "4.5", dash)

    made = pages.environment("gonio.lab.showing")
    made.globals.update(key=key, say=tables, asdict=asdict, BASELINE=BASELINE, yaml_of=_yaml_of)
    return made


def _yaml_of(content: Any) -> str:
    """The content as YAML, keys in their own order; by way of JSON, so that it is plain data."""
    data = json.loads(json.dumps(content, default=str))
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)).rstrip()
