"""The results as one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gonio import pages
from gonio.escaping import plain, write_text
from gonio.lab.judging.results import Results
from gonio.lab.showing import tables
from gonio.lab.showing.figures import cost_chart, curves, forest, layer_pictures, layers
from gonio.lab.showing.tables import Scale, attacks, costs, evidence, further, hidden_gradients, tuning, verdicts
from gonio.pages.pictures import colors as colors_of
from gonio.recipes import BASELINE

if TYPE_CHECKING:
    from jinja2 import Environment


def html(results: Results) -> str:
    """The comparison as one self-contained page.

    Verdicts, effects, costs, learning curves, angles and norms of the layers, the changes of each recipe, and
    everything that is needed to repeat the study. The page loads nothing, runs only its own script (with a content
    security policy), is complete without it, and follows the reader's light or dark setting. The same results give
    the same bytes.

    Names, errors and notes come from other people's files: every value is escaped, without control and
    bidirectional characters, home directories and credentials in URLs.

    Example:
        >>> page = gonio.lab.showing.html(gonio.lab.showing.example())
        >>> "decoupled-tanh helps" in page, "http:" in page, len(page) < 200_000
        (True, False, True)
    """
    colors = colors_of([BASELINE, *(effect.recipe for effect in results.effects)])
    table, found = verdicts(results), layers(results.runs)
    notes = [f"{row[1]}  {effect.verdict}" for row, effect in zip(table.rows, results.effects, strict=True)]
    page = {
        "results": results,
        "plan": results.plan,
        "scale": Scale.of(results),
        "colors": colors,
        "verdicts": list(zip(results.effects, table.rows, strict=True)),
        "evidence": evidence(results),
        "further": further(results),
        "costs": costs(results),
        "tuning": tuning(results),
        "attacks": attacks(results),
        "hidden_gradients": hidden_gradients(results),
        "forests": [forest(results, notes, narrow=narrow) for narrow in (False, True)],
        "time_chart": cost_chart(results, colors, "step_time"),
        "memory_chart": cost_chart(results, colors, "memory"),
        "curves": curves(results, colors),
        "layers": list(layer_pictures(found, colors)),
        "all_layers": len(found),
    }
    return environment().get_template("page.html.j2").render(page, whole=True)


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


@cache
def environment() -> Environment:
    """The templates of all pages, with the words, colours and recipes that pages of studies show."""
    from markupsafe import Markup

    def key(color: str, *, dashed: bool = False) -> Markup:
        """The line with the colour of a recipe; decoration, the name stands beside it."""
        dash = Markup(' stroke-dasharray="4 3"') if dashed else ""
        return Markup(
            '<svg class="key" viewBox="0 0 24 10" aria-hidden="true"><line x1="1" y1="5" x2="23" y2="5" '
            'stroke="var(--{})" stroke-width="{}"{}/></svg>'
        ).format(plain(color), "2" if dashed else "4.5", dash)

    made = pages.environment("gonio.lab.showing")
    made.globals.update(key=key, tables=tables, asdict=asdict, BASELINE=BASELINE, yaml_of=_yaml_of)
    return made


def _yaml_of(content: Any) -> str:
    """The content as YAML, keys in their own order; by way of JSON, so that it is plain data."""
    data = json.loads(json.dumps(content, default=str))
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)).rstrip()
