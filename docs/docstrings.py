"""Docstrings in this project's sections as markdown."""

from __future__ import annotations

import inspect
import re
import textwrap

__all__ = ["inline", "render_docstring"]

SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Shape": "Shape",
    "Invariances": "Invariances",
    "Raises": "Raises",
    "Cost": "Cost",
    "Folding": "Folding",
    "Differs": "Differs",
    "Note": "Note",
    "See also": "See also",
    "References": "References",
}
EXAMPLES = {"Example", "Examples"}
HEADER = re.compile(rf"^({'|'.join([*SECTIONS, *EXAMPLES])}):(?:\s+(.*))?$")


def inline(text: str) -> str:
    """RST roles and double backquotes in markdown."""
    text = re.sub(r":math:`([^`]+)`", lambda m: f"${' '.join(m[1].split())}$", text)
    text = re.sub(r":\w+:`~?(?:gonio\.)?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def blocks(text: str) -> list[str]:
    """Paragraphs; an indented continuation stays with the directive that it belongs to."""
    parts = [part for part in re.split(r"\n\s*\n", text.strip("\n")) if part.strip()]
    joined: list[str] = []
    for part in parts:
        if joined and joined[-1].lstrip().startswith(".. ") and part.startswith(" "):
            joined[-1] += "\n" + part
        else:
            joined.append(part)
    return joined


def paragraph(block: str) -> str:
    """One block of prose, mathematics, a table or a list."""
    lines = block.splitlines()
    if lines[0].startswith(".. math::"):
        formula = "\n".join([lines[0].removeprefix(".. math::"), *lines[1:]])
        return f"$$\n{inspect.cleandoc(formula).strip()}\n$$"
    if re.fullmatch(r"=+( +=+)*", lines[0].strip()):
        return f"```text\n{block}\n```"
    return inline(block)


def items(text: str) -> str:
    """`name: what it is` lines of a section as a list; prose stays prose."""
    body = textwrap.dedent(text).strip("\n")
    if not re.match(r"^(\*{0,2}\w[\w.]*|\w+(, \w+)*): ", body):
        return "\n\n".join(paragraph(block) for block in blocks(body))
    entries = re.split(r"\n(?=\S)", body)
    return "\n".join(_entry(entry) for entry in entries)


def _entry(entry: str) -> str:
    name, _, text = entry.partition(":")
    folded = " ".join(line.strip() for line in text.strip().splitlines())
    return f"- `{name}`: {inline(folded)}"


def split(document: str) -> list[tuple[str, str]]:
    """(section, text) pairs in order; the opening has the section ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in document.splitlines():
        header = HEADER.match(line)
        if header:
            found.append((header[1], [f"    {header[2]}"] if header[2] else []))
        else:
            found[-1][1].append(line)
    return [(name, "\n".join(lines)) for name, lines in found]


def render_docstring(document: str) -> str:
    parts = []
    for name, text in split(document):
        if name in EXAMPLES:
            parts.append(f"**Example**\n\n```pycon\n{textwrap.dedent(text).strip()}\n```")
        elif name:
            parts.append(f"**{SECTIONS[name]}**\n\n{items(text)}")
        else:
            parts += [paragraph(block) for block in blocks(text)]
    return "\n\n".join(parts)
