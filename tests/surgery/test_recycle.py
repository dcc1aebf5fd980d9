"""`gonio.recycle_`: dead and duplicate filters are drawn anew, and the function stays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gonio


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model: nn.Module) -> nn.Module:
    """A model in float64 whose parameters and statistics are away from their initial values."""
    model.double().eval()
    with torch.no_grad():
        for seed, tensor in enumerate(model.parameters()):
            tensor.copy_(0.3 * seeded(*tensor.shape, seed=seed) + (tensor.dim() == 1) * 0.4)
        for seed, tensor in enumerate(model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.3 * seeded(*tensor.shape, seed=seed)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_var.abs_().add_(0.1)
    return model


def convolutions(*, padding: int = 0, bias: bool = True, norm: bool = False, act: nn.Module | None = None) -> nn.Module:
    between = [nn.BatchNorm2d(6)] if norm else []
    last = nn.Conv2d(6, 5, 3, padding=padding, bias=bias)
    features = 5 * (4 + 2 * padding) ** 2
    head = (nn.ReLU(), nn.Flatten(), nn.Linear(features, 4))
    return filled(nn.Sequential(nn.Conv2d(3, 6, 3), *between, act or nn.ReLU(), last, *head))


def mlp(act: nn.Module | None = None) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(12, 8), act or nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)))


def convolution_and(*layers: nn.Module) -> nn.Module:
    return filled(nn.Sequential(nn.Conv2d(3, 6, 3), *layers))


class Twice(nn.Module):
    """One layer that runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


IMAGES, ROWS = seeded(4, 3, 8, 8, seed=9), seeded(6, 12, seed=9)


def kill(model: nn.Module, layer: int = 0, row: int = 1) -> None:
    with torch.no_grad():
        model[layer].weight[row] = 0


def copy_filter(model: nn.Module, factor: float = 1.0, *, bias: float | None = None) -> None:
    """Filter 4 of the first layer becomes a multiple of filter 2."""
    with torch.no_grad():
        model[0].weight[4] = factor * model[0].weight[2]
        model[0].bias[4] = (factor if bias is None else bias) * model[0].bias[2]


def outgoing(model: nn.Module, channel: int) -> Tensor:
    """What the next weighted layer reads of a channel."""
    reader = [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))][1]
    return reader.weight[:, channel]


def same_output(before: nn.Module, after: nn.Module, x: Tensor) -> bool:
    return torch.allclose(before(x), after(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [mlp, convolutions, lambda: convolutions(norm=True), lambda: mlp(nn.GELU())])
def test_a_dead_filter_is_drawn_anew_and_nothing_else_changes(make: Callable[[], nn.Module]) -> None:
    model = make()
    kill(model)
    x = ROWS if isinstance(model[0], nn.Linear) else IMAGES
    before = copy.deepcopy(model)
    edited = gonio.recycle_(model, example=x)
    assert same_output(before, model, x)
    assert not outgoing(model, 1).any()
    norms = before[0].weight.detach().flatten(1).norm(dim=1)
    expected = norms[[0, *range(2, len(norms))]].median()
    assert float(model[0].weight[1].detach().norm()) == pytest.approx(float(expected), rel=1e-12)
    assert not model[0].bias[1]
    kept = [row for row in range(len(norms)) if row != 1]
    assert torch.equal(model[0].weight[kept], before[0].weight[kept])
    edited.undo_()
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )


def test_its_new_weights_train() -> None:
    """The gradient of the outgoing weights is that of a live filter; before, neither side of a dead filter had one."""
    model = mlp()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0
    model(ROWS).square().sum().backward()
    assert not model[2].weight.grad[:, 1].any()
    gonio.recycle_(model)
    model.zero_grad()
    model(ROWS).square().sum().backward()
    assert model[2].weight.grad[:, 1].any()


def test_the_constant_of_a_dead_filter_moves_to_the_next_bias() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 2.5
    expected = model[2].bias + 2.5 * model[2].weight[:, 1]
    gonio.recycle_(model)
    assert torch.allclose(model[2].bias, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.2)])
def test_a_duplicate_is_merged(factor: float, act: nn.Module) -> None:
    model = mlp(act)
    copy_filter(model, factor)
    before = copy.deepcopy(model)
    edited = gonio.recycle_(model, example=ROWS)
    assert str(edited).splitlines()[1].split(maxsplit=1)[1] == "filter 4 merged into 2 and drawn anew"
    assert same_output(before, model, ROWS)
    assert torch.allclose(outgoing(model, 2), outgoing(before, 2) + factor * outgoing(before, 4), rtol=1e-13)
    cosine = torch.cosine_similarity(model[0].weight[2], model[0].weight[4], dim=0)
    assert abs(cosine.item()) < 0.95


def test_all_copies_of_a_filter_are_merged() -> None:
    model = mlp()
    with torch.no_grad():
        for row in (3, 4, 7):
            model[0].weight[row], model[0].bias[row] = model[0].weight[2], model[0].bias[2]
    before = copy.deepcopy(model)
    gonio.recycle_(model)
    assert same_output(before, model, ROWS)
    assert torch.allclose(outgoing(model, 2), before[2].weight[:, [2, 3, 4, 7]].sum(1), rtol=1e-13)


def test_an_opposite_filter_is_merged_where_nothing_lies_between() -> None:
    model = filled(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)))
    copy_filter(model, -2.0)
    before = copy.deepcopy(model)
    gonio.recycle_(model)
    assert same_output(before, model, ROWS)


@pytest.mark.parametrize(
    ("act", "factor", "bias"),
    [(nn.ReLU(), -1.0, None), (nn.GELU(), 2.0, None), (nn.Tanh(), -1.0, None), (nn.ReLU(), 1.0, 0.5)],
)
def test_what_is_no_multiple_behind_the_activation_stays(act: nn.Module, factor: float, bias: float | None) -> None:
    model = mlp(act)
    copy_filter(model, factor, bias=bias)
    before = copy.deepcopy(model)
    with pytest.raises(gonio.GonioError, match="filters 0 4: behind the layers that follow, its output is no multiple"):
        gonio.recycle_(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_copies_behind_a_batch_norm_are_compared_behind_it() -> None:
    model = convolutions(norm=True)
    copy_filter(model)
    with pytest.raises(gonio.GonioError, match="no multiple"):
        gonio.recycle_(copy.deepcopy(model))
    with torch.no_grad():
        for tensor in (*model[1].parameters(), model[1].running_mean, model[1].running_var):
            tensor[4] = tensor[2]
        model[1].weight[4] *= 2
        model[1].bias[4] *= 2
    before = copy.deepcopy(model)
    gonio.recycle_(model, example=IMAGES)
    assert same_output(before, model, IMAGES)
    assert torch.allclose(outgoing(model, 2), outgoing(before, 2) + 2 * outgoing(before, 4), rtol=1e-10)


def test_a_batch_norm_starts_anew_with_the_statistics_of_the_example() -> None:
    model = convolutions(norm=True)
    kill(model)
    gonio.recycle_(model, example=IMAGES)
    y = model[0](IMAGES)[:, 1].detach()
    assert model[1].running_mean[1].item() == pytest.approx(y.mean().item(), rel=1e-9)
    assert model[1].running_var[1].item() == pytest.approx(y.var().item(), rel=1e-9)
    assert [model[1].weight[1].item(), model[1].bias[1].item()] == [1, 0]
    without = convolutions(norm=True)
    kill(without)
    edited = gonio.recycle_(without)
    assert (float(without[1].running_mean[1]), float(without[1].running_var[1])) == (0, 1)
    assert any("pass example=, or use calibrate_" in note for note in edited.notes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: convolutions(padding=1, act=nn.Sigmoid()), r"the constant 0\.\d+, which is cut off at the edges"),
        (lambda: convolutions(bias=False, act=nn.Sigmoid()), r"the constant 0\.\d+, and 2 has no bias for it"),
        (lambda: convolution_and(nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 2, 3)), "GroupNorm"),
        (lambda: convolution_and(nn.ReLU()), "it is the model's output"),
        (lambda: convolution_and(nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6)), "filters of 2 have no weight left"),
        (
            lambda: convolution_and(nn.Sigmoid(), nn.AvgPool2d(2, padding=1), nn.Conv2d(6, 2, 1)),
            "not the same everywhere",
        ),
        (
            lambda: convolution_and(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Twice()),
            "layer runs more than once",
        ),
    ],
)
def test_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    model = make()
    kill(model)
    before = copy.deepcopy(model)
    with pytest.raises(gonio.GonioError, match=rf"recycle_: cannot recycle filters of the model: filters 0 1: .*{why}"):
        gonio.recycle_(model)
    assert same_output(before, model, IMAGES)


def test_zero_is_no_constant_at_an_edge() -> None:
    model = convolutions(padding=1, bias=False)
    kill(model)
    with torch.no_grad():
        model[0].bias[1] = -1
    before = copy.deepcopy(model)
    gonio.recycle_(model, example=IMAGES)
    assert same_output(before, model, IMAGES)


class Residual(nn.Module):
    """A block of two layers, whose first one alone can be recycled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x + self.b(torch.relu(self.a(x))))


def test_in_a_residual_block_the_inner_layer_alone() -> None:
    model = filled(Residual())
    with torch.no_grad():
        model.a.weight[3], model.b.weight[5] = 0, 0
    before = copy.deepcopy(model)
    edited = gonio.recycle_(model, example=ROWS)
    assert [change.path for change in edited.changes] == ["a"]
    assert any("filters b 5 stay: add (add) reads its output" in note for note in edited.notes)
    assert same_output(before, model, ROWS)
    with pytest.raises(gonio.GonioError, match="filters b 5: add"):
        gonio.recycle_(before, where="b")


def test_dead_layers_that_follow_each_other() -> None:
    model = mlp()
    kill(model, 0, 1)
    kill(model, 2, 5)
    before = copy.deepcopy(model)
    assert [change.path for change in gonio.recycle_(model, example=ROWS).changes] == ["0", "2"]
    assert same_output(before, model, ROWS)


def test_groups_and_transposed_convolutions() -> None:
    model = filled(
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.ReLU(),
                      nn.ConvTranspose2d(4, 4, 3, groups=2))
    )  # fmt: skip
    with torch.no_grad():
        model[0].weight[2:, 1] = 0  # filter 4, of the second group
        model[0].bias[4] = 0.7
        model[2].weight[3] = 2 * model[2].weight[2]
        model[2].bias[3] = 2 * model[2].bias[2]
    x, before = seeded(2, 4, 6, 6), copy.deepcopy(model)
    edited = gonio.recycle_(model, example=x)
    assert ["4" in edited.changes[0].what, "3 merged into 2" in edited.changes[1].what] == [True, True]
    assert same_output(before, model, x)
    assert model[0].weight[2:, 1].any()
    assert not model[2].weight[2, 1].any()  # filter 3 was drawn anew itself


def test_weak_filters_are_recycled_where_it_is_asked_for() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[1] *= 1e-6
    assert not gonio.recycle_(copy.deepcopy(model)).changes
    edited = gonio.recycle_(model, example=ROWS, weak=1e-3)
    assert [change.what for change in edited.changes] == ["filter 1 drawn anew"]
    assert any("largest deviation" in note for note in edited.notes)
    with pytest.raises(gonio.GonioError, match=r"takes 0 <= weak < 1; found 1\.5"):
        gonio.recycle_(model, weak=1.5)


def test_nothing_to_do_is_said() -> None:
    edited = gonio.recycle_(mlp())
    assert (edited.changes, edited.notes) == ((), ("no filter is 0 or proportional to another one",))


def test_filters_of_one_number_are_all_proportional_and_no_duplicates() -> None:
    assert not gonio.recycle_(filled(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2)))).changes


def test_a_layer_without_live_filters_is_left_alone() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.zero_()
    assert not gonio.recycle_(model).changes
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
        model[2].weight[1] = 0
    assert not gonio.recycle_(model).changes


def test_the_seed_decides() -> None:
    rows = []
    for seed in (0, 0, 1):
        model = mlp()
        kill(model)
        gonio.recycle_(model, seed=seed)
        rows.append(model[0].weight[1])
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


class TrainingOnly(nn.Module):
    """In training an auxiliary head reads the hidden channels too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        return self.b(hidden) + self.aux(hidden) if self.training else self.b(hidden)


def test_a_layer_that_is_read_in_training_only() -> None:
    model = filled(TrainingOnly())
    with torch.no_grad():
        model.a.weight[1] = 0
    with pytest.raises(gonio.GonioError, match="used differently in training and in evaluation"):
        gonio.recycle_(model)


@pytest.mark.parametrize("verb", [gonio.recycle_, gonio.balance_, gonio.fold_])
def test_a_layer_at_rest_that_may_read_the_channels_keeps_them(verb: Callable[..., gonio.Edited]) -> None:
    class WithAux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
            self.aux, self.use_aux = nn.Conv2d(6, 2, 1), False

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            read = self.conv(x) if verb is gonio.fold_ else torch.relu(self.conv(x))
            out = self.last(torch.relu(self.norm(read)) if verb is gonio.fold_ else read)
            return (out, self.aux(read)) if self.use_aux else (out,)

    model = filled(WithAux())
    with torch.no_grad():
        model.conv.weight[3] = 0
    x = seeded(2, 3, 8, 8)
    model.use_aux = True
    before = model(x)
    model.use_aux = False
    if verb is gonio.fold_:
        assert "norm stays: aux does not run, and may read the output of its layer" in str(verb(model))
    else:
        with pytest.raises(gonio.errors.NotApplicableError, match="aux does not run, and may read the output of its"):
            verb(model)
    model.use_aux = True
    assert all(torch.equal(a, b) for a, b in zip(before, model(x), strict=True))
