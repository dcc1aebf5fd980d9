"""Measure a model, a state dict or a file."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring.engines import measure_here, measure_on_ray
from gonio.measuring.measurements import Measurements
from gonio.measuring.operator_norm import ALSO, Also
from gonio.measuring.rules import findings_of
from gonio.measuring.setting import Setting
from gonio.measuring.signals import measure_signals
from gonio.measuring.source import Source, contents_of, name_of
from gonio.measuring.structure import Structure, structure_of
from gonio.measuring.tensor import TensorMeasurement
from gonio.measuring.training import Training

__all__ = ["measure"]


def measure(
    source: Source,
    *,
    batch: Any = None,
    loader: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    base: Source | None = None,
    engine: Literal["local", "ray"] = "local",
    also: Also = (),
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    r"""Norms, angles and spectra of all weights, each beside what random weights would show.

    For filters :math:`w_1, \dots, w_n \in \mathbb{R}^d` of a layer: their norms; the angles between them,
    whose law for random directions is :math:`p(\theta) \propto \sin^{d-2}\theta`; the alignment
    :math:`d \cdot \overline{\cos^2}`, 1 for random directions, with its z-score; the coherence beside the
    Welch bound; the spectral norm and the ranks beside those of random matrices. Every tensor gets figures or
    the reason why it has none. Nothing is changed, and no random number of yours is used.

    Args:
        source: a model (measured as its layers use their weights, parametrized or not); a state dict or a
            checkpoint that holds one; the path of a `.safetensors` file, of the index of a sharded one, of a
            torch checkpoint (loaded with `weights_only`: no code in it runs), or of a folder that holds one
            of these. Without the model, layouts are read off the shapes; each tensor's `notes` say so.
        batch: an input of the model (a tensor, a tuple of arguments, or a dict of keyword arguments). With it
            the outputs of all layers and the gradients there are measured too, in evaluation mode: `signals`.
        loader: the data loader of the model's training. Its sizes are read, nothing is drawn from it: batches too
            small for batch normalisation, a last batch of one sample.
        optimizer: of the model's training: weight decay where the scale of a weight does not matter.
        base: of a source that holds low-rank adapters, the model that they adapt: then the adapted weights and their
            sums with the adapters are measured too.
        engine: `ray` spreads the tensors of a file over the cluster to which this process is, or can be, connected;
            the file must have the same path everywhere.
        also: figures that take longer than all others together: `operator_norm`, of convolutions, on a periodic grid of
            16 positions each way (or twice the kernel), exact up to 1e-5 as a rule.
        progress: called after each tensor with how many are done and how many there are.

    Returns:
        :class:`Measurements`: printable, a mapping from paths, exportable.

    Raises:
        InvalidArgumentError: if the source is none of these or holds no tensors, if a batch, a loader or an
            optimizer is given without a model, or is none, if a base is given without adapters, or for an unknown
            engine.
        UnknownNameError: for an unknown figure in `also`.
        UnreadableFileError: if a file is missing, damaged, or holds more than data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
        >>> m = gonio.measure(gonio.init_(model, gonio.init.orthogonal_) and model)
        >>> round(m["2"].alignment, 4), m["2"].dim, m.findings
        (0.0, 288, ())

    References:
        [1] T. T. Cai, J. Fan, T. Jiang, "Distributions of angles in random packing on spheres", JMLR 14
        (2013), Eq. (1).
        [2] L. Welch, "Lower bounds on the maximum cross correlation of signals", IEEE Trans. Inf. Theory
        20(3), 1974.
    """
    _check(source, batch, loader, optimizer)
    _check_engine(engine, source, base)
    _check_also(also)
    training = Training.of(loader, optimizer)
    name, contents = name_of(source), contents_of(source, base)
    if engine == "ray":
        tensors = measure_on_ray(source, base, contents.entries, progress, also)
    else:
        tensors = measure_here(contents.entries, progress, also)
    notes = contents.notes
    if not isinstance(source, nn.Module):
        return Measurements(name, tuple(tensors), findings_of(tensors), notes=notes, versions=_versions())
    structure = structure_of(source)
    signals, silent = ((), ()) if batch is None else measure_signals(source, batch)
    return Measurements(
        name,
        tuple(_annotated(tensor, structure) for tensor in tensors),
        findings_of(tensors, Setting.of(source, structure, signals, training)),
        scale=structure.scale,
        mixtures=structure.mixtures,
        signals=signals,
        notes=(*notes, *structure.notes, *silent),
        versions=_versions(),
    )


def _check(source: Source, batch: Any, loader: Any, optimizer: Any) -> None:
    """What says how a model is used needs the model."""
    if isinstance(source, nn.Module):
        return
    given = {
        "batch": (batch, "runs a batch through a model"),
        "loader": (loader, "reads the loader of a model's training"),
        "optimizer": (optimizer, "reads the optimizer of a model's training"),
    }
    for name, (value, what) in given.items():
        if value is not None:
            raise InvalidArgumentError(f"measure() {what}", type(source).__name__, f"Pass the model, or no {name}.")


def _check_engine(engine: str, *sources: Source | None) -> None:
    if engine not in ("local", "ray"):
        raise InvalidArgumentError("measure(engine=) is 'local' or 'ray'", repr(engine), "Choose one of them.")
    other = [source for source in sources if source is not None and not isinstance(source, (str, os.PathLike))]
    if engine == "ray" and other:
        raise InvalidArgumentError(
            "measure(engine='ray') spreads the tensors of files",
            type(other[0]).__name__,
            "Save the weights where all nodes can read them, or measure here.",
        )


def _check_also(also: Also) -> None:
    if isinstance(also, str):
        raise InvalidArgumentError("measure(also=) is a tuple of figures", repr(also), f"Write ({also!r},).")
    for name in also:
        if name not in ALSO:
            raise UnknownNameError("figure", str(name), ALSO)


def _annotated(tensor: TensorMeasurement, structure: Structure) -> TensorMeasurement:
    norm = structure.followed.get(tensor.path)
    if norm is None or tensor.status != "measured":
        return tensor
    note = f"followed by {norm}"
    if tensor.path in structure.invariant:
        note += ": the function does not depend on its norm"
    return replace(tensor, notes=(*tensor.notes, note))


def _versions() -> dict[str, str]:
    try:
        own = version("gonio")
    except PackageNotFoundError:  # run from a source tree that is not installed
        own = "not installed"
    return {"gonio": own, "torch": torch.__version__, "python": platform.python_version()}
