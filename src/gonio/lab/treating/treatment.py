"""The result of `doctor`: what was found, what was tried, what proved it, and the treated model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gonio.editing.edit import Edited
from gonio.errors import listing
from gonio.escaping import html_table, json_data, plain, write_text
from gonio.lab.judging.results import Results
from gonio.lab.running.study import Study
from gonio.measuring import Finding, Measurements
from gonio.measuring.findings.remedies import call_of
from gonio.messages import fixed, joined, local, say
from gonio.pages import made_by, render

SCHEMA = "gonio.treatment/1"
HEAD = (say("treatment"), say("for"), say("verdict"), say("why"), say("not repaired by it"))


@dataclass(frozen=True)
class TreatmentStep:
    """One treatment that was prescribed.

    Attributes:
        verb, options: what was to be done. `codes`: of the rules whose findings it treats.
        verdict: `kept`, `undone` (it was tried on the copy, and taken back) or `not applied`.
        proof: what proved it, or why it was not kept.
        proved: whether a proof was found; False for a step that was kept because `apply_unproven` asked for it.
        cannot: what such a treatment does not repair.
        results: the study of the treated model beside the untreated one; None for a proof by equal outputs.
    """

    verb: str
    options: Mapping[str, Any]
    codes: tuple[str, ...]
    verdict: str
    proof: str
    proved: bool = False
    cannot: str = ""
    results: Results | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the study's runs as JSON-able data; a number that is not finite is None."""
        content = {name: value for name, value in vars(self).items() if name != "results"}
        effect = None if self.results is None else asdict(self.results.effects[0])
        found: dict[str, Any] = json_data(content | {"options": dict(self.options), "effect": effect})
        return found

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """The cells of a table, without the layers."""
        return call_of(self.verb), ", ".join(self.codes), self.verdict, self.proof, self.cannot


@dataclass(frozen=True, repr=False)
class Treatment:
    """The findings of a model, their treatments with proofs, and the treated copy of the model.

    `str()` is a table; a notebook shows it as HTML.

    Attributes:
        source: the name of the model or file.
        before, after: the measurements of the model and of its treated copy.
        steps: each prescribed treatment with its verdict.
        untreated: the findings that are left and have no prescription, each with the reason.
        model: the treated copy; None for a file without its model.
        notes: what a batch of random numbers cannot tell, and which outputs are still not finite.
    """

    source: str
    before: Measurements
    after: Measurements
    steps: tuple[TreatmentStep, ...]
    untreated: tuple[tuple[Finding, str], ...]
    model: nn.Module | None = None
    edits: tuple[Edited, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[TreatmentStep, ...]:
        """The steps that are in force in `model`."""
        return tuple(step for step in self.steps if step.verdict == "kept")

    @property
    def recipe(self) -> dict[str, Any]:
        """The kept steps as data: verbs of `gonio.surgery`, or `gonio.lab.retrain_`, with their options."""
        steps = [{"verb": step.verb, "options": dict(step.options), "for": list(step.codes)} for step in self.kept]
        return {"schema": SCHEMA, "steps": steps}

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if not self.before.findings and not self.before.layers:
            return joined([self.before.verdict, self.before.coverage], " ")
        if not self.before.findings:
            return say("Nothing to do: no findings.")
        times = Counter(call_of(step.verb) for step in self.kept)
        done = joined([v if n == 1 else say("{verb} ({n} times)", verb=v, n=n) for v, n in times.items()])
        counts = {"before": len(self.before.findings), "after": len(self.after.findings)}
        return say("Findings: {before} before, {after} after. Done: {done}.", **counts, done=done or say("nothing"))

    def undo_(self) -> None:
        """Take all kept steps back, exactly: `model` then equals the model that was given.

        Raises: UndoError if it was undone before.
        """
        for edit in reversed(self.edits):
            edit.undo_()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the measurements' tables as JSON-able data."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "summary": self.summary,
            "before": [asdict(finding) for finding in self.before.findings],
            "after": [asdict(finding) for finding in self.after.findings],
            "steps": [step.to_dict() for step in self.steps],
            "untreated": [{"code": finding.code, "path": finding.path, "why": why} for finding, why in self.untreated],
            "recipe": self.recipe,
            "notes": list(self.notes),
        }

    def studies(self, folder: str | os.PathLike[str]) -> list[Study]:
        """Write the study of each step that was compared as a folder of its own, as `gonio report` reads it.

        Raises:
            PlanChangedError: a folder holds another study.
        """
        made = []
        for number, step in enumerate(self.steps):
            if step.results is None:
                continue
            study = Study.create(Path(folder) / f"{number}-{step.verb.rstrip('_')}", step.results.plan)
            entries = {entry.name: entry for entry in step.results.plan.recipes}
            for run in step.results.runs:
                study.add(entries[run.recipe], run, step.results.plan.versions)
            made.append(study)
        return made

    def page(self, path: str | os.PathLike[str], *, command: str = "", date: str = "") -> Path:
        """Write one self-contained page: before, after, proof.

        Args:
            command, date: shown on the page, so that the same treatment can be made again.
        """
        made = made_by(self.before.versions, command=command, date=date)
        text = render("gonio.lab.treating", "treatment.html.j2", t=self, head=HEAD, made=made)
        return write_text(text, path)

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The cells of a table: one row for steps that differ in their layers alone, and the untreated findings."""
        layers: dict[tuple[str, str, str, str, str], dict[str, None]] = {}
        for step in self.steps:
            layers.setdefault(step.row, {}).update(dict.fromkeys(step.options.get("where", ())))
        rows = [
            (say("{verb} of {layers}", verb=row[0], layers=listing([*paths], limit=6)) if paths else row[0], *row[1:])
            for row, paths in layers.items()
        ]
        none, untreated = say("none"), say("untreated")
        return [*rows, *((none, f"{f.code} {f.path}".strip(), untreated, why, "") for f, why in self.untreated)]

    def __repr__(self) -> str:
        return f"<Treatment of {plain(self.source)}: {len(self.kept)} of {len(self.steps)} steps kept>"

    def __str__(self) -> str:
        rows = [
            say("  {verb}: {verdict} (for {codes}): {why}", verb=verb, codes=codes, verdict=verdict, why=why)
            for verb, codes, verdict, why, _ in self.rows
        ]
        notes = [say("  {problem}", problem=fixed(note)) for note in self.notes]
        lines = map(local, (say("{source}: {summary}", source=self.source, summary=self.summary), *notes, *rows))
        return "\n".join(plain(line, longest=len(line)) for line in lines)

    def _repr_html_(self) -> str:
        rows = [[*map(local, row)] for row in self.rows]
        said = [*map(local, (self.summary, *self.notes))]
        return html_table(self.source, [*map(local, HEAD)], rows, said)
