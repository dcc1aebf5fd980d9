"""The frame of a page, its tables, and the one place where foreign text becomes HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources

from gonio.escaping import plain

__all__ = ["labelled", "page", "row", "table", "text"]

HEAD = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
)
BODY = (
    ":root {{ color-scheme: light dark; }} body {{ margin: 0; background: #fbfaf7; }}\n"
    "@media screen and (prefers-color-scheme: dark) {{ body {{ background: #15171b; }} }}\n"
    "main {{ max-width: 1400px; margin: 0 auto; padding: clamp(16px, 4vw, 48px); }}"
)


def page(title: str, inner: str, *, whole: bool) -> str:
    """One self-contained page, or (`whole=False`) a fragment with its own style."""
    style = (resources.files("gonio.measuring") / "page.css").read_text(encoding="utf-8")
    if not whole:
        return f'<div class="gonio-m"><style>{style}</style>\n{inner}</div>\n'
    body = BODY.format()
    return (
        f"{HEAD}<title>{text(title)}</title>\n<style>\n{body}\n{style}</style>\n</head>\n"
        f'<body>\n<main class="gonio-m">\n{inner}</main>\n</body>\n</html>\n'
    )


def text(value: object) -> str:
    """Foreign text as HTML: nothing else may become a part of a page."""
    return html.escape(plain(value), quote=True)


def table(before: str, css: str, head: str, rows: Sequence[str]) -> str:
    """A table of rows that are HTML already, which scrolls where it is too wide."""
    body = "\n".join(rows)
    made = f'<table class="{css}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'{before}<div class="scroll">{made}</div>\n'


def labelled(titles: Iterable[str], cells: Iterable[object]) -> str:
    """Cells that carry their column's title, which a narrow screen shows instead of a head."""
    made = zip(titles, cells, strict=True)
    return "".join(f'<td data-title="{text(title)}">{text(cell)}</td>' for title, cell in made)


def row(name: str, cells: Iterable[str]) -> str:
    """A row of a table: its name and its cells, as they are."""
    return f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells)}</tr>'
