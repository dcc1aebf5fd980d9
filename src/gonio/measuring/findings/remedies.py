"""Remedies: what `gonio.doctor` does about the findings of a rule, as data, or why it does nothing.

`gonio explain CODE` shows them. `rules.yaml` names those of each rule, and `remedies.yaml` says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from gonio.messages import Message, fixed, joined, say

PROOFS = ("same function", "held-out score", "better held-out score")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One treatment of a rule's findings.

    Attributes:
        verb: the name of a verb of :mod:`gonio.surgery`, or `retrain_` of :mod:`gonio.lab`. `options`: its arguments.
        proof: `same function`, which the verb promises; `held-out score`, which must not be worse; or `better held-out
            score`, for a guess and for new training.
        why: the reason that it can help. `changes`: what it changes and costs. `cannot`: what it does not repair.
        of: `buffers` or `parameters`, if it acts on findings of these only.
        reads: `data`, if it averages over batches; `task`, if it takes a task's training data.
        package: of the verb within gonio, if it is in one.
    """

    verb: str
    proof: str
    why: str
    changes: str
    cannot: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""
    reads: str = ""
    package: str = ""

    def __str__(self) -> str:
        return str(self.said)

    @property
    def call(self) -> str:
        """The verb as it is called: a verb of `gonio` by its name, another one with its package."""
        return f"gonio.{self.package}.{self.verb}" if self.package else self.verb

    @property
    def said(self) -> Message:
        """The treatment in sentences."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return say(
            "{verb}({options}){of}, proved by {proof}. {why} It changes {changes} It does not repair: {cannot}",
            verb=self.call,
            options=options,
            of=say(" for {what}", what=fixed(self.of)) if self.of else "",
            proof=fixed(self.proof),
            why=fixed(self.why),
            changes=fixed(self.changes),
            cannot=Message(f"{self.cannot[0].lower()}{self.cannot[1:]}", self.cannot),
        )


@dataclass(frozen=True)
class Prescription:
    """The treatments of one rule's findings, in the order in which they are tried, or why there is `none`."""

    remedies: tuple[Remedy, ...] = ()
    none: str = ""

    @classmethod
    def of(cls, treatment: str | Sequence[str]) -> Prescription:
        """That of the names of remedies, or of the reason why there is none."""
        return cls(none=treatment) if isinstance(treatment, str) else cls(tuple(_remedies()[n] for n in treatment))

    def __str__(self) -> str:
        return str(self.said)

    @property
    def said(self) -> Message:
        """The prescription as a sentence."""
        if self.none:
            return say("none. {why}", why=fixed(self.none))
        steps = [say("{n}. {remedy}", n=n, remedy=remedy.said) for n, remedy in enumerate(self.remedies, 1)]
        return joined(steps, "\n")


@cache
def _remedies() -> Mapping[str, Remedy]:
    import yaml  # only a treatment or an explanation needs it

    content = (resources.files("gonio.measuring.findings") / "remedies.yaml").read_text(encoding="utf-8")
    return {name: Remedy(**fields) for name, fields in yaml.safe_load(content).items()}


def call_of(verb: str) -> str:
    """The verb of a remedy as it is called.

    Example:
        >>> from gonio.measuring.findings.remedies import call_of
        >>> call_of("calibrate_"), call_of("retrain_")
        ('calibrate_', 'gonio.lab.retrain_')
    """
    return next((remedy.call for remedy in _remedies().values() if remedy.verb == verb), verb)


def success_rate(code: str) -> list[Message]:
    """What became of the damages that were planted and found by a rule (`benchmarks/doctor.py`); empty if none were."""
    text = (resources.files("gonio.measuring.findings") / "treatments.json").read_text(encoding="utf-8")
    seen = json.loads(text).get(code)
    if seen is None:
        return []
    return [
        say(
            "Measured: of {cases} planted damages with this finding, {near} ended within a point of the healthy "
            "network's score, and {refused} were refused.",
            cases=seen["cases"],
            near=seen["near"],
            refused=seen["refused"],
        )
    ]
