"""timm's models, which nobody here wrote: through all of the library, and every verb undone to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from foreign import timm
from sweeps import certify_timm, passage
from sweeps.measure_timm import on_meta, with_weights
from sweeps.passage import VERBS, check_verb, prepared, walk
from sweeps.timm_sweep import SMALL, build, models, sample, summary

REFUSALS = ("calibrate_", "balance_", "fold_", "swap_ norms", "swap_ linear layers", "swap_ convolutions")


def test_the_sample_and_the_list_are_what_they_say() -> None:
    listed = dict(models())
    assert len(listed) >= 600
    assert max(listed.values()) <= 30_000_000
    assert len(set(SMALL)) == len(set(sample(30))) == 30
    assert set(SMALL) <= set(listed)


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "name", [name if at % 12 == 0 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(SMALL)]
)
def test_measure_convert_train_undo_fold_save_load(name: str, tmp_path: Path) -> None:
    timm()
    found = walk(name, lambda: build(name), tmp_path, verbs=False)
    assert not found.failed
    assert all(outcome.startswith("passed") for outcome in found.steps.values())
    assert found.figures["converted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(30))
def test_every_verb_is_undone_to_the_bit(name: str) -> None:
    timm()
    model, x = build(name)
    prepared(model, x)
    outcomes = {verb: check_verb(apply, model, x) for verb, apply in VERBS.items()}
    refused = {verb for verb, outcome in outcomes.items() if outcome != "passed"}
    assert refused <= set(REFUSALS), {verb: outcomes[verb] for verb in refused}


# One architecture of each family: shapes on the meta device.
DESIGNS = (
    *("beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "coat_lite_tiny", "convit_tiny", "convnext_atto"),
    *("crossvit_tiny_240", "cspresnet50", "darknet17", "deit_tiny_patch16_224", "densenet121", "dla34", "dpn48b"),
    *("efficientnet_b0", "efficientvit_b0", "eva02_tiny_patch14_224", "focalnet_tiny_srf", "ghostnet_050"),
    *("hrnet_w18_small", "levit_128s", "maxvit_rmlp_pico_rw_256", "mixer_s16_224", "mobilenetv3_small_050"),
    *("nfnet_l0", "poolformer_s12", "regnetx_002", "res2net50_14w_8s", "resnet18", "swin_tiny_patch4_window7_224"),
    *("vgg11", "xcit_nano_12_p8_224"),
)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", DESIGNS)
def test_shapes_and_layouts_of_an_architecture(name: str) -> None:
    timm()
    found = on_meta(name)
    assert found["weights"] == found["laid out"] > 0
    assert found["entries"] > 10_000


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet_gn"])
def test_figures_of_a_small_architecture(name: str) -> None:
    timm()
    found = with_weights(name)
    assert not found["skipped"]
    assert found["layers"] > 5
    assert "G001" not in found["findings"]


def test_every_model_has_a_valid_bound_or_is_refused_by_name() -> None:
    """The committed rows of the sweep, and the page's table of them."""
    found, listed = certify_timm.rows(), dict(models())
    names = [row["model"] for row in found]
    assert len(set(names)) == len(names) > 150
    assert set(names) <= set(listed)
    for row in found:
        outcome = row["steps"]["certify"]
        if outcome != "passed":
            assert outcome.startswith("refused: certify: cannot bound "), row
            continue
        figures = row["figures"]
        assert 0 < max(figures["lower"], figures["seen"]) <= figures["upper"] < float("inf")
        assert figures["pairs"] >= 10_000
    page = certify_timm.PAGE.read_text(encoding="utf-8")
    assert certify_timm.with_table(page) == page


@pytest.mark.parametrize("name", ["test_resnet", pytest.param("regnetx_002", marks=pytest.mark.slow)])
def test_a_model_is_bounded_as_its_row_says(name: str) -> None:
    timm()
    row = next(row for row in certify_timm.rows() if row["model"] == name)
    found = certify_timm.certified(name, lambda: build(name))
    assert found["steps"] == row["steps"]
    assert found["figures"]["upper"] == pytest.approx(row["figures"]["upper"], rel=0.01)


# --- negative controls ------------------------------------------------------------------------------


def small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)), seeded(4, 2, 3, 3)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (lambda m: m[0].weight.data.add_(1e-7), "0.weight differs"),
        (lambda m: m[0].register_forward_hook(lambda *_: None), "hooks differ"),
        (lambda m: m.train(), "classes differ"),
        (lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach())), "parameters differ"),
    ],
)
def test_what_an_undo_leaves_behind_is_found(leave, message: str) -> None:
    class Undone:
        def undo_(self) -> None:
            leave(model)

    model, x = small()
    with pytest.raises(AssertionError, match=message):
        check_verb(lambda m, x: Undone(), model.eval(), x)


def test_a_bound_that_a_pair_exceeds_is_found() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    found = gonio.certify(model, x)
    seen = certify_timm.largest_quotient(found, (4,))
    assert 0.5 * found.upper < seen <= found.upper
    assert certify_timm.judged(found, seen) == "passed"
    assert certify_timm.judged(replace(found, upper=0.9 * seen, lower=0.0), seen).startswith("failed: a quotient of ")
    assert certify_timm.judged(replace(found, upper=float("inf")), seen).startswith("failed: the upper bound is inf")


def test_a_wrong_fold_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(model: nn.Module) -> gonio.surgery.Edited:
        edited = gonio.fold_(model)
        model[0].bias.data.mul_(1.001)
        return edited

    monkeypatch.setattr(passage, "fold_", wrong)
    found = walk("small", small, tmp_path, verbs=False)
    assert [line.split(": ")[0] for line in found.failed] == ["fold in float32", "fold in float64"]
    text = summary([found.to_dict()], wanted=1)
    assert "fold in float64: 1 failed" in text
    assert "deviates by" in text
