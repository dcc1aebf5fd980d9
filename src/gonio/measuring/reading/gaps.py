"""Tensors that one block of a model lacks and all others have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from gonio.measuring.reading.state_dicts import Problem
from gonio.messages import counted, say

_BLOCKS = 4  # at least so many, of which the first and the last may differ
_TENSORS = 4  # that the others have in common, at least: a block is more than one layer
_MOST = 2  # that one block lacks
_DIGITS = 6  # of the number of a block


def missing_in_blocks(names: Iterable[str], known: Iterable[Problem]) -> list[Problem]:
    """A problem for each name of :func:`gaps_in_blocks`.

    Args:
        known: problems that are told already; the tensors that they name are missed no second time.
    """
    told = {problem.path for problem in known}
    return [
        Problem("G714", name, say("not there, and in {blocks} like it", blocks=counted(others, "block")))
        for name, others in gaps_in_blocks({*names, *told})
    ]


def gaps_in_blocks(names: Collection[str]) -> Iterator[tuple[str, int]]:
    """The names that are missing in a list of numbered blocks, each with the number of blocks that have it.

    A block between the first and the last one, which has nothing that the others lack, and of what all others have
    lacks one tensor or two. Blocks that are built in different ways differ in more, or not in a single one of them.

    Example:
        >>> from gonio.measuring.reading.gaps import gaps_in_blocks
        >>> parts = ("q.weight", "k.weight", "v.weight", "o.weight")
        >>> names = [f"h.{block}.{part}" for block in range(4) for part in parts]
        >>> names.remove("h.2.k.weight")
        >>> list(gaps_in_blocks(names))
        [('h.2.k.weight', 3)]
    """
    lists: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and len(part) <= _DIGITS:
                lists[".".join(parts[:at])][int(part)].add(".".join(parts[at + 1 :]))
    for before, blocks in lists.items():
        numbers = sorted(blocks)
        if len(numbers) < _BLOCKS or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            continue
        times = Counter(name for block in blocks.values() for name in block)
        everywhere = sum(count == len(numbers) for count in times.values())
        but_one = {name for name, count in times.items() if count == len(numbers) - 1}
        for number in numbers[1:-1] if but_one else ():
            lacking, own = but_one - blocks[number], any(times[name] == 1 for name in blocks[number])
            if 0 < len(lacking) <= _MOST and everywhere + len(lacking) >= _TENSORS and not own:
                prefix = f"{before}." if before else ""
                yield from ((f"{prefix}{number}.{name}", len(numbers) - 1) for name in sorted(lacking))
