"""What a code of a finding or the title of a column means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gonio.languages import language
from gonio.measuring.changes import difference, several
from gonio.measuring.findings.remedies import success_rate
from gonio.measuring.findings.rules import RULES, Finding, FindingRule, measured_rates, unknown_rule
from gonio.measuring.showing import columns, heads, training
from gonio.measuring.showing.table import Column
from gonio.measuring.showing.usual import explained
from gonio.messages import LANGUAGES, Message, fixed, joined, local, say, tag

TABLES: Mapping[str, tuple[Column[Any], ...]] = {
    "": columns.COLUMNS,
    say("outputs"): columns.SIGNALS,
    say("attention heads"): heads.COLUMNS,
    say("the change of a weight"): difference.COLUMNS,
    say("the changes of several models"): several.COLUMNS,
    say("training"): (*training.COLUMNS, *training.ATTENTION),
}
"""The columns of every table, by what the table is of; the first is that of `gonio measure`."""


def explain(name: str | Finding) -> str:
    """A rule or a column in words.

    Of a rule: what it finds, its meaning, the value for random weights, what to do, what `gonio.doctor` does about it
    or why it does nothing, its false-alarm rate. Of a column: its meaning in each table that has one of this title.

    Args:
        name: the code of a rule, a finding of it, or the title of a column. A title in another language than the
            reader's is answered in that language.

    Raises:
        UnknownNameError: if there is neither.

    Example:
        >>> print(gonio.measuring.explain("G001").splitlines()[0])
        G001 (error): values that are NaN or infinite
        >>> print(gonio.measuring.explain("rank 99%"))
        rank 99% (of the change of a weight): singular directions with 99 % of its squared norm
    """
    code = name.code if isinstance(name, Finding) else name.strip().upper()
    if code in RULES:
        return explained_rule(RULES[code])
    found = in_its_language(lambda: "\n".join(explained_columns(str(name))))
    if not found:
        raise unknown_rule(str(name), say("rule or column"), titles())
    return found


def explained_rule(rule: FindingRule[Any]) -> str:
    """What a rule finds, its meaning, the value for random weights, what to do, its treatment, its false-alarm rate."""
    text = rule.text
    alarms = say("none by construction: {why}", why=text.exact) if text.exact else _rate(rule.code)
    prescription = text.prescription
    treated = joined([prescription.said, *(success_rate(rule.code) if prescription.remedies else ())], " ")
    lines = [
        say("{code} ({level}): {title}", code=rule.code, level=fixed(text.level), title=text.title),
        "",
        text.means,
        *([say("Random weights: {chance}", chance=text.chance)] if text.chance else []),
        say("What to do: {do}", do=text.do),
        say("gonio.doctor: {treated}", treated=treated),
        say("False alarms: {alarms}", alarms=alarms),
        say("Source: {source}", source=text.source),
    ]
    return "\n".join(map(local, lines))


def _rate(code: str) -> Message:
    """On random and on trained models, or on cases that are in order, each with the upper end of its interval."""
    seen = measured_rates()["cases"].get(code)
    if seen is not None:
        told = {"alarms": seen["alarms"], "cases": seen["cases"], "of": fixed(seen["of"]), "upper": 100 * seen["upper"]}
        return say("{alarms} of {cases} {of}; the true rate is below {upper:.2g} % (95 %).", **told)
    if not RULES[code].text.calibrated:
        return say("not measured; the threshold is a choice.")
    said = []
    named = {"random": say("randomly initialised models"), "trained": say("trained networks")}
    for name, models in named.items():
        rates = measured_rates()[name]
        seen = rates["rules"][code]
        said.append(
            say(
                "{hit} of {tensors} tensors in {flagged} of {count} {models}; "
                "the true rate per model is below {upper:.2g} % (95 %).",
                hit=seen["tensors"],
                tensors=rates["tensors"],
                flagged=seen["models"],
                count=rates["models"],
                models=models,
                upper=100 * seen["models_upper"],
            )
        )
    return joined(said, " ")


def in_its_language(answer: Callable[[], str]) -> str:
    """The answer in the language of the reader, else in the first other one that has it; empty if none has."""
    languages = sorted(LANGUAGES, key=lambda name: LANGUAGES[name] != tag())
    for name in languages:
        with language(name):  # type: ignore[arg-type]
            if found := answer():
                return found
    return ""


def titles() -> list[str]:
    """The titles of all columns, in English and in the language of the reader."""
    every = [column.title for table in TABLES.values() for column in table]
    return list(dict.fromkeys([*every, *map(local, every)]))


def explained_rules(name: str) -> list[str]:
    """One line for each rule whose title, in the language of the reader or in English, has these words."""
    word = name.strip().lower()
    named = [(rule.code, rule.text.title) for rule in RULES.values()]
    found = [pair for pair in named if word and word in f"{pair[1]}\n{local(pair[1])}".lower()]
    return [local(say("{title}: {explanation}", title=code, explanation=fixed(title))) for code, title in found]


def _titles(column: Column[Any]) -> set[str]:
    """How a column is called: its title, in the language of the reader too, without a trailing point."""
    return {title.lower() for said in (column.title, local(column.title)) for title in (said, said.rstrip("."))}


def explained_columns(name: str) -> list[str]:
    """The columns with this title or name, or else whose title begins the word, and what is usual; empty if none."""
    word = name.strip().lower()
    every = [(of, column) for of, table in TABLES.items() for column in table]
    found = [(of, column) for of, column in every if word in _titles(column)]
    found = found or [(of, column) for of, column in every if word == column.name]
    long = [(of, column) for of, column in every if len(column.title) > 2]
    found = found or [(of, column) for of, column in long if word.startswith(column.title.lower().rstrip("."))]
    lines = []
    for of, column in found:
        said = {"title": column.title, "explanation": column.explanation}
        if of:
            lines.append(say("{title} (of {of}): {explanation}", of=fixed(of), **said))
        else:
            lines += [say("{title}: {explanation}", **said), *explained(column.name)]
    return list(map(local, lines))
