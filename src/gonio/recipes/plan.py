"""Which rule takes which layer, before anything happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from gonio.errors import NoMatchError, UnmatchedRuleError, closest, listing
from gonio.penalty.binding import bind
from gonio.recipes.names import find
from gonio.recipes.rule import KEEP, Rule
from gonio.recipes.where import ENDS, Ends, Paths, has_weight_matrix, selector
from gonio.regularizers import OutputRegularizer
from gonio.surgery import Site, sites

__all__ = ["Assignment", "Plan", "Step", "assign", "plan"]


@dataclass(frozen=True)
class Assignment:
    """One rule and the modules that it takes.

    Attributes:
        number: of the rule within its verb, from 1.
        place: file, line and rule, for messages.
        skipped: why a penalty does nothing to some of these modules, by path.
    """

    verb: str
    number: int
    rule: Rule
    sites: tuple[Site, ...]
    place: str
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> Paths:
        """A selector of exactly these modules."""
        return Paths(frozenset(site.path for site in self.sites), f"{_shown(self.rule.where)} (rule {self.number})")


@dataclass(frozen=True)
class Step:
    """One row of a plan.

    Attributes:
        verb: init, swap, parametrize or penalty.
        rule: number of the rule within its verb, from 1.
        path: of the module; `""` is the model itself.
        kind: the module's class name.
        what: the thing named with its options, or `keep`.
        skipped: why the thing does nothing here; empty if it does.

    Example:
        >>> plan = gonio.Recipe.load("orthogonal-init").plan(nn.Sequential(nn.Linear(4, 3)))
        >>> plan.steps[0].verb, plan.steps[0].path, plan.steps[0].kind
        ('init', '0', 'Linear')
    """

    verb: str
    rule: int
    path: str
    kind: str
    what: str
    skipped: str = ""


@dataclass(frozen=True)
class Plan:
    """What a recipe would do to a model; `str()` is a table.

    Attributes:
        recipe: its name.
        steps: one per rule and module, in the order in which they would happen.
        untouched: path and class name of every module with parameters that no rule changes or reads.
        notes: what was assumed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> print(gonio.Recipe.load("switchable-norm").plan(model))
        switchable-norm:
          verb  rule  layer  is           gets
          swap  1     1      BatchNorm2d  SwitchableNorm2d.from_batch_norm
        untouched:
          0  Conv2d
    """

    recipe: str
    steps: tuple[Step, ...]
    untouched: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.recipe}:" + ("" if self.steps else " nothing to do")]
        rows = [(s.verb, str(s.rule), s.path or "(model)", s.kind, _outcome(s)) for s in self.steps]
        lines += _aligned([("verb", "rule", "layer", "is", "gets"), *rows]) if rows else []
        if self.untouched:
            lines.append("untouched:")
            lines += _aligned([(path or "(model)", kind) for path, kind in self.untouched])
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(name: str, rules: Mapping[str, tuple[Rule, ...]], model: nn.Module, *, origin: str) -> Plan:
    """See :meth:`gonio.Recipe.plan`."""
    ends = Ends.of(model)
    assignments = assign(rules, model, ends, origin=origin)
    steps = tuple(
        Step(a.verb, a.number, site.path, type(site.module).__name__, str(a.rule), a.skipped.get(site.path, ""))
        for a in assignments
        for site in a.sites
    )
    touched = {step.path for step in steps if step.what != KEEP and not step.skipped}
    untouched = tuple(
        (site.path, type(site.module).__name__)
        for site in sites(model)
        if site.module._parameters and site.path not in touched
    )
    uses_ends = any(assignment.rule.where in ENDS for assignment in assignments)
    return Plan(name, steps, untouched, (ends.assumed,) if ends.assumed and uses_ends else ())


def assign(rules: Mapping[str, tuple[Rule, ...]], model: nn.Module, ends: Ends, *, origin: str) -> list[Assignment]:
    """Every rule with the modules that it takes; per verb, the first rule that selects a module.

    Raises:
        UnmatchedRuleError: naming every rule that takes nothing, its file and its line.
    """
    found: list[Assignment] = []
    unmatched: list[str] = []
    for verb, ordered in rules.items():
        taken: dict[str, int] = {}
        for number, rule in enumerate(ordered, start=1):
            able = _able_to_keep(verb, ordered) if rule.keeps else _able(verb, rule)
            mine, why = _take(rule, able, model, ends, taken)
            line = "" if rule.line is None else f":{rule.line}"
            place = f"{origin}{line}: rule {number} of {verb} ({_shown(rule.where)}: {rule})"
            assignment = Assignment(verb, number, rule, tuple(mine), place)
            if verb == "penalty" and mine and not rule.keeps:
                assignment, why = _with_skipped(assignment, model)
            if why:
                unmatched.append(f"{place} {why}")
            taken.update({site.path: number for site in mine})
            found.append(assignment)
    if unmatched:
        raise UnmatchedRuleError(origin, unmatched)
    return found


def _with_skipped(assignment: Assignment, model: nn.Module) -> tuple[Assignment, str | None]:
    """What the penalty would leave out of the modules that its rule takes; an error if that is all of them."""
    regularizer = find("penalty", assignment.rule.use).target(**assignment.rule.arguments())
    try:
        bindings, _ = bind(model, [(assignment.where, regularizer)])
    except NoMatchError as error:
        return assignment, f"does nothing: {error}"
    reads = {b.slot.path for b in bindings if not b.skipped}
    skipped = {b.slot.path: b.skipped for b in bindings if b.skipped and b.slot.path not in reads}
    return replace(assignment, skipped=skipped), None


def _take(
    rule: Rule, able: Callable[[nn.Module], bool], model: nn.Module, ends: Ends, taken: dict[str, int]
) -> tuple[list[Site], str | None]:
    """The modules that a rule takes, and why there are none."""
    chosen = selector(rule.where, ends)
    selected = [site for site in sites(model) if site.matches(chosen)]
    can = [site for site in selected if able(site.module)]
    mine = [site for site in can if site.path not in taken]
    if mine:
        return mine, None
    if can:
        earlier = sorted({taken[site.path] for site in can})
        return [], f"takes nothing: earlier rules ({listing([str(n) for n in earlier])}) took {listing(_paths(can))}"
    if selected:
        return [], f"takes nothing: it cannot act on {listing(_kinds(selected))}{_could(model, able)}"
    return [], f"selects nothing{_nearest(rule.where, model)}{_could(model, able)}"


def _able(verb: str, rule: Rule) -> Callable[[nn.Module], bool]:
    """Whether a rule can act on a module, as far as its class and its weight's shape say."""
    if verb == "swap":
        accepts = find(verb, rule.use).accepts
        return lambda module: isinstance(module, accepts)
    if verb == "penalty":
        return _readable(rule)
    tensor = str(dict(rule.options).get("tensor", "weight"))
    return lambda module: has_weight_matrix(module, tensor)


def _readable(rule: Rule) -> Callable[[nn.Module], bool]:
    """As :class:`gonio.Penalty` has it: null does not mean embeddings, and outputs are those of plain layers."""
    if issubclass(find("penalty", rule.use).makes, OutputRegularizer):
        return lambda module: isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    tables = (nn.Embedding, nn.EmbeddingBag) if rule.where is None else ()
    return lambda module: (
        not isinstance(module, tables)
        and any(has_weight_matrix(module, name) for name in ("weight", *module._parameters))
    )


def _able_to_keep(verb: str, rules: tuple[Rule, ...]) -> Callable[[nn.Module], bool]:
    """A `keep` takes weighted layers and what another rule of the verb could act on.

    Keeping a container keeps nothing, and is an error; keeping a linear classifier where only
    convolutions are swapped is a statement that stays true.
    """
    acting = [_able(verb, rule) for rule in rules if not rule.keeps]
    return lambda module: has_weight_matrix(module) or any(able(module) for able in acting)


def _outcome(step: Step) -> str:
    return f"{step.what}; skipped: {step.skipped}" if step.skipped else step.what


def _could(model: nn.Module, able: Callable[[nn.Module], bool]) -> str:
    found = [site for site in sites(model) if able(site.module)]
    return f". It could take: {listing(_kinds(found))}" if found else ". It could take no module of this model"


def _nearest(where: str | None, model: nn.Module) -> str:
    everything = sites(model)
    if where is not None and where.startswith("type:"):
        kinds = dict.fromkeys(type(site.module).__name__ for site in everything)
        near = [f"type:{name}" for name in closest(where[5:], kinds)]
    else:
        near = closest(where or "", [site.path for site in everything if site.path])
    return f"; did you mean {listing(near)}?" if near else ""


def _kinds(found: list[Site]) -> list[str]:
    return [f"{site.path or 'the model'} ({type(site.module).__name__})" for site in found]


def _paths(found: list[Site]) -> list[str]:
    return [site.path or "the model" for site in found]


def _shown(where: str | None) -> str:
    return "every module" if where is None else where


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
