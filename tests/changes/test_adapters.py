"""Adapters of peft, read without peft, equal what peft merges; their changes are named as what they are."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foreign import torchvision
from gonio.measuring import difference, measure
from gonio.measuring.changes.sources import base_entries, tuned, values_of
from gonio.measuring.reading.adapters import rotations_in
from gonio.measuring.reading.entry import Stored

torchvision()  # peft imports transformers, and that torchvision
peft = pytest.importorskip("peft")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.v = nn.Embedding(50, 48), nn.Linear(48, 40), nn.Linear(40, 48)
        self.conv, self.head = nn.Conv2d(4, 8, 3), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.v(self.q(self.emb(x))))


def oft(**options: Any) -> Any:
    return peft.OFTConfig(target_modules=["q", "v"], init_weights=False, **options)


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **{"target_modules": ["q", "v"], **options})


CONFIGS: dict[str, Any] = {
    "lora": lambda: lora(target_modules=["emb", "q", "conv"]),
    "lora, rank-stabilised": lambda: lora(use_rslora=True),
    "lora with patterns": lambda: lora(alpha_pattern={"q": 6}, rank_pattern={"v": 4}),
    "lora with a trained head": lambda: lora(modules_to_save=["head"]),
    "dora": lambda: lora(use_dora=True),
    "dora of a convolution": lambda: lora(use_dora=True, target_modules=["conv", "q"]),
    "oft": lambda: oft(oft_block_size=8),
    "oft, two blocks": lambda: oft(r=2, oft_block_size=0),
    "oft, exact": lambda: oft(oft_block_size=8, use_cayley_neumann=False),
    "oft, four terms": lambda: oft(oft_block_size=8, num_cayley_neumann_terms=4),
    "oft, three terms": lambda: oft(oft_block_size=8, num_cayley_neumann_terms=3),
    "oft, shared": lambda: oft(oft_block_size=8, block_share=True, use_cayley_neumann=False),
    "oft, constrained": lambda: oft(oft_block_size=8, coft=True, eps=0.05, use_cayley_neumann=False),
    "oft of a convolution": lambda: peft.OFTConfig(target_modules=["conv"], oft_block_size=12, init_weights=False),
}  # fmt: skip


def adapted(name: str) -> tuple[nn.Module, Any, nn.Module]:
    """A network, a copy of it with adapters of random values, and what peft merges."""
    torch.manual_seed(0)
    base = Network()
    model = peft.get_peft_model(copy.deepcopy(base), CONFIGS[name]())
    if name == "lora with a trained head":
        with torch.no_grad():
            model.base_model.model.head.modules_to_save.default.weight.mul_(2)
    return base, model, copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_adapters_gives_what_peft_merges(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, model, merged = adapted(name)
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)  # an import of it would fail
    read = tuned(base_entries(base), tmp_path)
    exact = dict(merged.named_parameters())
    assert read.adapters
    for key, entry in read.entries.items():
        torch.testing.assert_close(values_of(entry, "after"), exact[key].detach(), rtol=1e-5, atol=1e-6)
    changed = {key for key, value in exact.items() if not torch.equal(value, base.get_parameter(key))}
    assert changed <= set(read.entries)
    found = difference(base, tmp_path)
    assert {t.name for t in found.moved} == changed
    assert {t.status for t in found.values()} == {"compared", "equal"}


@pytest.mark.parametrize("name", ["lora", "dora", "lora with a trained head"])
def test_an_adapted_model_gives_the_same(name: str) -> None:
    base, model, merged = adapted(name)
    here, there = difference(base, model), difference(base, merged)
    assert [t.name for t in here.moved] == [t.name for t in there.moved]
    for mine, theirs in zip(here.moved, there.moved, strict=True):
        assert mine.relative == pytest.approx(theirs.relative, rel=1e-4)


def test_forms_of_adapters_are_named(tmp_path: Path) -> None:
    forms = {}
    for name in ("lora", "oft, exact"):
        base, model, _ = adapted(name)
        model.save_pretrained(tmp_path / name)
        forms[name] = difference(base, tmp_path / name)["q"].form
    assert forms == {"lora": "rank 2", "oft, exact": "rotation"}


def test_several_adapters_of_one_base(tmp_path: Path) -> None:
    for name in ("lora", "dora", "oft"):
        base, model, _ = adapted(name)
        model.save_pretrained(tmp_path / name)
    found = measure(base, *(tmp_path / name for name in ("lora", "dora", "oft")))
    assert len(found["q"].cosines) == 3
    assert "v" in found


def test_the_rotated_weight_is_measured_beside_its_base(tmp_path: Path) -> None:
    base, model, merged = adapted("oft")
    model.save_pretrained(tmp_path)
    found, exact = measure(tmp_path, base=base), measure(merged)
    for key in ("frobenius", "sigma_max", "alignment"):
        assert getattr(found["q.base_and_oft"], key) == pytest.approx(getattr(exact["q"], key), rel=1e-4)


def test_a_rotation_that_does_not_fit_keeps_its_row_and_says_why(tmp_path: Path) -> None:
    base, model, _ = adapted("oft")
    model.save_pretrained(tmp_path)
    base.q, base.v = nn.Linear(30, 40), None
    found = difference(base, tmp_path)
    assert "the adapter rotates 6 blocks of 8, the base has filters of length 30" in found["q"].reason
    assert found["v"].reason == "only after"
    ragged = Stored((2, 5), "float32", lambda: torch.ones(2, 5))  # 5 entries are no triangle
    assert rotations_in({"q.oft_R.weight": ragged}, {}) == []
