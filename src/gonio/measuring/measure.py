"""`measure`: figures and findings of a model, a state dict or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring.cache import Cache
from gonio.measuring.changes.difference import Differences, difference
from gonio.measuring.changes.several import Changes, changes
from gonio.measuring.checking.rules import of_files
from gonio.measuring.engines import Engine, Progress, Spread, path_of, results, versions
from gonio.measuring.figures.checkpoints import structure_of_checkpoint
from gonio.measuring.figures.signals import Signal, measure_signals
from gonio.measuring.figures.structure import ModelFacts, Structure, TrainingFacts, structure_of
from gonio.measuring.figures.tensor import EXTRA_FIGURES, ExtraFigures, TensorMeasurement, alike, measure_tensors
from gonio.measuring.findings.model_rules import findings_of, of_entries
from gonio.measuring.findings.rules import worst_first
from gonio.measuring.findings.state_rules import judged_states
from gonio.measuring.measurements import Measurements
from gonio.measuring.reading.entry import FACTOR, TensorEntry
from gonio.measuring.reading.source import Source, contents_of, name_of, watching
from gonio.surgery.equivalent import fitting


@overload
def measure(
    source: Source,
    after: None = None,
    *,
    batch: Any = ...,
    loader: Any = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    base: Source | None = ...,
    engine: Engine = ...,
    jobs: int = ...,
    journal: str | os.PathLike[str] | None = ...,
    cache: str | os.PathLike[str] | None = ...,
    extra_figures: ExtraFigures = ...,
    deep: bool = ...,
    progress: Progress = ...,
) -> Measurements: ...


@overload
def measure(
    source: Source,
    after: Source,
    *,
    engine: Engine = ...,
    jobs: int = ...,
    journal: str | os.PathLike[str] | None = ...,
    progress: Progress = None,
) -> Differences: ...


@overload
def measure(
    source: Source,
    after: Source,
    other: Source,
    /,
    *more: Source,
    engine: Engine = ...,
    jobs: int = ...,
    progress: Progress = None,
) -> Changes: ...


def measure(
    source: Source,
    after: Source | None = None,
    *more: Source,
    batch: Any = None,
    loader: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    base: Source | None = None,
    engine: Engine = "local",
    jobs: int = 1,
    journal: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    extra_figures: ExtraFigures = (),
    deep: bool = False,
    progress: Progress = None,
) -> Measurements | Differences | Changes:
    r"""Norms, angles and spectra of all weights, each beside its value for random weights.

    For filters :math:`w_1, \dots, w_n \in \mathbb{R}^d` of a layer: their norms; the angles between them,
    distributed as :math:`p(\theta) \propto \sin^{d-2}\theta` for random directions; the alignment
    :math:`d \cdot \overline{\cos^2}`, 1 for random directions, with its z-score; the coherence beside the
    Welch bound; the spectral norm and the ranks beside those of random matrices. Every tensor has figures or
    the reason why it has none. The model is not changed, and the global random generator is not used.

    Args:
        source: a model (measured as its layers use their weights, parametrized or not); a state dict or a
            checkpoint that holds one; the path of a `.safetensors` file, of the index of a sharded one, of a
            torch checkpoint (no code in it runs; a module that was saved whole is read as its tensors), of a folder
            that holds one of these, or of another format that `docs/howto/formats.md` lists. Without the model,
            layouts are inferred from the shapes; each tensor's `notes` say so.
        after: a second one: then the result is :func:`gonio.measuring.difference` of the two.
        more: further ones: then the result is :func:`gonio.measuring.changes` of all from the first.
        batch: an input of the model (a tensor, a tuple of arguments, or a dict of keyword arguments). With it
            the outputs of all layers and the gradients there are measured too, in evaluation mode: `signals`.
        loader: the data loader of the model's training, for advice on batch sizes. Nothing is drawn from it.
        optimizer: of the model's training, for advice on weight decay and on parameters that it does not have.
        base: for a source that holds low-rank adapters, the model that they adapt: then the adapted weights and their
            sums with the adapters are measured too.
        engine: `ray` distributes the tensors of one file, or of all files, over the Ray cluster to which this process
            is, or can be, connected; the files must have the same paths on all nodes.
        jobs: of a file, the number of processes that measure its tensors; in a script, call it below
            `if __name__ == "__main__":`.
        journal: of a file, the path of another one that keeps each row when it is made: a measurement that was stopped
            goes on from there, if files, options and versions are the same, and repeats at most the tensors at work:
            one large tensor, or some small ones of one shape, in each process.
        cache: of a file, a folder that keeps the figures of its content: a measurement with the same bytes, options and
            versions reads them there, and a note says of when they are. Every byte is hashed each time. A file of ONNX
            and a model are always measured anew.
        extra_figures: figures on request: `operator_norm`, of convolutions, on a periodic grid of 16 positions in each
            dimension (or twice the kernel), usually exact up to 1e-5, takes longer than all others together;
            `quantisation`, the errors of rounding to int8 and int4 (:func:`gonio.geometry.quantization_error`);
            `blocks`, of a model, or of a checkpoint of transformers with its ``config.json``: heads, and the scale that
            can move in attention and MLPs (see :func:`gonio.surgery.anatomy`); a model of at most 5 million weights
            always has them, a larger one takes seconds.
        deep: use all pairs of filters and all singular values of large weights too. By default, angles between more
            than 2048 filters are those of a sample, and of large weights only the largest singular value is estimated;
            both have errors. The time grows with the square of the number of filters and the cube of the smaller side
            (7 s on two cores for 4096×4096), and a copy of the weight is held in float32.
        progress: called after each tensor, or some small ones of one shape, with the number done and the number in all.

    Returns:
        :class:`Measurements`, :class:`Differences` for two sources, or :class:`Changes` for more: printable, a mapping
        from paths, exportable.

    Raises:
        InvalidArgumentError: if the source is none of these or holds no tensors; if a batch, a loader or an
            optimizer is given without a model, or is of another type; if a base is given without adapters; or for an
            unknown engine.
        UnknownNameError: for an unknown figure in `extra_figures`.
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
    options = {"batch": batch, "loader": loader, "optimizer": optimizer, "base": base}
    options |= {"extra_figures": extra_figures or None, "deep": deep or None, "cache": cache}
    if after is not None:
        _check_several((after, *more), options, journal)
        if not more:
            return difference(source, after, engine=engine, jobs=jobs, journal=journal, progress=progress)
        return changes(source, after, *more, engine=engine, jobs=jobs, progress=progress)
    spread = Spread(engine, jobs, journal)
    _check(source, options, spread)
    training = TrainingFacts.of(loader, optimizer)
    figures, given = tuple(extra_figures), [source] if base is None else [source, base]
    about = {"deep": deep, "extra_figures": figures}
    watched = watching(given)
    cached = None if cache is None else Cache(cache, given, TensorMeasurement, about)  # before anything is read
    entries = (contents := contents_of(source, base)).entries
    with cached.opened(entries) if cached else spread.journal_of(TensorMeasurement, given, **about) as kept:
        tensors = results(
            lambda numbers: _rows(entries, numbers, figures, deep=deep),
            _measured,
            lambda: (path_of(source), None if base is None else path_of(base), figures, deep),
            [prod(entry.shape or ()) for entry in entries],
            spread,
            progress,
            kept,
        )
    structure, signals, silent = _run(source, batch, entries, figures)
    factors = {t.path for t in tensors if t.kind == FACTOR}
    facts = ModelFacts.of(source, structure, signals, training, factors) if isinstance(source, nn.Module) else None
    states, of_states, updates = judged_states(contents.optimizer)
    of_weights = findings_of(tensors, facts, structure.heads)
    found = [*of_weights, *of_entries(entries), *of_files([*contents.problems, *watched.changed()]), *of_states]
    return Measurements(
        name_of(source),
        tuple(_annotated(tensor, structure) for tensor in tensors),
        worst_first(found),
        scale=structure.scale,
        mixtures=structure.mixtures,
        heads=structure.heads,
        signals=signals,
        optimizer=states,
        notes=(*(cached.notes if cached else ()), *contents.notes, *updates, *structure.notes, *silent),
        versions=versions(),
    )


def _run(
    source: Source, batch: Any, entries: Sequence[TensorEntry], figures: ExtraFigures
) -> tuple[Structure, tuple[Signal, ...], tuple[str, ...]]:
    """What a model, or the configuration of a checkpoint on request, shows beyond its tensors; outputs on a batch."""
    if not isinstance(source, nn.Module):
        if "blocks" in figures and isinstance(source, (str, os.PathLike)):
            return structure_of_checkpoint(Path(os.fspath(source)), entries), (), ()
        return Structure(), (), ()
    structure = structure_of(source, batch, blocks="blocks" in figures)
    if batch is None:
        return structure, (), ()
    with fitting(source, batch, "measure(batch=)"):  # where a layer got an input of another size, the error says so
        return structure, *measure_signals(source, batch)


def _check_several(after: Sequence[Source], options: dict[str, Any], journal: str | os.PathLike[str] | None) -> None:
    """Refuse options of a single source or of two, and `measure(model, batch)` without its keyword."""
    if any(isinstance(source, torch.Tensor) for source in after):
        raise InvalidArgumentError("measure(a, b) compares two sources", "a Tensor", "Pass a batch as batch=.")
    given = next((name for name, value in options.items() if value is not None), "")
    if given:
        raise InvalidArgumentError("measure(a, b) compares two sources", f"{given}= as well", "Leave it out.")
    if journal is not None and len(after) > 1:
        raise InvalidArgumentError("measure(journal=) keeps one source, or two", "more", "Leave it out.")


_OF_MODELS = {
    "batch": "runs a batch through a model",
    "loader": "reads the loader of a model's training",
    "optimizer": "reads the optimizer of a model's training",
}


def _check(source: Source, options: dict[str, Any], spread: Spread) -> None:
    """Refuse options that do not fit the source, an unknown engine and unknown figures."""
    for name, what in _OF_MODELS.items():
        if options[name] is not None and not isinstance(source, nn.Module):
            found = "a path" if isinstance(source, (str, os.PathLike)) else type(source).__name__
            raise InvalidArgumentError(f"measure() {what}", found, f"Pass the model, or no {name}.")
    if _is_sizes(batch := options["batch"]):
        do = "For random numbers write e.g. batch=torch.randn(8, 3, 32, 32)."
        raise InvalidArgumentError("measure(batch=) takes an input of the model, e.g. a tensor", repr(batch)[:80], do)
    spread.check([given for given in (source, options["base"]) if given is not None])
    if options["cache"] is not None and spread.journal is not None:
        raise InvalidArgumentError("measure(cache=) keeps a whole measurement", "journal= as well", "Leave one out.")
    extra_figures = options["extra_figures"] or ()
    if isinstance(extra_figures, str):
        raise InvalidArgumentError(
            "measure(extra_figures=) is a tuple of figures", repr(extra_figures), f"Write ({extra_figures!r},)."
        )
    for name in extra_figures:
        if name not in EXTRA_FIGURES:
            raise UnknownNameError("figure", str(name), EXTRA_FIGURES)
    if "blocks" in extra_figures and isinstance(source, Mapping):
        asked, do = "measure(extra_figures=('blocks',)) reads the config.json beside a file", "Pass the folder."
        raise InvalidArgumentError(asked, "a state dict", do)


def _is_sizes(batch: object) -> bool:
    """Whether a batch is the sizes of one, as `8x3x32x32` on the command line."""
    if isinstance(batch, str):
        return re.fullmatch(r"\d+(x\d+)+", batch) is not None
    return isinstance(batch, (tuple, list)) and len(batch) > 0 and all(isinstance(size, int) for size in batch)


def _annotated(tensor: TensorMeasurement, structure: Structure) -> TensorMeasurement:
    """The measurement with a note on the normalisation that follows, if one does."""
    norm = structure.followed.get(tensor.path)
    if norm is None or tensor.status != "measured":
        return tensor
    free = ": the function does not depend on its norm" if tensor.path in structure.invariant else ""
    return replace(tensor, notes=(*tensor.notes, f"followed by {norm}{free}"))


def _measured(
    source: Source, base: Source | None, extra_figures: ExtraFigures, deep: bool, numbers: Sequence[int]
) -> list[TensorMeasurement]:
    """These tensors of a file, on a worker."""
    entries = contents_of(source, base).entries
    made = {
        n: row
        for part, rows in _rows(entries, numbers, extra_figures, deep=deep)
        for n, row in zip(part, rows, strict=True)
    }
    return [made[number] for number in numbers]


def _rows(
    entries: Sequence[TensorEntry], numbers: Sequence[int], extra_figures: ExtraFigures, *, deep: bool
) -> Iterator[tuple[list[int], list[TensorMeasurement]]]:
    """The rows of these tensors, part by part."""
    for part in alike(entries, numbers):
        yield part, measure_tensors([entries[n] for n in part], extra_figures=extra_figures, deep=deep)
