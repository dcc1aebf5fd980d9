"""How a parametrization computes a tensor of a layer: attach, read, assign, copy, load, detach.

The trained Parameter stays in ``layer._parameters["weight"]``: the same object, under the same key, in the same
place. The class of the layer becomes a subclass with a property ``weight`` that returns the effective weight,
``layer.weight_parametrization(raw)``. A property takes precedence over ``nn.Module.__getattr__``, so every forward
that reads ``self.weight`` uses the effective weight. The subclass is made once per (class, names) and never changed
afterwards: copies and pickles refer to it by these two, and detaching gives one instance its own class back.

``torch.nn.utils.parametrize`` was not enough. It moves the Parameter to ``parametrizations.weight.original``, which
changes the key of the state dict and the order of ``parameters()`` and so invalidates checkpoints and states of
optimizers; and it makes one class per instance, so that layers cannot be pickled or sent to another process. Here
keys, Parameter objects and their order stay.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError, with_article
from gonio.execution import is_sharded
from gonio.geometry.views import Layout, layout_of
from gonio.parametrizations.checkpoints import translate_
from gonio.parametrizations.parametrization import Parametrization, check_like, check_options

# --- attach and detach ----------------------------------------------------------------------------


def attach(module: nn.Module, name: str, parametrization: Parametrization) -> Parametrization:
    """Compute the tensor `name` of a layer by a parametrization from now on; in place.

    The Parameter object stays under its own name and in its place among the layer's parameters. It now is the
    trained tensor, from which ``layer.weight`` is computed at each read. Parameters that the parametrization
    adds (a gain) come after it, and are frozen if it is. ``layer.weight = tensor`` sets the effective weight.

    Every layer whose forward reads the attribute is supported, including ``nn.MultiheadAttention``, the fast
    path of ``nn.TransformerEncoderLayer``, RNN, LSTM and GRU. Not supported are weights that a forward changes
    in place (``max_norm``), that have sparse gradients, or that are sharded or not yet materialised.

    Args:
        module: the layer.
        name: a parameter of the layer that is a stack of filters.
        parametrization: a template. It is bound and stored, not copied; layers that share the Parameter get the
            same object.

    Returns: The parametrization, bound.

    Raises:
        AlreadyAppliedError: if the tensor is parametrized already, by torch or by gonio.
        NotApplicableError: if the layer or its tensor cannot be parametrized; the message gives the reason.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> raw = layer.weight
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> torch.allclose(layer.weight.norm(dim=1), torch.ones(3)), next(layer.parameters()) is raw
        (True, True)
    """
    raw = _trainable(module, name)
    layout = layout_of(module, name)
    template = parametrization.layout is None
    if not template and parametrization.trained is not raw:
        raise InvalidArgumentError(
            "attach() needs a template, or a parametrization that is bound to the same Parameter",
            f"one that is bound to another tensor, of layout {parametrization.layout}",
            "Attach a new one: parametrization.unbound() has the same options.",
        )
    if not template and parametrization.layout != layout:
        raise NotApplicableError("attach()", name, "a layer with another layout shares it", "Untie the two layers.")
    base, names = _own_class(module)
    kind = type(module)
    try:
        module.__class__ = parametrized_class(base, (*names, name))
    except TypeError as error:
        raise NotApplicableError(
            "attach()", f"{base.__name__}.{name}", f"its class cannot be extended ({error})", "Exclude the layer."
        ) from error
    if template:  # last: it may move the weight, which a refused call leaves as it was
        try:
            _bind_(parametrization, raw, layout)
        except BaseException as error:
            module.__class__ = kind
            if isinstance(error, torch.linalg.LinAlgError) and not bool(torch.isfinite(raw).all()):
                why = "it has values that are not finite", "Restore it, or exclude the layer."
                raise NotApplicableError("attach()", f"{base.__name__}.{name}", *why) from error
            raise
    module._modules[child_name(name)] = parametrization.train(module.training)
    return parametrization


def _trainable(module: nn.Module, name: str) -> nn.Parameter:
    """The Parameter to be parametrized, or an error that gives the reason why it cannot be."""
    if isinstance(module, torch.jit.ScriptModule):
        why = "a scripted layer has a compiled forward", "Script the folded model instead."
        raise NotApplicableError("attach()", name, *why)
    there = parametrization_of(module, name)
    torchs = f"parametrizations.{name}" if name in parametrizations_of_torch(module) else None
    legacy = next((n for n in (f"{name}_orig", f"{name}_g") if n in module._parameters), None)
    if there is not None or torchs or legacy:
        found = type(there).__name__ if there is not None else f"torch's own ({torchs or legacy})"
        raise AlreadyAppliedError("attach()", name, found)
    raw = module._parameters.get(name)
    if raw is None:
        why = "it is not a Parameter of that layer", "Name a tensor in layer.named_parameters()."
    elif isinstance(raw, nn.UninitializedParameter):
        why = "it has no shape yet", "Run one batch through the model first."
    elif is_sharded(raw):
        why = "it is sharded", "Parametrize before sharding."
    elif raw.numel() == 0:
        why = f"it has no entries (shape {tuple(raw.shape)})", "Exclude the layer."
    elif getattr(module, "max_norm", None) is not None:
        why = "max_norm renormalises it in place during forward", "Set max_norm=None."
    elif getattr(module, "sparse", False):
        why = "its gradients are sparse", "Set sparse=False."
    else:
        return raw
    raise NotApplicableError("attach()", f"{type(module).__name__}.{name}", *why)


@torch.no_grad()
def _bind_(parametrization: Parametrization, raw: nn.Parameter, layout: Layout) -> None:
    weight = raw.detach()
    check_options(parametrization)
    parametrization.bind(weight, layout)
    inverse = parametrization.right_inverse(weight)
    check_like(inverse, weight, f"{type(parametrization).__name__}.right_inverse()")
    if inverse is not weight:
        raw.copy_(inverse)
    parametrization.track(raw)
    for parameter in parametrization.parameters():
        parameter.requires_grad_(raw.requires_grad)


def detach(module: nn.Module, name: str, *, keep: Literal["raw", "weight"] = "raw") -> Parametrization:
    """Remove the parametrization of a tensor; the layer gets its own class back.

    The Parameter has the value `keep` afterwards: ``"weight"`` for the effective weight, with which the layer computes
    the same function, or ``"raw"`` for the trained tensor.

    Returns: The parametrization, still bound, so that it can be attached to the same Parameter again.

    Raises:
        NotApplicableError: if the tensor is not parametrized, or if the layer's class was changed since.
        InvalidArgumentError: if `keep` has another value.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> weight = layer.weight
        >>> _ = gonio.parametrizations.detach(layer, "weight", keep="weight")
        >>> type(layer) is nn.Linear, torch.equal(layer.weight, weight)
        (True, True)
    """
    parametrization = parametrization_of(module, name)
    if parametrization is None:
        raise NotApplicableError("detach()", name, "it is not parametrized", "Attach one first.")
    if keep not in ("raw", "weight"):
        raise InvalidArgumentError('detach() needs keep="raw" or "weight"', repr(keep), "Choose one.")
    base, names = _own_class(module)
    if type(module) is not parametrized_class(base, names):
        why = f"the layer became {with_article(type(module).__name__)} after the parametrization was attached"
        raise NotApplicableError("detach()", name, why, "Undo that change first. Fold a model before it is sharded.")
    if keep == "weight":
        raw = cast(nn.Parameter, module._parameters[name])
        with torch.no_grad():
            raw.copy_(parametrization(raw))
    rest = tuple(n for n in names if n != name)
    module.__class__ = parametrized_class(base, rest) if rest else base
    del module._modules[child_name(name)]
    return parametrization


def parametrization_of(module: nn.Module, name: str = "weight") -> Parametrization | None:
    """The parametrization of a layer's tensor, or None.

    Example:
        >>> gonio.parametrizations.parametrization_of(nn.Linear(2, 2)) is None
        True
    """
    return _parametrization(module, name) if is_parametrized(module, name) else None


def is_parametrized(module: nn.Module, name: str | None = None) -> bool:
    """Whether the tensor `name` of a layer is parametrized; for None, whether any of its tensors is.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> gonio.parametrizations.is_parametrized(layer), gonio.parametrizations.is_parametrized(layer, "bias")
        (True, False)
    """
    return isinstance(module, Parametrized) and (name is None or name in module.parametrized_names)


def parametrizations_of_torch(module: nn.Module) -> dict[str, ParametrizationList]:
    """The lists of `torch.nn.utils.parametrize` by tensor: of the module itself, not of one to which it forwards."""
    found = dict(module._modules.items()).get("parametrizations")  # a scripted module keeps no dict of them
    parts = dict(found.items()) if isinstance(found, nn.ModuleDict) else {}
    return {name: part for name, part in parts.items() if isinstance(part, ParametrizationList)}


@contextmanager
def without_steps(module: nn.Module) -> Iterator[None]:
    """Torch's parametrizations of a module in evaluation mode: in training, spectral_norm takes a step at each read.

    Example:
        >>> layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        >>> with without_steps(layer):
        ...     first, second = layer.weight, layer.weight
        >>> torch.equal(first, second)
        True
    """
    lists = parametrizations_of_torch(module).values()
    parts = [part for each in lists for part in each.modules() if part.training]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part in parts:
            part.training = True


def child_name(name: str) -> str:
    """The name of the child module that parametrizes the tensor `name`."""
    return f"{name}_parametrization"


def _parametrization(layer: Any, name: str) -> Parametrization:
    found: Parametrization = layer._modules[child_name(name)]
    return found


# --- the classes of parametrized layers -----------------------------------------------------------


class _NoTensorParallelism:
    """The answer to whether a layer is distributed already, which `parallelize_module` asks before anything else."""

    def __bool__(self) -> bool:
        raise NotApplicableError(
            "parallelize_module()",
            "weight",
            "it is parametrized, and tensor parallelism splits Parameters that it looks up by name",
            "Fold the model first: gonio.fold_(model), or leave the layer out of the plan.",
        )


class Parametrized:
    """The behaviour of a layer with parametrized tensors; a mixin before the layer's own class."""

    _distribute_module_applied = _NoTensorParallelism()
    parametrized_base: type[nn.Module]
    parametrized_names: tuple[str, ...]

    # the parts of nn.Module that this mixin uses
    _parameters: dict[str, nn.Parameter | None]
    _modules: dict[str, nn.Module | None]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Refuse to make a layer: the class is that of layers that were parametrized after they had been made."""
        own = self.parametrized_base.__name__
        why = f"it is the class of a parametrized {own}, and a new layer has no parametrization"
        do = f"Make a {own}, and parametrize it; or copy the layer by copy.deepcopy."
        raise NotApplicableError("type(layer)(…)", type(self).__name__, why, do)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.parametrized_names or not isinstance(value, Tensor):
            super().__setattr__(name, value)
        elif name not in self._parameters:
            # A replica of DataParallel has no Parameters; a view is assigned in the place of each.
            self.__dict__[name] = value
        else:
            _assign_(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse for a parametrized tensor: torch's parametrizations and old spectral norm begin with this."""
        if name in self.parametrized_names:
            raise self._is_taken(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse the Parameters with which torch's pruning and old weight norm replace a parametrized tensor."""
        for taken in self.parametrized_names:
            if name in (f"{taken}_orig", f"{taken}_g"):
                raise self._is_taken(taken)
        super().register_parameter(name, param)  # type: ignore[misc]

    def _is_taken(self, name: str) -> NotApplicableError:
        parametrization, rest = _parametrization(self, name), dict(self._parameters)
        raw = parametrization.trained
        if name not in rest and raw is not None:  # old weight norm has removed it already
            self._parameters.clear()
            self._parameters.update({name: raw, **rest})
        return NotApplicableError(
            "removing or replacing a Parameter",
            f"{self.parametrized_base.__name__}.{name}",
            f"gonio's {type(parametrization).__name__} parametrizes it, and torch's parametrizations, norms, pruning "
            "and FullyShardedDataParallel (FSDP 1) cannot be added",
            f"Fold it first: gonio.fold_(model), or detach(layer, {name!r}, keep='weight'). FSDP 2 (fully_shard) "
            "shards it as it is.",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        new, arguments, *state = cast(tuple[Any, ...], super().__reduce_ex__(max(int(protocol), 2)))
        base, names = self.parametrized_base, self.parametrized_names
        if new is cast(Any, copyreg).__newobj__ and arguments == (parametrized_class(base, names),):
            # The class is made at run time and cannot be imported: a pickle stores how to make it.
            return (_new, (base, names), *state)
        return (new, arguments, *state)

    def reset_parameters(self) -> None:
        """Reset the layer as its own class does, then bind the state to the new weights."""
        with as_own_class(self) as layer:
            reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
            if reset is not None:
                reset()
        for name in self.parametrized_names:
            raw = self._parameters[name]
            if raw is not None:
                _set_weight_(_parametrization(self, name), raw, raw)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in self.parametrized_names:
            translate_(_parametrization(self, name), state_dict, prefix, name)
        with as_own_class(self) as layer:
            layer._load_from_state_dict(state_dict, prefix, *arguments)
        self._note_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._note_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As for any module. Torch moves no tensor to which there is a weak reference, as a parametrization has one."""
        trained = {name: _parametrization(self, name).release() for name in self.parametrized_names}
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for name, raw in trained.items():
                if raw is not None and self._parameters.get(name) is raw:
                    _parametrization(self, name).track(raw)

    def _note_parameters(self) -> None:
        """Tell the parametrizations which Parameters they are bound to; others may have taken their place."""
        for name in self.parametrized_names:
            _parametrization(self, name).track(self._parameters.get(name))

    def register_load_state_dict_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """As for any module. FSDP 2 registers one when it shards a parameter, and then learns where it is."""
        redirect_fsdp_(hook, cast(nn.Module, self), self.parametrized_base)
        handle: RemovableHandle = super().register_load_state_dict_post_hook(hook)  # type: ignore[misc]
        return handle


class ParametrizedRecurrent(Parametrized):
    """RNN, LSTM and GRU read a list of tensors, which is made at each read here.

    cuDNN's packing of all weights into one buffer cannot apply to computed weights and is skipped.
    """

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, _: list[Tensor]) -> None:
        # torch sets the list after it has moved the parameters. The layer's own class needs it after a detach.
        self.__dict__["_flat_weights"] = [self._parameters.get(name) for name in self._flat_weights_names]

    def _update_flat_weights(self) -> None:
        """Do nothing: the list is made at each read."""

    def flatten_parameters(self) -> None:
        """Do nothing: computed weights cannot be packed."""


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def parametrized_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The one subclass of `base` whose tensors `names` are computed by parametrizations."""
    if (base, names) in _CLASSES:
        return _CLASSES[base, names]
    mixin = ParametrizedRecurrent if issubclass(base, nn.RNNBase) else Parametrized
    namespace: dict[str, Any] = {name: _effective_weight(name) for name in names}
    namespace |= {
        "parametrized_base": base,
        "parametrized_names": names,
        "__doc__": base.__doc__,
        # torch.fx treats a module as one opaque layer if its class is torch's own.
        "__module__": base.__module__,
        "__qualname__": f"Parametrized{base.__qualname__}",
    }
    _CLASSES[base, names] = cast(type[nn.Module], type(f"Parametrized{base.__name__}", (mixin, base), namespace))
    return _CLASSES[base, names]


def _own_class(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    """The layer's own class, and the names of its parametrized tensors."""
    if isinstance(module, Parametrized):
        return module.parametrized_base, module.parametrized_names
    return type(module), ()


@contextmanager
def as_own_class(layer: Any) -> Iterator[nn.Module]:
    """The layer with its own class, for which the raw parameters have the names of the weights."""
    kind = type(layer)
    layer.__class__ = kind.parametrized_base
    try:
        yield layer
    finally:
        layer.__class__ = kind


def _new(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty instance of a parametrized class, for unpickling and copying."""
    kind = parametrized_class(base, names)
    return kind.__new__(kind)


# --- read and assign ------------------------------------------------------------------------------


def _effective_weight(name: str) -> property:
    child = child_name(name)

    def read(self: Parametrized) -> Tensor | None:
        try:
            raw = self._parameters[name] if name in self._parameters else self.__dict__[name]
            parametrization: Any = self._modules[child]
            return None if raw is None else parametrization(raw)
        except (AttributeError, KeyError) as error:
            # After an AttributeError of a property, nn.Module.__getattr__ would return the raw tensor.
            raise RuntimeError(f"the parametrized tensor {name!r} cannot be computed: {error!r}") from error

    return property(read)


@torch.no_grad()
def _assign_(layer: Parametrized, name: str, value: Tensor) -> None:
    """Set the effective weight to a tensor; a Parameter also becomes the trained object."""
    raw = layer._parameters[name]
    if isinstance(value, nn.Parameter) and (raw is None or is_sharded(raw) or is_sharded(value)):
        layer._parameters[name] = value  # FSDP exchanges the whole and the sharded form of the same numbers
        if is_sharded(value):
            _parametrization(layer, name).track(value)
        return
    if raw is None or value.shape != raw.shape:
        raise InvalidArgumentError(
            f"assigning a parametrized {name!r} needs a tensor of its shape",
            f"{tuple(value.shape)} for {None if raw is None else tuple(raw.shape)}",
            "Detach the parametrization first to assign a tensor of another shape.",
        )
    parametrization = _parametrization(layer, name)
    if isinstance(value, nn.Parameter):
        if not parametrization.reaches(value):
            raise InvalidArgumentError(
                f"assigning a Parameter to a parametrized {name!r} needs values that the parametrization can reach",
                f"values that {parametrization} would change",
                f"Fold the layer first: gonio.fold_(model), or detach(layer, {name!r}, keep='weight'). "
                "A plain tensor sets the nearest weight.",
            )
        layer._parameters[name] = raw = value
        layer._note_parameters()
    _set_weight_(parametrization, raw, value.detach())


@torch.no_grad()
def _set_weight_(parametrization: Parametrization, raw: nn.Parameter, weight: Tensor) -> None:
    parametrization.rebind_(weight)
    inverse = parametrization.right_inverse(weight)
    if inverse is not raw:
        raw.copy_(inverse)
    parametrization.track(raw)


# --- private interface of torch -------------------------------------------------------------------


def redirect_fsdp_(hook: Callable[..., Any], layer: nn.Module, own_class: type[nn.Module]) -> None:
    """Let FSDP 2 read and replace the raw Parameter of a parametrized layer.

    FSDP reads ``layer.weight`` before the first forward, and after a load or a move, to see whether it still is the
    Parameter that it shards. On a parametrized layer it would find the effective weight and train that. Its record
    of the Parameter therefore gets a view of the layer: an instance of the layer's own class with the same
    ``__dict__``. Other readers of a sharded layer still get the effective weight.

    Raises: NotApplicableError if FSDP's hook, which refers to its record, has another form in this version of torch.
    """
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
        return
    record: Any = getattr(inspect.getclosurevars(hook).nonlocals.get("self"), "_module_info", None)
    if getattr(record, "module", None) is not layer:
        raise NotApplicableError(
            "fully_shard()",
            type(layer).__name__,
            f"it is parametrized, and the FSDP of torch {torch.__version__} is not known to gonio",
            "Fold the model first: gonio.fold_(model).",
        )
    view = own_class.__new__(own_class)
    object.__setattr__(view, "__dict__", layer.__dict__)
    record.module = view
