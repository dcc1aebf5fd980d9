"""State dicts, in memory and inside of what trainers save: found by the keys that trainers use, or by an optimizer.

Under other keys a state dict is that of the model only if it is the one mapping of named tensors, and the parameters of
the optimizer beside it have the shapes of its tensors. Nothing is guessed from a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from gonio.errors import InvalidArgumentError, listing
from gonio.escaping import plain, shorten
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.measuring.reading.opened import Opened
from gonio.measuring.reading.optimizers import FORM, Raw, fitted, in_memory, optimizers_in, shape_of
from gonio.measuring.reading.pickles import ARRAY, Record, is_array
from gonio.messages import Message, say

# The keys under which trainers store the weights, most trusted first; averages of the weights last.
_KEYS: tuple[str, ...] = (
    *(
        "state_dict",
        "model_state_dict",
        "model_state",
        "model",
        "module",
        "net",
        "network",
        "params",
        "weights",
        "state",
    ),
    *("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema", "shadow_params"),
)
_DEPTH = 3
_NESTED = 6  # levels below which containers of a checkpoint are not searched for tensors


@dataclass(frozen=True)
class Found:
    """A state dict in a checkpoint.

    Attributes:
        at: the keys that lead to it; none for the checkpoint itself.
        beside: the places of other tensors in the checkpoint, which were not read.
        prefix: of a part of the mapping at this place, what the names of all its tensors began with.
        whole: the mapping at this place.
    """

    state: Mapping[Any, Any]
    at: tuple[Any, ...]
    beside: tuple[str, ...]
    prefix: str = ""
    whole: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The keys, and the prefix within the mapping, with dots between them."""
        return ".".join(map(str, (*self.at, self.prefix))).strip(".")


def state_in(content: Any, *, what: str, key: str = "") -> Found:
    """The state dict in a checkpoint: the least deep one, and of several the one under the most trusted key.

    Args:
        what: the name of `content` in the error.
        key: its place, with dots between keys, where it is under another one.

    Raises:
        InvalidArgumentError: if it holds no named tensors there.
    """
    if key:
        inner, at, rest = _walked(content, key)
        if rest and isinstance(inner, Mapping) and (part := _part(inner, rest)):
            above, depth = ".".join(map(str, at)), rest.count(".") + 1
            beside = {f"{above}.{'.'.join(str(name).split('.')[:depth])}".lstrip(".") for name in inner}
            return Found(part, at, tuple(sorted(beside - {key})), f"{rest}.", inner)
        if rest or not isinstance(inner, Mapping) or not _holds_tensors(inner):
            held = list(holders(content)) if isinstance(content, Mapping) else []
            do = f"Tensors are under: {shorten_list(held, repr)}." if held else "Leave the key out."
            raise InvalidArgumentError(f"measure() looks for named tensors under the key {key!r} of {what}", "none", do)
        found = state_in(inner, what=f"{what} under {key!r}")
        return replace(found, at=(*at, *found.at), beside=(*found.beside, *_beside(content, at)))
    places = list(_places(content, "", _DEPTH)) if isinstance(content, Mapping) else []
    places = places or _trained(content)
    if not places:
        raise _no_state(content, what)
    place, state = min(places, key=lambda found: found[0].count("."))  # the first of the least deep
    others, at = [other.removeprefix(".") for other, _ in places if other != place], tuple(place.split(".")[1:])
    others += [name for name in _beside(content, at) if not any(f"{other}.".startswith(f"{name}.") for other in others)]
    return Found(state, at, tuple(others), whole=state)


def _beside(content: Any, at: Sequence[Any]) -> Iterator[str]:
    """The places of other tensors at each level of the way to one."""
    for depth, key in enumerate(at):
        yield from (".".join(map(str, (*at[:depth], name))) for name in holders(content) if name != str(key))
        content = content[key]


def _walked(content: Any, key: str) -> tuple[Any, tuple[Any, ...], str]:
    """The mapping at a place, the keys that lead to it, which may be no texts or have dots, and what is not found."""
    best: tuple[Any, tuple[Any, ...], str] = (content, (), key)
    for name, inner in content.items() if key and isinstance(content, Mapping) else ():
        if isinstance(inner, Mapping) and f"{key}.".startswith(f"{name}."):
            found, at, rest = _walked(inner, key[len(str(name)) + 1 :])
            if len(rest) < len(best[2]):
                best = found, (name, *at), rest
    return best


def _part(state: Mapping[Any, Any], beginning: str) -> dict[str, Any]:
    """What a mapping has under names that begin so, without it; empty if no tensor is there."""
    prefix = f"{beginning}."
    held = {str(name).removeprefix(prefix): one for name, one in state.items() if str(name).startswith(prefix)}
    return held if any(isinstance(one, Tensor) for one in held.values()) else {}


def twins(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The prefixes under which a mapping has tensors of the same names and shapes, most of its matrices together.

    They are two networks or more of one architecture: a network and the average of its weights, as in MoCo and in mean
    teachers, or twin towers. Words that end with a digit count layers, which are alike in any network.

    Example:
        >>> from gonio.measuring.reading.state_dicts import twins
        >>> twins({f"{side}.{i}.weight": (4, 4) for side in ("encoder_q", "encoder_k") for i in (0, 1)})
        ('encoder_q', 'encoder_k')
    """
    under: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        words = name.split(".")
        counted_from = next((at for at, word in enumerate(words) if word[-1:].isdigit()), len(words))
        for depth in range(1, min(_DEPTH, len(words) - 1, counted_from) + 1):
            under.setdefault(".".join(words[:depth]), set()).add((".".join(words[depth:]), shape))
    alike: dict[frozenset[tuple[str, tuple[int, ...]]], list[str]] = {}
    for prefix, held in under.items():
        if sum(len(shape) > 1 for _, shape in held) > 1:
            alike.setdefault(frozenset(held), []).append(prefix)
    matrices = sum(len(shape) > 1 for shape in shapes.values())
    for each, prefixes in sorted(alike.items(), key=lambda pair: -len(pair[0]) * len(pair[1])):
        if len(prefixes) > 1 and 2 * len(prefixes) * sum(len(shape) > 1 for _, shape in each) > matrices:
            return tuple(prefixes)
    return ()


def _no_state(content: Any, what: str) -> InvalidArgumentError:
    held = content.name if isinstance(content, Record) else type(content).__name__
    held, do = plain(held, longest=200), f"Pass the state dict itself, or store it under one of: {', '.join(_KEYS)}."
    if isinstance(content, Mapping):
        held = f"a mapping with the keys [{shorten_list(content, repr)}]"
        if places := list(holders(content)):
            named = [_without_known(at.removeprefix(".")) for at, _ in by_form(content)]
            do = "Pass them with their names, as a mapping: a list has none."
            if content.keys() >= FORM:
                held, do = "the state of an optimizer, and no weights", "Pass the weights, or the folder with both."
            if named:
                do = f"Name the one to measure (--key {named[0]} on the command line), or pass it alone."
            do += f" Tensors are under: {shorten_list(places, repr)}."
    return InvalidArgumentError(f"measure() looks for named tensors in {what}", held, do)


def _without_known(place: str) -> str:
    """A place as short as it can be named: known keys at its end are found under the rest."""
    *above, last = place.split(".")
    return _without_known(".".join(above)) if above and last in _KEYS else place


def _trained(content: Any) -> list[tuple[str, Mapping[Any, Any]]]:
    """The one (place, state dict) under keys that are not known, if every optimizer beside it is of its tensors."""
    found = list(by_form(content))
    if len(found) != 1:
        return []
    there = Counter(tuple(value.shape) for value in found[0][1].values() if isinstance(value, Tensor))
    shapes = [[shape_of(one) for one in raw.state.values()] for raw in optimizers_in(content, in_memory)]
    trained = [Counter(shape for shape in each if shape is not None) for each in shapes]
    fits = all(wanted <= there and any(len(shape) > 1 for shape in wanted) for wanted in trained)
    return found if trained and fits else []


def by_form(content: Any, at: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(place, mapping) for every mapping of named tensors, matrices among them, that is no state of an optimizer."""
    if not isinstance(content, Mapping) or content.keys() >= FORM:
        return
    if at and _matrices(content) and all(isinstance(key, str) for key in content):
        yield at, content
    elif depth:
        for key, value in content.items():
            if isinstance(key, str) and "." not in key:
                yield from by_form(value, f"{at}.{key}", depth - 1)


def _places(content: Mapping[Any, Any], at: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(place, state dict) for every state dict under the known keys, or for the mapping itself.

    A mapping with tensors and with a state dict in it is that of a trainer, unless it has more matrices itself; so is
    one with a state dict under a key that is not known, which is not guessed.
    """
    known = ((key, content.get(key)) for key in _KEYS) if depth else ()
    inner = [
        place for key, held in known if isinstance(held, Mapping) for place in _places(held, f"{at}.{key}", depth - 1)
    ]
    own = any(isinstance(value, Tensor) for value in content.values())
    own = own and (bool(inner) or _matrices(content) >= _most_matrices(content, _DEPTH))
    if own and _matrices(content) >= max((_matrices(state) for _, state in inner), default=0) + bool(inner):
        yield at, content
    else:
        yield from inner


def _matrices(state: Mapping[Any, Any]) -> int:
    return sum(isinstance(value, Tensor) and value.ndim > 1 for value in state.values())


def _most_matrices(content: Mapping[Any, Any], depth: int) -> int:
    """The most matrices that a mapping inside of this one holds."""
    held = [value for value in content.values() if depth and isinstance(value, Mapping)]
    return max((max(_matrices(value), _most_matrices(value, depth - 1)) for value in held), default=0)


def holders(content: Mapping[Any, Any]) -> Iterator[str]:
    """The keys under which there are tensors, at any depth."""
    return (str(key) for key, value in content.items() if isinstance(value, Tensor) or _holds_tensors(value))


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for _, leaf in leaves(value, _NESTED))


def leaves(content: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """(place, value) of everything in nested containers; a container that contains itself is visited once.

    Args:
        depth: levels of containers that are looked into.
    """
    stack, seen = [("", content, 0)], set[int]()
    while stack:
        name, value, level = stack.pop()
        if isinstance(value, Mapping):
            inner = [(str(key), held) for key, held in value.items()]
        elif isinstance(value, (list, tuple)):
            inner = [(str(key), held) for key, held in enumerate(value)]
        else:
            yield name, value
            continue
        if id(value) not in seen and level < depth:
            seen.add(id(value))
            dot = "." if name else ""
            stack += [(f"{name}{dot}{key}", held, level + 1) for key, held in reversed(inner)]


def shorten_list(names: Collection[Any], form: Callable[[Any], str] = str) -> str:
    """The first names, shortened, and how many more there are; for errors, which stay short whatever the names are."""
    shown = ", ".join(shorten(form(name)[:200]) for name in islice(names, 8))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def open_state(found: Found, raw: Sequence[Raw], read: Callable[[Any], Tensor] | None = None) -> Opened:
    """The tensors of a state dict; torch's quantised linear layers store (weight, bias) under one key.

    Args:
        raw: the states of optimizers in the same checkpoint.
        read: returns the tensor of a key when it is measured; by default tensors are kept in memory.
    """
    stored: dict[str, StoredTensor] = {}
    packed: dict[str, StoredTensor] = {}
    others = []
    for name, value in found.state.items():
        path = str(name).removesuffix("._packed_params").removesuffix("._packed_params")
        if isinstance(value, Tensor):
            stored[str(name)] = StoredTensor.of(value, read and partial(read, name))
        elif path != str(name) and isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            pairs = zip(("weight", "bias"), value, strict=False)
            packed |= {f"{path}.{last}": StoredTensor.of(one) for last, one in pairs if isinstance(one, Tensor)}
        elif value is not None:
            kind = value.name if isinstance(value, Record) else type(value).__name__
            reason = ARRAY if is_array(value) else f"not a tensor but {plain(kind, longest=200)}"
            others.append(TensorEntry(str(name), kind, None, None, reason))
    notes = [say("read from {key} of the checkpoint", key=repr(plain(found.place)))] if found.place else []
    notes += _of_twins(found, {name: tensor.shape for name, tensor in stored.items()}, in_file=read is not None)
    places = {one.place for one in raw}
    places |= {place.rpartition(".")[0] for place in places if place.rpartition(".")[2].isdecimal()}  # lists of states
    if left := [plain(place) for place in found.beside if place not in places]:
        notes.append(say("not read: {names}, of the same checkpoint", names=listing(left, limit=4)))
    notes += of_states([plain(place) for place in found.beside if place in places])
    stored |= packed
    return Opened(stored, tuple(others), tuple(notes), optimizer=fitted(raw, stored, in_order=True))


def _of_twins(found: Found, shapes: Mapping[str, tuple[int, ...]], *, in_file: bool) -> list[Message]:
    """A note on networks of one architecture under several prefixes, which are measured together."""
    if not (alike := twins(shapes)):
        return []
    key = plain(f"{found.place}.{alike[0]}".lstrip("."))
    do = say("--key {key} reads the first alone", key=key) if in_file else say("pass one alone for its own figures")
    return [
        say(
            "{names} have tensors of the same names and shapes, as a network and its average have, or two of one "
            "architecture; all are read: {do}",
            names=listing([plain(one) for one in alike], limit=4),
            do=do,
        )
    ]


def of_states(names: Sequence[str]) -> list[Message]:
    """The note on states of optimizers under these names; none without a name."""
    said = say("the state of an optimizer, not weights: {names}", names=listing(names, limit=4))
    return [said] if names else []
