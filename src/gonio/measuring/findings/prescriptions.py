"""Prescriptions: what to do about the findings of each rule, as data, or why nothing is done.

`gonio.doctor` fills them; `gonio explain CODE` shows them. The registry is `prescriptions.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from gonio.messages import Message, fixed, say


@dataclass(frozen=True)
class Prescription:
    """The treatment of one rule's findings; either `verb` or `none` is empty.

    Attributes:
        verb: the name of a verb of :mod:`gonio.surgery`. `options`: its arguments.
        proof: `same function`, which the verb promises, or `held-out score`, which takes a task.
        why: the reason that it can help. `changes`: what it changes and costs. `cannot`: what it does not repair.
        buffers: it acts on findings of buffers only.
        otherwise: what is tried if the finding is still there.
        none: why there is no treatment.
    """

    verb: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    proof: str = ""
    why: str = ""
    changes: str = ""
    cannot: str = ""
    buffers: bool = False
    otherwise: Prescription | None = None
    none: str = ""

    def __str__(self) -> str:
        return str(self.said)

    @property
    def said(self) -> Message:
        """The prescription as a sentence."""
        if self.none:
            return say("none. {why}", why=fixed(self.none))
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        cannot = Message(f"{self.cannot[0].lower()}{self.cannot[1:]}", self.cannot)
        said = say(
            "{verb}({options}), proved by {proof}. {why} It changes {changes} It does not repair: {cannot}",
            verb=self.verb,
            options=options,
            proof=fixed(self.proof),
            why=fixed(self.why),
            changes=fixed(self.changes),
            cannot=cannot,
        )
        if self.otherwise is None:
            return said
        return say("{said} If the finding remains: {otherwise}", said=said, otherwise=self.otherwise.said)


@cache
def prescriptions() -> Mapping[str, Prescription]:
    """The prescription of every rule, by code."""
    import yaml  # only a treatment or an explanation needs it

    content = (resources.files("gonio.measuring.findings") / "prescriptions.yaml").read_text(encoding="utf-8")
    return {code: _read(fields) for code, fields in yaml.safe_load(content).items()}


def _read(fields: Mapping[str, Any]) -> Prescription:
    then = fields.get("otherwise")
    return Prescription(**{**fields, "otherwise": None if then is None else _read(then)})


def success_rate(code: str) -> list[Message]:
    """What became of the damages that were planted and found by a rule (`benchmarks/doctor.py`); empty if none were."""
    text = (resources.files("gonio.measuring.findings") / "treatments.json").read_text(encoding="utf-8")
    seen = json.loads(text).get(code)
    if seen is None or not prescriptions()[code].verb:
        return []
    return [
        say(
            "Measured: of {cases} planted damages with this finding, {near} ended within a point of the healthy "
            "network's accuracy, and {refused} were refused.",
            cases=seen["cases"],
            near=seen["near"],
            refused=seen["refused"],
        )
    ]
