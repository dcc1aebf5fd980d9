"""What `gonio measure` computes, piece by piece and on whole models.

Spectra and pairs are held against the product that they cannot do without, one Gram matrix of the filters; whole
models against the Gram matrices of all their weights. WeightWatcher (`pip install weightwatcher`) is
left out where it is not installed; its power-law fits are part of what it does, as angles, norms and the trace of
the model's graph are of what `measure` does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

import scipy.linalg
import torch
from torch import Tensor, nn

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.large_networks import Layer, ResNet50, VisionTransformer
from benchmarks.shapes import TINY, resnet50, weights
from gonio.geometry import singular_values, spectral_norm
from gonio.geometry.lanczos import largest_singular_value
from gonio.geometry.pairs import pair_statistics
from gonio.geometry.spectra import spectrum_estimate

TITLE = "Measuring"
FLOOR = (
    "spectra and models: the Gram matrix of the smaller side of every weight in float64; largest and pairs: one Gram "
    "matrix in float32"
)
SIDE = 4096
PEER = "WeightWatcher"
Shape = tuple[int, ...]
Work = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def matrices(shapes: Sequence[Shape]) -> list[Tensor]:
    """The filters of each weight, flattened."""
    return [weight.detach().flatten(1) for weight in weights(shapes)]


def _candidate(name: str, shapes: Sequence[Shape], work: Work) -> Candidate:
    def make() -> Operation:
        inputs = matrices(shapes)

        def operation() -> Sequence[Tensor]:
            with torch.no_grad():
                return work(inputs)

        return operation

    return Candidate(name, make)


def grams(inputs: Sequence[Tensor]) -> list[Tensor]:
    wide = (w.double() for w in inputs)
    return [w @ w.mT if len(w) <= w.shape[1] else w.mT @ w for w in wide]


def decomposed(inputs: Sequence[Tensor]) -> list[Tensor]:
    """LAPACK in float64, as WeightWatcher calls it where there is no CUDA."""
    return [torch.from_numpy(scipy.linalg.svd(w.double().numpy(), compute_uv=False)) for w in inputs]


def decomposed_by_torch(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The LAPACK of torch's own build."""
    return [torch.linalg.svdvals(w.double()) for w in inputs]


def measured(inputs: Sequence[Tensor]) -> list[Tensor]:
    """What `measure` does with a weight."""
    found = [spectrum_estimate(w[None], name="w").values for w in inputs]
    return [values.sort(descending=True).values for values in found if values is not None]


def exact(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [singular_values(w).double() for w in inputs]


def spectra(*, quick: bool) -> Iterator[Row]:
    """All singular values."""
    cases = {"tiny": TINY} if quick else {"ResNet-50": tuple(resnet50()), "768×3072": ((768, 3072),)}
    for case, shapes in cases.items():
        peers = (*_decompositions(shapes), _candidate("gonio, measure", shapes, measured))
        yield Row(case, "F", _candidate("Gram", shapes, grams), peers, "spectra")
    side = 12 if quick else SIDE  # measure itself takes the largest value alone here
    one = ((side, side),)
    peers = (*_decompositions(one), _candidate("gonio, all values", one, exact))
    yield Row(f"{side}×{side}", "F", _candidate("Gram", one, grams), peers, "spectra")


def _decompositions(shapes: tuple[tuple[int, ...], ...]) -> tuple[Candidate, Candidate]:
    return _candidate("SciPy's SVD", shapes, decomposed), _candidate("torch's SVD", shapes, decomposed_by_torch)


def largest(*, quick: bool) -> Iterator[Row]:
    """The largest singular value alone; the first candidate's error is rounding."""
    for shape in ((12, 12),) if quick else ((SIDE, SIDE), (11008, SIDE)):
        peers: dict[str, Work] = {
            "gonio, 256 steps": lambda inputs: [spectral_norm(inputs[0], steps=256)],
            "gonio, 48 steps": lambda inputs: [spectral_norm(inputs[0], steps=48)],
            "gonio, 24 steps": lambda inputs: [spectral_norm(inputs[0], steps=24)],
            "gonio, measure": lambda inputs: [torch.tensor(largest_singular_value(inputs[0], name="w"))],
        }
        candidates = tuple(_candidate(name, (shape,), work) for name, work in peers.items())
        yield Row("×".join(map(str, shape)), "F", _candidate("Gram", (shape,), _gram), candidates, "largest")


def _gram(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return [inputs[0] @ inputs[0].mT]


def whole(inputs: Sequence[Tensor]) -> list[Tensor]:
    """All pairs at once: cosines, angles and their histogram."""
    unit = torch.nn.functional.normalize(inputs[0], dim=1)
    n = len(unit)
    rows, columns = torch.triu_indices(n, n, 1)
    cosines = (unit @ unit.mT)[rows, columns]
    angles = torch.rad2deg(torch.acos(cosines.clamp(-1, 1)))
    histogram = torch.histc(angles, 180, 0, 180)
    figures = [angles.mean(), angles.std(correction=0), cosines.square().mean(), cosines.abs().max()]
    return [torch.stack([figure.double() for figure in figures]), histogram.double().cumsum(0)]


def blocked(inputs: Sequence[Tensor]) -> list[Tensor]:
    found = pair_statistics(inputs[0][None], name="w")
    if found is None:
        return []
    figures = [found.angle_mean, found.angle_std, found.mean_square_cosine, found.coherence]
    histogram = torch.tensor(found.histogram, dtype=torch.float64)
    return [torch.tensor(figures, dtype=torch.float64), histogram.cumsum(0)]


def pairs(*, quick: bool) -> Iterator[Row]:
    """Angles between all pairs of filters."""
    for shape in ((12, 12),) if quick else ((SIDE, SIDE), (1000, 2048)):
        peers = (_candidate("all at once", (shape,), whole), _candidate("gonio, measure", (shape,), blocked))
        yield Row("×".join(map(str, shape)), "F", _candidate("Gram", (shape,), _gram), peers, "pairs")


def models(*, quick: bool) -> Iterator[Row]:
    """Everything that is said of a model."""
    cases: dict[str, Callable[[], nn.Module]] = {
        "ResNet-50": ResNet50,
        "ViT-B": VisionTransformer,
        "1 of 20 layers of a 1 B transformer": lambda: nn.Sequential(Layer(2048, 16)),
    }
    if quick:
        cases = {"tiny ResNet": lambda: ResNet50(4, (1, 1), 3)}
    for case, build in cases.items():
        peers = [_on_model("gonio", build, gonio.measure), _eigenvalues(build)]
        if importlib.util.find_spec("weightwatcher") is not None:
            peers.append(_on_model("WeightWatcher", build, analysed, slow=True))
        yield Row(case, "F", _on_model("Gram", build, _all_grams), tuple(peers), "models")


def _all_grams(model: nn.Module) -> list[Tensor]:
    return grams([p.detach().flatten(1) for p in model.parameters() if p.ndim > 1])


def _eigenvalues(build: Callable[[], nn.Module]) -> Candidate:
    """Of the matrices of the floor, which are known: what all singular values cost beside it."""

    def make() -> Operation:
        torch.manual_seed(0)
        known = _all_grams(build())

        def operation() -> Sequence[Tensor]:
            for gram in known:
                torch.linalg.eigvalsh(gram)
            return []

        return operation

    return Candidate("their eigenvalues", make)


def analysed(model: nn.Module) -> object:
    """WeightWatcher's default analysis, silenced."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import weightwatcher

            return weightwatcher.WeightWatcher(model=model).analyze()
    finally:
        logging.disable(logging.NOTSET)


def _on_model(
    name: str, build: Callable[[], nn.Module], work: Callable[[nn.Module], object], *, slow: bool = False
) -> Candidate:
    def make() -> Operation:
        torch.manual_seed(0)
        model = build().eval()

        def operation() -> Sequence[Tensor]:
            work(model)
            return []  # other figures each

        return operation

    return Candidate(name, make, compiled=slow)


def rows(*, quick: bool) -> Iterator[Row]:
    """Pieces, then models."""
    if importlib.util.find_spec("weightwatcher") is None:
        print("weightwatcher is not installed: its candidates are left out", file=sys.stderr)
    for part in (spectra, largest, pairs, models):
        yield from part(quick=quick)
