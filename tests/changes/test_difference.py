"""Two checkpoints side by side."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring import difference, measure
from html_reader import Page


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(6, 4, 3, 3, generator=generator),
        "conv.bias": torch.randn(6, generator=generator),
        "fc.weight": torch.randn(5, 7, generator=generator),
    }


def test_how_the_base_was_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "base.pt"
    torch.save({"state_dict": state(), "ema": state(1)}, file)
    of_base = (f"{file}: read from 'state_dict' of the checkpoint", f"{file}: not read: ema, of the same checkpoint")
    assert difference(file, state(2)).notes == of_base
    assert difference(file, file).notes == tuple(note.partition(": ")[2] for note in of_base)


def test_norms_and_directions_are_told_apart() -> None:
    before, after = state(), state()
    after["conv.weight"] = before["conv.weight"] * 2
    turn = torch.linalg.matrix_exp(torch.tensor([[0.0, -0.3], [0.3, 0.0]]))
    after["fc.weight"] = before["fc.weight"].clone()
    after["fc.weight"][:, 2:] = 0
    before["fc.weight"][:, 2:] = 0
    after["fc.weight"][:, :2] = before["fc.weight"][:, :2] @ turn
    found = difference(before, after)
    conv, fc = found["conv"], found["fc.weight"]
    assert (conv.norm_ratio, conv.relative) == pytest.approx((2.0, 1.0))
    assert conv.angle_max == pytest.approx(0.0, abs=1e-3)
    assert fc.norm_ratio == pytest.approx(1.0, rel=1e-5)
    assert fc.angle_mean == pytest.approx(math.degrees(0.3), rel=1e-4)
    assert fc.relative == pytest.approx(2 * math.sin(0.15), rel=1e-4)
    assert found["conv.bias"].status == "equal"


def test_independent_weights_are_at_right_angles() -> None:
    found = difference(state(0), state(1))["conv"]
    assert found.angle_mean == pytest.approx(90, abs=5)


def test_what_cannot_be_compared_has_a_reason() -> None:
    before, after = state(), state()
    before["gone.weight"] = torch.ones(2, 2)
    after["new"] = torch.ones(2)
    after["fc.weight"] = torch.ones(5, 8)
    before["packed.weight"] = after["packed.weight"] = torch.ones(2, 2, dtype=torch.uint8)
    after["conv.weight"] = torch.zeros(6, 4, 3, 3)
    found = difference(before, after)
    reasons = {t.path: t.reason for t in found.values() if t.status == "not compared"}
    assert reasons == {
        "gone": "only before",
        "new": "only after",
        "fc": "shape (5, 7) before, (5, 8) after",
        "packed": "uint8: packed or quantised weights, whose scale is not known here",
    }
    assert found["conv"].angle_mean is None
    assert found["conv"].relative == pytest.approx(1.0)
    assert found.coverage.startswith("Compared: 2 of 6 tensors, 1 of them equal. Not compared: 4 (fc: shape")


def test_measure_of_two_sources_is_their_difference() -> None:
    assert measure(state(0), state(1)) == difference(state(0), state(1))
    with pytest.raises(InvalidArgumentError, match=r"compares two sources; found a Tensor\. Pass a batch as batch="):
        measure(nn.Linear(4, 3), torch.ones(2, 4))
    with pytest.raises(InvalidArgumentError, match=r"compares two sources; found batch= as well"):
        measure(nn.Linear(4, 3), nn.Linear(4, 3), batch=torch.ones(2, 4))


def test_models_files_and_state_dicts_mix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert {t.status for t in difference(tmp_path / "m.pt", model).values()} == {"equal"}
    with torch.no_grad():
        model[1].weight[0] *= -1
    found = difference(tmp_path / "m.pt", model)["1"]
    # read by the model's layout: each of the six filters has one of its two input slices flipped or none
    assert found.angle_max is not None
    assert found.norm_ratio == pytest.approx(1.0)


def test_it_prints_as_a_table_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    found = difference(state(0), state(1))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 70
    assert "state dict → state dict" in text
    assert "Compared: 3 of 3 tensors, 0 of them equal. Not compared: none." in text
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["schema"] == "gonio.difference/1"
    assert len(found) == len(list(found)) == 3
    with pytest.raises(UnknownNameError, match="no tensor named 'con'"):
        found["con"]


LARGE = pytest.param((2300, 2000), id="large", marks=pytest.mark.slow)


@pytest.mark.parametrize("shape", [pytest.param((60, 90), id="wide"), pytest.param((90, 60), id="tall"), LARGE])
def test_the_rank_of_a_low_rank_change_is_found(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=draw)
    change = torch.randn(shape[0], 3, generator=draw) @ torch.randn(3, shape[1], generator=draw)
    moved = difference({"w.weight": weight}, {"w.weight": weight + change})["w"]
    assert moved.rank_99 == 3
    squares = torch.linalg.svdvals(change.double()).square()
    assert moved.stable_rank == pytest.approx(float(squares.sum() / squares.max()), rel=1e-3)


def test_what_was_zero_before_comes_after_the_largest_change() -> None:
    before = {"a.weight": torch.zeros(3, 4), "b.weight": torch.ones(3, 4), "c.weight": torch.ones(3, 4)}
    found = difference(
        before, {"a.weight": torch.ones(3, 4), "b.weight": 2 * before["b.weight"], "c.weight": 4 * before["c.weight"]}
    )
    assert [row.path for row in found.largest] == ["c", "b", "a"]


def test_the_rank_counts_the_directions_of_99_percent_of_the_change() -> None:
    weight = torch.zeros(20, 30)
    after = torch.zeros(20, 30)
    after.diagonal().copy_(torch.tensor([10.0, 5.0, 1.0, *[0.1] * 17]))
    moved = difference({"w.weight": weight}, {"w.weight": after})["w"]
    assert moved.rank_99 == 2  # 125 of 126.17 is 99.07 %
    assert moved.relative is None
    after[2, 2] = 1.5
    assert difference({"w.weight": weight}, {"w.weight": after})["w"].rank_99 == 3  # 125 of 127.42 is 98.1 %


def test_the_rank_of_a_random_change_is_that_of_chance() -> None:
    draw = torch.Generator().manual_seed(1)
    weight, change = (torch.randn(200, 300, generator=draw) for _ in range(2))
    moved = difference({"w.weight": weight}, {"w.weight": weight + change})["w"]
    assert moved.stable_rank == pytest.approx(moved.stable_rank_random, rel=0.05)
    assert moved.rank_99 is not None
    assert moved.rank_99 > 150


@pytest.mark.slow
def test_a_large_weight_whose_change_has_no_low_rank_says_none() -> None:
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(2300, 2000, generator=draw)
    moved = difference({"w.weight": weight}, {"w.weight": torch.randn(2300, 2000, generator=draw)})["w"]
    assert moved.rank_99 is None
    assert moved.stable_rank == pytest.approx(moved.stable_rank_random, rel=0.05)


def test_float64_is_compared_in_float64() -> None:
    before = {"w.weight": torch.eye(3, dtype=torch.float64)}
    after = {"w.weight": torch.eye(3, dtype=torch.float64) * (1 + 1e-12)}
    assert difference(before, after)["w"].relative == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_figures_of_filters_do_not_depend_on_their_size(size: float) -> None:
    """The squares of such numbers leave the range of float64."""
    before = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    after = torch.tensor([[6.0, 8.0], [2.0, 0.0]], dtype=torch.float64)
    found = difference({"a": before * size}, {"a": after * size})["a"]
    assert (found.norm_ratio, found.angle_max) == pytest.approx((1.0, 90.0))
    assert (found.magnitude_change, found.direction_change) == pytest.approx((0.5, 0.5))


def test_sources_without_a_common_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no name in common: a\.weight before, b\.weight after"):
        difference({"a.weight": torch.eye(2)}, {"b.weight": torch.eye(2)})


def test_adapters_alone_are_no_base() -> None:
    adapter = {"q.lora_A.weight": torch.ones(1, 4), "q.lora_B.weight": torch.ones(4, 1)}
    with pytest.raises(InvalidArgumentError, match=r"takes the base first; found .*, which holds adapters alone"):
        difference(adapter, {"q.weight": torch.eye(4)})


def test_progress_counts_every_name() -> None:
    seen: list[tuple[int, int]] = []
    before, after = state(), state()
    after["new"] = torch.ones(1)
    difference(before, after, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_exports_hold_every_tensor_and_escape_its_name() -> None:
    before = {"<script>alert(1)</script>.weight": torch.eye(3), "=cmd": torch.ones(2)}
    after = {"<script>alert(1)</script>.weight": torch.eye(3) * 2}
    found = difference(before, after)
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["status"] for row in rows] == ["compared", "not compared"]
    assert rows[1]["path"] == "'=cmd"
    assert float(rows[0]["norm_ratio"]) == 2
    assert len(Page(found.to_html()).may_run()) == 1
    for html in (found.to_html(), found._repr_html_()):
        read = Page(html)
        assert "<script>alert(1)</script>" in read.text
        assert "alert(1)" not in "".join(text for tag, text in read.texts if tag == "script")
        assert found.coverage in read.text
    assert "&lt;script&gt;" in found.to_markdown()
    frame = found.to_frame()
    assert list(frame["status"]) == ["compared", "not compared"]
    assert frame["rank_99"][0] == 3


class Head(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(x))


@pytest.mark.parametrize(("before", "after", "head"), [(True, False, 0.5), (False, True, 1 / 3), (True, True, None)])
def test_a_layer_that_is_tied_on_one_side_is_compared(before: bool, after: bool, head: float | None) -> None:
    old, new = Head(tied=before), Head(tied=after)
    with torch.no_grad():
        new.emb.weight.copy_(old.emb.weight)
        larger, smaller = (new, old) if before else (old, new)
        if head is not None:
            larger.head.weight.copy_(1.5 * smaller.emb.weight)
    found = difference(old, new)
    assert found["emb"].relative == 0
    assert found["head"].relative == (head if head is None else pytest.approx(head, rel=1e-6))
    if head is None:
        assert found["head"].reason == "tied to emb.weight, where it is measured"
