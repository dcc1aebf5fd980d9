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
        if self.none:
            return f"none. {self.none}"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        said = (
            f"{self.verb}({options}), proved by {self.proof}. {self.why} It changes {self.changes} "
            f"It does not repair: {self.cannot[0].lower()}{self.cannot[1:]}"
        )
        return said if self.otherwise is None else f"{said} If the finding remains: {self.otherwise}"


@cache
def prescriptions() -> Mapping[str, Prescription]:
    """The prescription of every rule, by code."""
    import yaml  # only a treatment or an explanation needs it

    content = (resources.files("gonio.measuring.findings") / "prescriptions.yaml").read_text(encoding="utf-8")
    return {code: _read(fields) for code, fields in yaml.safe_load(content).items()}


def _read(fields: Mapping[str, Any]) -> Prescription:
    then = fields.get("otherwise")
    return Prescription(**{**fields, "otherwise": None if then is None else _read(then)})


def success_rate(code: str) -> str:
    """What became of the damages that were planted and found by a rule (`benchmarks/doctor.py`); empty if none were."""
    text = (resources.files("gonio.measuring.findings") / "treatments.json").read_text(encoding="utf-8")
    seen = json.loads(text).get(code)
    if seen is None or not prescriptions()[code].verb:
        return ""
    return (
        f" Measured: of {seen['cases']} planted damages with this finding, {seen['near']} ended within a point of the "
        f"healthy network's accuracy, and {seen['refused']} were refused."
    )
