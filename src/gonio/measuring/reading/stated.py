"""Where the tensors of a checkpoint are not those of the configuration beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gonio.escaping import plain
from gonio.measuring.reading.adapters import in_every_block
from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.entry import WRAPPERS, layer_path
from gonio.measuring.reading.opened import HeaderFacts, Problem
from gonio.measuring.reading.order import blocks_in, missing_in_blocks
from gonio.messages import counted, say

_TENSORS = 4  # that blocks have in common, at least
_BEFORE_ALL = ("module", "base_model.model")  # of DataParallel and DDP, and of peft
_INNER = "base_layer"  # of peft, around one layer; networks of other libraries have parts of this name, as DLA has
_INCOMPLETE = ("G701", "G702")  # then not all names are known
_INPUTS = "token_embd.weight"  # the table of tokens, by the names that GGUF has
_Blocks = Mapping[str, Mapping[str, set[str]]]


def unlike_others(
    shapes: Mapping[str, Sequence[int] | None],
    known: Iterable[Problem],
    beside: Configurations,
    header: HeaderFacts | None,
    adapting: Mapping[str, Any] | None,
) -> list[Problem]:
    """Where tensors are not those of the other blocks, nor those of the configuration.

    Args:
        adapting: the configuration of the adapters that they are; None without any.
    """
    if adapting is None:
        return [*missing_in_blocks(shapes, known), *unlike_stated(shapes, known, beside, header)]
    return missing_in_blocks(shapes, known) if in_every_block(adapting) else []


def unlike_stated(
    shapes: Mapping[str, Sequence[int] | None],
    known: Iterable[Problem],
    beside: Configurations,
    header: HeaderFacts | None = None,
) -> list[Problem]:
    """A problem for a list of blocks of another length, for tables of tokens that are too few, and for wrapped names.

    Args:
        shapes: of all tensors by name; None where it is not known.
        known: problems that are told already; the tensors that they name are missed no second time.
        header: what the file itself states.
    """
    known = list(known)
    told = {name for problem in known for name in (problem.path, *problem.tensors)}
    found = list(wrapped(shapes)) if beside.of_transformers else []
    if header is not None and beside.whole and not any(problem.code in _INCOMPLETE for problem in known):
        found += unlike_header(shapes, header)
    if beside.layers is not None:
        lists = numbered({*told, *shapes})
        found += fewer_blocks(lists, beside.layers)
        found += more_blocks(lists, beside.layers, beside.numbers) if beside.causal else []
    return found if told else [*found, *fewer_tables(shapes, beside)]


def numbered(names: Iterable[str]) -> _Blocks:
    """The lists of numbered blocks, each by its path and with the names in each block; lists in blocks are not told.

    Example:
        >>> from gonio.measuring.reading.stated import numbered
        >>> numbered(["h.0.w", "h.1.w", "norm.w"])
        {'h': {'0': {'w'}, '1': {'w'}}}
    """
    lists = blocks_in(dict.fromkeys(names)).items()
    outermost = [(path, blocks) for path, blocks in lists if not any(part.isdecimal() for part in path.split("."))]
    return {path: {number: set(block) for number, block in blocks.items()} for path, blocks in outermost}


def fewer_blocks(lists: _Blocks, stated: int) -> Iterator[Problem]:
    """A problem where the longest list of numbered blocks has fewer than the configuration states.

    A list has two blocks or more, with four tensors or more in common. Nothing is said of one block that runs several
    times, of blocks that are built in different ways, nor where the number is that of all lists together.

    Args:
        lists: as :func:`numbered` gives them, also of tensors whose values are not there.

    Example:
        >>> from gonio.measuring.reading.stated import fewer_blocks, numbered
        >>> lists = numbered(f"model.layers.{block}.{part}" for block in range(3) for part in ("q", "k", "v", "o"))
        >>> list(fewer_blocks(lists, 3)), [(each.path, each.found) for each in fewer_blocks(lists, 4)]
        ([], [('model.layers', '3 blocks, and the configuration states 4')])
    """
    alike = {path for path, blocks in lists.items() if len(set.intersection(*blocks.values())) >= _TENSORS}
    path = _longest(lists)
    if path in alike and 1 < len(lists[path]) < stated != sum(len(lists[each]) for each in alike):
        yield _of_number(path, len(lists[path]), stated)


def more_blocks(lists: _Blocks, stated: int, numbers: Iterable[int]) -> Iterator[Problem]:
    """A problem where the longest list has more blocks than are stated, all like the last that is.

    Blocks after those that are stated differ from them where they predict further tokens (DeepSeek-V3).

    Args:
        numbers: all that the configuration states of layers.

    Example:
        >>> from gonio.measuring.reading.stated import more_blocks, numbered
        >>> lists = numbered(f"model.layers.{block}.{part}" for block in range(3) for part in ("q", "k", "v", "o"))
        >>> list(more_blocks(lists, 3, [3])), [each.found for each in more_blocks(lists, 2, [2])]
        ([], ['3 blocks, and the configuration states 2'])
    """
    path = _longest(lists)
    blocks = lists.get(path, {})
    if not 0 < stated < len(blocks) or len(blocks) in numbers:
        return
    last = blocks.get(str(stated - 1), set())
    if len(last) >= _TENSORS and all(blocks.get(str(at)) == last for at in range(stated, len(blocks))):
        yield _of_number(path, len(blocks), stated)


def _longest(lists: _Blocks) -> str:
    return max(lists, key=lambda path: len(lists[path]), default="")


def _of_number(path: str, blocks: int, stated: int) -> Problem:
    said = say("{blocks}, and the configuration states {stated}", blocks=counted(blocks, "block"), stated=stated)
    return Problem("G717", path, said)


def wrapped(names: Iterable[str]) -> Iterator[Problem]:
    """A problem for names that wrappers of torch and peft leave in a state dict, beside a model of transformers.

    Example:
        >>> from gonio.measuring.reading.stated import wrapped
        >>> [each.found for each in wrapped(["_orig_mod.fc.weight", "_orig_mod.fc.bias"])]
        ['_orig_mod in the names of 2 of 2 tensors, which the model does not have: _orig_mod.fc.weight']
    """
    names = list(names)
    parts = {part: [name for name in names if part in name.split(".")] for part in sorted(WRAPPERS)}
    parts |= {prefix: [name for name in names if name.startswith(f"{prefix}.")] for prefix in _BEFORE_ALL}
    parts[_INNER] = [name for name in names if name.endswith((f".{_INNER}.weight", f".{_INNER}.bias"))]
    for part, held in parts.items():
        if not held or (part in _BEFORE_ALL and len(held) < len(names)):
            continue
        said = say(
            "{part} in the names of {n} of {tensors}, which the model does not have: {name}",
            part=part,
            n=len(held),
            tensors=counted(len(names), "tensor"),
            name=plain(held[0], longest=200),
        )
        yield Problem("G718", "", said)


def unlike_header(shapes: Mapping[str, Sequence[int] | None], header: HeaderFacts) -> Iterator[Problem]:
    """A problem where the tensors of a file are not those that its own header states.

    Of a file with two blocks or more, with four tensors or more in common: drafts and projectors have other tables.

    Example:
        >>> from gonio.measuring.reading.opened import HeaderFacts
        >>> from gonio.measuring.reading.stated import unlike_header
        >>> shapes = {f"blk.{block}.{part}": (8, 8) for block in range(3) for part in ("q", "k", "v", "o")}
        >>> for header in (HeaderFacts(3, width=8), HeaderFacts(4, width=16)):
        ...     [problem.found for problem in unlike_header(shapes, header)]
        []
        ['3 blocks, and the header states 4', 'no tensor is 16 wide, as the header states']
    """
    lists = numbered(shapes)
    blocks = lists.get(_longest(lists), {})
    whole = header.tensors is None or len(shapes) >= header.tensors
    if len(blocks) < 2 or len(set.intersection(*blocks.values())) < _TENSORS or not whole:
        return
    if header.layers is not None and len(blocks) < header.layers - header.optional:
        for problem in fewer_blocks(lists, header.layers):
            told = {"blocks": counted(len(lists[problem.path]), "block"), "stated": header.layers}
            yield replace(problem, found=say("{blocks}, and the header states {stated}", **told))
    sides = {side for shape in shapes.values() for side in shape or ()}
    if header.width and header.width not in sides and None not in shapes.values():
        yield Problem("G717", "", say("no tensor is {width} wide, as the header states", width=header.width))
    table = shapes.get(_INPUTS)
    if header.vocabulary and table and len(table) == 2 and table[0] < header.vocabulary:
        told = {"rows": counted(table[0], "row"), "vocabulary": header.vocabulary}
        path = layer_path(_INPUTS)
        yield Problem("G717", path, say("{rows}, and the header lists {vocabulary:,} tokens", **told))


def two_values(
    shapes: Mapping[str, Sequence[int] | None], values: Mapping[str, tuple[str, str]], beside: Configurations
) -> Iterator[Problem]:
    """A problem where a language model states one table of tokens for inputs and outputs, and two differ.

    transformers 5 keeps two, other programs and former versions read one of them.

    Args:
        values: of each tensor its dtype, and a hash of its values or nothing.
    """
    if not (beside.causal and beside.vocabulary and beside.with_text.get("tie_word_embeddings") is True):
        return
    if beside.quantisation:  # whose scales have a row for each token, too
        return
    tables = [name for name, shape in shapes.items() if shape and len(shape) == 2 and shape[0] >= beside.vocabulary]
    if len(tables) != 2 or shapes[tables[0]] != shapes[tables[1]]:
        return
    (kind, value), (other_kind, other) = (values.get(name, ("", "")) for name in tables)
    if value and other and kind == other_kind and value != other:
        said = say("it differs from {name}, and the configuration states that both are one", name=plain(tables[0]))
        yield Problem("G717", tables[1], said)


def fewer_tables(shapes: Mapping[str, Sequence[int] | None], beside: Configurations) -> Iterator[Problem]:
    """A problem where a language model has fewer tables of tokens than its configuration states.

    It has one, and a second one for its outputs where the configuration states that this is not the same. A table is a
    matrix with a side as long as the vocabulary, or longer.
    """
    vocabulary, needed = beside.vocabulary, beside.tables
    matrices = {name: shape for name, shape in shapes.items() if shape is None or len(shape) == 2}
    if not vocabulary or None in matrices.values():
        return
    tables = [name for name, shape in matrices.items() if shape is not None and max(shape) >= vocabulary]
    if len(tables) < needed:
        said = {"tables": counted(len(tables), "table"), "vocabulary": vocabulary, "needed": needed}
        text = say("{tables} of {vocabulary:,} tokens, and the configuration states {needed}", **said)
        yield Problem("G717", "".join(tables), text)
