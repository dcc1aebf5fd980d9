"""Which rule applies to which module of a model, and whether its verb refuses it, before anything is changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from gonio.editing.edit import Edited
from gonio.editing.where import Where, left_out, modules_at, require_model, why_not
from gonio.errors import (
    GonioError,
    InvalidArgumentError,
    NoMatchError,
    RecipeError,
    UnknownNameError,
    UnmatchedRuleError,
    closest,
    first_line,
    listing,
)
from gonio.escaping import aligned, html_table
from gonio.geometry.views import has_filters
from gonio.messages import local, say
from gonio.optim.clip_qk import clippable
from gonio.optim.hold import holdable
from gonio.penalty import terms
from gonio.recipes.catalogue import AFTER_STEPS, find
from gonio.recipes.rule import ENDS, KEEP, Rule
from gonio.seeding import state_kept
from gonio.surgery import Selector, Site, as_selector, init, init_, parametrize, parametrize_, sites, swap, swap_
from gonio.surgery.graph import trace

_LARGE = 1 << 22  # numbers of a layer that is not tried where a smaller one is


@dataclass(frozen=True)
class Step:
    """One row of a plan.

    Attributes:
        verb: init, swap, parametrize, penalty, optimizer, hold or clip_qk.
        rule: number of the rule within its verb, from 1.
        path: of the module; `""` is the model itself.
        kind: the module's class name.
        what: the method with its options, or `keep`.
        skipped: why the method has no effect here; empty if it has one.

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
    """The changes that a recipe would make to a model; `str()` is a table.

    Attributes:
        recipe: its name.
        steps: one per rule and module, in the order in which they would happen.
        untouched: path and class name of every module with parameters that no rule changes or reads.
        notes: assumptions.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> print(gonio.Recipe.load("switchable-norm").plan(model))
        switchable-norm:
          verb  rule  layer  type         action
          swap  1     1      BatchNorm2d  SwitchableNorm2d.from_batch_norm
        untouched:
          0  Conv2d
    """

    recipe: str
    steps: tuple[Step, ...]
    untouched: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps)

    def __bool__(self) -> bool:
        return True  # a plan without a step is a plan too

    def __repr__(self) -> str:
        return f"<Plan of {self.recipe}: {len(self)} steps, {len(self.untouched)} untouched modules>"

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        left = listing([path or local("(model)") for path, _ in self.untouched])
        notes = [say("untouched: {paths}", paths=left)] if self.untouched else []
        return html_table(self.recipe, head, rows, [*map(local, (*notes, *self.notes))])

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [tuple(map(local, _HEAD))]
        for step in self.steps:
            skipped = say("{what}; skipped: {reason}", what=step.what, reason=step.skipped)
            action = local(skipped if step.skipped else step.what)
            rows.append((step.verb, str(step.rule), step.path or local("(model)"), step.kind, action))
        return rows

    def __str__(self) -> str:
        lines = [say("{name}:", name=self.recipe), *_table(self._rows())]
        if not self.steps:
            lines = [say("{name}: nothing to do", name=self.recipe)]
        if self.untouched:
            rest = [(path or local("(model)"), kind) for path, kind in self.untouched]
            lines += [say("untouched:"), *_table(rest)]
        return "\n".join(map(local, [*lines, *(say("note: {text}", text=note) for note in self.notes)]))


_HEAD = (say("verb"), say("rule"), say("layer"), say("type"), say("action"))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]


@dataclass(frozen=True)
class Paths(Selector):
    """Selects modules by their exact paths; `str()` is the rule that they come from."""

    paths: frozenset[str]
    origin: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return path in self.paths

    def __str__(self) -> str:
        return self.origin


def _ends(model: nn.Module) -> tuple[dict[str | None, str], str]:
    """Paths of the `stem` and the `classifier`, the first and the last layer with a weight matrix, and an assumption.

    In the order of execution if `torch.fx` can trace the model, otherwise in the order of registration; the
    assumption then says why.
    """
    paths = {id(site.module): site.path for site in sites(model)}
    traced = trace(model)
    order = [paths[id(module)] for _, module, _ in traced.calls() if has_filters(module)]
    registered = [site.path for site in sites(model) if has_filters(site.module)]
    found = order or registered
    told = say("stem and classifier by order of registration: {reason}", reason=traced.reason)
    reason = "" if order or not traced.reason else told
    return ({"stem": found[0], "classifier": found[-1]}, reason) if found else ({}, "")


@dataclass(frozen=True)
class Assignment:
    """One rule and the modules that it applies to.

    Attributes:
        number: of the rule within its verb, from 1.
        place: file, line and rule, for messages.
        skipped: by path, why a penalty has no effect on some of these modules.
        left: by path, why the verb leaves out further layers that the rule selects.
        changes: paths of the layers that it changes inside these modules.
        note: an assumption.
    """

    verb: str
    number: int
    rule: Rule
    sites: tuple[Site, ...]
    place: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    changes: frozenset[str] = frozenset()
    note: str = ""

    @property
    def where(self) -> Paths:
        """A selector of these modules, and of those that the verb then leaves out with a note."""
        paths = frozenset((*(site.path for site in self.sites), *self.left))
        return Paths(paths, f"{_where_text(self.rule)} (rule {self.number})")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Inside, an error of a verb says which rule it is about."""
        try:
            yield
        except GonioError as error:
            error.add_note(f"in {self.place}")
            raise


def assign(rules: Mapping[str, tuple[Rule, ...]], model: nn.Module, *, origin: str) -> list[Assignment]:
    """Assign to every rule its modules: per verb, each module goes to the first rule that selects it.

    An UnmatchedRuleError names every rule that applies to no module, with its file (`origin`) and its line, and a
    RecipeError every rule that its verb would refuse on a module.
    """
    require_model(model, origin)
    uses_ends = any(rule.where in ENDS for ordered in rules.values() for rule in ordered)
    ends, assumed = _ends(model) if uses_ends else ({}, "")  # finding them traces the model
    modules = modules_at(model)
    found: list[Assignment] = []
    unmatched: list[str] = []
    refusals: list[str] = []
    for verb, ordered in rules.items():
        taken: dict[str, int] = {}
        for number, rule in enumerate(ordered, start=1):
            can_act = _can_keep(verb, ordered) if rule.keeps else _can_act(verb, rule)
            mine, why = _select(rule, can_act, model, ends, taken)
            line = "" if rule.line is None else f":{rule.line}"
            which = verb if verb in AFTER_STEPS else f"rule {number} of {verb}"
            place = f"{origin}{line}: {which} ({_where_text(rule)}: {rule})"
            note = assumed if rule.where in ENDS else ""
            assignment = Assignment(verb, number, rule, tuple(mine), place, note=note)
            if verb in ("init", "parametrize") and mine and not rule.keeps:
                tensor, selector = str(dict(rule.options).get("tensor", "weight")), _selector(rule, ends)
                left = left_out(model, selector, can_act=can_act, tensor=tensor)
                assignment = replace(assignment, left={path: why for path, why in left.items() if path not in taken})
                stopped = [path for path in assignment.left if has_filters(modules[path], tensor)]
                if stopped:
                    why = (
                        f"cannot act on {listing(stopped)}: {left[stopped[0]]}. Exclude what it cannot act on by `keep`"
                    )
            if verb == "penalty" and mine and not rule.keeps:
                assignment, why = _with_skipped(assignment, model)
            elif verb in _APPLICABLE and mine:
                assignment, why = _with_left_out(assignment, model)
            elif verb in ("init", "swap", "parametrize") and mine and not rule.keeps and not why:
                refusals += _refused(assignment)
            unmatched += [f"{place} {why}"] if why else []
            taken.update({site.path: number for site in mine})
            found.append(assignment)
    if unmatched:
        raise UnmatchedRuleError(origin, [*unmatched, *refusals])
    if refusals:
        raise RecipeError(origin, refusals)
    return found


def _refused(assignment: Assignment) -> list[str]:
    """Why its verb refuses a value of the rule, or the rule on a type of layers; raises what a layer's state provokes.

    Raises:
        GonioError: of the verb, where the layer and not the rule is the reason, as one that is parametrized before.
    """
    error = _refusal(assignment.verb, assignment.rule, assignment.sites)
    if isinstance(error, GonioError) and not isinstance(error, (InvalidArgumentError, UnknownNameError)):
        with assignment.named():
            raise error
    if error is None:
        return []
    said = str(error) if isinstance(error, GonioError) else f"it fails: {first_line(error, kind=True)}"
    return [f"{assignment.place}: {said}"]


def _refusal(verb: str, rule: Rule, sites: Iterable[Site]) -> Exception | None:
    """The error of a verb that refuses a rule on one of these layers; None if it refuses it on none.

    It is tried on a copy of the smallest layer of each type: a value out of range fails on every layer, and a method
    that does not fit a type of layers fails on each of them.
    """
    smallest: dict[type, tuple[int, Site]] = {}
    for site in sites:
        size = sum(each.numel() for each in site.module.parameters())
        if size < smallest.get(type(site.module), (size + 1, site))[0]:
            smallest[type(site.module)] = size, site
    tried = sorted(smallest.values(), key=lambda pair: pair[0])
    for number, (size, site) in enumerate(tried):
        if number and size > _LARGE:
            break
        try:
            alone = _alone(site)
        except Exception:  # a layer of the user's that cannot be copied is refused, or not, when the verb runs
            continue
        try:
            with state_kept():
                act_(alone, verb, rule, where=Paths(frozenset([site.path]), site.path), seed=0)
        except (GonioError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # torch's for a wrong value
            return error
    return None


def _alone(site: Site) -> nn.Module:
    """A model with a copy of one layer, under the same path."""
    layer = deepcopy(site.module)
    for name in reversed(site.path.split(".") if site.path else ()):
        layer = nn.Sequential(OrderedDict([(name, layer)]))
    return layer


def act_(model: nn.Module, verb: str, rule: Rule, *, where: Where, seed: int) -> Edited:
    """Run `init`, `swap` or `parametrize` by a rule."""
    arguments = rule.arguments()
    target, tensor = find(verb, rule.use).target, arguments.pop("tensor", "weight")
    match verb:
        case "swap":
            return swap_(model, target, where=where, **arguments)
        case "init":
            return init_(model, target, where=where, tensor=tensor, seed=seed, **arguments)
    return parametrize_(model, target(**arguments), where=where, tensor=tensor)


def plan(name: str, assignments: Sequence[Assignment], model: nn.Module, *, optimizer: Rule | None = None) -> Plan:
    """The plan of a recipe from its assigned rules; its optimizer trains the whole model."""
    steps = [
        Step(a.verb, a.number, site.path, type(site.module).__name__, str(a.rule), a.skipped.get(site.path, ""))
        for a in assignments
        for site in a.sites
    ]
    touched = {step.path for step in steps if step.what != KEEP and not step.skipped}
    touched |= {path for assignment in assignments for path in assignment.changes}
    if optimizer is not None:
        first = next((index for index, step in enumerate(steps) if step.verb in AFTER_STEPS), len(steps))
        steps.insert(first, Step("optimizer", 1, "", type(model).__name__, str(optimizer)))
    untouched = tuple(
        (site.path, type(site.module).__name__)
        for site in sites(model)
        if site.module._parameters and site.path not in touched
    )
    notes = [a.note for a in assignments if a.note]
    notes += [
        say("{path} is left out by {rule}: {reason}", path=path, rule=a.place, reason=why)
        for a in assignments
        for path, why in a.left.items()
    ]
    return Plan(name, tuple(steps), untouched, tuple(dict.fromkeys(notes)))


def _with_skipped(assignment: Assignment, model: nn.Module) -> tuple[Assignment, str]:
    """Which of its modules the penalty would skip; a reason if it would skip all of them."""
    regularizer = find("penalty", assignment.rule.use).target(**assignment.rule.arguments())
    try:
        bindings, _ = terms.bind(model, [(assignment.where, regularizer)])
    except NoMatchError as error:
        return assignment, f"has no effect: {error}"
    reads = {b.weight.path for b in bindings if not b.skipped}
    skipped = {b.weight.path: b.skipped for b in bindings if b.skipped and b.weight.path not in reads}
    return replace(assignment, skipped=skipped), ""


def _with_left_out(assignment: Assignment, model: nn.Module) -> tuple[Assignment, str]:
    """Which of its modules a verb after steps would leave out; a reason if it cannot act."""
    try:
        with assignment.named():
            found, changes = _APPLICABLE[assignment.verb](model, assignment.where, **assignment.rule.arguments())
    except NoMatchError as error:
        return assignment, f"has no effect: {error}"
    named = tuple(site for site in assignment.sites if site.path in found)
    skipped = {path: why for path, why in found.items() if why}
    return replace(assignment, sites=named, skipped=skipped, changes=changes), ""


_APPLICABLE: Mapping[str, Callable[..., tuple[dict[str, str], frozenset[str]]]] = {
    "hold": lambda model, where, **arguments: (holdable(model, where, **arguments), frozenset()),
    "clip_qk": clippable,
}


_CanAct = Callable[[nn.Module], str | None]


def _selector(rule: Rule, ends: Mapping[str | None, str]) -> Selector:
    if rule.where in ENDS:
        return Paths(frozenset(path for end, path in ends.items() if end == rule.where), str(rule.where))
    return as_selector(rule.where)


def _select(
    rule: Rule, can_act: _CanAct, model: nn.Module, ends: Mapping[str | None, str], taken: dict[str, int]
) -> tuple[list[Site], str]:
    """The modules of a rule, or why there are none."""
    selector, everything = _selector(rule, ends), sites(model)
    selected = [site for site in everything if site.matches(selector)]
    possible = [site for site in selected if why_not(site, can_act) is None]
    mine = [site for site in possible if site.path not in taken]
    if mine:
        return mine, ""
    if possible:
        rules = listing([f"rule {number}" for number in sorted({taken[site.path] for site in possible})])
        return [], f"applies to no module: {listing([s.path or 'the model' for s in possible])} went to {rules}"
    could = [_named(site) for site in everything if why_not(site, can_act) is None]
    hint = f"It can act on: {listing(could)}" if could else "It can act on no module of this model"
    if selected:
        return [], f"applies to no module: it cannot act on {listing([_named(s) for s in selected])}. {hint}"
    return [], f"selects nothing{_closest(rule.where, everything)} {hint}"


def _can_act(verb: str, rule: Rule) -> _CanAct:
    """Why the verb of a rule cannot act on a module, as the verb itself says; None if it can."""
    entry, tensor = find(verb, rule.use), str(dict(rule.options).get("tensor", "weight"))
    match verb:
        case "init":
            return partial(init.can_act, tensor=tensor)
        case "parametrize":
            return partial(parametrize.can_act, tensor=tensor)
        case "swap":
            return partial(swap.can_act, factory=entry.target)
        case "penalty":
            return partial(terms.can_act, kind=entry.makes, named=rule.where is not None)
        case "clip_qk":
            return lambda module: None  # the running model decides
    return lambda module: None if has_filters(module) else "it has no weight with filters"


def _can_keep(verb: str, rules: tuple[Rule, ...]) -> _CanAct:
    """Why `keep` cannot exclude a module: it is no layer with a weight, and no other rule of the verb acts on it.

    So keeping a container is an error, and keeping a linear classifier where only convolutions are swapped is not.
    """
    acting = [_can_act(verb, rule) for rule in rules if not rule.keeps]

    def can_keep(module: nn.Module) -> str | None:
        acts = has_filters(module) or any(can_act(module) is None for can_act in acting)
        return None if acts else "nothing would act on it"

    return can_keep


def _closest(where: str | None, everything: Sequence[Site]) -> str:
    """The paths and types that are spelled like a selector, as the end of a sentence."""
    name = (where or "").removeprefix("type:")
    near = [f"type:{kind}" for kind in closest(name, dict.fromkeys(type(s.module).__name__ for s in everything))]
    if name == where:
        near = closest(name, [site.path for site in everything if site.path]) + near
    return f"; did you mean {listing(near)}?" if near else "."


def _named(site: Site) -> str:
    return f"{site.path or 'the model'} ({type(site.module).__name__})"


def _where_text(rule: Rule) -> str:
    return "every module" if rule.where is None else rule.where
