"""`equivalent`: how far the outputs of two models differ, and the check of verbs that promise the same function."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader

from gonio.editing.edit import Edit
from gonio.editing.twin import copy_of, evaluating
from gonio.editing.where import require_model, sites, unwrapped
from gonio.errors import GonioError, InvalidArgumentError, NotApplicableError, first_line, with_article
from gonio.messages import Message, joined, say
from gonio.seeding import generator
from gonio.surgery.facts import CONVOLUTIONS, TABLES, facts_of

# Relative deviations of outputs that are rounding, by dtype: a few operations more than the same ones.
SAME_OUTPUTS = {torch.float64: 1e-12, torch.float32: 1e-5}
SAME_FUNCTION = {torch.float64: 1e-9, torch.float32: 1e-3}  # where an edit computes with other numbers

_NORM_DIMS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}  # of their inputs; those of nn.BatchNorm1d are 2 or 3
_SAMPLES = 4096  # of sound: a quarter of a second
_SIZES = (8, 16, 32, 64, 96, 128, 224, 256, 299, 384)
_MOST_ENTRIES = 2**22  # of an input that is tried


def or_coarser(allowed: Mapping[torch.dtype, float], eps: float) -> dict[torch.dtype, float]:
    """At least 64 times the rounding of a coarser type in which the model computes, as norms in float32 do."""
    return {dtype: max(each, min(64 * eps, 0.1)) for dtype, each in allowed.items()}


@dataclass(frozen=True)
class Deviation:
    """The largest difference between two models' outputs: max |a − b|, and this over max |a| (0 if both are 0).

    Both are infinite where outputs of whole numbers or truth values differ.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return str(self._said)

    @property
    def _said(self) -> Message:
        """Both in words."""
        return say("largest deviation {a:.3g} ({r:.3g} relative)", a=self.absolute, r=self.relative)


def equivalent(model_a: nn.Module, model_b: nn.Module, *, example: Any = None) -> Deviation:
    r"""Largest absolute and relative deviation of two models' outputs on the same input.

    .. math::
        \max_i |a_i - b_i| \quad\text{and}\quad \max_i |a_i - b_i| \,/\, \max_i |a_i|

    Both models run in evaluation mode without gradients and get their modes back. All tensors in the outputs are
    compared: complex ones by their parts; of whole numbers and truth values any difference counts as infinite.

    `example` is an input tensor, a tuple of arguments or a dict of keyword arguments; None for one that
    :func:`gonio.surgery.generated_example` makes for `model_a`, the reference.

    Raises: InvalidArgumentError if the outputs differ in structure or shape, or are not finite, or if no example is
        given and none can be made.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> gonio.equivalent(model, model, example=torch.ones(1, 2))
        Deviation(absolute=0.0, relative=0.0)
    """
    for model in (model_a, model_b):
        require_model(model, "equivalent")
    if example is None:
        example = generated_example(model_a)
    with fitting(model_a, example, "example="):
        before = outputs(model_a, example)
    with fitting(model_b, example, "example="):
        return deviation(before, outputs(model_b, example))


def generated_example(model: nn.Module, *, batch: int = 2, seed: int = 0) -> Any:
    r"""An input that the model takes: standard normal numbers, or indices for an embedding.

    The number of channels or features is that of the first layer with weights. Sizes are tried from small to large,
    after the `input_size` that a timm model declares and before the `dummy_inputs` of transformers. The returned
    input has run through the model in evaluation mode once.

    Raises: InvalidArgumentError if no tried input runs; a model of several inputs needs your own example.

    Example:
        >>> gonio.surgery.generated_example(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())).shape
        torch.Size([2, 3, 8, 8])
    """
    reason = "it has no layer that tells its input size"
    for example in examples_for(model, batch=batch, seed=seed):
        try:
            outputs(model, example)
        except Exception as error:  # a model can raise anything at a size that it does not take
            reason = first_line(error, kind=True)
            continue
        return example
    raise InvalidArgumentError("no example input was found for the model", reason, "Pass example= yourself.")


def examples_for(model: nn.Module, *, batch: int = 2, seed: int = 0) -> Iterator[Any]:
    """Inputs that the model may take, in the order in which they are tried."""
    random = generator(seed, "example")
    reference = next(
        (p for p in model.parameters() if p.is_floating_point()), torch.zeros((), device="cpu", dtype=torch.float32)
    )
    for shape, indices in _candidates(model, batch):
        if indices:
            yield torch.randint(indices, shape, generator=random, device="cpu").to(reference.device)
        else:
            yield torch.randn(shape, generator=random, device="cpu", dtype=torch.float32).to(reference)
    declared: Any = model.dummy_inputs if hasattr(type(model), "dummy_inputs") else None
    if isinstance(declared, Mapping):
        yield {name: value.to(reference.device) for name, value in declared.items() if isinstance(value, Tensor)}


def _candidates(model: nn.Module, batch: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(shape, number of indices or 0) in the order in which they are tried."""
    declared = vars(model).get("pretrained_cfg") or {}
    for key in ("test_input_size", "input_size"):
        if isinstance(declared, Mapping) and declared.get(key):
            yield (batch, *declared[key]), 0
    match _first_layer(model):
        case nn.modules.conv._ConvNd() as conv:
            shapes = [(batch, conv.in_channels, *[size] * len(conv.kernel_size)) for size in _SIZES]
            yield from ((shape, 0) for shape in shapes if prod(shape) <= _MOST_ENTRIES)
            if isinstance(conv, nn.Conv1d) and conv.in_channels == 1:  # models of sound, which add the axis themselves
                yield (batch, _SAMPLES), 0
        case nn.Linear() as linear:
            tokens = {vars(m).get("num_features", 8) for m in model.modules() if facts_of(m).why_not_affine is not None}
            yield from (((batch, *rest, linear.in_features), 0) for rest in ((), (8,), *((n,) for n in sorted(tokens))))
        case nn.Embedding() | nn.EmbeddingBag() as table:
            yield (batch, 8), table.num_embeddings
        case nn.RNNBase() as recurrent:
            yield (batch, 8, recurrent.input_size), 0
        case nn.MultiheadAttention() as attention:
            yield (batch, 8, attention.embed_dim), 0


def _first_layer(model: nn.Module) -> nn.Module | None:
    """The first registered layer that tells the size of its input."""
    kinds = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.MultiheadAttention)
    return next((module for module in model.modules() if isinstance(module, kinds)), None)


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The tensors in the outputs of a model in evaluation mode, as :func:`tensors_in` gives them."""
    return _run(model, example)[0]


def misfit(model: nn.Module, example: Any) -> tuple[str, str] | None:
    """Why a model cannot run on an example: which layer got what it does not take, and what to do; else empty.

    None for a model that runs on it.
    """
    last: list[tuple[str, nn.Module, Tensor]] = []

    def record(path: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if isinstance(given := first_input(arguments, keywords), Tensor):
            last[:] = [(path, module, given)]

    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return "a model on the meta device, which has no values", "Load its weights first."
    with evaluating(model) as plain, torch.no_grad(), ExitStack() as hooks:
        for site in sites(plain):
            if isinstance(site.module, (nn.Linear, *CONVOLUTIONS, *TABLES, *_NORM_DIMS)):
                hooks.enter_context(site.module.register_forward_pre_hook(partial(record, site.path), with_kwargs=True))
                hooks.enter_context(site.module.register_forward_hook(lambda *_: last.clear()))  # it takes its input
        try:
            call(plain, example)
        except Exception as error:
            raised = error
            path, module, given = last[0] if last else ("", plain, torch.empty(0, device="cpu", dtype=torch.float32))
        else:
            return None
    leaves = tree_flatten(example)[0]
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        if isinstance(example, Iterator):
            return say("an iterator"), say("Pass one batch: next(iterator).")
        found = say("no tensor, but {kind}", kind=type(leaves[0]).__name__ if leaves else type(example).__name__)
        return found, say("Give tensors; torch.from_numpy(array) makes one of an array.")
    kind_fits = isinstance(raised, (TypeError, AttributeError)) and isinstance(example, (list, tuple))
    entries = example if kind_fits and not last else ()
    if (nested := next((each for each in entries if isinstance(each, (list, tuple))), None)) is not None:
        wanted_names = ", ".join(inspect.signature(plain.forward).parameters)
        inside = f"{with_article(type(nested).__name__)} of {len(nested)} inside of the example"
        inside += f", with which the model raises {first_line(raised, kind=True)}"
        return inside.rstrip("."), f"Give the arguments of the model's forward ({wanted_names}) themselves, as a tuple."
    if isinstance(module, TABLES):
        return _no_indices(path, given, module.num_embeddings)
    dims = next((each for kind, each in _NORM_DIMS.items() if last and isinstance(module, kind)), given.dim())
    if given.dim() == dims - 1:
        found = say(
            "{given} dimensions at the layer {path!r}, which takes {dims}", given=dims - 1, path=path, dims=dims
        )
        return found, say("Add the dimension of the examples: batch[None].")
    if last and isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dtype != given.dtype:
        names = {"given": str(given.dtype).removeprefix("torch."), "wanted": str(weight.dtype).removeprefix("torch.")}
        found = say("{given} at the layer {path!r}, whose weight has the dtype {wanted}", path=path, **names)
        return found, say("Convert the input: batch.to(torch.{wanted}).", **names)
    if isinstance(module, CONVOLUTIONS):
        what, wanted, axis = "channels", module.in_channels, given.dim() - len(module.kernel_size) - 1
    elif isinstance(module, nn.Linear):
        what, wanted, axis = "features", module.in_features, given.dim() - 1
    else:
        return "", ""
    if axis < 0 or axis not in (0, 1, given.dim() - 1) or given.shape[axis] == wanted:
        return "", ""
    sizes = list(given.shape)
    sizes[axis] = wanted
    same = isinstance(example, Tensor) and example.shape == given.shape
    do = f"Give an input of the sizes {'x'.join(map(str, sizes))}." if same else "Give the sizes of the model's input."
    return f"{given.shape[axis]} {what} at the layer {path!r}, which takes {wanted}", do


def _no_indices(path: str, given: Tensor, rows: int) -> tuple[str, str]:
    """Why a table of rows cannot look up what it is given, and what to do; else empty."""
    if given.dtype not in (torch.int32, torch.int64):
        name = str(given.dtype).removeprefix("torch.")
        found = say("{name} at the layer {path!r}, which takes indices", name=name, path=path)
        return found, say("Give whole numbers of the dtype int64, as a tokenizer does.")
    outside = given[(given < 0) | (given >= rows)]
    if not outside.numel():
        return "", ""
    index = int(outside[0])
    found = say("the index {index} at the layer {path!r}, which has {rows} rows", index=index, path=path, rows=rows)
    return found, say("Give indices from 0 to {last}.", last=rows - 1)


@contextmanager
def fitting(model: nn.Module, example: Any, given: str, *, always: bool = False) -> Iterator[None]:
    """Replace an error of a model that runs on an example by one that names the layer, where :func:`misfit` finds it.

    Of one that runs on it by itself the error says that it does not while its layers are read.

    Args:
        given: what the example is, for the message.
        always: where no layer is found, the error has the first line of the model's own.
    """
    try:
        yield
    except GonioError:
        raise
    except Exception as error:  # whatever a user's model raises
        why = misfit(model, example)
        if why is None and not always:  # such as a transform of torch.func, in which no value can be read
            reason = say("it runs, but not while they are read ({error})", error=first_line(error, 200, kind=True))
            other = say("Act on parts of it that run without what raises this.")
            raise NotApplicableError(given, "", reason, other, action=say("read the layers of")) from error
        found, do = why or ("", "")
        if not found and not always:
            raise
        found = found or first_line(error, 2000)
        do = do or "Give the sizes of the model's input."
        asked = say("{option} must be an input that the model takes", option=given)
        raise InvalidArgumentError(asked, found, do) from error


def checked_batches(verb: str, batches: Iterable[Any]) -> Iterable[Any]:
    """The batches of a verb.

    Raises: InvalidArgumentError for one batch alone, whose rows would count as batches.
    """
    entries = batches if isinstance(batches, (list, tuple)) else ()
    labelled = all(isinstance(each, Tensor) for each in entries) and len({each.dim() for each in entries}) > 1
    if labelled or isinstance(batches, (Tensor, Mapping)):
        found = say("a dict")
        if labelled:
            dims = joined([str(each.dim()) for each in entries], last=" and ")
            found = say("tensors of {dims} dimensions, as inputs and labels have", dims=dims)
        if isinstance(batches, Tensor):
            found = say("one tensor of the sizes {sizes}", sizes="x".join(map(str, batches.shape)))
        asked = say("{verb} takes several batches, as a list or a DataLoader", verb=verb)
        raise InvalidArgumentError(asked, found, "Put it into a list: [batch].")
    return batches


def _run(model: nn.Module, example: Any) -> tuple[list[Tensor], dict[str, int]]:
    """The outputs of a model, and the number of dimensions of each layer's output where all calls agree."""
    dims: dict[str, set[int]] = {}

    def record(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dims.setdefault(path, set()).add(output.dim())

    with evaluating(model) as plain, torch.no_grad(), ExitStack() as hooks:
        for site in sites(plain):
            if not site.module._modules and not isinstance(site.module, torch.jit.ScriptModule):  # that takes no hook
                hooks.enter_context(site.module.register_forward_hook(partial(record, site.path)))
        found = tensors_in(call(plain, example))
    return found, {path: next(iter(each)) for path, each in dims.items() if len(each) == 1}


def tensors_in(result: Any) -> list[Tensor]:
    """Copies of the tensors in what a model returned, flattened in order; complex ones by their two parts."""
    leaves = [leaf.detach() for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    leaves = [leaf.dequantize() if leaf.is_quantized else leaf for leaf in leaves]
    return [torch.view_as_real(x.resolve_conj()).clone() if x.is_complex() else x.clone() for x in leaves]


def deviation(a: list[Tensor], b: list[Tensor]) -> Deviation:
    """The largest difference between two lists of outputs."""
    shapes = [tuple(x.shape) for x in a], [tuple(x.shape) for x in b]
    if not a and not b:
        do = "Give models with such outputs."
        raise InvalidArgumentError("equivalent() compares the tensors in the outputs", "none", do)
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError(
            "equivalent() compares two models with outputs of the same shapes",
            f"{shapes[0]} and {shapes[1]}",
            "Give an example that both models take.",
        )
    if not all(torch.isfinite(x).all() for x in (*a, *b)):
        raise InvalidArgumentError(
            "equivalent() compares finite outputs", "NaN or infinity", "Check weights and input."
        )
    both = [(x, y) for x, y in zip(a, b, strict=True) if x.numel()]
    if any(not torch.equal(x, y) for x, y in both if not (x.is_floating_point() and y.is_floating_point())):
        return Deviation(inf, inf)
    pairs = [(x.double(), y.double()) for x, y in both if x.is_floating_point()]
    absolute = max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
    scale = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
    return Deviation(absolute, absolute / scale if scale > 0 else absolute)


def first_input(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a layer is called with first, by position or by name; None for a call without arguments."""
    return next(iter((*arguments, *keywords.values())), None)


def call(model: nn.Module, example: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments, a dict of keyword arguments or a list, as a DataLoader yields it.

    Where all parameters are on one device, the tensors of the example are moved to it.

    Of a list, or of a tuple of more arguments than there are, which may end in labels, the model gets as many entries
    as its forward needs.

    Raises: InvalidArgumentError for a loader, of which one batch is wanted, and for names that the model does not take.
    """
    if isinstance(example, DataLoader):
        do = "Pass one batch: next(iter(loader))."
        raise InvalidArgumentError("a model is called on one batch", "a DataLoader", do)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type != "meta":
        example = moved_to(example, device)
    if isinstance(example, (list, tuple)) and example:
        parameters = [*inspect.signature(unwrapped(model).forward).parameters.values()]
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        more = len(example) > len(places) and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if isinstance(example, list) or more:
            return model(*example[: max(sum(p.default is p.empty for p in places), 1)])
    if isinstance(example, Mapping):
        return _call_on_names(model, example)
    if isinstance(example, tuple):
        return model(*example)
    return model(example)


def _call_on_names(model: nn.Module, example: Mapping[str, Any]) -> Any:
    """Call a model on keyword arguments, or on the mapping itself where its forward has no argument of these names."""
    known = inspect.signature(unwrapped(model).forward).parameters
    unknown = [str(name) for name in example if name not in known]
    if not unknown or any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return model(**example)
    asked = say("a dict has the arguments of the model's forward ({names})", names=", ".join(known))
    do = say("Give the inputs alone: a tensor, a tuple of arguments, or a dict of keyword arguments.")
    if len(unknown) < len(example) or not known:
        raise InvalidArgumentError(asked, ", ".join(unknown), do)
    try:
        return model(example)
    except (TypeError, AttributeError, LookupError) as error:  # of a forward that takes something else
        found = f"{', '.join(unknown)}; on the dict itself it raises {first_line(error, kind=True)}"
        raise InvalidArgumentError(asked, found.rstrip("."), do) from error


def moved_to(example: Any, device: torch.device) -> Any:
    """The example with its tensors on a device: those in tuples, lists and mappings too.

    Outside of inference mode, its tensors are copied, because no gradient can pass through them.

    Example:
        >>> from gonio.surgery.equivalent import moved_to
        >>> moved_to({"x": torch.ones(1), "n": [2]}, torch.device("cpu"))
        {'x': tensor([1.]), 'n': [2]}
    """
    if isinstance(example, Tensor):
        moved = example.to(device)
        return moved.clone() if moved.is_inference() and not torch.is_inference_mode_enabled() else moved
    if isinstance(example, Mapping):
        return {key: moved_to(value, device) for key, value in example.items()}
    if type(example) in (list, tuple):
        return type(example)(moved_to(value, device) for value in example)
    return example


# --- the check of an edit ------------------------------------------------------------------------------

_ROUNDINGS = 10  # a deviation of this many times the rounding of the model's own arithmetic is no mistake


class SameFunction:
    """The outputs of a model before an edit that promises the same function, to be compared with those after it.

    Args:
        example: an input; None for inputs that are made from the model's first layer, if it takes one.

    Attributes:
        example: the given input.
        dims: the number of dimensions of each layer's outputs, by path, where all inputs agree.
        why: why there is no input, if there is none.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.example, self._given = unwrapped(model), example, example is not None
        self._runs: list[tuple[Any, list[Tensor]]] = []
        self.why: str = say("the model has no layer that tells its input size")
        self.dims: dict[str, int] = {}
        conflicts: set[str] = set()
        if any(is_lazy(tensor) or tensor.is_meta for tensor in self.model.parameters()):
            self.why = say("the model is lazy or on the meta device")
            return
        for candidate in (example,) if self._given else examples_for(self.model):
            try:
                with fitting(self.model, candidate, "example=") if self._given else nullcontext():
                    found, dims = _run(self.model, candidate)
            except Exception as error:
                if self._given:
                    raise
                self.why = first_line(error, 100, kind=True)
                continue
            conflicts |= {path for path, n in dims.items() if self.dims.setdefault(path, n) != n}
            if found and all(bool(torch.isfinite(x).all()) for x in found):
                self._runs.append((candidate, found))
            elif self._given:
                deviation(found, found)  # raises
            if self._given or not isinstance(_first_layer(self.model), nn.Linear):
                break  # only a linear layer takes inputs of several numbers of dimensions
        for path in conflicts:
            del self.dims[path]

    @property
    def input(self) -> Any:
        """An input that the model takes, the one of most dimensions; None if there is none."""
        return self._runs[-1][0] if self._runs else None

    def check_(self, edit: Edit, action: str, allowed: Mapping[torch.dtype, float], otherwise: float) -> None:
        """Raise unless the outputs are the same, up to these relative deviations by dtype; notes the result.

        A NotApplicableError inside of the edit restores the model.
        """
        if not self._runs:
            edit.note(say("the outputs before and after were not compared: {why}; pass example=", why=self.why))
        for example, before in self._runs:
            with self._refused(edit, action):
                after = outputs(self.model, example)
                moved = deviation(before, after)
            dtypes = {x.dtype for x in before if x.is_floating_point()}
            if moved.relative > max((allowed.get(dtype, otherwise) for dtype in dtypes), default=0.0):
                # Some networks enlarge rounding: then the edited one differs as much from itself in float64.
                wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example)
                own = deviation(after, outputs(copy_of(self.model).double(), wide))
                if moved.relative > _ROUNDINGS * own.relative:
                    raise self._refusal(edit, action, say("the outputs changed: {moved}", moved=moved._said))
                r = own.relative
                edit.note(say("this model enlarges rounding: in float64 its outputs differ by {r:.3g} relative", r=r))
            if self._given:
                edit.note(moved._said)

    def check_runs_(self, edit: Edit, action: str) -> None:
        """Raise unless the edited model runs on the examples."""
        for example, _ in self._runs:
            with self._refused(edit, action):
                outputs(self.model, example)

    @contextmanager
    def _refused(self, edit: Edit, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = say("the edited model fails ({why})", why=first_line(error, kind=True))
            raise self._refusal(edit, action, why) from error

    @staticmethod
    def _refusal(edit: Edit, action: str, why: str) -> NotApplicableError:
        changed = edit.changes[0].path if len({change.path for change in edit.changes}) == 1 else ""
        do = "Leave layers out by `where` to find the one that depends on more than its input; please report the model."
        return NotApplicableError(edit.verb, changed, why, do, action=action)
