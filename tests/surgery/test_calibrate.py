from __future__ import annotations

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.surgery import calibrate_
from tolerances import close

BATCHES = [seeded(8, 3, 4, 4, seed=1), 3 + 2 * seeded(4, 3, 4, 4, seed=2), seeded(2, 3, 4, 4, seed=3)]


def rows(batch):
    return batch.double().transpose(0, 1).flatten(1)


def test_total_is_the_variance_of_all_values_together():
    model = nn.Sequential(nn.BatchNorm2d(3))
    calibrate_(model, BATCHES)
    everything = torch.cat([rows(batch) for batch in BATCHES], 1)
    torch.testing.assert_close(model[0].running_mean.double(), everything.mean(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model[0].running_var.double(), everything.var(1), rtol=1e-6, atol=0)


def test_mean_is_the_average_of_the_batches_variances_weighted_by_their_size():
    model = nn.Sequential(nn.BatchNorm2d(3))
    calibrate_(model, BATCHES, variance="mean")
    n = torch.tensor([rows(batch).shape[1] for batch in BATCHES]).double()
    each = torch.stack([rows(batch).var(1) for batch in BATCHES])
    torch.testing.assert_close(model[0].running_var.double(), (n / n.sum()) @ each, rtol=1e-6, atol=0)


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


def test_undo_modes_and_counters():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5)).eval()
    model[1].train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    edited = calibrate_(model, BATCHES)
    assert (model[0].training, model[1].training) == (False, True)
    assert model[0].num_batches_tracked == 0
    edited.undo_()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_nothing_to_average_or_nowhere_to_put_it():
    with pytest.raises(InvalidArgumentError, match="averages over batches; found no batch"):
        calibrate_(nn.Sequential(nn.BatchNorm2d(3)), [])
    with pytest.raises(NoMatchError, match="it keeps no running statistics"):
        calibrate_(nn.Sequential(nn.LayerNorm(3)), BATCHES)
    with pytest.raises(InvalidArgumentError, match='takes variance="total" or "mean"'):
        calibrate_(nn.Sequential(nn.BatchNorm2d(3)), BATCHES, variance="median")
