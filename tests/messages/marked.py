"""Every text that can be shown in another language, read from the source: the keys of a complete catalogue."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import yaml
from typer.main import get_command

from gonio.cli import app
from gonio.cli.explain import Listed, rows_of
from gonio.cli.helping import paragraphs_of
from gonio.lab.claims import load_claims
from gonio.lab.claims.claim import SCOPES
from gonio.lab.claims.result import WORDS
from gonio.lab.running.measures import measures
from gonio.lab.showing import tables
from gonio.lab.showing.claims import _MARKS, measured_text
from gonio.measuring.figures.heads import ROLES

SOURCE = Path(__file__).resolve().parents[2] / "src" / "gonio"
# The arguments that are texts, by the function that takes them: their places, or the names of keywords.
TEXTS: dict[str, tuple[int | str, ...]] = {
    "say": (0,),
    "fixed": (0,),
    "local": (0,),
    "Message": (1,),
    "Column": (1, 2, "title", "explanation"),
    "C": (1, 2, "explanation"),
    "figure": (0, 1),
    "rounding": (0, 1),
    "bare_table": (0, 1),
    "Lane": (0, 1),
    "joined": (1, "by", "last"),
    "progress": (0,),
    "save": (2,),
    "said_of": (2, 3),
    "rows_shown": ("noun", "by"),
    "tensor_table": (0,),
}
# Of exceptions, in the packages whose sentences a command shows; those of other packages stay English.
ERRORS: dict[str, tuple[int | str, ...]] = {
    "InvalidArgumentError": (0, 1, 2),
    "UnknownNameError": (0, "do"),
    "UnreadableFileError": (1, 2),
    "StudyError": (1, 2),
    "NotApplicableError": (0, 2, 3, "action"),
}
IN_ERRORS = (
    *("cli/", "models/", "measuring/reading/source.py", "measuring/reading/formats/", "measuring/checking/"),
    *("lab/treating/", "surgery/balance.py", "surgery/calibrate.py", "surgery/equivalent.py", "surgery/even_out.py"),
    *("surgery/lsuv.py", "surgery/match_statistics.py", "surgery/recycle.py", "surgery/shrink.py"),
)
OF_TYPER = ("install_completion", "show_completion")  # options with helps of its own
NOUNS = {"counted": 1, "verdict": 2}  # the place of a noun that a number stands before


def marked() -> dict[str, str]:
    """Each text, and the file that has it."""
    found: dict[str, str] = {", ": "__init__.py"}  # the default of `joined`; a space stands between sentences
    for path in sorted(SOURCE.rglob("*.py")):
        texts = TEXTS | ERRORS if path.relative_to(SOURCE).as_posix().startswith(IN_ERRORS) else TEXTS
        for text in _of_python(ast.parse(path.read_text(encoding="utf-8")), texts):
            found.setdefault(text, path.name)
    for path in sorted(SOURCE.rglob("*.j2")):
        for text in _of_template(path.read_text(encoding="utf-8")):
            found.setdefault(text, path.name)
    for words in (_MARKS, tables._MARKS, *WORDS.values()):  # verdicts, which code compares
        found |= dict.fromkeys((*words, *words.values()) if words in WORDS.values() else words, "verdicts")
    found |= dict.fromkeys(ROLES, "heads.py")
    found |= dict.fromkeys(helps(), "--help")
    listed = (text for kind in ("recipes", "tasks", "models") for _, text in rows_of(Listed(kind)))
    found |= dict.fromkeys(listed, "gonio list")
    found |= dict.fromkeys(
        (*SCOPES, "finished", "points", "percent", "variance", "bits", "% of runs", "% of the fall"), "words in results"
    )
    for claim in load_claims():  # what the page and its charts say of a claim
        said = (claim.differs, claim.axis, claim.measure.replace("_", " "))
        found |= dict.fromkeys((text for text in said if text), "claims/catalog")
    found |= dict.fromkeys((measured_text(spec.summary) for spec in measures().values()), "lab/running/measures")
    findings = SOURCE / "measuring" / "findings"
    codes = {"rules.yaml": ("level", "source", "batch"), "remedies.yaml": ("verb", "reads", "package")}
    for name, plainly in codes.items():
        for text in _of_data(yaml.safe_load((findings / name).read_text(encoding="utf-8")), plainly):
            found.setdefault(text, name)
    rates = json.loads((findings / "false_alarms.json").read_text(encoding="utf-8"))
    for case in rates["cases"].values():
        found.setdefault(case["of"], "false_alarms.json")
    return {" ": "__init__.py", **{text: place for text, place in found.items() if has_words(text)}}


def helps() -> Iterator[str]:
    """What `--help` shows of every command: its paragraphs, and the helps of its options and arguments."""
    program: Any = get_command(app)
    for command in (program, *program.commands.values()):
        own = [each.help for each in command.params if each.name not in OF_TYPER]
        for text in (command.help, command.epilog, *own):
            yield from paragraphs_of(text or "")


def has_words(text: str) -> bool:
    """Whether there is anything to translate between the fields: a word, or punctuation."""
    return bool(re.sub(r"\{\w+[^}]*\}", "", text).strip())


def _of_python(tree: ast.AST, texts: dict[str, tuple[int | str, ...]]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for place in texts.get(name, ()):
            yield from _constants(_argument(node, place))
        if name in NOUNS:
            yield from (f"{{n:,}} {noun}" for noun in _constants(_argument(node, NOUNS[name])))


def _argument(call: ast.Call, place: int | str) -> ast.AST | None:
    if isinstance(place, int):
        return call.args[place] if place < len(call.args) else None
    return next((word.value for word in call.keywords if word.arg == place), None)


def _constants(node: ast.AST | None) -> Iterator[str]:
    """The strings that an argument may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_constants(node.body), *_constants(node.orelse))
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from (text for each in node.elts for text in _constants(each))


def _of_template(text: str) -> Iterator[str]:
    for call in jinja2.Environment().parse(text).find_all(jinja2.nodes.Call):
        texts = [arg.value if isinstance(arg, jinja2.nodes.Const) else "" for arg in call.args]
        if isinstance(call.node, jinja2.nodes.Name) and call.node.name in ("say", "local"):
            yield texts[0]
        elif isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr == "counted":
            yield f"{{n:,}} {texts[1]}"


def _of_data(content: Any, plainly: tuple[str, ...]) -> Iterator[str]:
    """The strings in data, without those of these keys and the options of verbs."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            if key not in (*plainly, "options"):
                yield from _of_data(value, plainly)
