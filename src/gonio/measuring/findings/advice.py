"""Advice on normalisation and training: rules that read facts of a model and its training and judge no figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from gonio.errors import InvalidArgumentError, listing
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.structure import Structure
from gonio.measuring.findings.finding import Rule, rule
from gonio.parametrizations.mechanism import parametrization_of
from gonio.surgery import Site, sites
from gonio.surgery.kinds import SWITCHABLE_NORMS


@dataclass(frozen=True)
class Training:
    """Batch sizes and weight decays, as far as they are known.

    Attributes:
        batch: samples per batch and process.
        last: samples of an epoch's last batch.
        decayed: `id` of each Parameter under weight decay.
    """

    batch: int | None = None
    last: int | None = None
    decayed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> Training:
        """Read a data loader, without drawing from it, and an optimizer.

        Raises:
            InvalidArgumentError: if they are something else.
        """
        if loader is not None and not hasattr(loader, "batch_size"):
            raise InvalidArgumentError(
                "measure(loader=) reads the batch size of a DataLoader", type(loader).__name__, "Pass the loader."
            )
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise InvalidArgumentError(
                "measure(optimizer=) reads the weight decay of an optimizer", type(optimizer).__name__, "Pass it."
            )
        groups = [] if optimizer is None else optimizer.param_groups
        decayed = frozenset(id(p) for group in groups if group.get("weight_decay", 0) for p in group["params"])
        batch, last = _sizes(loader)
        return cls(batch, last, decayed)


def _sizes(loader: Any) -> tuple[int | None, int | None]:
    """Samples of a batch and of the last one of an epoch; None if the loader does not tell."""
    source = loader if getattr(loader, "batch_size", None) else getattr(loader, "batch_sampler", None)
    batch = getattr(source, "batch_size", None)
    if not isinstance(batch, int) or batch < 1:
        return None, None
    if getattr(source, "drop_last", False):
        return batch, batch
    sampler = getattr(source, "sampler", None)
    if not isinstance(sampler, Sized):
        return batch, None
    try:
        samples = len(sampler)
    except TypeError:  # the sampler of an iterable data set has no length
        return batch, None
    return batch, (samples % batch or batch) if samples else None


_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, *SWITCHABLE_NORMS)


@dataclass(frozen=True)
class NormUse:
    """One normalisation layer.

    Attributes:
        calls: how often it runs in one forward, as far as is known; else 1.
        positions: values per channel and sample; None if no batch was measured.
        frozen: whether it does not update its running statistics while the rest of the model trains.
        recomputed: whether activation checkpointing runs it twice.
    """

    path: str
    module: nn.Module
    calls: int
    positions: int | None
    frozen: bool
    recomputed: bool

    @property
    def has_statistics(self) -> bool:
        """Whether it has running statistics."""
        return self.module._buffers.get("running_mean") is not None

    @property
    def averages_over_batches(self) -> bool:
        """Whether it is a batch norm that updates its statistics in training."""
        return isinstance(self.module, _BatchNorm) and not self.frozen

    @property
    def values(self) -> int | None:
        """Number of values that are centred together, for a layer or group norm."""
        if isinstance(self.module, nn.LayerNorm):
            return prod(self.module.normalized_shape)
        if isinstance(self.module, nn.GroupNorm) and self.positions is not None:
            return self.positions * self.module.num_channels // self.module.num_groups
        return None

    @classmethod
    def of(cls, site: Site, signal: Signal | None, structure: Structure, *, trains: bool, recomputed: bool) -> NormUse:
        """A normalisation layer of a model that is in training mode or not."""
        calls = max(structure.calls.get(site.path, 1), signal.calls if signal is not None else 1)
        positions = prod(signal.shape[2:]) if signal is not None else None
        return cls(site.path, site.module, calls, positions, trains and not site.module.training, recomputed)


@dataclass(frozen=True)
class Setting:
    """The facts that the advice reads.

    Attributes:
        norms: every normalisation layer.
        decayed: paths of the weights under weight decay whose scale the function does not depend on.
        constant: as in :class:`Structure`. `signals`: of the measured batch, if there was one.
    """

    norms: tuple[NormUse, ...]
    training: Training
    decayed: tuple[str, ...]
    constant: tuple[str, ...]
    signals: tuple[Signal, ...]

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, signals: Sequence[Signal], training: Training) -> Setting:
        everything = sites(model)
        shapes = {signal.path: signal for signal in signals}
        wrappers = [site.module for site in everything if "_checkpoint_wrapped_module" in site.module._modules]
        inside = {id(module) for wrapper in wrappers for module in wrapper.modules()}
        norms = [
            NormUse.of(
                site, shapes.get(site.path), structure, trains=model.training, recomputed=id(site.module) in inside
            )
            for site in everything
            if isinstance(site.module, _NORMS)
        ]
        free = [
            f"{site.path}.{name}" if site.path else name
            for site in everything
            for name, parameter in site.module._parameters.items()
            if id(parameter) in training.decayed and _is_free(site, name, structure)
        ]
        return cls(tuple(norms), training, tuple(free), structure.constant, tuple(signals))


def _is_free(site: Site, name: str, structure: Structure) -> bool:
    """Whether the function does not depend on the scale of this weight."""
    return parametrization_of(site.module, name) is not None or (name == "weight" and site.path in structure.invariant)


SMALL = 8  # samples, below which [Wu and He 2018, table 2] sees batch normalisation fail


def _listed(norms: list[NormUse]) -> str:
    return listing([norm.path or "the model" for norm in norms], limit=3)


def _samples(norm: NormUse, batch: int | None) -> float:
    """The number of samples in a norm's statistics."""
    if batch is None:
        return float("inf")
    several = isinstance(norm.module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized()
    return batch * (dist.get_world_size() if several else 1)


@rule(
    "G401",
    "warn",
    "batch normalisation over fewer than 8 samples",
    means="Statistics over few samples are noisy and differ from those used in evaluation. Harmless for "
    "frozen norms (in evaluation mode while the rest trains), which the rule leaves out.",
    exact="the batch size is read from the loader.",
    do="Use larger batches; SyncBatchNorm over several processes; or a norm without batch statistics "
    "(gonio.swap_ with gonio.nn.to_group_norm, or SwitchableNorm with use_batch=False).",
    source="Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, table 2: top-1 error of a ResNet-50 "
    "with batch norm 23.6 % at 32 images per process, 24.8 % at 8, 27.3 % at 4, 34.7 % at 2; with group norm "
    "24.1 to 24.2 %.",
)
def _small_batches(setting: Setting) -> str | None:
    batch = setting.training.batch
    norms = [norm for norm in setting.norms if norm.averages_over_batches and _samples(norm, batch) < SMALL]
    return f"batch norms compute statistics over {batch} samples: {_listed(norms)}" if norms else None


@rule(
    "G402",
    "warn",
    "a last batch of one sample under batch normalisation",
    means="With one value per channel torch raises an error, at the end of the first epoch. With more (a map "
    "of one image) the variance of a single image enters the running statistics.",
    exact="the number of samples and the batch size are read from the loader.",
    do="Use drop_last=True, a batch size with another remainder, or a norm without batch statistics.",
    source="pytorch issue 7716 ('Expected more than 1 value per channel when training').",
)
def _last_batch(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.averages_over_batches and _samples(norm, setting.training.last) < 2]
    if not norms:
        return None
    raising = [norm for norm in norms if norm.positions == 1]
    unknown = [norm for norm in norms if norm.positions is None and isinstance(norm.module, nn.BatchNorm1d)]
    said = f"the last batch of an epoch has a single sample; batch norms: {_listed(norms)}"
    if raising:
        return f"{said}; training will raise an error there: {_listed(raising)} get one value per channel"
    return f"{said}; training will raise an error if the inputs of {_listed(unknown)} are (N, C)" if unknown else said


@rule(
    "G403",
    "warn",
    "a normalisation over single values",
    means="A value minus itself is 0: the output of the layer is its shift, for every input, and no gradient "
    "passes. A group norm with one channel per group does this on 1×1 maps, a layer norm on one feature.",
    exact="for one value x the output is (x − x)/√(0 + ε)·γ + β = β; the group's size is read from the layer "
    "and from the measured batch.",
    do="Use fewer groups, so that each has several values; or remove the norm.",
    source="Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, equation (7).",
)
def _single_values(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.values == 1]
    return f"each statistic is over one value, so that the input is lost: {_listed(norms)}" if norms else None


@rule(
    "G404",
    "warn",
    "batch statistics shared by several calls",
    means="A batch norm that runs more than once per forward (at each time step of a recurrent net, or in each "
    "branch of a shared one) normalises each call by its own statistics in training and all of them by "
    "one running average in evaluation. Harmless if all inputs have the same distribution.",
    exact="the calls are counted in the model's graph, or in the measured batch.",
    do="Use layer norm in recurrent nets, or one batch norm per call, with shared weights around it.",
    source="T. Cooijmans et al., 'Recurrent batch normalization', 2017, arXiv 1603.09025, section 3; J. L. Ba "
    "et al., 'Layer normalization', 2016, arXiv 1607.06450, section 2.",
)
def _several_uses(setting: Setting) -> str | None:
    reused = [norm for norm in setting.norms if norm.calls > 1 and not norm.frozen and norm.has_statistics]
    uses = [f"{norm.path or 'the model'} ({norm.calls} times)" for norm in reused]
    return f"several calls per forward share running statistics: {listing(uses, limit=3)}" if uses else None


@rule(
    "G406",
    "warn",
    "batch normalisation inside activation checkpointing",
    means="The forward pass is repeated during the backward pass and updates the running statistics a second "
    "time: their momentum is larger than configured, and batches are counted twice.",
    exact="torch's batch norm updates its buffers in every forward in training mode, the repeated one too.",
    do="Use the momentum 1 − √(1 − m) instead of m, or a layer that handles this (SwitchableNorm), or call "
    "calibrate_ before evaluating.",
    source="pytorch issue 96136.",
)
def _recomputed(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.recomputed and norm.averages_over_batches and norm.has_statistics]
    return f"activation checkpointing runs them twice per batch: {_listed(norms)}" if norms else None


@rule(
    "G405",
    "info",
    "weight decay on weights whose scale has no effect",
    means="Such a weight is followed by a normalisation, or parametrized by its direction: decay cannot make "
    "the function simpler. It does keep the effective learning rate lr/‖w‖² high, which is often intended.",
    exact="the function is the same for every positive multiple of such a weight, up to the norm's ε.",
    do="Keep it as a schedule of the effective learning rate, or set it to 0 there; do not rely on it as "
    "regularisation, and do not add a penalty on the scale.",
    source="T. van Laarhoven, 'L2 regularization versus batch and weight normalization', 2017, "
    "arXiv 1706.05350, sections 2 and 3.",
)
def _decayed(setting: Setting) -> str | None:
    free = setting.decayed
    if not free:
        return None
    return f"weight decay acts on {len(free)} weights whose scale has no effect: {listing(list(free), limit=3)}"


@rule(
    "G407",
    "warn",
    "an output that does not depend on the input",
    means="Every path from the input to the output leads through a layer whose weight is 0. This is normal only at "
    "the start of training, for a last layer that is initialised to 0.",
    exact="the weight is 0, and the graph of the model has no path around the layer.",
    do="If the model is trained, restore an earlier checkpoint; otherwise initialise the layer (gonio.init_).",
    source="H. Zhang, Y. Dauphin, T. Ma, 'Fixup initialization', 2019, arXiv 1901.09321, for last layers initialised "
    "to 0 on purpose.",
)
def _constant(setting: Setting) -> str | None:
    paths = [path or "the model" for path in setting.constant]
    return f"the output is the same for every input: the weight of {listing(paths, limit=3)} is 0" if paths else None


@rule(
    "G408",
    "warn",
    "a layer most of whose units are dead",
    means="The output of these units is 0 on the whole batch, and no gradient passes through them. After a ReLU, "
    "inputs that are all alike leave about half of the units dead; the rule needs four standard deviations more.",
    exact="the units are counted on the given batch; with other inputs some may be active.",
    do="Check the biases and the learning rate before this layer; use a smaller learning rate, an activation with a "
    "gradient below 0 (LeakyReLU, GELU), or a normalisation.",
    source="L. Lu et al., 'Dying ReLU and initialization: theory and numerical examples', 2019, arXiv 1903.06733.",
)
def _dead_units(setting: Setting) -> str | None:
    found, before = [], 0.0
    for signal in setting.signals:
        share = signal.dead_units / max(1, signal.units)
        many = signal.dead_units >= signal.units / 2 + 2 * sqrt(signal.units) or (share == 1 and signal.units >= 8)
        if many and share != before and signal.branch == "":  # an equal share is that of the layer before
            found.append(f"{signal.path or 'the model'} ({signal.dead_units} of {signal.units})")
        before = share
    return f"units whose output is 0 on the whole batch: {listing(found, limit=3)}" if found else None


_FACTOR = 30  # healthy trained networks: 0.36 to 5.9 (benchmarks/planted_damage.py)


@rule(
    "G409",
    "warn",
    "a layer that changes the size of its input more than thirtyfold",
    means="The weights are far too large or too small for their input, or the output of a normalisation is far from "
    "unit size: activations saturate or vanish, and the layer learns at another rate than its neighbours.",
    exact="the sizes are measured on the given batch; with other inputs they may differ.",
    do="Compare with an earlier checkpoint; move the scale back (gonio.balance_), or initialise anew (gonio.lsuv_).",
    source="D. Mishkin, J. Matas, 'All you need is a good init', 2016, arXiv 1511.06422; the threshold is a choice.",
)
def _out_of_scale(setting: Setting) -> str | None:
    found = []
    for signal in setting.signals:
        norm = "Norm" in signal.kind  # its input counts as of unit size
        weighted = "Linear" in signal.kind or "Conv" in signal.kind
        size = signal.rms if norm else signal.gain if weighted else None
        if size is not None and (size > _FACTOR or (not norm and 0 < size < 1 / _FACTOR)):
            found.append(f"{signal.path or 'the model'} (× {size:.3g})")
    return f"the output is far larger or smaller than the input: {listing(found, limit=3)}" if found else None


@rule(
    "G410",
    "warn",
    "running statistics that are not those of the batch",
    means="In evaluation the layer normalises by statistics far from those of this batch, so that it computes another "
    "function than in training: the weights before it have changed since, or the statistics were damaged, or the batch "
    "is not like the training data. Harmless for a batch of random numbers.",
    exact="both outputs are computed on the given batch; the deviation is above 0.5 and above four times that of "
    "a random sample of the same size.",
    do="Pass a batch of the training data; if the finding stays, recalibrate the statistics (gonio.calibrate_).",
    source="Y. Wu, J. Johnson, 'Rethinking \"batch\" in batch norm', 2021, arXiv 2105.07576, section 3; the threshold "
    "is a choice.",
)
def _stale(setting: Setting) -> str | None:
    found = []
    for signal in setting.signals:
        values = prod(signal.shape) / max(1, signal.units)
        least = max(0.5, 4 * sqrt(1.5 / max(1.0, values)))
        if signal.train_eval_gap is not None and signal.train_eval_gap > least:
            found.append(f"{signal.path or 'the model'} ({signal.train_eval_gap:.2g} standard deviations)")
    if not found:
        return None
    return f"the output differs from that in training mode on this batch: {listing(found, limit=3)}"


@rule(
    "G411",
    "warn",
    "running statistics at their initial values in a trained norm",
    means="The gains of the norm's channels differ, so it was trained; its running mean is still 0 and its running "
    "variance 1, so that it does not normalise in evaluation.",
    exact="the values are read from the layer.",
    do="Restore the statistics from the checkpoint, or recalibrate them (gonio.calibrate_).",
    source="torch.optim.swa_utils.update_bn, which exists because averaged weights need new statistics.",
)
def _forgotten(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.has_statistics and _trained_without_statistics(norm.module)]
    return f"running statistics are at their initial values: {_listed(norms)}" if norms else None


def _trained_without_statistics(norm: nn.Module) -> bool:
    found = (norm._buffers.get("running_mean"), norm._buffers.get("running_var"), norm._parameters.get("weight"))
    mean, var, gain = (t if t is not None and not is_lazy(t) and not t.is_meta else torch.ones(1) for t in found)
    return not bool(mean.any()) and not bool((var != 1).any()) and bool((gain != gain.flatten()[0]).any())


_RULES = (
    *(_small_batches, _last_batch, _single_values, _several_uses, _decayed, _recomputed),
    *(_constant, _dead_units, _out_of_scale, _stale, _forgotten),
)
ADVICE: Mapping[str, Rule[Setting]] = {found.code: found for found in _RULES}
