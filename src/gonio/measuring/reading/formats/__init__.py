"""Weights that a file stores as several tensors. Each module of this package reads one format and registers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import product
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from gonio.errors import GonioError
from gonio.measuring.reading.entry import EIGHT_BITS, StoredTensor, dtype_named
from gonio.measuring.reading.patterns import Budget, Pattern
from gonio.messages import Message, say


@dataclass(frozen=True)
class StoredWeight:
    """A weight stored as several tensors.

    Attributes:
        name: of the weight; `parts`: the names of its tensors, of which the first has the weight's row.
        stored: its shape, and how it is computed from its parts; None if it cannot be.
        note: its format and what was assumed, or why it cannot be computed.
        matrices: how many are stacked on dim 0.
        kind: an adjective for the weight, in the reasons of its parts.
    """

    name: str
    parts: tuple[str, ...]
    stored: StoredTensor | None
    note: str
    matrices: int = 1
    kind: str = "quantised"


StoredTensors = Mapping[str, StoredTensor]


class FileTensors(dict[str, StoredTensor]):
    """All tensors of a file, and those of each layer: the keys up to the last dot, and what follows it."""

    @cached_property
    def layers(self) -> Mapping[str, StoredTensors]:
        found: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in self.items():
            path, _, last = key.rpartition(".")
            found.setdefault(path, {})[last] = tensor
        return found

    @cached_property
    def inside(self) -> Mapping[str, list[str]]:
        """By the path of a layer, the layers inside of it."""
        found: dict[str, list[str]] = {}
        for path in self.layers:
            above = path
            while above:
                above = above.rpartition(".")[0]
                found.setdefault(above, []).append(path)
        return found


@dataclass(frozen=True)
class Format:
    """A format: which tensors may be the first part of a weight, and a function that decides it by shapes and values.

    Attributes:
        endings: of the tensor's key, or `dtypes`: the beginnings of its dtype.
        read: of the key, all tensors of the file and its `quantization_config`.
        quantised: whether the configuration of a quantisation concerns it.
    """

    read: Callable[[str, FileTensors, Mapping[str, Any]], StoredWeight | None]
    endings: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    quantised: bool = True


# Of a `quantization_config`: the keys that the readers use, and those that change no weight.
_UNDERSTOOD = {
    *("quant_method", "bits", "checkpoint_format", "weight_block_size", "group_size", "desc_act", "sym", "zero_point"),
    *("format", "config_groups", "quantization_status", "version", "fmt", "scale_fmt", "dequantize", "pack_dtype"),
    *("w_bit", "q_group_size", "quant_algo", "is_marlin_format", "method", "sparsity_config"),
}
# The values of those that decide how numbers are packed; any other value is refused.
_VALUES: dict[str, tuple[Any, ...]] = {
    "checkpoint_format": ("gptq", "gptq_v2", "gemm"),
    "format": (
        *("gptq", "gptq_v2", "gemm", "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision"),
    ),
    "pack_dtype": ("int32",),
    "quant_algo": ("FP8", "NVFP4"),
    "is_marlin_format": (False,),
    "method": ("gptq", "awq"),  # as GPTQModel names `quant_method` too
}
_SPARSE = (None, "dense", "sparse-bitmask", "sparse-24-bitmask")  # the formats of a `sparsity_config`
_HARMLESS = {
    *("activation_scheme", "modules_to_not_convert", "ignored_layers", "ignore", "kv_cache_scheme", "meta", "backend"),
    *("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "lm_head", "dataset", "tokenizer"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id"),
    *("use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length", "cache_block_outputs", "fuse_max_seq_len"),
    *("modules_in_block_to_quantize", "modules_to_fuse", "do_fuse", "quantizer", "global_compression_ratio"),
    *("model_file_base_name", "model_name_or_path", "quant_type", "disable_exllama", "producer", "exclude_modules"),
    *("kv_cache_quant_algo", "include_input_output_embeddings", "untie_embedding_weights", "quant_type_kwargs"),
    *("quant_config", "skip_modules", "weights", "activations", "mse", "pack_impl"),
}
_METHODS = (
    *("", "bitsandbytes", "fp8", "fbgemm_fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "quanto", "modelopt"),
    *("torchao", "hqq"),
)


def refusal_of(config: Mapping[str, Any]) -> str:
    """Why weights quantised by this configuration are not computed; empty if all of it is understood."""
    method = str(config.get("quant_method") or "")[:40]
    if method not in _METHODS:
        return f"quantised by {method}, which is not read"
    version = config.get("version") if method == "awq" or "w_bit" in config else "gemm"  # others: of the tool
    wrong = [key for key, values in _VALUES.items() if config.get(key) is not None and config[key] not in values]
    if wrong or str(version or "gemm").lower() != "gemm":
        key = wrong[0] if wrong else "version"
        return f"the quantisation has the {key} {str(config[key])[:40]}, which is not read"
    sparse = config.get("sparsity_config") or {}
    kind = sparse.get("format") if isinstance(sparse, dict) else sparse
    if kind not in _SPARSE:
        return f"the quantisation has the sparsity_config {str(kind)[:40]}, which is not read"
    known = _UNDERSTOOD | _HARMLESS
    prefixes = ("llm_int8_", "bnb_4bit_", "load_in_", "_load_in_")
    unknown = [str(key)[:40] for key, value in config.items()
               if value and key not in known and not str(key).startswith(prefixes)]  # fmt: skip
    return f"the quantisation has a key that is not understood: {', '.join(unknown[:3])}" if unknown else ""


_WITH_DYNAMIC = ("", "gptq", "awq")  # whose configurations have settings of this kind
_STEPS = 10**8  # of all matches of a file: tens of thousands of layers, and some tens of patterns


class Overrides:
    """The settings of each layer: `dynamic` of a configuration has those of single ones, as GPTQModel and vLLM read it.

    A key is a regular expression for the beginning of a layer's path, behind `+:` or nothing, and its value are
    settings that replace those of the whole model; behind `-:` it names layers that are not quantised. The first key
    that matches a path decides.

    References: GPTQModel, README, "Dynamic quantization"; vLLM, `quantization/utils/gptq_utils.py`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = config.get("dynamic") if str(config.get("quant_method") or "") in _WITH_DYNAMIC else None
        self._given: Any = found or {}
        self._model = {key: value for key, value in config.items() if key != "dynamic"} if self._given else config
        self._patterns: dict[str, Pattern | str] = {}
        self._known: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._budget = Budget(_STEPS)

    def of(self, path: str) -> tuple[Mapping[str, Any], str]:
        """The settings of a layer, and why its weights are not computed; empty if they can be."""
        if path not in self._known:
            try:
                self._known[path] = self._first(path)
            except ValueError as error:
                self._known[path] = (self._model, f"the configuration of its quantisation (dynamic): {error}")
        return self._known[path]

    def _first(self, path: str) -> tuple[Mapping[str, Any], str]:
        if not isinstance(self._given, dict):
            raise ValueError("it is no object")
        for key, settings in self._given.items():
            left_out, pattern = key.startswith("-:"), key.removeprefix("-:" if key.startswith("-:") else "+:")
            if not self._pattern(pattern).matches(path, self._budget):
                continue
            if left_out:
                raise ValueError(f"{key[:60]!r} leaves its layer out of the quantisation")
            if not isinstance(settings, dict):
                raise ValueError(f"the settings of {key[:60]!r} are no object")
            return {**self._model, **settings}, ""
        return self._model, ""

    def _pattern(self, text: str) -> Pattern:
        if text not in self._patterns:
            try:
                self._patterns[text] = made = Pattern(text)
            except ValueError as error:
                self._patterns[text] = str(error)
            else:
                self._budget.spend(made.steps)
        found = self._patterns[text]
        if isinstance(found, str):
            raise ValueError(found)
        return found


def stored_weights(suspects: Iterable[str], stored: StoredTensors, config: Mapping[str, Any]) -> list[StoredWeight]:
    """Every weight among the tensors that is stored as several of them in a known format; those computed last.

    Args:
        suspects: the keys that may be a weight's first part, see :data:`ENDINGS`.
        config: the `quantization_config` of the model's `config.json`, or an empty mapping.
    """
    overrides, made, tensors = Overrides(config), list[StoredWeight](), FileTensors(stored)
    for name, known in product(suspects, FORMATS):
        if not (name.endswith(known.endings) or stored[name].dtype.startswith(known.dtypes)):
            continue
        settings, refusal = overrides.of(name.rpartition(".")[0]) if known.quantised else (config, "")
        if (found := known.read(name, tensors, settings)) is not None:
            refusal = refusal or refusal_of(settings)
            refused = StoredWeight(found.name, found.parts, None, refusal, found.matrices, found.kind)
            made.append(refused if refusal and known.quantised else found)
    made += _packed_otherwise(tensors, made, overrides)
    for name in _bare(suspects, stored, made):
        floats = computed(plain_floats, stored[name], shape=stored[name].shape)
        made.append(StoredWeight(name, (name,), floats, EIGHT_BITS, kind=BARE))
    return sorted(made, key=lambda weight: weight.stored is not None)


# --- of other quantisations -------------------------------------------------------------------------------------------


def _packed_otherwise(
    tensors: FileTensors, weights: Iterable[StoredWeight], overrides: Overrides
) -> Iterator[StoredWeight]:
    """The layers with codes in a file whose configuration names a quantisation that is not read.

    What lies beside the codes, or in layers inside of theirs that hold none, are tables, scales or orders of them and
    no weights. A layer with a plain weight has whole numbers of another kind.
    """
    used = {part for weight in weights for part in weight.parts}
    refusals: dict[int, str] = {}
    for path, layer in tensors.layers.items():
        settings, other = overrides.of(path)
        refusal = "" if other else refusals.setdefault(id(settings), refusal_of(settings))
        keys = {last: f"{path}.{last}".lstrip(".") for last in layer}
        weight = layer.get("weight")
        if not refusal or not used.isdisjoint(keys.values()) or (weight and weight.floating and len(weight.shape) > 1):
            continue
        codes = [last for last, tensor in layer.items() if _may_be_codes(tensor)]
        if not codes:
            continue
        first = "weight" if "weight" in codes else codes[0]
        beside = [key for last, key in keys.items() if last not in (first, "bias") and layer[last].entries]
        parts = (keys[first], *beside, *_tables_of(path, tensors, used))
        yield StoredWeight(f"{path}.weight".lstrip("."), parts, None, refusal)


def _may_be_codes(tensor: StoredTensor) -> bool:
    """Whether whole numbers may be packed codes, and are neither a counter nor places in a sequence or a table."""
    if not tensor.dtype.startswith(("int", "uint")) or tensor.entries < 2:
        return False
    if tensor.dtype != "int64":
        return True
    try:
        values = tensor.load()
        return bool(int(values.min()) < 0 or int(values.max()) >= tensor.entries)
    except _UNREAD:
        return False


def _tables_of(path: str, tensors: FileTensors, used: AbstractSet[str]) -> list[str]:
    """The tensors of layers inside of one with codes; none where such a layer has codes or layers itself."""
    inner = tensors.inside.get(path, ()) if path else ()
    held = [f"{one}.{last}" for one in inner for last in tensors.layers[one]]
    plain = all(one.rpartition(".")[0] == path for one in inner) and used.isdisjoint(held)
    return held if plain and not any(tensors[key].dtype.startswith(("int", "uint")) for key in held) else []


# --- without a scale --------------------------------------------------------------------------------------------------

BARE = "unscaled"  # the kind of an 8-bit weight that lacks the scale that others have
_SCALED_UP = 0.5  # of the largest number of a dtype: weights without a scale are far below it


def _bare(suspects: Iterable[str], stored: StoredTensors, weights: Iterable[StoredWeight]) -> list[str]:
    """The 8-bit floats without a scale, of a dtype of which other weights of the file have one."""
    weights = list(weights)
    used = {part for weight in weights for part in weight.parts}
    scaled = {stored[weight.parts[0]].dtype for weight in weights if len(weight.parts) > 1}
    return [
        name
        for name in suspects
        if name not in used and stored[name].dtype.startswith("float8") and stored[name].dtype in scaled
    ]


def lost_scale(dtype: str, largest: float) -> Message | None:
    """What is wrong with an 8-bit weight of this dtype without a scale; None if it may be a plain one.

    A scale moves the largest value of a weight, or of each block, to the end of the dtype's range.

    Example:
        >>> from gonio.measuring.reading.formats import lost_scale
        >>> lost_scale("float8_e4m3fn", 448.0), lost_scale("float8_e4m3fn", 0.25)
        ('float8_e4m3fn up to 448, without the scale that other weights of the file have', None)
    """
    known = dtype_named(dtype)
    if known is None or not largest >= _SCALED_UP * torch.finfo(known).max:
        return None
    what = {"dtype": dtype, "largest": largest}
    return say("{dtype} up to {largest:g}, without the scale that other weights of the file have", **what)


def plain_floats(weight: StoredTensor) -> Tensor:
    """8-bit floats without a scale. Raises: ValueError, if they reach as far as those that have one."""
    values = weight.load().float()
    if values.numel() and (lost := lost_scale(weight.dtype, float(values.abs().max()))):
        raise ValueError(lost)
    return values


def present(stored: StoredTensors, *names: str) -> dict[str, StoredTensor] | None:
    """These tensors, if all of them are there."""
    return {name: stored[name] for name in names} if all(name in stored for name in names) else None


_UNREAD = (GonioError, RuntimeError, ValueError, OSError)  # of a damaged file, or a tensor without values


def numbers_in(stored: StoredTensor) -> list[Any] | None:
    """The numbers of a tensor that tells how others are stored, in a row; None where they cannot be read."""
    try:
        return list(stored.load().flatten().tolist())
    except _UNREAD:
        return None


def computed(load: Callable[..., Tensor], *arguments: Any, shape: tuple[int, ...]) -> StoredTensor:
    """A weight of this shape that `load` computes from the arguments."""
    return StoredTensor(shape, "float32", partial(load, *arguments))


FORMATS: tuple[Format, ...] = tuple(
    known
    for module in sorted(iter_modules(__path__), key=lambda module: module.name)
    for known in import_module(f"{__name__}.{module.name}").FORMATS
)
ENDINGS = tuple(ending for known in FORMATS for ending in known.endings)
DTYPES = tuple(dtype for known in FORMATS for dtype in known.dtypes)
