"""Adapters in files and state dicts: what each adds to, or makes of, a tensor of the base.

Tensors are grouped by the layer that they adapt. Each module of this package reads one kind of adapter; a group whose
parts, or whose configuration, it does not understand is refused with the reason, and never read in part.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from math import isfinite
from pkgutil import iter_modules
from typing import Any

from torch import Tensor

from gonio.escaping import plain
from gonio.geometry import Layout
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import LOW_RANK, StoredTensor, TensorEntry
from gonio.measuring.reading.opened import Problem
from gonio.measuring.reading.patterns import Budget, Pattern
from gonio.messages import Message, counted, say

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:(.+?)\.)?((?:lora|oft)_\w+|alpha|dora_scale|ranknum|(?:token_adapter\.)?trainable_tokens_\w+)"
    r"(?:\.([^.]+?))??(?:\.(weight|bias))?"
)
PACKED = "in_proj_weight"  # of nn.MultiheadAttention
UNKNOWN_SCALE = "the adapter's scale is not known"
UNKNOWN_TENSOR = "which of the layer's parameters it changes is not known"


class Unfit(ValueError):
    """An adapter and its base do not fit: the adapter, or the choice of its base, is at fault."""


def no_weight(path: str) -> Message:
    """Why the adapter of a layer that the base lacks is not computed."""
    return say("the base has no weight {path}", path=path)


@dataclass(frozen=True)
class Adapter:
    """What one adapter makes of one tensor of the base.

    Attributes:
        path: of the adapted layer. `tensor`: the adapted tensor of it. `among`: those of which it is one, where the
            file names several; their shapes in the base tell which.
        name: of the adapter where a layer may have several. `kind`: for the names of rows.
        change: the adapted tensor, of the base's tensor as its first argument and its entry as the second; None if it
            is not computed, with the `reason`; `fault` says whether the adapter is at fault for it, or the choice of
            its base. `check`: why it is not computed for one base, or nothing.
        product: of a low-rank adapter, the change itself. `layout`, `note`: of the product.
        parts: the keys of its tensors.
    """

    path: str
    name: str
    kind: str
    change: Callable[[Tensor, TensorEntry], Tensor] | None
    parts: tuple[str, ...] = ()
    tensor: str = "weight"
    among: tuple[str, ...] = ()
    reason: str = ""
    fault: bool = False
    check: Callable[[TensorEntry], str] = lambda _: ""
    product: StoredTensor | None = None
    layout: Layout = PLAIN
    note: str = ""

    @property
    def weight(self) -> str:
        """The name of the adapted tensor."""
        return f"{self.path}.{self.tensor}" if self.path else self.tensor

    def fits(self, base: TensorEntry | None) -> bool:
        """Whether the product of the adapter could be added to a tensor: a matrix, or one for each expert."""
        if self.product is None or base is None:
            return False
        shape, experts = tuple(self.product.shape), self.layout.blocks
        if experts == 1:
            return base.shape == shape
        outputs, inputs = shape[0] // experts, shape[1]
        return base.shape in (shape, (experts, outputs, inputs), (experts, inputs, outputs))

    def adapted(self, base: TensorEntry) -> TensorEntry:
        """The entry of the adapted tensor of a base."""
        if reason := self.reason or self.check(base):
            return replace(base.unknown(reason), fault=self.fault)
        return replace(base, load=partial(self._total, base), notes=(), marks=(), tied="")

    def _total(self, base: TensorEntry) -> Tensor:
        weight = base.read()
        if self.change is None or not isinstance(weight, Tensor):
            raise ValueError(self.reason or "the base has no values here")
        return self.change(weight.float() if weight.element_size() < 4 else weight, base)


@dataclass(frozen=True)
class Group:
    """The tensors of one adapter of one layer.

    Attributes:
        parts: by what they are (`lora_A`, `lora_B.bias`). `keys`: their keys in the file.
    """

    path: str
    name: str
    parts: dict[str, StoredTensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def adapter(self, kind: str, change: Callable[[Tensor, TensorEntry], Tensor] | None, **more: Any) -> Adapter:
        return Adapter(self.path, self.name, kind, change, tuple(self.keys.values()), **more)

    def refused(self, kind: str, reason: str, **more: Any) -> Adapter:
        return self.adapter(kind, None, reason=reason, **more)


def faults_of(adapters: Sequence[Adapter], config: Mapping[str, Any] | None) -> list[Problem]:
    """What is wrong with the adapters of a file.

    Args:
        config: the configuration beside it; None for adapters that are in memory.
    """
    found = [Problem("G713", adapter.path, adapter.reason) for adapter in adapters if adapter.fault]
    unknown = sum(bool(adapter.reason) and not adapter.fault for adapter in adapters)
    if unknown and config is not None and not config:
        what = say("no adapter_config.json that can be read, without which {n} changes are not known", n=unknown)
        found.append(Problem("G713", "", what))
    return found


def unlike_base(adapters: Sequence[Adapter], base: Mapping[str, TensorEntry], model: str) -> list[Problem]:
    """A problem for each adapter of a layer that a base does not have, or that has another shape there.

    Args:
        base: the tensors of the model, which may be without values. `model`: its name.
    """
    found, absent = [], 0
    for adapter in (placed := Places(base).of([*adapters])):
        held = base.get(adapter.weight)
        if held is None:
            absent += 1
            found.append(Problem("G719", adapter.path, say("{model} has no layer of this path", model=model)))
        elif adapter.product is not None and not (adapter.fits(held) or _is_transposed(adapter.product.shape, held)):
            made, own = ("×".join(map(str, shape or ())) for shape in (adapter.product.shape, held.shape))
            said = say("made for a weight of {made}, and {own} in {model}", made=made, own=own, model=model)
            found.append(Problem("G719", adapter.path, said))
    if absent < len(placed) or absent < 2:
        return found
    told = {"adapters": counted(absent, "adapter"), "model": model, "path": plain(placed[0].path, longest=200)}
    return [Problem("G719", "", say("{model} has the layer of none of {adapters}: {path}, …", **told))]


def _is_transposed(shape: Sequence[int], held: TensorEntry) -> bool:
    """Whether a base stores the matrix of an adapter with its inputs first, as embeddings and layers of GPT-2 do."""
    return len(shape) == 2 and held.shape == (shape[1], shape[0])


_CHOOSE = ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters")


def in_every_block(config: Mapping[str, Any]) -> bool:
    """Whether an `adapter_config.json` of LoRA names layers that are adapted in every block which has them.

    Example:
        >>> from gonio.measuring.reading.adapters import in_every_block
        >>> names = ["q_proj"], ["layers.1.q_proj"]
        >>> [in_every_block({"peft_type": "LORA", "target_modules": each}) for each in names]
        [True, False]
    """
    named = config.get("target_modules")
    if config.get("peft_type") != "LORA" or any(config.get(key) for key in _CHOOSE) or not isinstance(named, list):
        return False
    return all(isinstance(name, str) and not any(part.isdecimal() for part in name.split(".")) for name in named)


# --- adapter_config.json ---------------------------------------------------------------------------------------------

TYPES = ("LORA", "ADALORA", "OFT", "TRAINABLE_TOKENS")
# The keys that the readers use, and those that change no weight; any other one is refused if it has a value.
_UNDERSTOOD = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "fan_in_fan_out", "use_dora"),
    *("lora_bias", "bias", "init_lora_weights", "trainable_token_indices", "token_indices", "target_parameters"),
    *("modules_to_save", "init_r", "target_r", "coft", "eps", "block_share", "use_cayley_neumann", "oft_block_size"),
    *("num_cayley_neumann_terms",),
}
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "lora_dropout", "module_dropout", "layers_to_transform", "layers_pattern"),
    *("runtime_config", "ensure_weight_tying", "init_weights", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "qalora_group_size", "megatron_core", "megatron_config", "velora_config"),
    *("tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
}
_IN_HEADER = "lora_adapter_metadata"  # diffusers' key of the configuration in a header, which is JSON
_LARGEST_HEADER = 1 << 20  # characters of it
_STEPS = 10**8  # of all matches of a configuration's patterns


class AdapterConfig(dict[str, Any]):
    """An `adapter_config.json`, or an empty mapping where there is none. Its values have any type until checked.

    Attributes:
        refusal: why no adapter of the file is computed; empty if all its keys are understood.
    """

    def __init__(self, given: Mapping[str, Any], parts: Mapping[str, AdapterConfig] | None = None) -> None:
        super().__init__(given)
        self._parts = parts or {}
        self._patterns: dict[str, list[tuple[Pattern, float]]] = {}
        self._budget = Budget(_STEPS)
        kind = given.get("peft_type", "LORA")
        known = _UNDERSTOOD | _HARMLESS
        unknown = [str(key)[:40] for key, value in given.items() if key not in known and value]
        self.refusal = ""
        if not isinstance(kind, str) or kind not in TYPES:
            self.refusal = f"an adapter of type {str(kind)[:40]}, which is not computed"
        elif unknown:
            self.refusal = f"the adapter's configuration has a key that is not understood: {', '.join(unknown[:3])}"

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> AdapterConfig:
        """The configuration in the header of a file: one for each model of a pipeline, its name before each key."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in header.items():
            model, _, key = name.rpartition(".")
            parts.setdefault(model, {})[key] = value
        return cls({}, {model: cls(given) for model, given in parts.items()})

    def of(self, path: str) -> AdapterConfig:
        """The configuration of a layer's adapter."""
        held = [model for model in self._parts if f"{path}.".startswith(f"{model}.") or not model]
        return self._parts[max(held, key=len)] if held else self

    def number(self, key: str) -> float | None:
        """A finite number, or None for anything else."""
        return _finite(self.get(key))

    def pattern(self, key: str, path: str) -> float | None:
        """The number of the first pattern that matches a layer's path, else None.

        Raises:
            ValueError: for a pattern that is not understood, or if they take too many steps.
        """
        if key not in self._patterns:
            self._patterns[key] = list(_compiled(key, self.get(key) or {}))
        return next((value for pattern, value in self._patterns[key] if pattern.matches(path, self._budget)), None)


def stated_in_header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of adapters in the header of their file, as diffusers writes it, or `lora_alpha` and `r` alone.

    Example:
        >>> from gonio.measuring.reading.adapters import stated_in_header
        >>> stated_in_header({"format": "pt", "transformer.lora_alpha": "8", "transformer.r": "4"})
        {'transformer.lora_alpha': 8, 'transformer.r': 4}
    """
    found: dict[str, Any] = {}
    for name, text in metadata.items():
        if len(text) > _LARGEST_HEADER or not (name == _IN_HEADER or name.rpartition(".")[2] in ("lora_alpha", "r")):
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if name != _IN_HEADER:
            found[name] = value
        elif isinstance(value, dict):
            found |= value
    return found


def _compiled(key: str, given: Any) -> Iterator[tuple[Pattern, float]]:
    for text, value in given.items() if isinstance(given, Mapping) else [(given, None)]:
        number, refused = _finite(value), f"{key} of the adapter's configuration is not understood: {str(text)[:60]!r}"
        if number is None or not isinstance(text, str):
            raise ValueError(refused)
        try:
            Pattern(text)  # by itself: its brackets could close those around it
            yield Pattern(rf"(?:.*\.)?(?:{text})$"), number
        except ValueError as error:
            raise ValueError(refused) from error


def _finite(value: Any) -> float | None:
    try:
        found = None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        return None
    return found if found is not None and isfinite(found) else None


# --- places in the base ----------------------------------------------------------------------------------------------

_FLAT = re.compile(r"(?:lora_[a-z]+\d*|lycoris)_(\w+)")
SEVERAL = "several adapters change it, and which of them are in use is not known"


class Places:
    """Where adapters belong in a base: kohya's names have underscores for dots, and packed attention no `weight`.

    Files for a pipeline name the model first (`unet.`), which a base that is this model does not.
    """

    def __init__(self, base: Mapping[str, TensorEntry]) -> None:
        self._base = base
        self._paths = dict.fromkeys(name.rpartition(".")[0] for name in base)
        times = Counter(path.replace(".", "_") for path in self._paths)
        self._flat = {flat: path for path in self._paths if times[flat := path.replace(".", "_")] == 1}

    def path(self, path: str) -> str:
        """The path in the base of a path whose dots became underscores, or of one with a word before it."""
        match = _FLAT.fullmatch(path)
        if match:
            return self._flat.get(match[1], path)
        _, dot, rest = path.partition(".")
        return rest if dot and path not in self._paths and rest in self._paths else path

    def of(self, adapters: list[Adapter]) -> list[Adapter]:
        """The adapters at their places; a tensor that several of them change is refused."""
        found = [one for adapter in adapters for one in self._settled(self._of(adapter))]
        times = Counter(adapter.weight for adapter in found)
        return [replace(a, reason=a.reason or SEVERAL) if times[a.weight] > 1 else a for a in found]

    def _settled(self, adapter: Adapter) -> list[Adapter]:
        """The adapter of the one tensor among several that it fits, else one of each with the reason."""
        each = [replace(adapter, tensor=name) for name in adapter.among] if len(adapter.among) > 1 else [adapter]
        fitting = [one for one in each if one.fits(self._base.get(one.weight))]
        if len(each) == 1 or len(fitting) == 1:
            return fitting or each
        first, *rest = (replace(one, reason=one.reason or UNKNOWN_TENSOR) for one in each)
        return [first, *(replace(one, product=None) for one in rest)]

    def _of(self, adapter: Adapter) -> Adapter:
        made = replace(adapter, path=self.path(adapter.path))
        if made.tensor != "weight" or not made.path:
            return made
        parts = made.path.split(".")
        paths = (".".join(parts[i:]) for i in range(len(parts)))
        packed = any(f"{p}.{PACKED}" in self._base and f"{p}.weight" not in self._base for p in paths)
        return replace(made, tensor=PACKED) if packed else made


# --- all adapters of a file ------------------------------------------------------------------------------------------

Reader = Callable[[Group, AdapterConfig, Mapping[str, StoredTensor]], list[Adapter]]


@cache
def _readers() -> tuple[Reader, ...]:
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").adapters_of for name in names)


_MARKS = (".lora_", ".oft_", "trainable_tokens_", ".lora.", "_lora.")


def may_hold_adapters(names: Iterable[str]) -> bool:
    """Whether the keys of a file are such that it may hold adapters."""
    return any(mark in f".{name}" for name in names for mark in _MARKS)


def adapters_in(stored: Mapping[str, StoredTensor], config: AdapterConfig) -> list[Adapter]:
    """The adapters among these tensors."""
    groups: dict[tuple[str, str], Group] = {}
    for key, tensor in stored.items():
        if not (match := _KEY.fullmatch(_modern(key))):
            continue
        path, part, name, last = match[1] or "", match[2].removeprefix("token_adapter."), match[3] or "", match[4]
        path = ".".join(word for word in path.split(".") if word != "base_layer")
        nested = key.count(".base_layer.")  # adapters of several parameters of one module lie inside of each other
        group = groups.setdefault((f"{path}{'#' * nested}", name), Group(path, name))
        what = f"{part}.bias" if last == "bias" else part
        group.parts[what], group.keys[what] = tensor, key
    for (path, name), group in groups.items():  # kohya's alpha has no adapter's name
        if name and (shared := groups.get((path, ""))) is not None:
            for what in ("alpha", "dora_scale"):
                if what in shared.parts:
                    group.parts.setdefault(what, shared.parts[what])
                    group.keys.setdefault(what, shared.keys[what])
    return [
        found
        for group in groups.values()
        for read in _readers()
        for found in read(group, config.of(group.path), stored)
    ]


def _modern(key: str) -> str:
    """The key for one of older diffusers: `to_q.lora.down.weight`, or `processor.to_q_lora.down.weight`."""
    for mark, part in product((".lora", "_lora"), ("down", "up")):
        path = key.removesuffix(f"{mark}.{part}.weight")
        if path != key:
            parent, dot, last = path.rpartition(".")
            return f"{parent.removesuffix('.processor')}{dot}{last}.lora_{part}.weight"
    return key


def entries_of_adapters(adapters: list[Adapter], base: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    """The product of each low-rank adapter and, if the base is given, the tensor of the base and the adapted one.

    Args:
        base: the tensors of the adapted model by name; empty if it is not given.
    """
    made: list[TensorEntry] = []
    for adapter in Places(base).of(adapters):
        end = f".{adapter.name}" if adapter.name else ""
        if adapter.product is not None:
            owner = adapter.weight if len(adapter.among) > 1 else adapter.path
            path = f"{owner}.lora_BA{end}"
            product = adapter.product.entry(path, LOW_RANK, adapter.layout, notes=(adapter.note,))
            made.append(replace(product, role="adapter"))
        name = f"{adapter.weight.removesuffix('.weight')}.base_and_{adapter.kind}{end}"
        held = base.get(adapter.weight)
        if held is not None:
            made += [held, replace(adapter.adapted(held), name=name, weight_name="", inferred=False)]
        elif reason := adapter.reason if not base else no_weight(adapter.path):
            made += [TensorEntry(name, "", None, None, reason, role="adapter")] if base or not adapter.product else []
    return made
