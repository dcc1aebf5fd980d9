"""Rules on how a model normalises and is trained: each reads facts, none judges a figure."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gonio.errors import listing
from gonio.measuring.findings import Finding
from gonio.measuring.rule import Rule
from gonio.measuring.setting import NormUse, Setting, processes

__all__ = ["ADVICE", "advice_of"]

SMALL = 8  # samples, below which [Wu and He 2018, table 2] sees batch normalisation fail
_GROUP_NORM = (
    "Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, table 2: top-1 error of a ResNet-50 with batch "
    "norm 23.6 % at 32 images per process, 24.8 % at 8, 27.3 % at 4, 34.7 % at 2; with group norm 24.1 to 24.2 %."
)


def advice_of(setting: Setting) -> list[Finding]:
    """What the rules find; those on single layers name the layer, the others concern the model as a whole."""
    made = []
    for rule in ADVICE.values():
        found = rule.check(setting)
        if found is not None:
            made.append(Finding(rule.code, rule.level, "", found, rule.exact, rule.do))
    return made


def _listed(norms: list[NormUse]) -> str:
    return listing([norm.path or "the model" for norm in norms], limit=3)


def _small_batches(setting: Setting) -> str | None:
    batch = setting.training.batch
    norms = [norm for norm in setting.norms if norm.averages_over_batches and _samples(norm, batch) < SMALL]
    if not norms:
        return None
    return f"batch norms take their statistics of {batch} samples: {_listed(norms)}"


def _samples(norm: NormUse, batch: int | None) -> float:
    if batch is None:
        return float("inf")
    return batch * (processes() if isinstance(norm.module, nn.SyncBatchNorm) else 1)


def _last_batch(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.averages_over_batches and _samples(norm, setting.training.last) < 2]
    if not norms:
        return None
    raising = [norm for norm in norms if norm.positions == 1]
    unknown = [norm for norm in norms if norm.positions is None and isinstance(norm.module, nn.BatchNorm1d)]
    said = f"the last batch of an epoch has a single sample; batch norms: {_listed(norms)}"
    if raising:
        return f"{said}; training will stop there with an error, because {_listed(raising)} see one value per channel"
    return f"{said}; {_listed(unknown)} stop training with an error if inputs are (N, C)" if unknown else said


def _single_values(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.values == 1]
    return f"each statistic is of one value, so the input is lost: {_listed(norms)}" if norms else None


def _several_uses(setting: Setting) -> str | None:
    uses = [f"{norm.path or 'the model'} ({norm.calls} times)" for norm in setting.norms if _is_reused(norm)]
    return f"one set of running statistics for several uses in a forward: {listing(uses, limit=3)}" if uses else None


def _is_reused(norm: NormUse) -> bool:
    return norm.calls > 1 and not norm.frozen and norm.module._buffers.get("running_mean") is not None


def _recomputed(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.recomputed and norm.averages_over_batches and _tracks(norm)]
    return f"activation checkpointing runs them twice per batch: {_listed(norms)}" if norms else None


def _tracks(norm: NormUse) -> bool:
    return isinstance(norm.module, _BatchNorm) and norm.module.running_mean is not None


def _decayed(setting: Setting) -> str | None:
    if not setting.decayed:
        return None
    return f"{len(setting.decayed)} weights decay whose scale the function does not depend on: " + listing(
        list(setting.decayed), limit=3
    )


ADVICE: Mapping[str, Rule[Setting]] = {
    rule.code: rule
    for rule in (
        Rule(
            "G401",
            "warn",
            "batch normalisation over fewer than 8 samples",
            _small_batches,
            chance="",
            means="The statistics of few samples are noisy, and those of evaluation differ from them. Harmless where "
            "the norms are frozen (in evaluation mode while the rest trains), which the rule leaves out.",
            exact="the batch size is read from the loader.",
            do="Larger batches; SyncBatchNorm over several processes; a norm without batch statistics "
            "(gonio.swap_ with gonio.nn.to_group_norm, or SwitchableNorm with use_batch=False).",
            source=_GROUP_NORM,
        ),
        Rule(
            "G402",
            "warn",
            "a last batch of one sample under batch normalisation",
            _last_batch,
            chance="",
            means="With one value per channel torch raises an error, at the end of the first epoch. With more (a map "
            "of one image) the variance of a single image enters the running statistics.",
            exact="the number of samples and the batch size are read from the loader.",
            do="drop_last=True, a batch size that leaves another remainder, or a norm without batch statistics.",
            source="pytorch issue 7716 ('Expected more than 1 value per channel when training').",
        ),
        Rule(
            "G403",
            "warn",
            "a normalisation over single values",
            _single_values,
            chance="",
            means="A value minus itself is 0: the layer gives its shift, whatever comes in, and no gradient passes. A "
            "group norm with one channel per group does this on 1×1 maps, a layer norm on one feature.",
            exact="for one value x the output is (x − x)/√(0 + ε)·γ + β = β; the group's size is read from the layer "
            "and from the measured batch.",
            do="Fewer groups, so that each has several values; or no norm there.",
            source="Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, equation (7).",
        ),
        Rule(
            "G404",
            "warn",
            "batch statistics that several uses share",
            _several_uses,
            chance="",
            means="A batch norm that runs more than once per forward, at each time step of a recurrent net or in each "
            "branch of a shared one, normalises each use by its own statistics in training and all of them by "
            "one running average in evaluation. Harmless if all uses see the same distribution.",
            exact="the calls are counted in the model's graph, or in the measured batch.",
            do="Layer norm in recurrent nets; one batch norm per use, with shared weights around it.",
            source="T. Cooijmans et al., 'Recurrent batch normalization', 2017, arXiv 1603.09025, section 3; J. L. Ba "
            "et al., 'Layer normalization', 2016, arXiv 1607.06450, section 2.",
        ),
        Rule(
            "G405",
            "info",
            "weight decay on weights whose scale does not matter",
            _decayed,
            chance="",
            means="Such a weight is followed by a normalisation, or is parametrized by its direction: decay cannot "
            "make the function simpler. It does keep the effective learning rate lr/‖w‖² up, which often is wanted.",
            exact="the function is the same for every positive multiple of such a weight, up to the norm's ε.",
            do="Keep it as a schedule of the effective learning rate, or set it to 0 there; do not count it as "
            "regularisation, nor add a penalty on the scale.",
            source="T. van Laarhoven, 'L2 regularization versus batch and weight normalization', 2017, "
            "arXiv 1706.05350, sections 2 and 3.",
        ),
        Rule(
            "G406",
            "warn",
            "batch normalisation inside activation checkpointing",
            _recomputed,
            chance="",
            means="The forward that is run again in the backward pass moves the running statistics a second time, so "
            "their momentum is larger than asked for, and batches are counted twice.",
            exact="torch's batch norm moves its buffers in every training forward, the repeated one included.",
            do="Use the momentum 1 − √(1 − m) instead of m, or a layer that knows (SwitchableNorm), or calibrate_ "
            "before evaluating.",
            source="pytorch issue 96136.",
        ),
    )
}
