"""`calibrate_` against hand-written averages, in one process and in two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.measuring import measure
from gonio.surgery import calibrate_
from ranks import WORLD, spawned
from surgery.net import compiled_in_place
from surgery.processes import CALIBRATED, REFUSED, buffers, joined, prepared
from surgery.processes import calibrated as in_both
from tolerances import close, exact

BATCHES = [seeded(8, 3, 4, 4, seed=1), 3 + 2 * seeded(4, 3, 4, 4, seed=2), seeded(2, 3, 4, 4, seed=3)]


def rows(batch):
    return batch.double().transpose(0, 1).flatten(1)


def calibrated(norm: nn.Module, batches, **options) -> nn.Module:
    calibrate_(nn.Sequential(norm), batches, **options)
    return norm


def test_total_is_the_variance_of_all_values_together():
    norm = calibrated(nn.BatchNorm2d(3), BATCHES)
    everything = torch.cat([rows(batch) for batch in BATCHES], 1)
    torch.testing.assert_close(norm.running_mean.double(), everything.mean(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm.running_var.double(), everything.var(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("buffer", "value"), [("running_mean", torch.nan), ("running_var", -1.0), ("running_var", torch.inf)]
)
def test_invalid_channels_alone(buffer: str, value: float) -> None:
    norm, everything = nn.BatchNorm2d(3), calibrated(nn.BatchNorm2d(3), BATCHES)
    norm.running_mean.copy_(torch.tensor([7.0, 8.0, 9.0]))
    norm.get_buffer(buffer)[1] = value
    before = copy.deepcopy(norm)
    edited = calibrate_(nn.Sequential(norm), BATCHES, channels="invalid")
    assert edited.changes[0].what.endswith("values per channel, in 1 of 3 channels")
    for name in ("running_mean", "running_var"):
        old, new, measured = (each.get_buffer(name) for each in (before, norm, everything))
        assert torch.equal(new[[0, 2]], old[[0, 2]])
        assert torch.equal(new[1], measured[1])


def test_mean_is_the_average_of_the_batches_variances_weighted_by_their_size():
    norm = calibrated(nn.BatchNorm2d(3), BATCHES, variance="mean")
    n = torch.tensor([rows(batch).shape[1] for batch in BATCHES]).double()
    each = torch.stack([rows(batch).var(1) for batch in BATCHES])
    torch.testing.assert_close(norm.running_var.double(), (n / n.sum()) @ each, rtol=1e-6, atol=0)


def test_a_mean_far_above_the_spread_costs_no_digits():
    """Sums of squares about 0 would leave two digits of the variance of the batches' means."""
    batches = [(1e7 + 1e-3 * (k + seeded(8, 3, 4, 4, seed=k, dtype=torch.float64))) for k in range(3)]
    norm = calibrated(nn.BatchNorm2d(3).double(), batches)
    everything = torch.cat([rows(batch) for batch in batches], 1) - 1e7
    torch.testing.assert_close(norm.running_var, everything.var(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.running_mean - 1e7, everything.mean(1), rtol=0, atol=1e-8)


def test_one_batch_then_eval_equals_training_mode_up_to_the_unbiased_factor():
    """torch normalises by the biased variance in training and stores the unbiased one: n/(n − 1) larger."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-12))
    x, n = BATCHES[0], 8 * 2 * 2
    expected = model(x) * ((n - 1) / n) ** 0.5
    calibrate_(model, [x])
    torch.testing.assert_close(model.eval()(x), expected, **close(torch.float32))


def test_later_layers_see_what_they_saw_in_training():
    """The second layer's input is normalised by each batch's own statistics, not by old running ones."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[0].running_mean.fill_(50.0)
    calibrate_(model, BATCHES)
    torch.testing.assert_close(model[1].running_mean, torch.zeros(3), rtol=0, atol=1e-5)


def test_modes_and_counters_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5)).eval()
    model[1].train()
    calibrate_(model, BATCHES)
    assert (model[0].training, model[1].training) == (False, True)
    assert model[0].num_batches_tracked == 0


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_average_of_a_switchable_norm(dims):
    """Evaluation on one batch equals training on it; several batches give their hand-written average."""
    batches = [(k + (1 + k) * seeded(n, 3, *[4] * dims, seed=k)).double() for k, n in enumerate((8, 4, 2))]
    norm = getattr(gnn, f"SwitchableNorm{dims}d")(3).double()
    with torch.no_grad():
        norm.mean_logits.copy_(torch.tensor([0.2, -0.4, 1.0]))
    model = nn.Sequential(norm)
    expected = model(batches[0])
    calibrate_(model, batches[:1])
    torch.testing.assert_close(model.eval()(batches[0]), expected, **close(torch.float32))  # buffers are float32

    n = torch.tensor([rows(batch).shape[1] for batch in batches]).double()
    share = n / n.sum()
    means = torch.stack([rows(batch).mean(1) for batch in batches])
    variances = torch.stack([rows(batch).var(1, correction=0) for batch in batches])
    for variance in ("mean", "total"):
        calibrate_(model, batches, variance=variance)
        spread = share @ (means - share @ means).square() if variance == "total" else 0
        torch.testing.assert_close(norm.running_mean.double(), share @ means, **exact(torch.float32))
        torch.testing.assert_close(norm.running_var.double(), share @ variances + spread, **exact(torch.float32))


def test_the_batches_of_an_instance_norm_are_its_samples():
    x = torch.arange(1.0, 5)[:, None, None, None] * (1 + seeded(4, 3, 5, 5))
    torchs = nn.InstanceNorm2d(3, track_running_stats=True, momentum=1.0)
    torchs(x)
    for batches in ([x[:1], x[1:]], list(x)):  # one sample each, without the dimension of the batch
        norm = calibrated(nn.InstanceNorm2d(3, track_running_stats=True), batches, variance="mean")
        torch.testing.assert_close(norm.running_mean, torchs.running_mean)
        torch.testing.assert_close(norm.running_var, torchs.running_var)


def test_one_batch_with_nan_is_found_and_repaired():
    """It stays in running statistics for ever; measuring says where, calibrating replaces them."""
    for norm in (nn.BatchNorm2d(3), gnn.SwitchableNorm2d(3)):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
        spoilt = BATCHES[0].clone()
        spoilt[2, 1, 0, 0] = float("nan")
        for batch in (BATCHES[0], spoilt, *BATCHES):
            model(batch)
        assert {("G001", "1.running_mean"), ("G001", "1.running_var")} <= {
            (finding.code, finding.path) for finding in measure(model).findings
        }
        calibrate_(model, BATCHES)
        assert measure(model).findings == ()
        assert bool(model.eval()(BATCHES[0]).isfinite().all())
        with pytest.raises(NotApplicableError, match="its statistics are not finite"):
            calibrate_(model, [spoilt])


def test_after_averaging_weights_it_does_what_update_bn_does_for_batch_norms_alone():
    batches = [3 + seeded(4, 3, 5, 5, seed=k) for k in range(3)]
    for norm in (nn.BatchNorm2d(3), gnn.SwitchableNorm2d(3)):
        averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(norm))
        calibrated = copy.deepcopy(averaged)
        calibrate_(calibrated, batches, variance="mean")
        torch.optim.swa_utils.update_bn(batches, averaged)
        found, expected = averaged.module[0].running_mean, calibrated.module[0].running_mean
        assert torch.allclose(found, expected, rtol=1e-5) == isinstance(norm, nn.BatchNorm2d)
        torch.testing.assert_close(expected, torch.cat(batches).mean((0, 2, 3)))


def test_a_layer_may_get_its_input_by_name() -> None:
    model = nn.Module()
    model.norm = nn.BatchNorm2d(3)
    model.forward = lambda x: model.norm(input=x)
    calibrate_(model, BATCHES)
    assert not torch.equal(model.norm.running_mean, torch.zeros(3))


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), compiled_in_place, nn.DataParallel])
def test_wrapped_models_are_calibrated_as_the_plain_one(wrap) -> None:
    expected, model = (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))
    calibrate_(expected, BATCHES)
    wrapped = wrap(model)
    with torch.no_grad():
        wrapped.eval()(BATCHES[0])  # compiled before the hooks are set
    calibrate_(wrapped, BATCHES)
    torch.testing.assert_close(model[0].running_mean, expected[0].running_mean)
    torch.testing.assert_close(model[0].running_var, expected[0].running_var)


def test_empty_batches_count_nothing():
    found = calibrated(gnn.SwitchableNorm2d(3), [BATCHES[0], BATCHES[1][:0]])
    assert torch.equal(found.running_var, calibrated(gnn.SwitchableNorm2d(3), BATCHES[:1]).running_var)


@pytest.mark.parametrize(
    ("norm", "batches", "options", "error", "message"),
    [
        (nn.BatchNorm2d(3), [], {}, InvalidArgumentError, "averages over batches; found no batch"),
        (nn.BatchNorm2d(3), BATCHES[:1], {"variance": "median"}, InvalidArgumentError, 'variance="total" or "mean"'),
        (nn.BatchNorm2d(3), BATCHES[:1], {"channels": "bad"}, InvalidArgumentError, 'channels="all" or "invalid"'),
        (nn.LayerNorm(3), BATCHES[:1], {}, NoMatchError, "it keeps no running statistics"),
        (gnn.SwitchableNorm2d(3), [BATCHES[1][:0]], {}, NotApplicableError, "it saw no values"),
    ],
)
def test_nothing_to_average_or_nowhere_to_put_it(norm, batches, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        calibrate_(nn.Sequential(norm), batches, **options)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_both, tmp_path_factory.mktemp("calibrate"))


@pytest.mark.slow
@pytest.mark.parametrize("variance", ["total", "mean"])
@pytest.mark.parametrize("name", CALIBRATED)
def test_several_processes_equal_one(ranks: list[dict[str, Any]], name: str, variance: str) -> None:
    model = prepared(name)
    calibrate_(model, joined(name), variance=variance)
    for rank in ranks:
        for key, value in buffers(model).items():
            torch.testing.assert_close(rank[name][variance][key], value, **exact(torch.float32))


@pytest.mark.slow
def test_without_joining_the_average_variance_is_that_of_smaller_batches(ranks: list[dict[str, Any]]) -> None:
    """Negative control: batches of one process alone spread less than those of both together."""
    model = prepared("joined")
    calibrate_(model, [*joined("joined")[0].split((5, 1)), *joined("joined")[1].split((2, 3))], variance="mean")
    found = ranks[0]["joined"]["mean"]["0.running_var"]
    assert bool((found > 1.1 * buffers(model)["0.running_var"]).all())


@pytest.mark.slow
def test_what_would_wait_for_ever_is_refused_in_every_process(ranks: list[dict[str, Any]]) -> None:
    more = WORLD - 1
    for rank in ranks:
        assert all(rank[name].startswith("InvalidArgumentError: ") for name in REFUSED)
        message = f"needs as many batches in each; found {more} processes with one more batch than the other 1"
        assert message in rank["joined, numbers differ"]
        assert "averages over batches; found no batch" in rank["no batch at all"]


class NormAndDropout(nn.BatchNorm1d):
    """A norm with a dropout of its own, as timm's may have."""

    def __init__(self) -> None:
        super().__init__(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


def test_a_dropout_inside_a_norm_is_off() -> None:
    torch.manual_seed(0)
    first, last = NormAndDropout(), nn.BatchNorm1d(4)
    x = 3 * torch.randn(64, 4) + 1
    calibrate_(nn.Sequential(first, last), [x])
    y = (x.double() - x.double().mean(0)) / (x.double().var(0, correction=0) + first.eps).sqrt()
    torch.testing.assert_close(last.running_var.double(), y.var(0), atol=1e-6, rtol=1e-6)
    assert first.drop.training


def test_a_batch_with_its_labels_does_not_count_as_two_batches() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = buffers(model)
    found = r"takes several batches.*; found tensors of 4 and 1 dimensions, as inputs and labels have\. Put it into a"
    for batch in ((BATCHES[0], torch.arange(8)), [BATCHES[0], torch.arange(8)]):
        with pytest.raises(InvalidArgumentError, match=found):
            calibrate_(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in buffers(model).items())
    assert len(calibrate_(model, [(BATCHES[0], torch.arange(8))]).changes) == 1


def test_one_example_without_the_dimension_of_the_batch_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    found = r"must be an input that the model takes; found 3 dimensions at the layer '1', which takes 4\. Add the dim"
    with pytest.raises(InvalidArgumentError, match=found):
        calibrate_(model, [BATCHES[0][0]])
    with pytest.raises(InvalidArgumentError, match=found):
        measure(model, batch=BATCHES[0][0])


def test_an_iterator_of_batches_is_no_batch() -> None:
    with pytest.raises(InvalidArgumentError, match=r"found an iterator\. Pass one batch: next\(iterator\)\."):
        measure(nn.Sequential(nn.Conv2d(3, 4, 3)), batch=iter(BATCHES))
