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
