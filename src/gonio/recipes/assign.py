"""Which modules each rule takes: per verb the first rule that selects a module, and no rule may take nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from gonio.errors import NoMatchError, UnmatchedRuleError, closest, listing
from gonio.penalty.binding import bind
from gonio.recipes.names import find
from gonio.recipes.rule import Rule
from gonio.recipes.where import ENDS, Ends, Paths, has_weight_matrix, selector
from gonio.regularizers import OutputRegularizer
from gonio.surgery import Site, sites

__all__ = ["Assignment", "assign"]


@dataclass(frozen=True)
class Assignment:
    """One rule and the modules that it takes.

    Attributes:
        number: of the rule within its verb, from 1.
        place: file, line and rule, for messages.
        skipped: why a penalty does nothing to some of these modules, by path.
        note: what was assumed.
    """

    verb: str
    number: int
    rule: Rule
    sites: tuple[Site, ...]
    place: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def where(self) -> Paths:
        """A selector of exactly these modules."""
        return Paths(frozenset(site.path for site in self.sites), f"{_shown(self.rule.where)} (rule {self.number})")


def assign(rules: Mapping[str, tuple[Rule, ...]], model: nn.Module, *, origin: str) -> list[Assignment]:
    """Every rule with the modules that it takes.

    Args:
        rules: of each verb, in order.
        model: not changed.
        origin: the file's or the recipe's name, for messages.

    Raises:
        UnmatchedRuleError: naming every rule that takes nothing, its file and its line.
    """
    ends = _ends(rules, model)
    found: list[Assignment] = []
    unmatched: list[str] = []
    for verb, ordered in rules.items():
        taken: dict[str, int] = {}
        for number, rule in enumerate(ordered, start=1):
            able = _able_to_keep(verb, ordered) if rule.keeps else _able(verb, rule)
            mine, why = _take(rule, able, model, ends, taken)
            note = ends.assumed if rule.where in ENDS else ""
            assignment = Assignment(verb, number, rule, tuple(mine), _place(origin, verb, number, rule), note=note)
            if verb == "penalty" and mine and not rule.keeps:
                assignment, why = _with_skipped(assignment, model)
            unmatched += [f"{assignment.place} {why}"] if why else []
            taken.update({site.path: number for site in mine})
            found.append(assignment)
    if unmatched:
        raise UnmatchedRuleError(origin, unmatched)
    return found


def _ends(rules: Mapping[str, tuple[Rule, ...]], model: nn.Module) -> Ends:
    """Stem and classifier, where a rule asks for them: finding them traces the model."""
    asked = any(rule.where in ENDS for ordered in rules.values() for rule in ordered)
    return Ends.of(model) if asked else Ends(None, None)


def _place(origin: str, verb: str, number: int, rule: Rule) -> str:
    line = "" if rule.line is None else f":{rule.line}"
    return f"{origin}{line}: rule {number} of {verb} ({_shown(rule.where)}: {rule})"


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
        return [], f"takes nothing: it cannot act on {listing(_kinds(selected))}. {_could(model, able)}"
    return [], f"selects nothing{_nearest(rule.where, model)} {_could(model, able)}"


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


def _could(model: nn.Module, able: Callable[[nn.Module], bool]) -> str:
    found = [site for site in sites(model) if able(site.module)]
    return f"It could take: {listing(_kinds(found))}" if found else "It could take no module of this model"


def _nearest(where: str | None, model: nn.Module) -> str:
    """The end of the sentence that a selector found nothing: paths and types with names like it, if any."""
    everything = sites(model)
    name = (where or "").removeprefix("type:")
    near = [f"type:{kind}" for kind in closest(name, dict.fromkeys(type(s.module).__name__ for s in everything))]
    if name == where:
        near = closest(name, [site.path for site in everything if site.path]) + near
    return f"; did you mean {listing(near)}?" if near else "."


def _kinds(found: list[Site]) -> list[str]:
    return [f"{site.path or 'the model'} ({type(site.module).__name__})" for site in found]


def _paths(found: list[Site]) -> list[str]:
    return [site.path or "the model" for site in found]


def _shown(where: str | None) -> str:
    return "every module" if where is None else where
