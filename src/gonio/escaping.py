"""Escape text from files and other code for terminals, pages and tables.

Recipe names, layer names and error messages come from outside. All output passes through :func:`plain`; HTML is
escaped in addition by the template engine (autoescape), CSV, markdown, LaTeX and JSON by the functions below.
"""

from __future__ import annotations

import csv
import html
import io
import math
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gonio.errors import imported

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["csv_cell", "html_table", "markdown_cell", "plain", "redact", "shorten", "tex_cell"]
__dir__ = __all__.copy  # the public names alone

_KEPT = {"\n", "\t"}
_LONGEST = 20_000  # characters; keeps an error message of megabytes from making a page of megabytes
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_USERINFO = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@]+@")
_HOME = re.compile(r"(?<![\w.])(/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s\"':]+")


def plain(text: object, *, longest: int = _LONGEST) -> str:
    r"""Text without control, bidirectional-override, zero-width and surrogate characters.

    Newlines and tabs are kept. Text longer than `longest` is cut, with a note of the number of characters.

    Example:
        >>> from gonio.escaping import plain
        >>> plain("a\u202eb\x1b[31mc")
        'ab[31mc'
    """
    shown = str(text)
    cut = len(shown) - longest
    if cut > 0:
        shown = f"{shown[:longest]} … ({cut} more characters)"
    return "".join(c for c in shown if c in _KEPT or unicodedata.category(c) not in _UNSHOWN)


# Cc control, Cf format (bidi overrides, zero width), Cs surrogates, Zl/Zp line separators.
_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def redact(text: object) -> str:
    """Plain text without the user's home directory and without credentials in URLs.

    Example:
        >>> from gonio.escaping import redact
        >>> redact("https://me:secret@host/x and /home/me/data")
        'https://host/x and ~/data'
    """
    return _HOME.sub("~", _USERINFO.sub(r"\1", plain(text)))


def shorten(text: object, *, longest: int = 28) -> str:
    """Plain text on one line, with the middle replaced by … if it is longer than `longest`.

    Example:
        >>> from gonio.escaping import shorten
        >>> shorten("layer4.1.downsample.projection.0.conv", longest=17)
        'layer4.1…n.0.conv'
    """
    line = " ".join(plain(text).split())
    if len(line) <= longest:
        return line
    head = (longest - 1) // 2
    return f"{line[:head]}…{line[len(line) - (longest - 1 - head) :]}"


def csv_cell(value: object) -> str:
    """A CSV cell that no spreadsheet evaluates: text that starts like a formula gets a leading quote.

    Example:
        >>> from gonio.escaping import csv_cell
        >>> csv_cell("=HYPERLINK(1)"), csv_cell("-1.5"), csv_cell(None)
        ("'=HYPERLINK(1)", '-1.5', '')
    """
    if value is None:
        return ""
    shown = plain(value)
    if shown.lstrip(" ").startswith(_FORMULA) and not _NUMBER.fullmatch(shown):
        return f"'{shown}"
    return shown


def markdown_cell(value: object) -> str:
    r"""A Markdown table cell without active markup.

    Example:
        >>> from gonio.escaping import markdown_cell
        >>> markdown_cell("a|b <i>*c*</i>")
        'a\\|b &lt;i&gt;\\*c\\*&lt;/i&gt;'
    """
    line = " ".join(plain("" if value is None else value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#!|~$@])", r"\\\1", line) if line else ""


def csv_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Lines of CSV in which no cell is a formula; several values of one cell are joined."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    flat = (["; ".join(map(str, c)) if isinstance(c, (list, tuple)) else c for c in row] for row in rows)
    writer.writerows(map(csv_cell, row) for row in flat)
    return buffer.getvalue()


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a markdown table in which no cell acts as markup."""
    cells = [map(markdown_cell, head), ["---"] * len(head), *(map(markdown_cell, row) for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def display_width(text: str) -> int:
    """Columns of a terminal that a text takes: 2 for an East Asian wide character, 0 for a combining mark.

    Example:
        >>> from gonio.escaping import display_width
        >>> display_width("norm"), display_width("范数")
        (4, 4)
    """
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def aligned(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Rows as lines in which every column starts, or at these places ends, in the same column of a terminal.

    Example:
        >>> from gonio.escaping import aligned
        >>> aligned([("范数", "1"), ("a", "20")], right=[1])
        ['范数   1', 'a     20']
    """
    ends, widths = {*right}, [max(map(display_width, column)) for column in zip(*rows, strict=True)]

    def cell(text: str, at: int) -> str:
        gap = " " * (widths[at] - display_width(text))
        return f"{gap}{text}" if at in ends else f"{text}{gap}"

    return ["  ".join(cell(text, at) for at, text in enumerate(row)).rstrip() for row in rows]


def printed(table: RenderableType) -> str:
    """What rich prints without colours, as wide as the terminal, or 100 columns where there is none."""
    console = imported("rich.console").Console  # `gonio --help` does without it
    stream = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    console(file=stream, width=width, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())


def html_table(title: object, head: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()) -> str:
    """A table for a notebook: the `_repr_html_` of objects that `print` shows as aligned text.

    Example:
        >>> from gonio.escaping import html_table
        >>> html_table("swap_", ["layer"], [["<b>"]]).count("&lt;b&gt;")
        1
    """

    def line(cells: Sequence[object], tag: str) -> str:
        shown = (html.escape(plain("" if cell is None else cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"

    body = "".join([line(head, "th"), *(line(row, "td") for row in rows)])
    remarks = "".join(f"<p>{html.escape(plain(note))}</p>" for note in notes)
    return f"<p><strong>{html.escape(plain(title))}</strong></p><table>{body}</table>{remarks}"


_TEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "+": "$+$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "…": r"\ldots{}",
    **{
        character: f"${command}$"
        for character, command in {
            "‖": r"\|",
            "√": r"\surd",
            "∇": r"\nabla",
            "≥": r"\geq",
            "≤": r"\leq",
            "⟨": r"\langle",
            "⟩": r"\rangle",
            "α": r"\alpha",
            "β": r"\beta",
            "γ": r"\gamma",
            "ε": r"\varepsilon",
            "η": r"\eta",
            "θ": r"\theta",
            "λ": r"\lambda",
            "μ": r"\mu",
            "π": r"\pi",
            "ρ": r"\rho",
            "σ": r"\sigma",
            "Σ": r"\Sigma",
            "≈": r"\approx",
            "→": r"\to",
            "∞": r"\infty",
            "·": r"\cdot",
            "₁": "_1",
            "₂": "_2",
            "⁻": "^-",
            "⁰": "^0",
            "²": "^2",
            "³": "^3",
        }.items()
    },
}


def tex_cell(value: object) -> str:
    r"""A cell of a LaTeX table without active commands.

    Example:
        >>> from gonio.escaping import tex_cell
        >>> tex_cell(r"\input{x} & 5_%"), tex_cell("−0.5")
        ('\\textbackslash{}input\\{x\\} \\& 5\\_\\%', '$-$0.5')
    """
    line = " ".join(plain("" if value is None else value).split())
    return "".join(_TEX.get(character, character) for character in line)


def write_text(content: str, path: str | os.PathLike[str]) -> Path:
    """Write to a temporary file beside `path`, then rename it: a reader sees the old file or the new one.

    A link is followed; a device or a pipe is written to as it is.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_text(content, encoding="utf-8", newline="\n")
        return Path(path)
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
    return Path(path)


def json_data(value: Any, text: Callable[[str], str] = plain) -> Any:
    """Records as objects, plain text without control characters, None for a number that is not finite.

    `text` makes the texts; the keys are plain.

    Example:
        >>> from gonio.escaping import json_data
        >>> json_data({"norms": (1.0, float("inf")), "name": "a"})
        {'norms': [1.0, None], 'name': 'a'}
    """
    if is_dataclass(value):
        return {field.name: json_data(getattr(value, field.name), text) for field in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {plain(key): json_data(item, text) for key, item in value.items()}
    return [json_data(item, text) for item in value] if isinstance(value, (list, tuple)) else value
