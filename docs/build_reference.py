"""Write docs/reference/*.md from the docstrings of the public packages.

    python docs/build_reference.py            write the pages
    python docs/build_reference.py --check    exit 1 when a page differs from what would be written

A docstring is the only source: its examples run as doctests, so a page cannot promise what the code
does not do.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docstrings import inline, render_docstring

FOLDER = Path(__file__).resolve().parent / "reference"


def packages() -> list[str]:
    """`gonio` and every public package or module directly below it that lists its names in `__all__`.

    The command line has no names to import and no page. Nothing is imported to find out.
    """
    folder = Path(str(importlib.util.find_spec("gonio").origin)).parent
    found = [path for path in folder.glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()]
    found += [folder / "nn" / name for name in ("angular.py", "magnitude")]
    names = {".".join(["gonio", *path.relative_to(folder).with_suffix("").parts]): path for path in found}
    public = [name for name, path in names.items() if not path.name.startswith("_") and _exports(path)]
    return ["gonio", *sorted(set(public) - {"gonio.cli"})]


def _exports(path: Path) -> bool:
    file = path if path.suffix == ".py" else path / "__init__.py"
    return file.exists() and "__all__ = " in file.read_text(encoding="utf-8")


def members(module: ModuleType) -> list[tuple[str, Any]]:
    """The public names of a package in alphabetical order, sub-packages left out."""
    listed = [(name, getattr(module, name)) for name in sorted(module.__all__, key=str.casefold)]
    return [(name, member) for name, member in listed if not isinstance(member, ModuleType)]


def documented(member: Any) -> bool:
    return inspect.isclass(member) or inspect.isroutine(member)


# --- pages ----------------------------------------------------------------------------------------


def signature(member: Any) -> str:
    """The signature in the words of the source; one parameter per line where it is long."""
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError):
        return ""
    pieces = list(_pieces(found))
    result = found.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {_annotation(result)}"
    text = f"({', '.join(pieces)}){arrow}"
    if len(text) <= 90:
        return text
    return "\n".join(["(", *(f"    {piece}," for piece in pieces), f"){arrow}"])


def _pieces(found: inspect.Signature) -> Iterator[str]:
    """Each parameter as the source has it, with the markers of its kind."""
    parameters = list(found.parameters.values())
    for index, parameter in enumerate(parameters):
        kind, before = parameter.kind, [p.kind for p in parameters[:index]]
        if kind is parameter.KEYWORD_ONLY and not {parameter.VAR_POSITIONAL, kind} & set(before):
            yield "*"
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f"{' = ' if ':' in text else '='}{_default(parameter.default)}"
        yield text
        after = [p.kind for p in parameters[index + 1 :]]
        if kind is parameter.POSITIONAL_ONLY and kind not in after:
            yield "/"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    """Functions by name, records at their defaults by constructor: an address would change with every run."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if dataclasses.is_dataclass(value) and all(_has_default(field) for field in dataclasses.fields(value)):
        return f"{type(value).__name__}()" if value == type(value)() else repr(value)
    return f"{type(value).__name__}()" if " at 0x" in repr(value) else repr(value)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return not field.init or field.default is not missing or field.default_factory is not missing


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself defines and documents."""
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        described = isinstance(plain, property) or inspect.isfunction(plain)
        if described and not name.startswith("_") and plain.__doc__:
            yield name, getattr(cls, name) if not isinstance(plain, property) else plain


def render_member(name: str, member: Any) -> str:
    kind = "class " if inspect.isclass(member) else ""
    parts = [f"## {name}", f"```python\n{kind}{name}{signature(member)}\n```"]
    if written(member):
        parts.append(render_docstring(inspect.getdoc(member) or ""))
    if inspect.isclass(member):
        for key, method in own_methods(member):
            shown = key if isinstance(method, property) else f"{key}{signature(method)}"
            parts += [f"### {name}.{key}", f"```python\n{shown}\n```"]
            parts.append(render_docstring(inspect.getdoc(method) or ""))
    return "\n\n".join(parts)


def written(member: Any) -> bool:
    """Whether a person wrote the docstring: dataclasses make up one of their own."""
    generated = dataclasses.is_dataclass(member) and (member.__doc__ or "").startswith(f"{member.__name__}(")
    return bool(member.__doc__) and not generated


def summary(member: Any) -> str:
    first = (inspect.getdoc(member) or "").strip().split("\n\n")[0] if written(member) else ""
    return inline(" ".join(first.split())).replace("|", "\\|")


def anchors(names: list[str]) -> dict[str, str]:
    """The address of each heading: lower case, numbered where two names differ in case alone."""
    seen: dict[str, int] = {}
    found = {}
    for name in names:
        low = name.lower()
        found[name] = f"{low}-{seen[low]}" if low in seen else low
        seen[low] = seen.get(low, 0) + 1
    return found


def page(name: str) -> str:
    """The page of one package: its purpose, a table of names, then each name in full."""
    module = importlib.import_module(name)
    found = [(key, member) for key, member in members(module) if documented(member)]
    links = anchors([key for key, _ in found])
    rows = [f"| [`{key}`](#{links[key]}) | {summary(member)} |" for key, member in found]
    purpose = inline(inspect.cleandoc(module.__doc__ or ""))
    head = [f"# {name}", purpose, "\n".join(["| name | what it is |", "|---|---|", *rows])]
    return "\n\n".join([*head, *(render_member(key, member) for key, member in found)]) + "\n"


def root_page(names: list[str]) -> str:
    """The page of `gonio` itself: its names with the page that describes each."""
    module = importlib.import_module("gonio")
    rows = []
    for key, member in members(module):
        if documented(member):
            home = _home(key, member, names)
            link = f"[`{key}`]({home.removeprefix('gonio.')}.md#{key.lower()})" if home else f"`{key}`"
            rows.append(f"| {link} | {summary(member)} |")
    pages = [f"| [`{name}`]({name.removeprefix('gonio.')}.md) | {inline(_first_line(name))} |" for name in names[1:]]
    return (
        "\n\n".join(
            [
                "# gonio",
                inline(inspect.cleandoc(module.__doc__ or "")),
                "\n".join(["| name | what it is |", "|---|---|", *rows]),
                "\n".join(["| package | what is in it |", "|---|---|", *pages]),
            ]
        )
        + "\n"
    )


def _home(key: str, member: Any, names: list[str]) -> str | None:
    """The most specific package that exports the same object."""
    homes = [n for n in names[1:] if getattr(importlib.import_module(n), key, None) is member]
    listed = [n for n in homes if key in importlib.import_module(n).__all__]
    return max(listed, key=len) if listed else None


def _first_line(name: str) -> str:
    return (importlib.import_module(name).__doc__ or "").strip().split("\n")[0]


def build() -> dict[Path, str]:
    """The text of every generated page."""
    names = packages()
    pages = {FOLDER / "index.md": root_page(names)}
    return pages | {FOLDER / f"{name.removeprefix('gonio.')}.md": page(name) for name in names[1:]}


def stale(pages: dict[Path, str]) -> list[Path]:
    """Pages that are missing, differ, or describe nothing any more."""
    there = {*FOLDER.glob("*.md"), *(path for path in pages if path.exists())}
    on_disk = {path: path.read_text(encoding="utf-8") for path in there}
    return sorted({path for path in pages.keys() | on_disk.keys() if pages.get(path) != on_disk.get(path)})


def main(arguments: list[str]) -> int:
    pages = build()
    differing = stale(pages)
    if "--check" in arguments:
        if differing:
            names = ", ".join(path.name for path in differing)
            print(f"out of date: {names}; run `make docs`", file=sys.stderr)
        return int(bool(differing))
    FOLDER.mkdir(exist_ok=True)
    for path in differing:
        if path in pages:
            path.write_text(pages[path], encoding="utf-8")
        else:
            path.unlink()
    print(f"{len(pages)} pages, {len(differing)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
