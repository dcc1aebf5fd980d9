"""`changes`: the changes of several models from one base, each for itself and all against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod, sqrt
from operator import add
from typing import Any, ClassVar

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.escaping import json_data, markdown_cell, plain
from gonio.geometry.blocks import StoredDifference
from gonio.measuring.changes.difference import Deltas, Differences, Rows, assembled, compared
from gonio.measuring.changes.rules import PAIR_RULES, Pairing
from gonio.measuring.checking.rules import of_files
from gonio.measuring.engines import Engine, Progress, Spread
from gonio.measuring.findings.rules import (
    Finding,
    findings_by,
    markdown_findings,
    render_findings,
    verdict,
    worst_first,
)
from gonio.measuring.reading.entry import layer_path
from gonio.measuring.reading.source import Source, name_of, watching
from gonio.measuring.showing.page import agreement_lanes, layer_map, render
from gonio.measuring.showing.table import (
    PAGE,
    TERMINAL,
    Column,
    Grouped,
    Medium,
    PagedTable,
    markdown_table,
    rows_shown,
    tensor_table,
)
from gonio.messages import Message, counted, joined, local, say
from gonio.pages.tables import bare_table, number

BLOCK = 1 << 20  # entries of each change in float64 at once

Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Agreement:
    r"""The changes :math:`\Delta_1, \dots, \Delta_N` of one tensor, or of all together, against each other.

    Attributes:
        entries: their number d. `chance`: :math:`1/\sqrt d`, the standard deviation of the cosine of two changes with
            independent entries.
        norms: of each change. `relative`: over the norm of the base; None from a zero tensor.
        cosines: N × N, :math:`\langle \Delta_i, \Delta_j \rangle / \lVert \Delta_i \rVert \lVert \Delta_j \rVert`; None
            for a model that did not change.
        signs: N × N, share of the entries with the same sign among those that both models changed; by chance 0.5.
        cosine_mean, cosine_min: over all pairs. `sign_mean`: of `signs` over all pairs.
        kept: :math:`\lVert \overline\Delta \rVert / \overline{\lVert \Delta \rVert}`: 1 for equal changes, 0 where they
            cancel. `kept_random`: for orthogonal changes of these norms, :math:`1/\sqrt N` for equal ones.
    """

    name: str
    path: str
    entries: int
    chance: float
    norms: tuple[float, ...]
    relative: tuple[float | None, ...]
    cosines: Matrix
    signs: Matrix
    cosine_mean: float | None = None
    cosine_min: float | None = None
    sign_mean: float | None = None
    kept: float | None = None
    kept_random: float | None = None

    def __repr__(self) -> str:
        said = "" if self.cosine_mean is None else f": mean cosine {self.cosine_mean:.3g} ± {self.chance:.2g} by chance"
        return f"<{plain(self.path) or 'all tensors'}{said}>"


C = Column[Agreement]
COLUMNS: tuple[Column[Agreement], ...] = (
    C("relative", "change", "norm of each model's change over the norm of the base", 18, lambda a: _each(a.relative)),
    C("cosine_mean", "cosine", "between two changes: mean over the pairs", 7, lambda a: _cosine(a.cosine_mean)),
    C("cosine_min", "least", "the smallest of these cosines", 7, lambda a: _cosine(a.cosine_min)),
    C("chance", "chance ±", "standard deviation of a cosine by chance", 8),
    C("sign_mean", "signs", "share of entries changed in the same direction; by chance 0.5", 6),
    C("kept", "kept", "norm of the mean change over the mean of the norms", 6),
    C("kept_random", "chance", "the same for orthogonal changes", 6),
)
GROUPED: tuple[tuple[str, str, Callable[[Agreement], float | None]], ...] = (
    (say("cosine"), "between two changes: mean over the pairs", lambda a: a.cosine_mean),
    (say("signs"), "share of entries changed in the same direction; by chance 0.5", lambda a: a.sign_mean),
    (say("kept"), "norm of the mean change over the mean of the norms", lambda a: a.kept),
)
KEPT = ("cosine_mean", "chance", "kept", "kept_random", "cosine_min", "sign_mean", "relative")


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−")


def _each(values: Sequence[float | None]) -> str:
    return " ".join(number(value, 2) for value in values[:4]) + (" …" if len(values) > 4 else "")


@dataclass(frozen=True, repr=False)
class Changes(PagedTable[Agreement]):
    """Several models tuned from one base: a mapping from paths to the agreement of the changes of that tensor.

    Attributes:
        base: the name of the base.
        models: the :class:`Differences` of each model from the base.
        tensors: an :class:`Agreement` of each tensor that at least two models changed.
        whole: the agreement over all these tensors together.
        findings: on pairs of models and on their files, and on each model (in its own `findings`).

    Example:
        >>> draw = lambda seed: {"a.weight": torch.randn(40, 60, generator=torch.Generator().manual_seed(seed))}
        >>> base, one, two = draw(0), draw(1), draw(2)
        >>> found = gonio.measure(base, {"a.weight": base["a.weight"] + one["a.weight"]},
        ...     {"a.weight": base["a.weight"] - one["a.weight"] + 0.5 * two["a.weight"]})
        >>> found, round(found["a"].cosine_mean, 1), found.findings[0].code
        (<Changes of 2 models, 1 tensor>, -0.9, 'G504')
    """

    ROW: ClassVar = Agreement

    base: str
    models: tuple[Differences, ...]
    tensors: tuple[Agreement, ...]
    whole: Agreement
    findings: tuple[Finding, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names, numbered where two are alike."""
        return _numbered([model.after for model in self.models])

    @property
    def verdict(self) -> Message:
        """How far the changes agree, and what was found, as a sentence."""
        whole, many = self.whole, len(self.models)
        pairs = [c for i, row in enumerate(whole.cosines) for c in row[:i] if c is not None]
        plainly = [*self.findings, *(finding for model in self.models for finding in model.findings)]
        found = verdict(plainly, [tensor.path for tensor in self.tensors], "changed tensor")
        if not pairs:
            alone = say("No tensor that could be compared was changed by more than one of the {n} models.", n=many)
            told = zip(self.names, self.models, strict=True)
            return joined([alone, *(say("{name}: {text}", name=name, text=one.verdict) for name, one in told)], " ")
        low, high = _cosine(min(pairs)), _cosine(max(pairs))
        said = say("cosine {low}", low=low) if low == high else say("cosines {low} to {high}", low=low, high=high)
        said = say("{n} changes: {cosines}, by chance 0 ± {chance:.2g}", n=many, cosines=said, chance=whole.chance)
        if whole.kept is not None:
            said = say("{said}; their mean keeps {kept:.0%} of their norm", said=said, kept=whole.kept)
        return joined([say("{said}.", said=said), found], " ")

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings on pairs, then those of each model, with its name before the path; warnings first."""
        own = [
            replace(finding, path=f"{name}: {finding.path or 'the model'}")
            for name, model in zip(self.names, self.models, strict=True)
            for finding in model.findings
        ]
        return worst_first((*self.findings, *own))

    @property
    def coverage(self) -> Message:
        """How many tensors were compared, model by model."""
        models = zip(self.names, self.models, strict=True)
        return joined([say("{name}: {coverage}", name=name, coverage=model.coverage) for name, model in models], " ")

    @property
    def by_cosine(self) -> tuple[Agreement, ...]:
        """:attr:`tensors`, the lowest mean cosine first."""
        return tuple(sorted(self.tensors, key=lambda a: a.cosine_mean if a.cosine_mean is not None else 2.0))

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        head = {
            "schema": "gonio.changes/1",
            "verdict": self.verdict,
            "coverage": self.coverage,
            "names": list(self.names),
        }
        return {**head, **json_data(self), "models": [model.to_dict() for model in self.models]}

    def to_markdown(self) -> str:
        """The cosines of the models, the tensors' agreement, and the coverage."""
        head = f"**{markdown_cell(self.base)} → {markdown_cell(', '.join(self.names))}**"
        said = markdown_findings(self.all_findings, whole="the models")
        table = markdown_table("tensor", [self.whole, *self.tensors], COLUMNS)
        return "\n".join([head, "", self.verdict, "", *said, *table, "", markdown_cell(self.coverage), ""])

    def _shown(self, on: Medium) -> tuple[Grouped | None, Sequence[Agreement], str]:
        """The tensors that have a row, lowest cosine first, with groups and a sentence where these are not all."""
        return rows_shown(
            self.by_cosine,
            on,
            first={finding.path for model in self.models for finding in model.findings},
            score=lambda a: -2.0 if a.cosine_mean is None else -a.cosine_mean,
            figures=GROUPED,
            tensors=self.tensors,
            noun="tensors",
            by="the lowest cosines",
        )

    def _page(self, *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
        groups, shown, said = self._shown(PAGE)
        mapped = layer_map(self.tensors, self.all_findings, agreement_lanes(self.tensors), shown, every=self.tensors)
        parts = {"rows": shown, "groups": groups, "said": said, "most": PAGE.most}
        return render("changes.html.j2", whole=whole, c=self, columns=COLUMNS, made=made, map=mapped, **parts)

    def __repr__(self) -> str:
        return f"<Changes of {len(self.models)} models, {counted(len(self.tensors), 'tensor')}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(local(say("{base} → {n} models", base=plain(self.base), n=len(self.models))), style="bold")
        yield Text(local(self.verdict))
        yield Text("")
        yield from render_findings(self.all_findings)
        yield from self._cosines()
        groups, shown, said = self._shown(TERMINAL)
        if groups is not None:
            yield from groups.rich(said)
        yield tensor_table("tensor", [self.whole, *shown], COLUMNS, KEPT, options.max_width)
        yield Text("")
        yield Text(local(self.coverage), style="dim")

    def _cosines(self) -> Iterator[RenderableType]:
        """The N × N cosines over all tensors, with each model's change."""
        table = bare_table("model", ["change", "intruders", *map(str, range(1, len(self.models) + 1))])
        for i, (name, model) in enumerate(zip(self.names, self.models, strict=True)):
            found = str(sum(t.intruders or 0 for t in model.moved))
            cells = [number(self.whole.relative[i]), found, *(_cosine(c) for c in self.whole.cosines[i])]
            table.add_row(Text(f"{i + 1}  {plain(name)}"), *cells)
        said = say("Cosines of the changes (by chance 0 ± {chance:.2g}):", chance=self.whole.chance)
        yield Text(local(said), style="bold")
        yield table
        yield Text("")


def changes(
    base: Source, *models: Source, engine: Engine = "local", jobs: int = 1, progress: Progress = None
) -> Changes:
    r"""Compare several models with the base that they were tuned from, and their changes with each other.

    With :math:`\Delta_i = W_i - W`: for each model what :func:`gonio.measuring.difference` gives; for all together, by
    tensor and as a whole, the N × N cosines of the changes beside chance, the share of entries changed in the same
    direction, and what a mean of the models keeps of their changes. The base is read once.

    Args:
        base, models: anything that :func:`gonio.measure` takes; adapters for the base too.
        engine, jobs: of files, as in :func:`gonio.measure`.
        progress: called after each tensor with the number done and the number in all.

    Raises:
        InvalidArgumentError: as :func:`gonio.measuring.difference`, and for fewer than two models.

    Example:
        >>> base = {"a.weight": torch.zeros(20, 30)}
        >>> one, two = torch.ones(20, 30), torch.ones(20, 30)
        >>> one[:, 15:], two[:, :15] = 0, 0
        >>> found = gonio.measuring.changes(base, {"a.weight": one}, {"a.weight": two})
        >>> found.whole.cosine_mean, round(found.whole.kept, 3), round(found.whole.kept_random, 3)
        (0.0, 0.707, 0.707)

    References: [1] G. Ilharco et al., "Editing models with task arithmetic", 2023, arXiv 2212.04089, §5. [2] P. Yadav
        et al., "TIES-merging: resolving interference when merging models", 2023, arXiv 2306.01708, §3.
    """
    if len(models) < 2:
        asked = "changes() compares two models or more with their base"
        raise InvalidArgumentError(asked, f"{len(models)}", "Add one.")
    spread = Spread(engine, jobs)
    spread.check((base, *models))
    watched = watching((base, *models))
    held, read, found = compared(base, models, _reduced, spread, progress)
    tensors = [sums.agreement(rows[0].name) for rows, sums in found if sums is not None]
    whole = sum((sums for _, sums in found if sums is not None), CosineSums.empty(len(models))).agreement("")
    made = tuple(assembled(name_of(base), held, model, [rows[i] for rows, _ in found]) for i, model in enumerate(read))
    names = _numbered([model.after for model in made])
    findings = findings_by(PAIR_RULES, ((pair, "") for pair in _pairings(whole, names)))
    return Changes(name_of(base), made, tuple(tensors), whole, (*of_files(watched.changed()), *findings))


def _reduced(rows: Rows, deltas: Deltas) -> tuple[Rows, CosineSums | None]:
    """The rows of one tensor, and the sums over its changes if two models changed it at least."""
    if sum(delta is not None for delta in deltas) < 2:
        return rows, None
    return rows, CosineSums.of(deltas, next(row.norm for row in rows if row.norm is not None))


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, start=1))


def _pairings(whole: Agreement, names: Sequence[str]) -> list[Pairing]:
    made = []
    for i, j in combinations(range(len(names)), 2):
        cosine = whole.cosines[i][j]
        first, second = whole.norms[i], whole.norms[j]
        if cosine is not None:
            kept = sqrt(max(0.0, first**2 + second**2 + 2 * first * second * cosine)) / (first + second)
            made.append(Pairing(names[i], names[j], cosine, whole.chance, kept))
    return made


@dataclass(frozen=True)
class CosineSums:
    """Sums over the entries of some tensors.

    Attributes:
        entries: their number. `base`: squared norm of the base.
        inner: N × N, of the products of two changes. `same`: entries that both changed, in the same direction. `both`:
            entries that both changed.
    """

    entries: int
    base: float
    inner: Tensor
    same: Tensor
    both: Tensor

    @classmethod
    def empty(cls, count: int) -> CosineSums:
        zero = torch.zeros(count, count, dtype=torch.float64, device="cpu")
        return cls(0, 0.0, zero, zero, zero)

    @classmethod
    def of(cls, deltas: Sequence[StoredDifference | None], norm: float) -> CosineSums:
        """Of one tensor; a model that did not change it counts as 0."""
        known = next(delta for delta in deltas if delta is not None)
        flat = [None if delta is None else delta.flatten() for delta in deltas]
        inner, same, both = (torch.zeros(len(deltas), len(deltas), dtype=torch.float64, device="cpu") for _ in range(3))
        size = prod(known.shape)
        for start in range(0, size, BLOCK):
            block = torch.zeros(len(deltas), min(BLOCK, size - start), dtype=torch.float64, device=known.device)
            for row, delta in zip(block, flat, strict=True):
                if delta is not None:
                    row.copy_(delta[start : start + BLOCK])
            inner += (block @ block.mT).cpu()
            sign = block.sign_()
            agreed, changed = sign @ sign.mT, sign.abs() @ sign.abs().mT
            same += ((agreed + changed) / 2).cpu()
            both += changed.cpu()
        return cls(size, norm**2, inner, same, both)

    def __add__(self, other: CosineSums) -> CosineSums:
        return CosineSums(*map(add, vars(self).values(), vars(other).values()))

    def agreement(self, name: str) -> Agreement:
        norms = self.inner.diagonal().clamp_min(0).sqrt()
        scale = norms[:, None] * norms
        cosines = _matrix((self.inner / scale).clamp(-1, 1), scale > 0)
        signs = _matrix(self.same / self.both, self.both > 0)
        pairs = [[m[i][j] for i, j in combinations(range(len(norms)), 2)] for m in (cosines, signs)]
        known, agreed = ([value for value in values if value is not None] for values in pairs)
        total = float(norms.sum())
        return Agreement(
            name=name,
            path=layer_path(name) or "all tensors",
            entries=self.entries,
            chance=1 / sqrt(self.entries) if self.entries else 0.0,
            norms=tuple(norms.tolist()),
            relative=tuple(float(n) / sqrt(self.base) if self.base else None for n in norms),
            cosines=cosines,
            signs=signs,
            cosine_mean=sum(known) / len(known) if known else None,
            cosine_min=min(known, default=None),
            sign_mean=sum(agreed) / len(agreed) if agreed else None,
            kept=sqrt(max(0.0, float(self.inner.sum()))) / total if total else None,
            kept_random=float(norms.square().sum().sqrt()) / total if total else None,
        )


def _matrix(values: Tensor, known: Tensor) -> Matrix:
    return tuple(
        tuple(value if there else None for value, there in zip(row, mask, strict=True))
        for row, mask in zip(values.tolist(), known.tolist(), strict=True)
    )
