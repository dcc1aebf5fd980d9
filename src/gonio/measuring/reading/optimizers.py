"""The state of optimizers in a checkpoint, parameter by parameter, each beside the weight that it belongs to.

`torch.optim.Optimizer.state_dict()` is a mapping of `state` and `param_groups`, and trainers store one, or a list of
them, under a key of their choice: it is known by this form. `torch.distributed.checkpoint` names parameters; torch
itself numbers them in the order of the groups. Then the weight follows from the order of shapes, and only where no
other assignment in this order exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from gonio.editing.optimizer_states import is_joint, state_powers
from gonio.errors import listing
from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor, clean_names, layer_path
from gonio.messages import Message, counted, say

FORM = {"state", "param_groups"}  # the keys of `torch.optim.Optimizer.state_dict()`
_LEVELS = 6  # of containers in which one is looked for
_MOST_STEPS = 1e12
_LISTED = 1 << 20  # parameters of an optimizer

Path = tuple[Any, ...]
Leaf = Callable[[Path, Any], StoredTensor | None]


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer keeps of one parameter.

    Attributes:
        place: in the checkpoint. `name`: of the weight, as the model names it; "" where it is not known.
        tensors: by the optimizer's names for them. `step`: number of steps; None where it is not stored.
        options: the numbers of its parameter group, such as `lr` and `betas`; empty where they are not stored.
        shape: that of the parameter. `weights`: the weight; where it is not known, all that it may be.
        unknown: why name or weight are not known.
    """

    place: str
    name: str
    tensors: Mapping[str, StoredTensor]
    step: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    weights: tuple[StoredTensor, ...] = ()
    unknown: str = ""

    @property
    def path(self) -> str:
        """The layer's path for its weight, the weight's name for another one, the place where it is not known."""
        return layer_path(self.name) or self.place


@dataclass(frozen=True)
class OptimizerContents:
    """The states of all optimizers of a checkpoint.

    Attributes:
        parameters: that have a state. `without`: places, or names, of parameters in a group that have none.
        misfits: (place, what is wrong) of a state that belongs to no weight.
        left_out: why tensors of the state are not judged, with their number.
        damaged: names of torch files beside the model that are cut off or empty, so that nothing of them is known.
    """

    parameters: tuple[ParameterState, ...] = ()
    without: tuple[str, ...] = ()
    misfits: tuple[tuple[str, str], ...] = ()
    left_out: tuple[Message, ...] = ()
    damaged: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parameters or self.misfits)

    def __add__(self, other: OptimizerContents) -> OptimizerContents:
        names = ("parameters", "without", "misfits", "left_out", "damaged")
        return OptimizerContents(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def notes(self) -> tuple[Message, ...]:
        """What was found, and what of it is not judged."""
        if not self:
            return ()
        unknown = Counter(state.unknown for state in self.parameters if state.unknown)
        said = [say("the optimizer's state: of {n}", n=counted(len(self.parameters), "parameter"))]
        said += [say("{n} of them: {reason}", n=n, reason=reason) for reason, n in unknown.items()]
        return (*said, *self.left_out)


@dataclass(frozen=True)
class Raw:
    """One `state_dict()` of an optimizer, found in a checkpoint."""

    place: str
    state: Mapping[Any, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]


def optimizers_in(content: Any, leaf: Leaf) -> list[Raw]:
    """Every state of an optimizer in nested containers.

    Args:
        leaf: makes of (keys from the content on, value) the stored tensor, or None of a value that is none.
    """
    return list(_found(content, (), leaf, _LEVELS, set()))


def in_memory(_: Path, value: Any) -> StoredTensor | None:
    """The `leaf` of contents whose tensors are at hand."""
    return value if isinstance(value, StoredTensor) else StoredTensor.of(value) if isinstance(value, Tensor) else None


def _found(content: Any, at: Path, leaf: Leaf, levels: int, seen: set[int]) -> Iterator[Raw]:
    if id(content) in seen:
        return
    seen.add(id(content))
    if isinstance(content, Mapping):
        if content.keys() >= FORM and isinstance(content["state"], Mapping):
            groups = _groups(content["param_groups"])
            held = {key: one for key, one in content["state"].items() if isinstance(one, Mapping)}
            if groups or held:
                made = {key: dict(_words(one, (*at, "state", key), leaf, _LEVELS)) for key, one in held.items()}
                yield Raw(".".join(map(str, at)), made, groups)
                return
        inner: Iterable[tuple[Any, Any]] = content.items()
    elif isinstance(content, (list, tuple)):
        inner = enumerate(content)
    else:
        return
    if levels:
        for key, value in inner:
            if isinstance(value, (Mapping, list, tuple)):
                yield from _found(value, (*at, key), leaf, levels - 1, seen)


def _words(one: Mapping[Any, Any], at: Path, leaf: Leaf, levels: int) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of one parameter's state by name; those of an inner mapping by their own names.

    bitsandbytes stores moments in one (`__bnb_optimizer_quant_state__`), so that FSDP does not take them apart.
    """
    for word, value in one.items():
        found = leaf((*at, word), value)
        if found is None and isinstance(value, Mapping) and levels:
            yield from _words(value, (*at, word), leaf, levels - 1)
        else:
            yield str(word), value if found is None else found


def _groups(value: Any) -> list[Mapping[str, Any]]:
    """The parameter groups; none where they have another form."""
    if isinstance(value, Mapping):  # by number or by name, as some trainers store them
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [g for g in value if isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple))]


def number(value: Any) -> float | None:
    """A number, or a tensor of one, as a float; None for anything else, and for one that cannot be read."""
    try:
        if isinstance(value, StoredTensor):
            value = value.load() if value.entries == 1 else None
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_complex():
            value = value.item()
        return float(value) if isinstance(value, (int, float)) else None
    except Exception:  # of a damaged file, or of a tensor's class
        return None


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: numbers, tuples of numbers, and the names of others that are switched on."""
    made: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        one = number(value)
        several = [number(part) for part in value] if isinstance(value, (list, tuple)) and len(value) < 9 else [None]
        if one is not None:
            made[str(name)] = one
        elif None not in several:
            made[str(name)] = tuple(several)
        elif value is not None:
            made[str(name)] = "?"
    return made


# --- which weight a state belongs to -------------------------------------------------------------------------------


def fitted(found: Iterable[Raw], weights: Mapping[str, StoredTensor], *, in_order: bool) -> OptimizerContents:
    """The states with the weights that they belong to.

    Args:
        weights: the model's tensors in the order of the file.
        in_order: whether that is the order of the model's parameters; safetensors sorts tensors by their names.
    """
    whole = OptimizerContents()
    for raw in found:
        try:
            whole += _fitted(raw, weights, in_order)
        except Exception as error:  # of a hostile file's content
            why = plain(str(error), longest=100)
            said = say("it does not have the form of an optimizer's state ({error})", error=why)
            whole += OptimizerContents(misfits=((raw.place, said),))
    return whole


@dataclass
class _Numbered:
    """The parameters of an optimizer by its keys for them: options of their groups, and names where these are told."""

    groups: list[list[Any]]
    options: dict[Any, dict[str, Any]]
    names: dict[Any, str]
    state: dict[Any, Mapping[str, Any]]

    @classmethod
    def of(cls, raw: Raw) -> _Numbered:
        made = cls([], {}, {}, {})
        for group in raw.groups:
            ids = [key for key in list(group["params"])[:_LISTED] if isinstance(key, (int, str))]
            made.groups.append(ids)
            made.options |= dict.fromkeys(ids, options_of(group))
            told = group.get("param_names")
            if isinstance(told, (list, tuple)) and len(told) == len(ids):
                made.names |= {key: str(name) for key, name in zip(ids, told, strict=True)}
        numbers = {str(key): key for ids in made.groups for key in ids if isinstance(key, int)}
        made.state = {numbers.get(key, key): held for key, held in raw.state.items()}  # numbers may be stored as text
        made.names |= {key: key for key in made.keys if isinstance(key, str)}
        return made

    @property
    def keys(self) -> list[Any]:
        return list(dict.fromkeys([*(key for ids in self.groups for key in ids), *self.state]))


def _fitted(raw: Raw, weights: Mapping[str, StoredTensor], in_order: bool) -> OptimizerContents:
    by_clean = {clean: name for name, clean in clean_names(weights).items()}
    found = _Numbered.of(raw)
    parts = factors(found.state.values())
    shapes = {key: shape_of(held, without=parts) for key, held in found.state.items()}
    named = bool(found.names)
    trained = {name: t.shape for name, t in weights.items() if t.dtype.startswith(("float", "bfloat", "complex"))}
    names = found.names or _by_order(found.groups, shapes, trained, in_order)
    parameters: list[ParameterState] = []
    misfits, without = [], []
    spare = Counter(t.shape for t in weights.values())
    alike: dict[tuple[int, ...], list[StoredTensor]] = {}
    for weight in weights.values():
        alike.setdefault(weight.shape, []).append(weight)
    joint = {key for key, held in found.state.items() if is_joint(held)}
    stateful = any(found.state.values()) and not joint
    for key in found.keys:
        dot = "" if not raw.place or raw.place.endswith(": ") else "."
        place = f"{raw.place}{dot}state.{plain(str(key), longest=200)}"
        name = "" if key in joint else names.get(key, "")
        name = name if name in weights else by_clean.get(name, "")
        held, shape = found.state.get(key) or {}, shapes.get(key)
        if not held:
            without += [name or place] if stateful and key in found.options else []
            continue
        told = any(held[word].shape == shape for word in state_powers(held) if isinstance(held[word], StoredTensor))
        unknown, wrong = "" if name else _why_unknown(named, in_order), ""
        unknown = unknown if weights else say("no weights are beside it")
        unknown = say("one state for all parameters of its optimizer") if key in joint else unknown
        if raw.groups and key not in found.options:
            wrong = say("no parameter group of the optimizer has it")
        elif named and not name and weights and not joint:
            wrong = say("the model has no weight of its name")
        elif name and told and shape != weights[name].shape:
            wrong = say("its shape is {shape}, that of the weight {other}", shape=shape, other=weights[name].shape)
            name, unknown = "", say("its shape is not that of the weight")
        elif not name and weights and told and shape is not None:
            spare[shape] -= 1
            wrong = say("the model has no weight of its shape {shape} left", shape=shape) if spare[shape] < 0 else ""
        misfits += [(place, wrong)] if wrong else []
        options = found.options.get(key, {})
        step = number(held.get("step"))
        step = options.get("step") if step is None else step
        step = step if isinstance(step, float) and 1 <= step < _MOST_STEPS else None
        made = ParameterState(place, name, _tensors(held, shape), step, options, shape or ())
        may = (weights[name],) if name else tuple(alike.get(made.shape, ())) if not wrong and not joint else ()
        parameters.append(replace(made, weights=may, unknown=unknown))
    return OptimizerContents(tuple(parameters), tuple(without), tuple(misfits), _unjudged(parameters))


def _tensors(held: Mapping[str, Any], shape: tuple[int, ...] | None) -> dict[str, StoredTensor]:
    """The tensors of a state, without single numbers such as the step."""
    stored = {word: value for word, value in held.items() if isinstance(value, StoredTensor)}
    return {
        word: value for word, value in stored.items() if value.entries > 1 or (value.shape and value.shape == shape)
    }


def factors(states: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names under which an optimizer keeps something else than one number for each of the parameter's.

    Adafactor keeps sums over rows and over columns, bitsandbytes tables and scales of blocks. Such tensors have another
    shape than the largest of the same parameter's state; where none of these has room for all others, none has the
    parameter's shape. Moments of gradients always have it.
    """
    made: set[str] = set()
    for held in states:
        shapes = {word: v.shape for word, v in held.items() if isinstance(v, StoredTensor) and v.shape}
        most = max(shapes.values(), key=lambda shape: (len(shape), prod(shape)), default=())
        fits = all(shape == most or (prod(shape) < prod(most) and is_within(shape, most)) for shape in shapes.values())
        made |= {word for word, shape in shapes.items() if shape != most or not fits} - state_powers(shapes).keys()
    return frozenset(made)


def is_within(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a shape is that of a whole without some of its dimensions, or with 1 in their place.

    Example:
        >>> from gonio.measuring.reading.optimizers import is_within
        >>> is_within((64, 1), (64, 32)), is_within((32,), (64, 32)), is_within((16,), (64, 32))
        (True, True, False)
    """
    left = iter(whole)
    return all(any(size == one for one in left) for size in shape if size != 1)


def shape_of(held: Mapping[str, Any], *, without: Collection[str] = ()) -> tuple[int, ...] | None:
    """The shape of most tensors of a state, that of the parameter; None where none has more than one number.

    Args:
        without: names of tensors that do not have the shape of the parameter.
    """
    found = Counter(v.shape for w, v in held.items() if isinstance(v, StoredTensor) and v.shape and w not in without)
    return found.most_common(1)[0][0] if found else None


def _why_unknown(named: bool, in_order: bool) -> str:
    if named:
        return say("no weight of the model has this name")
    if in_order:
        return say("parameters have numbers, and several assignments of weights are possible")
    return say("parameters have numbers, and the file sorts weights by name: several have this shape")


def _unjudged(parameters: Sequence[ParameterState]) -> tuple[Message, ...]:
    """The tensors of the state that no rule reads, by name."""
    other: Counter[str] = Counter()
    for one in parameters:
        powers = state_powers(one.tensors)
        other.update(word for word in one.tensors if not (powers.get(word) in (1, 2) and judged(one, word)))
    if not other:
        return ()
    names = listing([plain(name, longest=60) for name in other], limit=4)
    return (
        say(
            "of the optimizer's state only checked for NaN and infinity, not known as moments of gradients: "
            "{n} ({names})",
            n=counted(other.total(), "tensor"),
            names=names,
        ),
    )


def judged(one: ParameterState, word: str) -> bool:
    """Whether a tensor of the state has one number for each of the parameter."""
    return one.tensors[word].shape == one.shape


def _by_order(
    groups: Sequence[Sequence[Any]],
    shapes: Mapping[Any, tuple[int, ...] | None],
    weights: Mapping[str, tuple[int, ...]],
    in_order: bool,
) -> dict[Any, str]:
    """Names of numbered parameters where one assignment alone is possible."""
    names = list(weights)
    if not in_order:
        wanted = Counter(shape for shape in shapes.values() if shape is not None)
        there = Counter(weights.values())
        lone = {shape: name for name, shape in weights.items() if there[shape] == 1 == wanted[shape]}
        return {key: lone[shape] for key, shape in shapes.items() if shape in lone}
    held = list(weights.values())
    whole = [key for ids in groups for key in ids]
    runs = [whole] if _places([shapes.get(key) for key in whole], held) is not None else groups
    found: dict[Any, str] = {}
    for ids in runs:
        wanted_shapes = [shapes.get(key) for key in ids]
        first, last = _places(wanted_shapes, held), _places(wanted_shapes[::-1], held[::-1])
        if first is None or last is None:
            continue
        last = [len(held) - 1 - at for at in reversed(last)]
        pairs = zip(ids, first, last, strict=True)
        found |= {key: names[a] for key, a, b in pairs if a == b and shapes.get(key) is not None}
    times = Counter(found.values())
    return {key: name for key, name in found.items() if times[name] == 1}


def _places(wanted: Sequence[tuple[int, ...] | None], held: Sequence[tuple[int, ...]]) -> list[int] | None:
    """The earliest places of wanted shapes in this order; None where there are none. None as a shape fits any."""
    at, found = 0, []
    for shape in wanted:
        while at < len(held) and shape is not None and held[at] != shape:
            at += 1
        if at == len(held):
            return None
        found.append(at)
        at += 1
    return found
