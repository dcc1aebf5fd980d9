"""What the names of a file's tensors tell: their order along the depth of the model, and what a block lacks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from gonio.measuring.reading.opened import Problem
from gonio.messages import counted, say

SIBLINGS = 3  # of one shape, and of one name up to numbers in it, that a matrix of a stack of layers has at least
_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts the numbers in names as numbers.

    Example:
        >>> from gonio.measuring.reading.order import natural
        >>> sorted(["layers.10", "layers.9", "layers.9.bias"], key=natural)
        ['layers.9', 'layers.9.bias', 'layers.10']
    """
    parts = (part for part in _NUMBER.split(name) if part)
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 20 else (1, 0, part) for part in parts)


def pattern_of(path: str) -> str:
    """A path with a star for each number.

    Example:
        >>> from gonio.measuring.reading.order import pattern_of
        >>> pattern_of("model.layers.31.mlp.up_proj")
        'model.layers.*.mlp.up_proj'
    """
    return _NUMBER.sub("*", path)


def parted(name: str) -> list[str]:
    """A name in parts, of which every second one is a number.

    Example:
        >>> from gonio.measuring.reading.order import parted
        >>> parted("layers.31.mlp")
        ['layers.', '31', '.mlp']
    """
    return _NUMBER.split(name)


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether more than one side is longer than 1; others are vectors, such as the bias of all channels of an image."""
    return sum(side > 1 for side in shape) > 1


def families(shapes: Mapping[str, tuple[int, ...]], *, siblings: int = SIBLINGS) -> list[list[str]]:
    """The matrices that repeat from layer to layer: at least four of one shape and one name up to numbers in it.

    Args:
        siblings: of each matrix, at least.

    Example:
        >>> from gonio.measuring.reading.order import families
        >>> families({"embed": (9, 2)} | {f"layers.{i}.up": (4, 2) for i in range(4)})
        [['layers.0.up', 'layers.1.up', 'layers.2.up', 'layers.3.up']]
    """
    return _alike(((name, shape) for name, shape in shapes.items() if is_matrix(shape)), siblings)


def families_of_vectors(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The vectors that repeat so, beside tensors of the same shapes; single numbers are none.

    The bias of a linear layer is no sibling of that of a convolution, whatever their names and lengths.

    Example:
        >>> from gonio.measuring.reading.order import families_of_vectors
        >>> shapes = {f"{i}.{leaf}": shape for i in range(5) for leaf, shape in (("weight", (3, 3)), ("bias", (3,)))}
        >>> families_of_vectors(shapes | {"4.weight": (3, 3, 1, 2)})
        [['0.bias', '1.bias', '2.bias', '3.bias']]
    """
    modules: defaultdict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        modules[module].append((leaf, shape))
    kinds: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    kind_of = {module: kinds.setdefault(tuple(sorted(own)), len(kinds)) for module, own in modules.items()}
    vectors = (name for name, shape in shapes.items() if sum(side > 1 for side in shape) == 1)
    return _alike(((name, (shapes[name], kind_of[name.rpartition(".")[0]])) for name in vectors), SIBLINGS)


def _alike(tensors: Iterable[tuple[str, Hashable]], siblings: int) -> list[list[str]]:
    """The names that are the same up to numbers, of tensors with the same properties."""
    found: defaultdict[tuple[str, Hashable], list[str]] = defaultdict(list)
    for name, properties in tensors:
        found[pattern_of(name), properties].append(name)
    return [names for names in found.values() if len(names) > siblings]


def tells_depth(names: Sequence[str]) -> bool:
    """Whether tensors in this order are in the order of a model: in another than that of their names, or numbered.

    Example:
        >>> from gonio.measuring.reading.order import tells_depth
        >>> names = ["layers.0.down", "layers.1.down"], ["stem", "body"], ["body", "stem"]
        >>> tuple(map(tells_depth, names))
        (True, True, False)
    """
    stacks = {_NUMBER.split(name)[0] if _NUMBER.search(name) else name for name in names}
    return len(stacks) < 2 or list(names) != sorted(names, key=natural)


def in_depth_order(shapes: Mapping[str, Sequence[int]], vocabulary: int | None = None) -> list[str]:
    """The names in natural order if the file lists them by the alphabet; any other order is the model's, and stays.

    Args:
        vocabulary: the configuration's `vocab_size`. The only matrix with so many rows, or the one in the module that
            holds the numbered blocks, is where the model begins; one outside of that module is where the model ends.
    """
    names = list(shapes)
    if names != sorted(names):
        return names
    ordered = sorted(names, key=natural)
    homes = Counter(name.split(".")[0] for name in names if any(part.isdecimal() for part in name.split(".")[1:]))
    home = homes.most_common(1)[0][0] if homes else None
    tables = [
        name
        for name in ordered
        if len(shapes[name]) == 2
        and shapes[name][0] == vocabulary
        and not any(part.isdecimal() for part in name.split("."))
    ]
    first = [name for name in tables if len(tables) == 1 or (home is not None and name.startswith(f"{home}."))]
    ends = {name.rpartition(".")[0] for name in tables if name not in first} if first else set()
    last = [name for name in ordered if name.rpartition(".")[0] in ends]
    moved = {*first, *last}
    return [*first, *(name for name in ordered if name not in moved), *last]


# --- gaps -------------------------------------------------------------------------------------------------------------

_BLOCKS = 4  # at least so many, of which the first and the last may differ
_TENSORS = 4  # that the others have in common, at least: a block is more than one layer
_MOST = 2  # that one block lacks
_Shape = tuple[int, ...] | None
_Times = tuple[_Shape, int]  # a shape, and how often it is there
_DIGITS = 6  # of the number of a block


def blocks_in(shapes: Mapping[str, Sequence[int] | None]) -> Mapping[str, Mapping[str, Mapping[str, _Shape]]]:
    """The lists of numbered blocks: by the path of a list and the number of a block, the shapes of its tensors by name.

    Args:
        shapes: of all tensors by name; None where it is not known.
    """
    lists: dict[str, dict[str, dict[str, _Shape]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and len(part) <= _DIGITS:
                lists[".".join(parts[:at])][part][".".join(parts[at + 1 :])] = None if shape is None else tuple(shape)
    return lists


def missing_in_blocks(shapes: Mapping[str, Sequence[int] | None], known: Iterable[Problem]) -> list[Problem]:
    """A problem for each name of :func:`gaps_in_blocks`.

    Args:
        shapes: of all tensors by name; None where it is not known.
        known: problems that are told already; the tensors that they name are missed no second time.
    """
    told = {name for problem in known for name in (problem.path, *problem.tensors)}
    gaps = gaps_in_blocks({**dict.fromkeys(told), **shapes})
    found = [
        Problem("G714", name, say("not there, and in {blocks} like it", blocks=counted(others, "block")))
        for name, others in gaps
    ]
    for name, others in dict(turned_in_blocks(shapes)).items():
        size, blocks = "×".join(map(str, shapes[name] or ())), counted(others, "block")
        said = say("it is {shape}, and transposed in {blocks} like it", shape=size, blocks=blocks)
        found.append(Problem("G714", name, said))
    return found


def turned_in_blocks(shapes: Mapping[str, Sequence[int] | None]) -> Iterator[tuple[str, int]]:
    """The matrices of one block that have the sides of those of all others in the other order, each with their number.

    Four blocks or more, with the same names and four tensors at least, have all other shapes in common. Square matrices
    are not told.

    Example:
        >>> from gonio.measuring.reading.order import turned_in_blocks
        >>> parts = {"q.weight": (4, 4), "k.weight": (4, 4), "up.weight": (8, 4), "up.bias": (8,)}
        >>> shapes = {f"h.{block}.{part}": shape for block in range(4) for part, shape in parts.items()}
        >>> list(turned_in_blocks(shapes)), list(turned_in_blocks({**shapes, "h.3.up.weight": (4, 8)}))
        ([], [('h.3.up.weight', 3)])
    """
    for before, blocks in blocks_in(shapes).items():
        names = next(iter(blocks.values())).keys()
        if len(blocks) < _BLOCKS or len(names) < _TENSORS or any(block.keys() != names for block in blocks.values()):
            continue
        times = {name: Counter(block[name] for block in blocks.values()).most_common() for name in names}
        turned = {name: found for name, found in times.items() if len(found) > 1}
        if not all(_is_turned(*found) for found in turned.values()):
            continue
        for name, ((_, others), (shape, _)) in turned.items():
            number = next(number for number, block in blocks.items() if block[name] == shape)
            yield ".".join(part for part in (before, number, name) if part), others


def _is_turned(usual: _Times, *unusual: _Times) -> bool:
    """Whether one matrix has the shape of all others in the other order."""
    (shape, _), (other, times) = usual, unusual[0]
    return len(unusual) == times == 1 and shape is not None and len(shape) == 2 and other == tuple(reversed(shape))


def gaps_in_blocks(shapes: Mapping[str, Sequence[int] | None]) -> Iterator[tuple[str, int]]:
    """The names that are missing in a list of numbered blocks, each with the number of blocks that have it.

    A block between the first and the last one, which has nothing that the others lack, and of what all others have
    lacks one tensor or two. Blocks that are built in different ways differ in more, or not in a single one of them, or
    in the size of the kernel that one lacks, as the steps of a pyramid of which one keeps the size of its input. A
    whole block is missing where one number is, between blocks that all have the same names.

    Args:
        shapes: of all tensors by name; None where it is not known.

    Example:
        >>> from gonio.measuring.reading.order import gaps_in_blocks
        >>> parts = ("q.weight", "k.weight", "v.weight", "o.weight")
        >>> names = [f"h.{block}.{part}" for block in range(4) for part in parts]
        >>> names.remove("h.2.k.weight")
        >>> list(gaps_in_blocks(dict.fromkeys(names)))
        [('h.2.k.weight', 3)]
    """
    for before, named in blocks_in(shapes).items():
        blocks = {int(number): block for number, block in named.items()}
        numbers, prefix = sorted(blocks), f"{before}." if before else ""
        span = range(numbers[0], numbers[-1] + 1)
        if len(numbers) >= _BLOCKS and len(span) == len(numbers) + 1:
            first = blocks[numbers[0]]
            if len(first) >= _TENSORS and all(block.keys() == first.keys() for block in blocks.values()):
                yield f"{prefix}{next(number for number in span if number not in blocks)}", len(numbers)
            continue
        if len(numbers) < _BLOCKS or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            continue
        times = Counter(name for block in blocks.values() for name in block)
        everywhere = sum(count == len(numbers) for count in times.values())
        but_one = {name for name, count in times.items() if count == len(numbers) - 1}
        for number in numbers[1:-1] if but_one else ():
            lacking, own = but_one - blocks[number].keys(), any(times[name] == 1 for name in blocks[number])
            held = [[one[name] for one in blocks.values() if name in one] for name in lacking]
            alike = all(len({shape[2:] for shape in each if shape is not None}) <= 1 for each in held)  # the kernels
            if 0 < len(lacking) <= _MOST and everywhere + len(lacking) >= _TENSORS and not own and alike:
                yield from ((f"{prefix}{number}.{name}", len(numbers) - 1) for name in sorted(lacking))
