"""Everything that can be measured: a model, a state dict, a file, or a folder that holds a model.

Every tensor of a source is accounted for: it is measured, it is a part of a measured weight, or it has the reason why
it is not read. Files are read tensor by tensor, and no code in a file ever runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gonio.errors import GonioError, InvalidArgumentError, UnreadableFileError, closest, listing
from gonio.escaping import plain, redact
from gonio.geometry import Layout
from gonio.measuring.reading.adapters import (
    Adapter,
    AdapterConfig,
    adapters_in,
    entries_of_adapters,
    faults_of,
    may_hold_adapters,
    stated_in_header,
)
from gonio.measuring.reading.configurations import CONFIGURATIONS, Configurations
from gonio.measuring.reading.deepspeed_files import is_universal, is_zero, open_universal, open_zero
from gonio.measuring.reading.distributed import METADATA, PIECES, is_distributed, open_distributed
from gonio.measuring.reading.entry import (
    AS_STORED,
    EMBEDDING,
    FACTOR,
    LINEAR,
    MATRIX,
    TABLE,
    UNKNOWN,
    Axes,
    Shapes,
    StoredTensor,
    TensorEntry,
    clean_names,
    has_bias,
    infer,
    is_batched_kernel,
    stores_inputs_first,
    with_ties,
)
from gonio.measuring.reading.experts import stacks_in, untold
from gonio.measuring.reading.formats import DTYPES, ENDINGS, StoredTensors, StoredWeight, stored_weights
from gonio.measuring.reading.hqq_files import open_layers
from gonio.measuring.reading.hub import how_to_fetch, is_address, name_on_hub
from gonio.measuring.reading.model import entries_of_model
from gonio.measuring.reading.opened import Opened, Problem, Watched, link_to_nothing, without_values
from gonio.measuring.reading.optimizers import OptimizerContents, fitted, in_memory, optimizers_in
from gonio.measuring.reading.order import families, in_depth_order
from gonio.measuring.reading.shards import (
    KINDS,
    OTHERS,
    PART,
    are_parts,
    around,
    is_index,
    is_passed_over,
    of_one_part,
    open_parts,
    open_shards,
    open_single,
    shards_of,
    weight_map,
    without_key,
)
from gonio.measuring.reading.state_dicts import open_state, state_in
from gonio.measuring.reading.stated import unlike_others
from gonio.measuring.reading.torch_files import SUFFIXES, optimizer_files
from gonio.messages import Message, joined, say

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]

# The names under which libraries save the weights of a model, before any others in its folder.
_STANDARD = frozenset(
    f"{stem}.{kind}"
    for stem in ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
    for kind in ("safetensors", "bin")
)
_MODELS = (*SUFFIXES, *OTHERS)
# Of a folder's files, the kinds in the order in which one is the model.
_PATTERNS = (
    *("*.safetensors.index.json", "*.safetensors.index.*.json", "*.safetensors"),
    *("*.bin.index.json", "*.bin.index.*.json", "*.bin", "*.pt", "*.pth"),
    *(f"*{suffix}" for suffix in OTHERS if suffix != ".safetensors"),
)


_LEVELS = 3  # of folders in which models are looked for, as `snapshots/COMMIT` in a hub's cache


@dataclass(frozen=True)
class CheckpointPart(os.PathLike[str]):
    """A checkpoint that holds several state dicts, and the key of the one to read, with dots between keys."""

    path: str
    key: str

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Contents:
    """A source's tensors, notes on how it was read, the adapters of a file or state dict, what is wrong with files.

    Attributes:
        refusal: why its adapters are not computed; empty if they are, or if it has none.
    """

    entries: list[TensorEntry]
    notes: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    problems: tuple[Problem, ...] = ()
    optimizer: OptimizerContents = field(default_factory=OptimizerContents)
    refusal: str = ""


def name_of(source: Source) -> str:
    """The name of the source in tables."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    if not isinstance(source, (str, os.PathLike)):
        return "state dict"
    given = os.fspath(source)
    if given and not given.strip("./\\"):  # . and .., which tell nothing on a page that is kept
        given = Path(given).resolve().name or given
    return redact(given)


def contents_of(source: Source, base: Source | None = None) -> Contents:
    """The source's tensors and, for each adapter in a file or state dict, its product and sum.

    A `config.json` beside a file describes its quantisation, an `adapter_config.json` its adapters.

    Args:
        base: of a source that holds adapters, the model that they adapt.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.
    """
    adapters: list[Adapter] = []
    absent: list[Problem] = []
    refusal = ""
    if isinstance(source, nn.Module):
        opened, beside, made = Opened({}), Configurations(), entries_of_model(source)
    else:
        opened, beside = _opened(source)
        if opened.refusal is not None:
            raise opened.refusal
        headers = {other.name: (other.shape or (), other.dtype) for other in opened.others}
        headers |= {name: (tensor.shape, tensor.dtype) for name, tensor in opened.stored.items()}
        absent = without_values(headers)
        order = in_depth_order({name: tensor.shape for name, tensor in opened.stored.items()}, beside.vocabulary)
        opened = replace(opened, stored={name: opened.stored[name] for name in order})
        about, config = configured(beside.adapter, opened.metadata, opened.stored)
        adapters = adapters_in(opened.stored, config) if config is not None else []
        parts = {key for adapter in adapters for key in adapter.parts}
        made = [*_entries(opened.stored, beside, parts), *opened.others]
        made = made if config is not None else _as_stored(made, opened.stored)  # adapters have matrices of their own
        if config is not None and config.refusal:
            refusal = plain(config.refusal)
            opened = replace(opened, notes=(*opened.notes, refusal))
    if base is not None and not adapters:
        raise InvalidArgumentError(
            "measure(base=) adds adapters to the weights that they adapt",
            say("{source} without adapters that are read", source=name_of(source)),
            "Pass the adapters first and the model that they adapt as base, or no base; gonio.measuring.difference "
            "and `gonio measure BASE AFTER` compare two checkpoints.",
        )
    made += _adapted(adapters, base)
    in_files = isinstance(source, (str, os.PathLike))
    faults = faults_of(adapters, about if in_files else None) if adapters else []
    shapes = {name: each.shape for name, each in opened.stored.items()} | {o.name: o.shape for o in opened.others}
    gaps = unlike_others(shapes, opened.problems, beside, opened.header, about if adapters else None)
    problems = (*opened.problems, *of_damaged(opened.optimizer), *faults, *gaps, *absent)
    notes = (*opened.notes, *([AS_STORED] if any(e.kind == MATRIX for e in made) else []), *opened.optimizer.notes)
    return Contents(made, notes, tuple(adapters), problems, opened.optimizer, refusal)


def _adapted(adapters: list[Adapter], base: Source | None) -> list[TensorEntry]:
    """The products of adapters, and what they make of the tensors of their base."""
    held = {} if base is None else {e.weight_name or e.name: e for e in with_ties(contents_of(base).entries)}
    added = entries_of_adapters(adapters, held)
    if base is None or any(held.get(e.weight_name or e.name) is e for e in added):
        return added
    path = plain(adapters[0].path)
    raise InvalidArgumentError(
        "measure(base=) takes the model that the adapters adapt",
        say("{base}, which has none of the weights that they adapt, such as {path}", base=name_of(base), path=path),
        "Pass the model that they were trained on as base.",
    )


def configured(
    beside: Mapping[str, Any], metadata: Mapping[str, str], names: Iterable[str]
) -> tuple[Mapping[str, Any], AdapterConfig | None]:
    """The configuration of a file's adapters: that beside it, else that in its header; none if it has no adapters."""
    if not beside and not may_hold_adapters(names):
        return beside, None
    header = {} if beside else stated_in_header(metadata)
    return (header, AdapterConfig.of_header(header)) if header else (beside, AdapterConfig(beside))


def _as_stored(entries: list[TensorEntry], stored: StoredTensors) -> list[TensorEntry]:
    """The entries, with the rows of matrices as filters where a file tells of none of them what its dimensions are.

    Norms, ranks and spectra of all of a matrix are the same for both dimensions. A file with a weight that is read, or
    with a tensor of more than one dimension that is left out for another reason, is none of these.
    """
    held = {cleaned: stored[name] for name, cleaned in clean_names(stored).items()}
    wide = [entry for entry in entries if entry.shape is None or len(entry.shape) > 1]
    if not all(_is_untold(entry, held.get(entry.name)) for entry in wide):
        return entries

    def read(entry: TensorEntry) -> TensorEntry:
        told = (*entry.notes, AS_STORED)
        return replace(entry, kind=MATRIX, layout=Layout(), reason="", notes=told, inferred=True, table=True)

    return [read(entry) if len(entry.shape or ()) > 1 else entry for entry in entries]


def _is_untold(entry: TensorEntry, stored: StoredTensor | None) -> bool:
    """Whether a tensor is a matrix of numbers of which only the order of the dimensions is not known."""
    if entry.reason != UNKNOWN or entry.role or stored is None or len(stored.shape) != 2 or 1 in stored.shape:
        return False
    return stored.floating


def tables_in(shapes: Shapes) -> frozenset[tuple[int, ...]]:
    """The shapes of matrices without a bias, which may be embeddings."""
    return frozenset(shape for name, shape in shapes.items() if len(shape) == 2 and not has_bias(name, shapes))


def padding_rows(shape: tuple[int, ...], rows: tuple[int, ...], tables: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The rows of a tensor of which one is 0 if it is an embedding with padding, or tied to one; empty if it cannot be.

    Args:
        rows: of the padding, as :attr:`Configurations.padding` has them. `tables`: of :func:`tables_in`.
    """
    return tuple(row for row in rows if row < shape[0]) if len(shape) == 2 and shape in tables else ()


def _entries(stored: StoredTensors, beside: Configurations, of_adapters: set[str]) -> Iterator[TensorEntry]:
    """One entry per tensor; a weight of several tensors is the entry of the first, computed from all of them."""
    plainly = {name: tensor for name, tensor in stored.items() if tensor.axes is None}
    suspects = [name for name, t in plainly.items() if name.endswith(ENDINGS) or t.dtype.startswith(DTYPES)]
    several = stored_weights(suspects, stored, beside.quantisation) if suspects or beside.quantisation else []
    weights = {part: one for one in several for part in one.parts}
    cleaned, shapes = clean_names(stored), {name: tensor.shape for name, tensor in stored.items()}
    inputs_first, tables = stores_inputs_first(shapes), tables_in(shapes)
    read = {name: infer(name, shapes, inputs_first=inputs_first) for name in plainly if name not in weights}
    layers = {name for names in families(shapes) for name in names} | {n for n in shapes if has_bias(n, shapes)}
    stacks = stacks_in(shapes, [name for name, one in read.items() if one.layout is None or untold(name, shapes)])
    for name, tensor in stored.items():
        weight = weights.get(name)
        if tensor.axes is not None:
            yield _by_axes(cleaned[name], tensor, tensor.axes)
        elif weight is None:
            axes = read[name]
            kind = LINEAR if axes.kind == TABLE and name in layers else axes.kind
            notes = (*axes.notes, f"dequantised from {tensor.dtype}") if tensor.values else axes.notes
            made = tensor.entry(cleaned[name], kind, axes.layout, axes.reason, notes)
            made = replace(made, inferred=True, weight_name=_plain_name(cleaned[name]), table=kind == TABLE)
            made = replace(made, padding=padding_rows(shapes[name], beside.padding, tables))
            made = stacks[name].entry(made) if name in stacks else made
            yield _without_batch(replace(made, role="adapter", kind=FACTOR) if name in of_adapters else made)
        elif weight.parts[0] == name:
            yield _computed(weight, cleaned.get(weight.name, weight.name), shapes)
        else:
            reason = f"a part of the {weight.kind} {cleaned.get(weight.name, weight.name)}"
            yield replace(tensor.entry(cleaned[name], "", None, reason), role="part")


def _by_axes(name: str, tensor: StoredTensor, axes: Axes) -> TensorEntry:
    """The entry of a tensor whose format tells its dimensions, in torch's order."""
    order = axes.order
    kind = axes.kind or f"{len(tensor.shape)}-d tensor"
    made = tensor.entry(name, kind, axes.layout, axes.reason, axes.notes)
    made = replace(made, table=kind in (TABLE, EMBEDDING), role="part" if axes.part else "")
    if order is None or order == tuple(range(len(order))):
        return made
    shape = tuple(tensor.shape[dim] for dim in order)
    return replace(made, load=lambda: tensor.load().permute(order).contiguous(), shape=shape)


def _plain_name(name: str) -> str:
    """The name in the plain model of a tensor of peft's wrapped layer; empty if it is the same."""
    parts = name.split(".")
    if "modules_to_save" in parts[:-1]:  # in a file the adapter's name after it may be left out
        at = parts.index("modules_to_save")
        return ".".join(parts[:at] + parts[min(at + 2, len(parts) - 1) :])
    kept = ".".join(part for part in parts if part not in ("base_layer", "original_module"))
    return "" if kept == name else kept


def _without_batch(entry: TensorEntry) -> TensorEntry:
    """The entry of a modulated convolution's weight without its first dimension of 1."""
    if entry.layout is None or entry.shape is None or entry.load is None or not is_batched_kernel(entry.shape):
        return entry
    load, said = entry.load, "read as (1, outputs, inputs, …) of a modulated convolution"
    return replace(entry, load=lambda: load()[0], shape=entry.shape[1:], notes=(*entry.notes, said))


def _computed(weight: StoredWeight, name: str, shapes: Shapes) -> TensorEntry:
    """The entry of a weight computed from its parts; a stack of matrices is read as one of experts."""
    if weight.stored is None:
        return TensorEntry.unread(name, weight.note)
    axes = infer(weight.name, {**shapes, weight.name: weight.stored.shape})
    if weight.matrices > 1 or (axes.layout is None and weight.kind == "quantised"):
        axes = replace(axes, layout=Layout(blocks=weight.matrices), kind="linear", reason="")
    made = weight.stored.entry(name, axes.kind, axes.layout, axes.reason, (weight.note, *axes.notes))
    return replace(made, inferred=True)


def _opened(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Opened, Configurations]:
    """The tensors, and the configurations beside a file; or why it has no known weights, and the optimizer's states."""
    if isinstance(source, Mapping):
        if (layers := open_layers(source)) is not None:
            return layers, Configurations()
        raw = optimizers_in(source, in_memory)
        try:
            held = state_in(source, what="the mapping")
        except InvalidArgumentError as error:
            return Opened({}, refusal=error, optimizer=fitted(raw, {}, in_order=True)), Configurations()
        return open_state(held, raw), Configurations()
    if not isinstance(source, (str, os.PathLike)):
        raise _no_source(source)
    path, key = Path(source), source.key if isinstance(source, CheckpointPart) else ""
    files, others = files_in(path) if path.is_dir() else ([path], [])
    opened = open_files(files, key, of_folder=path.is_dir())
    if path.is_dir() and files[0] != path:
        opened, states = _with_optimizer(opened, path, files)
        opened = replace(opened, notes=(*opened.notes, *left_out(path, [f for f in others if f not in states], files)))
    if not path.is_dir():
        opened = replace(opened, notes=(*opened.notes, *of_one_part(path)))
    beside = Configurations.beside(files)
    problems = (*opened.problems, *beside.problems, *around(files, of_folder=path.is_dir()))
    return replace(opened, problems=problems), beside


def left_out(folder: Path, others: Iterable[Path], model: Iterable[Path]) -> tuple[Message, ...]:
    """A note on other files beside the model of a folder, and one on folders that have models of their own."""
    shards = {folder / shard for shard in shards_of(model)}
    files, folders = [plain(file.name) for file in others], folders_with_models(folder, without=shards)
    notes = [say("not read: {names}", names=listing(files, limit=4))] if files else []
    notes += [say("not read: models in the folders {names}", names=listing(folders, limit=4))] if folders else []
    return tuple(notes)


def _with_optimizer(opened: Opened, folder: Path, model: Collection[Path]) -> tuple[Opened, Collection[Path]]:
    """What was opened, with the states of optimizers in the torch files beside the model, and these files."""
    found, broken = optimizer_files(folder, model)
    in_order = all(file.suffix in SUFFIXES for file in model)
    for file, raw in found.items():
        placed = [replace(one, place=f"{file.name}: {one.place}") for one in raw]
        opened = replace(opened, optimizer=opened.optimizer + fitted(placed, opened.stored, in_order=in_order))
    broken_ones = OptimizerContents(damaged=tuple(file.name for file in broken))
    return replace(opened, optimizer=opened.optimizer + broken_ones), found


def of_damaged(contents: OptimizerContents) -> list[Problem]:
    """The problems of files beside the model."""
    return [Problem("G701", name, say("cut off or empty")) for name in contents.damaged]


def optimizer_of(source: Source) -> OptimizerContents:
    """The states of optimizers in a checkpoint, those without the model's tensors among them."""
    if isinstance(source, nn.Module):
        return OptimizerContents()
    try:
        return _opened(source)[0].optimizer
    except GonioError:  # damage is a finding of `check`
        return OptimizerContents()


def _no_source(given: object) -> InvalidArgumentError:
    """The error for anything else."""
    found, do = type(given).__name__, "Pass one of them."
    if isinstance(given, type):
        found, do = f"the class {given.__name__}", f"Pass an instance of it: {given.__name__}(...)."
    elif isinstance(given, Tensor):
        do = "For one tensor use the functions of gonio.geometry."
    return InvalidArgumentError("measure() takes a model, a state dict or a path", found, do)


def _matched(path: Path) -> list[Path]:
    """The files that a pattern in the place of a name matches; none for a name."""
    return sorted(islice(path.parent.glob(path.name), 1000)) if set("*?[") & set(path.name) else []


def _without_ending(path: Path, beside: Iterable[str]) -> list[str]:
    """The names of checkpoints that have this name and an ending."""
    return sorted(name for name in beside if name.endswith(_MODELS) and Path(name).stem == path.name)


def nearly_a_file(path: Path) -> bool:
    """Whether a path lacks only its ending, is a pattern of files, or a link to nothing: :func:`absent` says which."""
    if _matched(path) or link_to_nothing(path):
        return True
    return bool(_without_ending(path, (file.name for file in islice(path.parent.glob("*"), 10_000))))


def absent(path: str | os.PathLike[str]) -> UnreadableFileError:
    """The error for a path without a file; it names similar files in the folder."""
    word, path = os.fspath(path), Path(path)
    if is_address(word):
        word = re.sub(r":/+", "://", word, count=1)
        return UnreadableFileError(redact(word), "it is an address, not a file", how_to_fetch(word))
    missing = partial(UnreadableFileError, str(path), "there is no such file")
    if ".py:" in path.name:
        return missing("In Python pass the model itself; FILE.py:NAME is a word of the command line.")
    if path.exists() and not path.is_file() and not path.is_dir():
        return UnreadableFileError(str(path), "it is a pipe or a device", "Copy its content to a file.")
    if link := link_to_nothing(path):
        do = say("Copy or download the file again; in a hub's cache links lead to the folder blobs.")
        return UnreadableFileError(str(path), link, do)
    if word.startswith("~") and (home := path.expanduser()).exists():
        return missing(say("The shell replaces ~ only outside quotation marks. Write {path}.", path=str(home)))
    if matched := _matched(path):
        names = listing([plain(str(file)) for file in matched], limit=4)
        do = say(
            "It is a pattern, which the shell replaces only outside quotation marks; it matches {names}. "
            "Leave the marks out, or name one.",
            names=names,
        )
        return missing(do)
    beside = [file.name for file in islice(path.parent.glob("*"), 10_000) if file.is_file()]
    beside += folders_with_models(path.parent) if path.parent.is_dir() else []
    near = _without_ending(path, beside) or closest(path.name, beside)
    paths = joined([str(path.with_name(name)) for name in near], " or ")
    do = say("Did you mean {near}?", near=paths) if near else say("Check the path.")
    elsewhere = path.suffix not in _MODELS and (word == path.name or not path.parent.exists())
    if not near and elsewhere and name_on_hub(word):
        do = joined([do, how_to_fetch(word)], " ")
    return missing(do)


def open_file(path: Path, key: str = "") -> Opened:
    """The tensors of one file, of an index with its shards, or of a folder that is a checkpoint as a whole.

    Raises:
        UnreadableFileError: if there is no such file, if it is damaged, or of a kind that is not known.
        InvalidArgumentError: for a key of a file that holds one state dict.
        MissingExtraError: if the package that reads its kind is not installed.
    """
    if path.is_dir():
        if is_distributed(path):
            return open_distributed(path, key)
        without_key(key, path)
        return open_universal(path) if is_universal(path) else open_zero(path)
    if not path.is_file():
        raise absent(path)
    if not is_index(path):
        return open_single(path, key)
    without_key(key, path)
    return open_shards(path)


def open_files(files: list[Path], key: str = "", *, of_folder: bool) -> Opened:
    """The tensors of the one file of a model, as :func:`open_file`, or of its parts without an index."""
    if not are_parts(files, of_folder=of_folder):
        return open_file(files[0], key)
    without_key(key, *files)
    return open_parts(files)


def is_whole(folder: Path) -> bool:
    """Whether a folder is a checkpoint as a whole."""
    return is_distributed(folder) or is_zero(folder) or is_universal(folder)


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The one model of a folder, or its parts where the index is missing; other files.

    An index comes before single files, except those that transformers reads before it.

    A folder of torch.distributed.checkpoint or of DeepSpeed is itself the one.
    """
    if is_whole(folder):
        return [folder], []
    every = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    for pattern in _PATTERNS:
        found = [file for file in every if file.match(pattern) and not is_passed_over(file)]
        parts = [PART.fullmatch(file.name) for file in found]
        if len(found) == 1 or (all(parts) and len({(m[1], m[3], m[4]) for m in parts if m}) == 1):
            return found, _beside(every, found)
        if standard := [file for file in found if file.name in _STANDARD]:
            return standard[:1], _beside(every, standard[:1])
        if found:
            names = listing([plain(file.name) for file in every], limit=8)
            raise UnreadableFileError(str(folder), say("it holds several: {names}", names=names), "Name one of them.")
    raise _no_checkpoint(folder)


def _beside(every: Iterable[Path], model: Collection[Path]) -> list[Path]:
    """The files of known kinds that are neither the model nor a shard that its index names."""
    shards = shards_of(model)
    return [file for file in every if file not in model and file.name not in shards]


def files_read(source: Source) -> Iterator[tuple[str, Path]]:
    """The files that a measurement reads, each with its name.

    Raises: OSError for a source that is no file, or of a kind that is not kept.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise OSError("no file")
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    for file in files_in(path)[0] if path.is_dir() else [path]:
        if file.is_dir() and is_whole(file):
            yield from ((each.relative_to(file).as_posix(), each) for each in sorted(file.rglob("*")) if each.is_file())
        elif file.suffix == ".onnx" or not (file.name.endswith(KINDS) or is_index(file)):
            raise OSError("its values may lie in other files")
        else:
            yield file.name, file
            if is_index(file):
                shards = sorted({*weight_map(file)[0].values()})
                yield from ((shard, file.parent / shard) for shard in shards if (file.parent / shard).exists())
    yield from ((name, folder / name) for name in CONFIGURATIONS if (folder / name).is_file())


def watching(sources: Iterable[Source]) -> Watched:
    """The files of some sources as they are now; none of a kind whose values may lie in others."""
    files: list[Path] = []
    for source in sources:
        with suppress(OSError, GonioError):  # what is wrong with the source, reading it says
            files += [file for _, file in files_read(source)]
    return Watched(files)


def _no_checkpoint(folder: Path) -> UnreadableFileError:
    """The error for a folder without a model of its own; it names its folders that may have one, or what is in it."""
    if any(folder.glob(f"*{PIECES}")) and not (folder / METADATA).exists():
        what = say(
            "it holds pieces of torch.distributed.checkpoint without {name}, which is written last", name=METADATA
        )
        return UnreadableFileError(str(folder), what, say("Save or copy it again."))
    if held := folders_with_models(folder, levels=_LEVELS):
        found = f"it holds no checkpoint, but its folders do: {listing(held, limit=8)}"
        return UnreadableFileError(str(folder), found, "Name one of them.")
    there = sorted(plain(one.name) for one in islice(folder.iterdir(), 10_000))
    if not there:
        return UnreadableFileError(str(folder), say("it is empty"), "Name a .safetensors or .pt file.")
    what = say("it holds no checkpoint of a kind that is read; there are {names}", names=listing(there, limit=8))
    return UnreadableFileError(str(folder), what, say("Known kinds: {kinds}.", kinds=", ".join(KINDS)))


def folders_with_models(folder: Path, *, without: Collection[Path] = (), levels: int = 1) -> list[str]:
    """The names of the folders in a folder that may hold a model, or of those in these.

    Args:
        without: files that are known to be of another model. `levels`: of folders; below one that holds a model none.
    """
    found = []
    for one in sorted(islice(folder.iterdir(), 10_000)):
        if not one.is_dir() or not os.access(one, os.R_OK | os.X_OK):
            continue
        files = (file for file in islice(one.iterdir(), 1000) if file.suffix in _MODELS)
        if is_whole(one) or any(file not in without for file in files):
            found.append(plain(one.name))
        elif levels > 1 and not one.is_symlink():
            found += [f"{plain(one.name)}/{name}" for name in folders_with_models(one, levels=levels - 1)]
    return found
