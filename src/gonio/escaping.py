"""Escape text from files and other code for terminals, pages and tables.

Recipe names, layer names and error messages come from outside. All output passes through :func:`plain`; HTML is
escaped in addition by the template engine (autoescape), CSV, markdown and LaTeX by the functions below.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = ["csv_cell", "html_table", "markdown_cell", "plain", "redact", "shorten", "tex_cell"]

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


def html_table(title: object, head: Sequence[str], rows: Iterable[Sequence[object]], notes: Sequence[str] = ()) -> str:
    """A table for a notebook: the `_repr_html_` of objects that `print` shows as aligned text.

    Example:
        >>> from gonio.escaping import html_table
        >>> html_table("swap_", ["layer"], [["<b>"]]).count("&lt;b&gt;")
        1
    """
    made = [[html.escape(plain("" if cell is None else cell)) for cell in row] for row in (head, *rows)]
    cells = ["".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in zip(_tags(made), made, strict=True)]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    remarks = "".join(f"<p>{html.escape(plain(note))}</p>" for note in notes)
    return f"<p><strong>{html.escape(plain(title))}</strong></p><table>{body}</table>{remarks}"


def _tags(rows: Sequence[object]) -> list[str]:
    return ["th", *["td"] * (len(rows) - 1)]


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


def __dir__() -> list[str]:
    return sorted(__all__)
