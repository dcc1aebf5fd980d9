"""The committed fine-tunings of a transformer: which ways made intruders, counted as by full decompositions."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from benchmarks.fine_tuning import PATHS, RESULT, WAYS, Way, adapted, english, intruders_of
from torch import nn

import gonio
from foreign import torchvision

RUNS: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]


def test_every_way_was_tried_with_every_seed() -> None:
    tried = {(run["method"], run.get("lr"), run.get("rank"), run["seed"]) for run in RUNS}
    assert tried == {("base", None, None, seed) for seed in range(5)} | {
        (way.method, way.lr, way.rank, seed) for way in WAYS for seed in range(5)
    }


def test_counts_are_those_of_a_full_decomposition_and_full_tuning_and_rotations_make_no_intruders() -> None:
    counts: dict[str, list[int]] = defaultdict(list)
    for run in RUNS:
        if run["method"] != "base":
            assert run["intruders"] == run["exact"]
            counts[run["method"]].append(run["intruders"])
    assert max(counts["full"]) == max(counts["OFT"]) == 0
    assert max(counts["LoRA"]) > 40
    assert max(counts["DoRA"]) > 40


@pytest.mark.parametrize("way", [Way("full", 1e-3), Way("LoRA", 1e-2, 4), Way("DoRA", 1e-2, 4), Way("OFT", 1e-2, 8)])
def test_each_way_changes_what_it_says(way: Way) -> None:
    if way.method != "full":
        torchvision()  # peft imports transformers, and that torchvision
        pytest.importorskip("peft")
    base = gonio.models.ByteTransformer(width=32, depth=2)
    trained = {name for name, p in adapted(base, way).named_parameters() if p.requires_grad}
    assert trained
    assert all(any(path in name for path in PATHS) for name in trained) == (way.method != "full")


def test_the_texts_of_training_and_test_share_no_window() -> None:
    text = english()
    rows = [{tuple(row) for row in split.inputs.tolist()} for split in (text.train, text.validation, text.test)]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


def test_a_planted_direction_is_an_intruder_of_the_reference() -> None:
    base = nn.init.orthogonal_(torch.empty(48, 48), generator=torch.Generator().manual_seed(0))
    base = base * torch.arange(1.0, 49.0).pow(-1)
    ones = torch.ones(48, 1)
    assert intruders_of(base, base) == 0
    assert intruders_of(base, base + ones @ ones.T / 10) >= 1


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("verb", ["WeightNorm", "DecoupledLinear", "init_"])
def test_an_edit_inside_an_adapter_says_what_merging_would_break(verb: str, merged: bool) -> None:
    """peft adds an adapter to the stored weight and takes it away again; a computed weight does not follow it."""
    torchvision()
    peft = pytest.importorskip("peft")
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
    model, x = peft.get_peft_model(plain, config).eval(), torch.randn(5, 6, dtype=torch.float64)
    if merged:
        model.merge_adapter()
    before = model(x)
    if verb == "WeightNorm":
        edited = gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="*base_layer")
    elif verb == "DecoupledLinear":
        edited = gonio.swap_(model, gonio.nn.DecoupledLinear.from_linear, where="*base_layer")
    else:  # stored weights change: peft's own step follows them
        edited = gonio.init_(model, gonio.init.orthogonal_, where="*base_layer")
        before = model(x)
    said = [note for note in edited.notes if "merge and unmerge the adapters of base_model.model.0, base_mo" in note]
    assert len(said) == (verb != "init_")
    if verb != "init_":
        edited.undo_()
    (model.unmerge_adapter if merged else model.merge_adapter)()
    torch.testing.assert_close(model(x), before)
