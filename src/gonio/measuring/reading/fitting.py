"""Whether the tensors of a checkpoint are those of a model: by names and shapes, without reading a value."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.editing.twin import copy_of
from gonio.editing.where import unwrapped
from gonio.errors import first_line, import_extra, listing
from gonio.escaping import plain
from gonio.measuring.reading.entry import clean_names, layer_path
from gonio.measuring.reading.opened import Problem
from gonio.messages import Message, counted, joined, say

Shape = tuple[int, ...] | None
"""Of a tensor; None where it is not known, which fits any."""
Shapes = Mapping[str, Shape]
_NUMBERED = re.compile(r"(.*\.)(\d+\.)(.*)")  # at the last number
_NUMBER = re.compile(r"\d+(?=\.)")


@dataclass(frozen=True)
class ModelFit:
    """How the names and shapes of a checkpoint differ from those of a model.

    Attributes:
        missing: the tensors that only the model has, with its shapes. `unknown`: those that only the checkpoint has.
        reshaped: the shapes in the checkpoint and in the model, where they differ.
        fitting: how many tensors of the checkpoint have a place in the model; 0 where no name is in both.
        refused: why the library of the model does not load the checkpoint at all; empty if it does.
        prefix: what was removed from the beginning of names, and `prefixed` of how many. `wrapped`: whether names of
            wrappers were.
    """

    missing: Shapes = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    fitting: int = 0
    refused: str = ""
    prefix: str = ""
    prefixed: int = 0
    wrapped: bool = False

    @property
    def whole(self) -> bool:
        """Whether the model gets every tensor, and the checkpoint holds no other."""
        return not (self.missing or self.unknown or self.reshaped or self.refused)

    @property
    def said(self) -> Message:
        """The differences, by kind; empty without any.

        Example:
            >>> from gonio.measuring.reading.fitting import ModelFit
            >>> print(ModelFit({"fc.bias": (2,)}, ("head.bias",)).said)
            1 missing (fc.bias); 1 unknown (head.bias)
        """
        told = [
            say("{count} missing ({names})", count=len(self.missing), names=_named([*self.missing])),
            say("{count} unknown ({names})", count=len(self.unknown), names=_named(self.unknown)),
            say("{count} of another shape ({names})", count=len(self.reshaped), names=_named([*self.reshaped])),
        ]
        kinds = zip((self.missing, self.unknown, self.reshaped), told, strict=True)
        return joined([each for held, each in kinds if held], "; ")


def _named(names: Sequence[str]) -> Message:
    return listing([f"{name:.80}" for name in names], limit=3)


def shapes_of(state: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes of the tensors of a state dict."""
    tensors = ((name, tensor) for name, tensor in state.items() if isinstance(tensor, Tensor))
    return {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}


def compared(own: Shapes, given: Shapes) -> ModelFit:
    """The differences of two lists of names and shapes.

    Args:
        own: of the model. `given`: of the checkpoint.

    Example:
        >>> from gonio.measuring.reading.fitting import compared
        >>> compared({"w": (2, 3), "b": (2,)}, {"w": (3, 2), "b": (2,)}).reshaped
        {'w': ((3, 2), (2, 3))}
    """
    shared = [name for name in own if name in given]
    return ModelFit(
        {name: shape for name, shape in own.items() if name not in given},
        tuple(name for name in given if name not in own),
        {name: (given[name], own[name]) for name in shared if not _alike(given[name], own[name])},
    )


def _alike(a: Shape, b: Shape) -> bool:
    return a is None or b is None or a == b


def fit_of(model: nn.Module, shapes: Shapes) -> ModelFit:
    """How a checkpoint fits a model, as the model's own loader would find; the model does not change.

    The `load_state_dict` of a copy whose tensors are on the meta device takes tensors of these shapes, so that the
    names of former versions are read as its layers read them. For a model of transformers whose names differ from those
    of the checkpoint its `from_pretrained` is asked, which knows the names of former versions and joins experts. Where
    no name fits, the model is asked without its wrappers, and names are compared without those of wrappers, and without
    what stands before all of them, or before most names of the model. A tensor that the model shares under two names is
    not missed under the second one.

    Args:
        shapes: of all tensors of the checkpoint.

    Raises:
        MissingExtraError: if a model of transformers cannot be asked because accelerate is not installed.

    Example:
        >>> from gonio.measuring.reading.fitting import fit_of
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        >>> fit_of(model, shapes).whole
        True
        >>> print(fit_of(model, {**shapes, "0.weight": (3, 2)}).said)
        1 of another shape (0.weight)
    """
    state = model.state_dict(keep_vars=True)
    found = _fit(model, state, shapes)
    if found.fitting:
        return found
    if (inner := unwrapped(model)) is not model:
        within = fit_of(inner, shapes)
        return replace(within, wrapped=True) if within.fitting else found
    renamed = {clean: shapes[name] for name, clean in clean_names(shapes).items()}
    prefix = common_prefix(renamed, state) or _usual_prefix(renamed, shapes_of(state))
    if not prefix and renamed == shapes:
        return found
    other = _fit(model, state, {name.removeprefix(prefix): shape for name, shape in renamed.items()})
    if not other.fitting:
        return found
    prefixed = sum(name.startswith(prefix) for name in renamed) if prefix else 0
    return replace(other, prefix=prefix, prefixed=prefixed, wrapped=renamed.keys() != shapes.keys())


def common_prefix(given: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What stands before all names of a checkpoint, where the rest of one of them is a name of the model.

    Example:
        >>> from gonio.measuring.reading.fitting import common_prefix
        >>> common_prefix({"model.fc.weight": 0, "model.fc.bias": 0}, {"fc.weight": 0, "fc.bias": 0})
        'model.'
    """
    first = next(iter(given), "")
    for start in (first[: at + 1] for at, letter in enumerate(first) if letter == "."):
        if all(name.startswith(start) for name in given) and any(name.removeprefix(start) in own for name in given):
            return start
    return ""


def _usual_prefix(given: Shapes, own: Shapes) -> str:
    """What stands before most tensors of the model, by name and shape, where a checkpoint holds others beside them.

    Example:
        >>> from gonio.measuring.reading.fitting import _usual_prefix
        >>> _usual_prefix({"net.fc.weight": (2, 3), "net.fc.bias": (2,), "loss.weight": (2,)}, {"fc.bias": (2,)})
        'net.'
    """
    dots = ((name, at + 1) for name in given for at, letter in enumerate(name) if letter == ".")
    starts = Counter(name[:at] for name, at in dots if name[at:] in own and _alike(given[name], own[name[at:]]))
    start, count = starts.most_common(1)[0] if starts else ("", 0)  # of several the first in the file
    return start if 2 * count > len(own) else ""


def _fit(model: nn.Module, state: Mapping[str, Any], shapes: Shapes) -> ModelFit:
    own = shapes_of(state)
    found = compared(own, shapes)
    if not found.whole:
        loaded = _loaded(model, state, shapes, found)
        asked = found.reshaped or not loaded.whole  # transformers reads no tensor of another shape, as torch may
        found = (_by_transformers(model, own, shapes) if asked else None) or loaded
    missing: dict[int, str] = {}  # one name of each tensor
    for name in found.missing:
        missing.setdefault(id(state.get(name, name)), name)
    held = len({id(state[name]) for name in own}) - len(missing)
    fitting = min(held, len(shapes) - len(found.unknown))  # libraries leave out names that they know to be harmless
    return replace(found, missing={name: found.missing[name] for name in missing.values()}, fitting=max(fitting, 0))


def _loaded(model: nn.Module, state: Mapping[str, Any], shapes: Shapes, found: ModelFit) -> ModelFit:
    """The differences that are left when the model's layers have read the names, and tensors with two names are one."""
    own = shapes_of(state)
    tensors = [*model.parameters(), *model.buffers(), *(t for t in state.values() if isinstance(t, Tensor))]
    empty = {id(tensor): _empty_like(tensor) for tensor in tensors if not is_lazy(tensor)}
    read = _ShapesRead(state.keys())
    missing, unknown, reshaped = [*found.missing], found.unknown, found.reshaped
    # whatever hooks raise without values, or a loader that returns nothing: names and shapes are compared all the same
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        twin = copy_of(model, instead=empty)
        for module in twin.modules():
            module.register_load_state_dict_pre_hook(read)  # after those of the module
        with torch.device("meta"):  # also what a layer makes anew for a tensor of another shape
            made = twin.load_state_dict(_without_values(shapes, own), strict=False)
        missing = [name for name in made.missing_keys if name in own and name not in read.states]
        unknown, reshaped = tuple(made.unexpected_keys), read.reshaped
    lost = set(missing)
    held = {id(tensor) for name, tensor in state.items() if name not in lost}
    return ModelFit({n: own[n] for n in missing if id(state[n]) not in held}, unknown, reshaped)


class _ShapesRead:
    """A hook of every module that finds the shapes which torch would refuse, once the names are those of the model.

    In their place it leaves tensors that fit, so that all are found. States that a module reads itself
    (`set_extra_state`) may have any size and need values: the module does not get them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.reshaped: dict[str, tuple[Shape, Shape]] = {}
        self.states: set[str] = set()

    def __call__(self, module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, own in (*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)):
            tensor = given.get(prefix + name) if prefix + name in self._names else None
            if tensor is None or is_lazy(own) or own.shape == tensor.shape:
                continue
            if own.ndim or tensor.ndim != 1:  # torch reads the first of several numbers, as files of 2017 have one
                self.reshaped[prefix + name] = tuple(tensor.shape), tuple(own.shape)
                given[prefix + name] = torch.empty_like(own, device="meta")
        if (name := f"{prefix}_extra_state") in self._names and given.pop(name, None) is not None:
            self.states.add(name)


def _empty_like(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _without_values(shapes: Shapes, own: Shapes) -> dict[str, Tensor]:
    known = {name: own.get(name) if shape is None else shape for name, shape in shapes.items()}
    return {name: torch.empty(shape or (), device="meta") for name, shape in known.items()}


# --- models of transformers -------------------------------------------------------------------------------------------


def _by_transformers(model: nn.Module, own: Shapes, shapes: Shapes) -> ModelFit | None:
    """What `from_pretrained` of its class finds; None for another model, and for one that was changed since."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return None
    what = say("holding a checkpoint against a model of transformers")  # which accelerate builds without values
    import_extra("accelerate", what, package="accelerate", extra="models")
    try:
        return _from_pretrained(model, own, shapes)
    except Exception as error:
        if _refuses(model, own, own):  # for a reason of its own
            return None
        for usual in (_usual(shapes, apart=True), _usual(shapes, apart=False)):
            if usual != shapes and not _refuses(model, own, usual):
                return _completed(model, own, shapes, usual)
        return ModelFit(refused=first_line(error, 200))


def _refuses(model: nn.Module, own: Shapes, shapes: Shapes) -> bool:
    try:
        return _from_pretrained(model, own, shapes) is None
    except Exception:
        return True


def _completed(model: nn.Module, own: Shapes, shapes: Shapes, usual: Shapes) -> ModelFit | None:
    """What is found with tensors of the usual number and shapes, with the differences from those that there are."""
    found = _from_pretrained(model, own, usual)
    if found is None:
        return None
    added = {name: shape for name, shape in usual.items() if name not in shapes and name not in found.unknown}
    odd = {name: (shape, usual[name]) for name, shape in shapes.items() if usual[name] != shape}
    reshaped = {**odd, **{name: (shapes.get(name, given), wanted) for name, (given, wanted) in found.reshaped.items()}}
    return ModelFit(
        {**found.missing, **added},
        tuple(name for name in found.unknown if name in shapes),
        {name: (given, wanted) for name, (given, wanted) in reshaped.items() if given != wanted},
    )


def _from_pretrained(model: Any, own: Shapes, shapes: Shapes) -> ModelFit | None:
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True, "device_map": "meta"}
    state = _without_values(shapes, own)
    with _silent():
        made, info = type(model).from_pretrained(None, config=copy.deepcopy(model.config), state_dict=state, **how)
    if shapes_of(made.state_dict()) != own:
        return None
    reshaped = {name: (tuple(given), tuple(wanted)) for name, given, wanted in sorted(info["mismatched_keys"])}
    missing = {name: own.get(name) for name in sorted(info["missing_keys"]) if name not in reshaped}
    return ModelFit(missing, tuple(sorted(info["unexpected_keys"])), reshaped)


def _usual(shapes: Shapes, *, apart: bool) -> dict[str, Shape]:
    """The tensors with the shape that most have whose names differ in numbers alone, and with those that one numbered
    part lacks while most of the others have them.

    transformers refuses a model of which it cannot join the tensors, as those of experts: with these it tells the rest.

    Args:
        apart: whether the last number must be the same, as where the first experts are of another size.

    Example:
        >>> from gonio.measuring.reading.fitting import _usual
        >>> parts = {"e.0.a": (2, 3), "e.0.b": (3,), "e.1.a": (2, 3), "e.1.b": (3,), "e.2.a": (9, 9)}
        >>> _usual(parts, apart=False) == {**parts, "e.2.a": (2, 3), "e.2.b": (3,)}
        True
    """
    kinds = defaultdict[tuple[str, str], dict[str, Shape]](dict)  # shapes by the numbered part, and by the rest
    parts = defaultdict[str, dict[str, None]](dict)
    for name, shape in shapes.items():
        found = _NUMBERED.fullmatch(name)
        before, number, rest = found.groups() if found else ("", "", name)
        part, kind = before + number, _NUMBER.sub("*", before) + (number if apart else "")
        kinds[kind, rest][part] = shape
        parts[kind][part] = None
    usual = dict(shapes)
    for (kind, rest), held in kinds.items():
        shape, count = Counter(held.values()).most_common(1)[0]
        if kind and 2 * count > len(parts[kind]):
            usual |= {f"{part}{rest}": shape for part in parts[kind]}
    return usual


@contextmanager
def _silent() -> Iterator[None]:
    """Without the reports and progress bars of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# --- findings ---------------------------------------------------------------------------------------------------------


def unlike_model(fit: ModelFit, model: nn.Module, shapes: Shapes, known: Sequence[Problem]) -> list[Problem]:
    """A problem for each tensor that the model lacks, that it alone has, or that has another shape there.

    Args:
        known: problems that are told already; the tensors that they name are missed no second time.
    """
    name_of = plain(type(model).__name__, longest=80)
    if fit.refused:
        return [Problem("G719", "", say("{model} does not load it: {why}", model=name_of, why=plain(fit.refused)))]
    own = shapes_of(model.state_dict(keep_vars=True))
    if own and shapes and not fit.fitting:
        said = say(
            "none of its {tensors} is one of {model} by name: {first}, and there {own}",
            tensors=counted(len(shapes), "tensor"),
            model=name_of,
            first=plain(next(iter(shapes)), longest=200),
            own=plain(next(iter(own)), longest=200),
        )
        return [Problem("G719", "", said)]
    told = {name.removeprefix(fit.prefix) for problem in known for name in (problem.path, *problem.tensors)}
    found = [
        Problem("G719", layer_path(name), say("missing: {model} has it ({shape})", model=name_of, shape=_size(shape)))
        for name, shape in fit.missing.items()
        if name not in told
    ]
    for name, (given, wanted) in fit.reshaped.items():
        sizes = {"given": _size(given), "wanted": _size(wanted)}
        found.append(Problem("G719", layer_path(name), say("{given}, and {wanted} in {model}", model=name_of, **sizes)))
    said = say("{model} has no tensor of this name", model=name_of)
    return [*found, *(Problem("G720", layer_path(name), said) for name in fit.unknown)]


def fitted(fit: ModelFit, model: nn.Module, tensors: int) -> list[Message]:
    """The notes on a comparison with a model: that all fits, and which parts of names were left out."""
    notes = []
    if fit.prefix:
        told = {"prefix": plain(fit.prefix), "n": fit.prefixed, "every": tensors}
        if fit.prefixed == tensors:
            notes.append(say("names are compared without {prefix}, which stands before all of them", **told))
        else:
            notes.append(say("names are compared without {prefix}, which stands before {n} of {every}", **told))
    if fit.wrapped:
        notes.append(say("names are compared without those of wrappers (_orig_mod, module, …)"))
    if fit.whole:
        name_of = plain(type(model).__name__, longest=80)
        count = counted(fit.prefixed or tensors, "tensor")
        notes.append(say("fits {model} by name and shape: {tensors}", model=name_of, tensors=count))
    return notes


def _size(shape: Shape) -> str:
    if shape is None:
        return say("a size that is not known")
    return "×".join(map(str, shape)) if shape else say("a single number")
