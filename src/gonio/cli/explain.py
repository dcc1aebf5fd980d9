"""`gonio list` and `gonio explain`: the names that commands take, and the meaning of findings and columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated

import typer

from gonio.cli.app import print_out
from gonio.errors import UnknownNameError
from gonio.escaping import aligned
from gonio.messages import local, say


class Listed(StrEnum):
    """What can be listed."""

    recipes = "recipes"
    tasks = "tasks"
    models = "models"
    rules = "rules"
    columns = "columns"
    claims = "claims"


_OTHER_TASKS = (
    ("cifar10:FOLDER", "CIFAR-10 in its binary version, flipped and cropped while it trains."),
    ("fashion-mnist:FOLDER", "A part of Fashion-MNIST at 14 × 14, from the four official files."),
    ("fashion-mnist-full:FOLDER", "All of Fashion-MNIST at 28 × 28, from the four official files."),
    ("text:FILE", "Windows of 128 bytes of a text."),
    ("torchvision:NAME:FOLDER", "An image data set of torchvision in a folder of this machine."),
    ("imagefolder:FOLDER", "Images in one folder per class."),
    ("file.py:factory", "A function of your own that returns a gonio.lab.Task."),
)
_OTHER_MODELS = (
    ("timm:NAME", "A model of timm, with random weights."),
    ("torchvision:NAME", "A model of torchvision, with random weights."),
    ("transformers:NAME", "A class, a model type or a config.json of transformers, with random weights."),
    ("file.py:factory", "A function of your own that returns a torch.nn.Module."),
)


def list_names(
    kind: Annotated[
        Listed | None, typer.Argument(help="List these only.", metavar="recipes|tasks|models|rules|columns|claims")
    ] = None,
) -> None:
    """List recipes, tasks and models by name, the rules of findings, the columns of tables and the claims of papers."""
    for shown in Listed if kind is None else [kind]:
        if kind is None:
            print_out(f"{shown}:")
        for line in aligned([tuple(map(local, row)) for row in rows_of(shown)]):
            print_out(f"{'' if kind else '  '}{line}")


def rows_of(kind: Listed) -> list[tuple[str, ...]]:
    """What is listed: names, each with a sentence; of rules the level too, of claims the verdict here."""
    from gonio.lab.claims import load_claims, recorded
    from gonio.lab.showing.claims import sentence_of
    from gonio.lab.tasks import BUILT_IN as TASKS
    from gonio.measuring.findings.rules import RULES
    from gonio.measuring.showing.columns import COLUMNS
    from gonio.models import BUILT_IN as MODELS
    from gonio.recipes import Recipe, built_in_names

    rows: dict[Listed, Callable[[], Iterable[tuple[str, ...]]]] = {
        Listed.recipes: lambda: ((name, _first(Recipe.load(name).description)) for name in built_in_names()),
        Listed.tasks: lambda: (*((name, _first(task.__doc__ or "")) for name, task in TASKS.items()), *_OTHER_TASKS),
        Listed.models: lambda: (*((name, _first(m.__doc__ or "")) for name, m in MODELS.items()), *_OTHER_MODELS),
        Listed.rules: lambda: ((code, rule.text.level, rule.text.title) for code, rule in sorted(RULES.items())),
        Listed.columns: lambda: ((column.title, column.explanation) for column in COLUMNS),
        Listed.claims: lambda: ((c.name, recorded(c.name)[0], _first(sentence_of(c))) for c in load_claims()),
    }
    return list(rows[kind]())


def _first(text: str) -> str:
    """The first sentence of a text, without markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text.partition(". ")[0].splitlines()[0])


def explain(
    name: Annotated[
        str | None,
        typer.Argument(help="A finding, e.g. G001, a column, e.g. align, or a claim.", metavar="RULE|COLUMN|CLAIM"),
    ] = None,
) -> None:
    """Explain a finding or a column of `gonio measure`, or a claim; without a name, list the findings."""
    from gonio.lab.claims import claim_names, load_claim
    from gonio.measuring.explaining import (
        explained_columns,
        explained_rule,
        explained_rules,
        in_its_language,
        titles,
    )
    from gonio.measuring.findings.rules import RULES, unknown_rule

    if name is None:
        list_names(Listed.rules)
        return
    word = name.strip().lower()
    if rule := RULES.get(name.strip().upper()):
        print_out(explained_rule(rule))
    elif word in claim_names():
        from gonio.lab.showing.claims import claim_explanation

        print_out(claim_explanation(load_claim(word), word))
    elif found := in_its_language(lambda: "\n".join(explained_columns(word) or explained_rules(word))):
        print_out(found)
    else:
        do = say("Give a code such as G102, the title of a column such as align, or the name of a claim.")
        placeholder = word in ("code", "rule", "column", "claim")  # typed as a page has it
        kind, known = say("rule, column or claim"), [*titles(), *claim_names()]
        raise UnknownNameError(kind, name, known, do=do) if placeholder else unknown_rule(name, kind, known)
