"""The tensors of a base and of a model tuned from it, paired by name across prefixes and adapters, and by value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, cause_of, listing
from gonio.escaping import plain
from gonio.geometry import Layout
from gonio.geometry.blocks import count_nonfinite
from gonio.geometry.views import PLAIN
from gonio.measuring.changes.pair import Cause, TensorDifference, norm_of
from gonio.measuring.reading.adapters import Places, Unfit, no_weight
from gonio.measuring.reading.entry import (
    ADDITIVE_MASK,
    TensorEntry,
    is_additive_mask,
    layer_path,
    numbers_of,
    with_ties,
)
from gonio.measuring.reading.source import Contents, Source, contents_of, name_of
from gonio.measuring.reading.state_dicts import shorten_list
from gonio.messages import Message, counted, said_by, say

DEPTH = 4  # components of a prefix, at most
SHARED = 0.3  # share of the names that have a prefix, at least

_OF_PEFT = "base_model.model."  # before the names of a model in peft's wrapper


@dataclass(frozen=True)
class TunedModel:
    """A model beside its base.

    Attributes:
        entries: by the names of the base where there is one.
        adapters: whether it holds adapters. `rest_equal`: whether tensors of the base without one are unchanged.
        notes: how names were matched.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    adapters: bool = False
    rest_equal: bool = False
    notes: tuple[str, ...] = ()


def base_entries(source: Source) -> dict[str, TensorEntry]:
    """The tensors of a base by name, as the plain model has them.

    Raises:
        InvalidArgumentError: as :func:`gonio.measure`, and if it holds adapters alone.
    """
    found = contents_of(source)
    entries = _plain(found.entries)
    if found.adapters and not entries:
        raise InvalidArgumentError(
            "difference() takes the base first",
            f"{name_of(source)}, which holds adapters alone",
            "Write the model that they adapt first, and the adapters after it.",
        )
    return entries


def tuned(base: Mapping[str, TensorEntry], source: Source) -> TunedModel:
    """The tensors of a source under the names of the base.

    Names that differ by a prefix (`model.`, `base_model.model.`) are matched. Where the source holds adapters, an
    adapted tensor is what they make of the base's. A tensor of the base beside parts of an adapter that is not read is
    not compared.

    Raises:
        InvalidArgumentError: as :func:`gonio.measure`, and if no name is that of a tensor of the base.
    """
    found = contents_of(source)
    if not found.entries:
        raise InvalidArgumentError(
            "difference() matches tensors by name",
            say("{source}, and it holds no tensor", source=name_of(source)),
            say("Save it again, or name the file that holds the weights."),
        )
    entries = _plain(found.entries)
    if found.adapters:  # whose names are read without the prefix; beside them a weight saved in full may have it
        last = {name.rpartition(".")[2] for name in base}
        full = (name for name in entries if name not in base and name.rpartition(".")[2] in last)
        short = {name: name.removeprefix(_OF_PEFT) for name in full}
        entries = {new if (new := short.get(name, name)) not in entries else name: e for name, e in entries.items()}
    places = Places(base)
    adapters = places.of([*found.adapters])
    wanted = [*(name for name in entries if name not in base), *(adapter.weight for adapter in adapters)]
    names = renamed([*(set(entries) & set(base)), *wanted] if wanted else [*entries], base)
    made = {names.get(name, name): entry for name, entry in entries.items()}
    alone = False  # whether an adapter has no tensor in the base
    for adapter in adapters:
        name = names.get(adapter.weight, adapter.weight)
        held = made[name] if name in made and made[name].load is not None else base.get(name)
        alone |= held is None
        missing = TensorEntry(name, "", None, None, no_weight(adapter.path), fault=True)
        made[name] = missing if held is None else replace(adapter.adapted(held), name=name)
        if adapter.kind == "tokens":  # peft replaces the rows of the head too where the model's class states the tie
            why = f"tied to {name}, of which an adapter replaces rows; whether here too depends on the model"
            made |= {other: base[other].unknown(why) for other in _tied_to(name, base) if other not in made}
    unread = _unread(made, base, found, names, places)
    alone |= any(name not in base and name not in dict(unread) for name in made)
    for name, path in unread:
        for owned in (key for key in base if key.rpartition(".")[0] == path):
            made[owned] = base[owned].unknown(f"changed by {name}, which is not read")
    if not made.keys() & base.keys():
        said = "".join(f" ({note})" for note in ([found.refusal] if found.refusal else found.notes[-1:]))
        raise InvalidArgumentError(
            "difference() matches tensors by name",
            f"no name in common: {shorten_list(base)} before, {shorten_list(made)} after{said}",
            say("Merge the adapter into its base by the library that made it, and compare the merged model.")
            if found.refusal
            else "They look like two architectures; if they are one, rename the keys of one of them.",
        )
    moved = sum(old != new for old, new in names.items())
    notes = (f"{counted(moved, 'name')} matched across prefixes",) if moved else ()
    holds = bool(found.adapters)
    return TunedModel(name_of(source), made, holds, rest_equal=holds and not alone, notes=(*found.notes, *notes))


def _tied_to(name: str, base: Mapping[str, TensorEntry]) -> list[str]:
    """The other names of a tensor of the base."""
    if name not in base:
        return []
    first = base[name].tied or name
    return [other for other, entry in base.items() if (entry.tied or other) == first and other != name]


def _plain(entries: Iterable[TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of the plain model by their names in it; a trained copy of a layer before the original."""
    made: dict[str, TensorEntry] = {}
    for entry in with_ties(entries):
        name = entry.weight_name or entry.name
        if entry.role not in ("part", "adapter") and not (name in made and ".original_module." in entry.name):
            made[name] = entry
    return made


def _unread(
    made: Mapping[str, TensorEntry],
    base: Mapping[str, TensorEntry],
    found: Contents,
    names: Mapping[str, str],
    places: Places,
) -> list[tuple[str, str]]:
    """Tensors of adapters that are not read, each with the path of the layer of the base that it belongs to."""
    wrapped = {entry.weight_name for entry in found.entries if ".base_layer." in f".{entry.name}"}
    if not (found.adapters or wrapped):
        return []
    prefixes = {old.removesuffix(new) for old, new in names.items() if old.endswith(new)} | {"", _OF_PEFT}
    pairs = []
    for name in made:
        parts = name.split(".") if name not in base else []
        for prefix, i in product(sorted(prefixes, key=len, reverse=True), range(len(parts) - 1, 0, -1)):
            owner = f"{places.path('.'.join(parts[:i]))}.weight"
            plain = owner.removeprefix(prefix)
            if plain in base and (found.adapters or owner in wrapped):
                pairs.append((name, plain.removesuffix("weight").removesuffix(".")))
                break
    return pairs


def renamed(names: Collection[str], base: Collection[str]) -> dict[str, str]:
    """The name in the base of each of these names that one has, up to one prefix of either side.

    Of all pairs of prefixes that enough names share, the one with the most matches; the names as they are if no pair
    has more.

    Example:
        >>> from gonio.measuring.changes.sources import renamed
        >>> renamed(["base_model.model.h.0.fc.weight"], ["transformer.h.0.fc.weight", "head.weight"])
        {'base_model.model.h.0.fc.weight': 'transformer.h.0.fc.weight'}
    """
    known = set(base)
    best = {name: name for name in names if name in known}
    for theirs in _prefixes(names):
        for ours in _prefixes(base):
            pairs: dict[str, str] = {}
            taken: set[str] = set()
            for name in names:
                stem = name.removeprefix(theirs)
                for candidate in (ours + stem, stem):
                    apart = theirs and candidate != stem and "." not in stem  # two prefixes leave only `weight`
                    if candidate in known and candidate not in taken and not apart:
                        pairs[name] = candidate
                        taken.add(candidate)
                        break
            if len(pairs) > len(best):
                best = pairs
    return best


def _prefixes(names: Iterable[str]) -> list[str]:
    """The empty prefix, and those without a number that enough names share."""
    names = list(names)
    found: Counter[str] = Counter()
    for name in names:
        parts = list(takewhile(lambda part: not part.isdigit(), name.split(".")[:-1]))
        found.update(".".join(parts[:depth]) + "." for depth in range(1, min(DEPTH, len(parts)) + 1))
    return ["", *(prefix for prefix, count in found.items() if count >= max(1, SHARED * len(names)))]


# --- reading a pair --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotCompared:
    """Why a tensor of one source has no values to compare, and what is the cause where a rule asks for it."""

    reason: str
    cause: Cause = ""


def values_of(entry: TensorEntry, when: str) -> Tensor | NotCompared:
    """The values, all finite, in their own dtype of two bytes or more, or the reason why there are none."""
    if entry.load is None or entry.role == "unknown":
        return NotCompared(entry.reason, "adapter" if entry.fault else "")
    try:
        found = numbers_of(entry.load())
    except Unfit as error:
        return NotCompared(said_by(error), "adapter")
    except Exception as error:  # numbers of a file, or code of a tensor's class, can provoke any of them
        return NotCompared(f"cannot be read: {cause_of(error)}")
    if found.tensor is None:
        return NotCompared(found.reason)
    values = found.tensor.float() if found.tensor.element_size() == 1 else found.tensor
    nonfinite, _ = count_nonfinite(values)
    if nonfinite and is_additive_mask(values, nonfinite):
        return NotCompared(ADDITIVE_MASK)
    return NotCompared(f"NaN or infinite values {when}", "nonfinite") if nonfinite else values


def layout_of_pair(before: TensorEntry, after: TensorEntry) -> Layout | None:
    """The layout that a model knows, before one that is inferred from a shape."""
    inferred = before.layout is None or (before.layout == PLAIN and after.layout is not None)
    return after.layout if inferred else before.layout


# --- weights under other names: a conversion put layers or experts in another order, or copied one --------------------

FAR = 0.5  # relative change from which a weight is looked for under other names; that of independent ones is 1.4
_NEAR, _NEAR_ROUNDED = 1e-9, 1e-4  # relative difference of the norms of equal weights, and of rounded ones
_TRIED = 4  # weights of about the same norm that are compared with one


def with_origins(
    rows: Sequence[TensorDifference], held: Mapping[str, TensorEntry], model: TunedModel
) -> list[TensorDifference]:
    """The rows; that of a weight whose values are those of another one in the base names it.

    Only weights that changed much, or that the base has not, are read again, and compared with those of the base that
    have their shape and norm.
    """
    far = {row.name: row.shape for row in rows if (row.relative or 0.0) > FAR and len(row.shape) > 1}
    new = [row.name for row in rows if row.name in model.entries and row.name not in held]
    far |= {name: shape for name in new if len(shape := model.entries[name].shape or ()) > 1}
    shapes = {*far.values()}
    known = [(row.norm, row.shape, row.name) for row in rows if row.norm and row.shape in shapes]
    gone = [row.name for row in rows if row.norm is None and row.name in held and held[row.name].shape in shapes]
    known += [(norm_of(before), tuple(before.shape), name) for name, before in _loaded(gone, held)]
    found = {name: origin for name, shape in far.items() if (origin := _origin(name, shape, known, held, model))}
    return [replace(row, moved_from=found[row.name]) if row.name in found else row for row in rows]


def copied(rows: Sequence[TensorDifference]) -> list[Message]:
    """A note on weights that the base has not under their names, and whose values are those of its weights."""
    new = [row for row in rows if row.moved_from and row.status == "not compared"]
    pairs = [say("{name} of {origin}", name=plain(row.path), origin=plain(layer_path(row.moved_from))) for row in new]
    said = say("only after, with the values of weights of the base: {pairs}", pairs=listing(pairs, limit=4))
    return [said] if new else []


def _origin(
    name: str,
    shape: tuple[int, ...],
    known: Sequence[tuple[float, tuple[int, ...], str]],
    held: Mapping[str, TensorEntry],
    model: TunedModel,
) -> str:
    """The name in the base of the weight with the values of this one after; empty if there is none."""
    after = values_of(model.entries[name], "after")
    norm = norm_of(after) if isinstance(after, Tensor) else 0.0
    if not isinstance(after, Tensor) or not norm:  # zeros come from nowhere
        return ""
    near = sorted((abs(n - norm), other) for n, each, other in known if each == shape and other != name)
    closest = [other for distance, other in near[:_TRIED] if distance <= _NEAR_ROUNDED * norm]
    return next((other for other, before in _loaded(closest, held) if _are_equal(before, after, norm)), "")


def _loaded(names: Sequence[str], held: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        values = values_of(held[name], "before")
        if isinstance(values, Tensor):
            yield name, values


def _are_equal(before: Tensor, after: Tensor, norm: float) -> bool:
    """Whether two tensors are equal, or one is the other in its dtype."""
    after = after.to(before.device)
    if before.dtype == after.dtype:
        return abs(norm_of(before) - norm) <= _NEAR * norm and torch.equal(before, after)
    return is_rounded(before, after)


def is_rounded(one: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors is the other one in its dtype, which is another one."""
    if one.dtype == other.dtype:
        return False
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)
