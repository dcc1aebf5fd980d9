"""The tensors of a base and of a model tuned from it, paired by name across prefixes and adapters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from torch import Tensor

from gonio.errors import GonioError, InvalidArgumentError
from gonio.geometry import Layout
from gonio.geometry.blocks import count_nonfinite
from gonio.measuring.reading.entry import Entry, numbers_of
from gonio.measuring.reading.source import Source, contents_of, name_of, some

DEPTH = 4  # components of a prefix, at most
SHARED = 0.3  # share of the names that have a prefix, at least
NONFINITE = "NaN or infinite values"
_PARTS = re.compile(r".+\.(lora_[^.]+(\..+)?|oft_[^.]+(\..+)?|modules_to_save\..+)")
_WEIGHTS = (  # of an adapted model, with the name of the layer's weight; the last that exists counts
    (re.compile(r"(.+)\.(base_layer|original_module)\.(.+)"), r"\1.\3"),
    (re.compile(r"(.+)\.modules_to_save\.[^.]+\.(.+)"), r"\1.\2"),
    (re.compile(r"(.+)\.base_and_lora\.[^.]+"), r"\1.weight"),
)


@dataclass(frozen=True)
class Tuned:
    """A model beside its base.

    Attributes:
        entries: by the names of the base where there is one.
        adapters: whether it holds only adapters: tensors of the base without one are unchanged.
        notes: how names were matched.
    """

    name: str
    entries: Mapping[str, Entry]
    adapters: bool = False
    notes: tuple[str, ...] = ()


def base_entries(source: Source) -> dict[str, Entry]:
    """The tensors of a base by name."""
    return {entry.name: entry for entry in contents_of(source).entries}


def tuned(base: Mapping[str, Entry], source: Source) -> Tuned:
    """The tensors of a source under the names of the base.

    Names that differ by a prefix (`model.`, `base_model.model.`) are matched. Where the source holds adapters, an
    adapted weight is the sum of the base's and the adapter's, or the rotated weight of the base.

    Raises:
        InvalidArgumentError: as :func:`gonio.measure`, and if no name is that of a tensor of the base.
    """
    found = contents_of(source)
    adapters = {adapter.path: adapter for adapter in found.adapters}
    entries = _whole({entry.name: entry for entry in found.entries})
    wanted = [*(name for name in entries if name not in base), *(f"{path}.weight" for path in adapters)]
    names = renamed([*(set(entries) & set(base)), *wanted] if wanted else [*entries], base)
    made = {names.get(name, name): entry for name, entry in entries.items()}
    for path, adapter in adapters.items():
        name = names.get(f"{path}.weight", f"{path}.weight")
        held = base.get(name)
        if held is None:
            made[name] = Entry(name, "", None, None, f"the base has no weight {path}")
        else:
            made[name] = replace(held, load=partial(adapter.total, held), shape=None, notes=())
    if not made.keys() & base.keys():
        raise InvalidArgumentError(
            "difference() matches tensors by name",
            f"no name in common: {some(base)} before, {some(made)} after",
            "Rename the keys of one of them.",
        )
    moved = sum(old != new for old, new in names.items())
    notes = (f"{moved} names matched across prefixes",) if moved else ()
    return Tuned(name_of(source), made, adapters=bool(adapters), notes=(*found.notes, *notes))


def _whole(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries without the parts of adapters: sums, trained copies and bases have the name of the layer's weight."""
    parts = [_PARTS, *(pattern for pattern, _ in _WEIGHTS)]
    made = {name: entry for name, entry in entries.items() if not any(part.fullmatch(name) for part in parts)}
    for pattern, weight in _WEIGHTS:
        made |= {m.expand(weight): entry for name, entry in entries.items() if (m := pattern.fullmatch(name))}
    return made


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


def values_of(entry: Entry, when: str) -> Tensor | str:
    """The values, all finite, in their own dtype of two bytes or more, or the reason why there are none."""
    if entry.load is None:
        return entry.reason
    try:
        found = numbers_of(entry.load())
    except (GonioError, RuntimeError, ValueError, TypeError, OSError) as error:
        return f"cannot be read: {error}"
    if found.tensor is None:
        return found.reason
    values = found.tensor.float() if found.tensor.element_size() == 1 else found.tensor
    return f"{NONFINITE} {when}" if count_nonfinite(values)[0] else values


def layout_of_pair(before: Entry, after: Entry) -> Layout | None:
    """The layout that a model knows, before one that is inferred from a shape."""
    inferred = before.layout is None or (before.layout == Layout() and after.layout is not None)
    return after.layout if inferred else before.layout
