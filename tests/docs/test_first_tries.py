"""What the author of each source would type first, as it is typed, and what he looks for on the first page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from docs.pages import ROOT
from gonio import geometry, init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.nn import angular, magnitude
from gonio.seeding import generator


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    source = generator(0, "first tries")
    return torch.randn(32, 1, 8, 8, generator=source), torch.randint(10, (32,), generator=source)


def trained(model: nn.Module, batch: tuple[Tensor, Tensor], penalty: gonio.Penalty | None = None) -> list[float]:
    """The losses of some steps of a training loop of one's own."""
    x, y = batch
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(8):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        total = loss + penalty() if penalty else loss
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return losses


def test_self_orthogonality(batch: tuple[Tensor, Tensor]) -> None:
    """000: the paper's form as it is offered leaves the task its course, and at the strength 1 it does not."""

    def lasts(*terms: R.SelfOrthogonality) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = gonio.models.digits_cnn()
        penalty = gonio.Penalty(model, [(nn.Conv2d, term) for term in terms]) if terms else None
        return trained(model, batch, penalty)[-1]

    plain = lasts()
    assert lasts(R.SelfOrthogonality.paper()) == pytest.approx(plain, rel=0.02)
    assert lasts(R.SelfOrthogonality.paper(1.0)) > 1.1 * plain
    assert torch.allclose(geometry.sign_similarity(torch.eye(3)), torch.eye(3), atol=1e-6)


def test_weissi(batch: tuple[Tensor, Tensor]) -> None:
    """001: the paper's form, the least sum of squares, and the network that has it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    losses = trained(model, batch, gonio.Penalty(model, [(nn.Linear, R.ScaleShift.paper(1e-3, 1e-5))]))
    assert losses[-1] < losses[0]
    weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
    least = float(geometry.least_scale(weights))
    before = model(batch[0]).detach()
    gonio.balance_(model, example=batch[0], level="layer")
    assert torch.allclose(model(batch[0]).detach(), before, rtol=1e-4, atol=1e-5)
    assert float(sum(w.detach().square().sum() for w in weights)) == pytest.approx(least, rel=1e-4)


def test_norms(batch: tuple[Tensor, Tensor]) -> None:
    """002: swap one norm for another, calibrate it, and train with spectral norm, which needs no further call."""
    layer_norm = {"groups": 1}
    for factory, options in ((gnn.to_group_norm, {}), (gnn.to_group_norm, layer_norm), (gnn.to_instance_norm, {})):
        model = gonio.models.digits_cnn()
        gonio.swap_(model, factory, where=nn.BatchNorm2d, **options)
        assert np.isfinite(trained(model, batch)).all()
    model = gonio.models.digits_cnn()
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    trained(model, batch)
    gonio.calibrate_(model, [batch[0]])
    gonio.parametrize_(model, P.SpectralNorm(), where=nn.Conv2d)
    trained(model, batch)
    norms = [float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))
             for layer in model.modules() if isinstance(layer, nn.Conv2d)]  # fmt: skip
    assert norms == pytest.approx([1.0] * len(norms), rel=0.02)


@pytest.mark.parametrize(
    "function",
    [magnitude.Sphere(), magnitude.Ball(), magnitude.Tanh(), magnitude.Linear(), magnitude.Segmented(),
     magnitude.Logarithm(), magnitude.Mixed()],
    ids=lambda function: type(function).__name__,
)  # fmt: skip
def test_decoupled_networks(function: magnitude.Magnitude, batch: tuple[Tensor, Tensor]) -> None:
    """003: any operator in an existing network, its weights projected, and back again."""
    model = gonio.models.digits_cnn()
    before = model.eval()(batch[0]).detach()
    edit = gonio.swap_(
        model, gnn.DecoupledConv2d.from_conv, where="conv[23]", magnitude=function, angular=angular.Cosine()
    )
    gnn.project_weights_(model).undo_()
    assert np.isfinite(trained(model.train(), batch)).all()
    edit.undo_()
    assert model.eval()(batch[0]).shape == before.shape


def test_five_lines_of_numpy() -> None:
    """004: the check of the article, and the same figure from its array."""
    n = 100
    W = np.random.default_rng(0).standard_normal((n, n)) / np.sqrt(n)
    X = np.dot(W.T, W)
    by_hand = np.square(X - np.eye(n)).mean()
    assert float(geometry.orthogonality_defect(W).entrywise) == pytest.approx(by_hand)


def test_the_strategy_of_the_geometric_view() -> None:
    """004: all biases 0, orthogonal weights: 50 layers keep the norm of every input."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(50)]).double()
    gonio.init_(model, init.orthogonal_)
    x = torch.randn(16, 64, dtype=torch.float64, generator=generator(0))
    assert (model(x).norm(dim=1) / x.norm(dim=1)).tolist() == pytest.approx([1.0] * 16)


METHODS = {
    "Self-Orthogonality": "angular-regularisation.md",
    "WEISSI": "scale-shift-invariant.md",
    "Switchable": "normalisation.md",
    "decoupled networks": "decoupled.md",
    "initialisation": "initialisation.md",
}


@pytest.mark.parametrize(("word", "page"), METHODS.items(), ids=METHODS)
@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_reader_of_an_article_finds_its_row_on_the_first_screen(word: str, page: str, name: str) -> None:
    """One row with the article, the method's page, one line of code and a verdict, within the first 40 lines."""
    rows = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines()[:40] if line.startswith("| ")]
    row = next(line for line in rows if page in line)
    words = {"initialisation": "初始化", "decoupled networks": "解耦"} if "zh" in name else {}
    assert words.get(word, word).lower() in row.lower()
    assert "gonio." in row
    assert "#" in row.split("|")[-2]  # the verdict links its claim
