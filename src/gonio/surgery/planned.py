"""Models that a `config.json` describes, to be run without their weights: one layer of each kind, with random values.

Layers of a list that have the same classes, shapes and settings are one kind. What a run shows of the first of a kind
holds for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gonio.editing.twin import set_tensors_
from gonio.errors import InvalidArgumentError, MissingExtraError, NotApplicableError, UnknownNameError
from gonio.messages import Message, said_by, say
from gonio.seeding import generator
from gonio.surgery.blocks import Anatomy
from gonio.surgery.configured import CONFIG, Configured, configured, load_library, read_config
from gonio.surgery.stated import HEADS, KV_HEADS, LAYERS, WIDTHS
from gonio.system import memory

_MANY = 2**28  # weights above which tables are made smaller
_WORDS = 512  # rows of a smaller table
_SHARE = 4  # of the machine's memory a run takes one part at most
_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = {"layers": LAYERS, "heads": HEADS, "heads of keys and values": KV_HEADS, "channels": WIDTHS}
Part = TypeVar("Part")


@dataclass(frozen=True)
class Repeated:
    """A list of layers of which only the first ones are run.

    Attributes:
        path: of the list.
        like: for each layer the number of the first one of its kind.
    """

    path: str
    like: tuple[int, ...]

    @property
    def run(self) -> int:
        """The number of layers that are run: those up to the last first one of a kind."""
        return max(self.like) + 1

    def places(self, names: Iterator[str]) -> tuple[int, ...]:
        """The layer to which these tensors belong, and those like it that are not run; none if it is no single one."""
        start = f"{self.path}."
        inside = {name[len(start) :].partition(".")[0] for name in names if name.startswith(start)}
        if len(inside) != 1 or not (number := inside.pop()).isdecimal():
            return ()
        own = int(number)
        return (own, *(index for index in range(self.run, len(self.like)) if self.like[index] == own))


@dataclass(frozen=True)
class Planned:
    """A model with random weights that stands for one of more layers."""

    model: nn.Module
    lists: tuple[Repeated, ...]

    def spread(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Parts, paths or symmetries, and their copies in layers of the same kind, in the order of the layers."""
        placed: list[tuple[int, int, int, Part]] = []
        first: dict[str, int] = {}
        for number, part in enumerate(parts):
            named = [(of, places) for of in self.lists if (places := of.places(_names(part)))]
            if len(named) != 1:  # of no list, or of several
                placed.append((number, 0, number, part))
                continue
            ((of, places),) = named
            at, start = first.setdefault(of.path, number), f"{of.path}.{places[0]}."
            placed += [(at, index, number, _moved(part, start, f"{of.path}.{index}.")) for index in places]
        return tuple(part for *_, part in sorted(placed, key=lambda each: each[:3]))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the whole model; None if it has none of this name."""
        for of in self.lists:
            number, _, rest = name.removeprefix(f"{of.path}.").partition(".")
            if name.startswith(f"{of.path}.") and number.isdecimal() and int(number) < len(of.like):
                name = f"{of.path}.{of.like[int(number)]}.{rest}"
        found = dict(self.model.named_parameters(remove_duplicate=False)).get(name)
        return None if found is None else tuple(found.shape)

    def whole(self, found: Anatomy) -> Anatomy:
        """What was found in this model, for all layers."""
        names = ("attention", "mlps", "routers", "norms", "stacks")
        unknown = {name: why for path, why in found.unknown.items() for name in self.spread((path,))}
        return replace(found, **{name: self.spread(getattr(found, name)) for name in names}, unknown=unknown)


def _names(part: Any) -> Iterator[str]:
    """The names of tensors and paths of modules in a part; a path as if it had a tensor."""
    if isinstance(part, str):
        yield f"{part}."
    elif isinstance(part, tuple):
        for each in part:
            yield from _names(each)
    elif is_dataclass(part):
        for field in fields(part):
            if field.name in ("tensor", "bias", "path") or not isinstance(getattr(part, field.name), str):
                yield from _names(getattr(part, field.name))


def _moved(part: Any, old: str, new: str) -> Any:
    """The same part of another layer."""
    if isinstance(part, str):
        return (new + f"{part}."[len(old) :]).removesuffix(".") if f"{part}.".startswith(old) else part
    if isinstance(part, tuple):
        return tuple(_moved(each, old, new) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _moved(getattr(part, field.name), old, new) for field in fields(part)})
    return part


# --- building it ------------------------------------------------------------------------------------------------------


def planned(path: Path) -> Planned | str:
    """The model of a `config.json`, of the folder that holds one, or of a file beside one; or why there is none.

    Raises:
        InvalidArgumentError: without a `config.json`.
        UnreadableFileError: for a damaged one.
    """
    folder = path if path.is_dir() else path.parent
    place = path if path.suffix == ".json" and path.is_file() else folder / CONFIG
    if not place.is_file():
        do = "Pass the model, or a folder that has its configuration."
        raise InvalidArgumentError(f"anatomy() of a checkpoint reads its {CONFIG}", f"no file {str(place)!r}", do)
    data = read_config(place)
    try:
        found, _ = configured(load_library("transformers", str(path)), str(path), place)
        return _built(found, data)
    except MissingExtraError:
        return _stated(say("transformers is not installed, which would build the model"), data)
    except (NotApplicableError, UnknownNameError) as error:
        return _stated(said_by(error), data)


def _stated(why: Message, data: Mapping[str, Any]) -> Message:
    """Why a model was not built, with the numbers that its configuration states."""
    numbers = [f"{value} {what}" for what, keys in _NUMBERS.items()
               if (value := next((data[key] for key in keys if isinstance(data.get(key), int)), None))]  # fmt: skip
    if not numbers:
        return why
    return say("{reason}; its configuration states {numbers}", reason=why, numbers=", ".join(numbers))


def _built(found: Configured, data: Mapping[str, Any]) -> Planned | str:
    model = found.empty()
    lists = tuple(_shortened(model))
    if _weights(model) > _MANY:  # tables of words may be the largest part
        ids = {key: 0 for key, value in data.items() if key.endswith("_token_id") and isinstance(value, int)}
        try:
            smaller = found.empty(vocab_size=_WORDS, **ids)
        except NotApplicableError:
            smaller = None
        if smaller is not None and tuple(_shortened(smaller)) == lists:
            model = smaller
    size, most = 4 * _weights(model), memory()
    if most and size * _SHARE > most:
        told = {"gib": size / 2**30, "share": _SHARE}
        return say("one layer of each kind takes {gib:.1f} GiB, more than 1/{share} of this machine's memory", **told)
    bare = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if bare:
        return say("the buffer {name} has no values without a run of its own", name=bare[0])
    _fill_(model)
    return Planned(model.eval(), tuple(each for each in lists if len(set(each.like)) < len(each.like)))


def _weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _shortened(model: nn.Module) -> Iterator[Repeated]:
    """Cut each outermost list of layers after the last layer that is the first of its kind."""
    for path, layers in _lists(model):
        kinds: dict[Any, int] = {}
        found = Repeated(path, tuple(kinds.setdefault(kind, index) for index, kind in enumerate(_kinds(layers))))
        del layers[found.run :]
        yield found


def _lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield inner, child
        else:
            yield from _lists(child, inner)


def _kinds(layers: nn.ModuleList) -> list[Any]:
    """The classes, shapes and settings of each layer, without settings that are its number in the list."""
    settings = [_settings(layer) for layer in layers]
    numbers = {key for key in settings[0] if all(type(each.get(key)) is int and each[key] == index
               for index, each in enumerate(settings))}  # fmt: skip
    kinds = []
    for layer, own in zip(layers, settings, strict=True):
        tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in tensors)
        classes = tuple((path, type(module)) for path, module in layer.named_modules())
        kinds.append((classes, shapes, repr([(key, own[key]) for key in sorted(own.keys() - numbers)])))
    return kinds


def _settings(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of a layer and of the modules in it, by path and name."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
    }


@torch.no_grad()
def _fill_(model: nn.Module) -> None:
    """Random values for all weights without values, and for those of one value, which may hide what they multiply."""
    random = generator(0, "planned")
    made: dict[int, Tensor] = {}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random, device="cpu", dtype=torch.float32)
        if parameter.is_meta:
            wide = max(parameter[0].numel(), 1) ** -0.5 if parameter.ndim > 1 else 0.1
            value = wide * noise + (0.5 if parameter.ndim < 2 else 0.0)
        elif parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            value = parameter + 0.1 * noise.to(parameter)
        else:
            continue
        made[id(parameter)] = nn.Parameter(value, requires_grad=False)
    set_tensors_(model, made)
