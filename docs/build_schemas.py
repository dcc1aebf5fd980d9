"""Writes docs/schemas/*.json, the JSON Schemas of all exported documents, from the tables of docs/json.md.

`python docs/build_schemas.py` writes the files; with `--check` it fails if a file differs from what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE, FOLDER = DOCS / "json.md", DOCS / "schemas"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+?) \| ?([^|]*?) ?\|$", flags=re.M)
LINK = re.compile(r"\]\(#([\w-]+)\)")
TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "true or false": {"type": "boolean"},
    "object": {"type": "object"},
    "null": {"type": "null"},
    "list of text": {"type": "array", "items": {"type": "string"}},
    "list of integers": {"type": "array", "items": {"type": "integer"}},
    "list of two integers": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "list of 180 integers": {"type": "array", "items": {"type": "integer"}, "minItems": 180, "maxItems": 180},
    "list of numbers": {"type": "array", "items": {"type": "number"}},
    "list of lists": {"type": "array", "items": {"type": "array"}},
    "list of objects": {"type": "array", "items": {"type": "object"}},
}


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each document, by the file's name."""
    parts = re.split(r"^##+ (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    tables = {title: ROW.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}
    titles = {_anchor(title): title for title in tables}
    return {
        f"{title.replace('/', '-')}.json": _document(title, tables, titles)
        for title in tables
        if title.startswith("gonio.")
    }


def _anchor(title: str) -> str:
    """Where a link to a heading leads."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _document(name: str, tables: dict[str, list[Any]], titles: dict[str, str]) -> dict[str, Any]:
    parts: dict[str, Any] = {}

    def made(title: str) -> dict[str, Any]:
        rows = {key: _typed(kind, meaning, refer) for key, kind, meaning in tables[title]}
        return {"type": "object", "required": list(rows), "properties": rows}

    def refer(anchor: str) -> dict[str, Any]:
        if anchor not in parts:
            parts[anchor] = {}  # a document may hold documents of its own kind
            parts[anchor] = made(titles[anchor])
        return {"$ref": f"#/$defs/{anchor}"}

    content = made(name)
    content["properties"]["schema"] = {"const": name}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{name.replace('/', ':')}",
        "title": name,
    }
    return {**head, **content, **({"$defs": parts} if parts else {})}


def _typed(kind: str, meaning: str, refer: Any) -> dict[str, Any]:
    """The schema of one row; a link in its meaning leads to the table of its objects."""
    text = " ".join(re.sub(r"\[|\]\(#[\w-]+\)|`", "", meaning).split())
    said = {"description": text} if text else {}
    names = [kind] if kind in TYPES else kind.split(" or ")
    choices = [dict(TYPES[name]) for name in names]
    if link := LINK.search(meaning):
        for choice in choices:
            if choice.get("items") == {"type": "object"}:
                choice["items"] = refer(link[1])
            elif choice == {"type": "object"}:
                choice.update(refer(link[1]))
    return {**said, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}


def main() -> None:
    written = {FOLDER / name: json.dumps(one, indent=1, ensure_ascii=False) + "\n" for name, one in schemas().items()}
    old = [path for path in FOLDER.glob("*.json") if path not in written]
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{path} is not what docs/build_schemas.py writes" for path in [*stale, *old]) or 0)
    FOLDER.mkdir(exist_ok=True)
    for path in old:
        path.unlink()
    for path in stale:
        path.write_text(written[path], encoding="utf-8")


if __name__ == "__main__":
    main()
