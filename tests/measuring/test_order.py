"""Depth is the depth of the model: numbers in names are numbers, embedding first and head last where that is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gonio


def saved(folder: Path, names: list[str], rows: dict[str, int] | None = None, **config: object) -> Path:
    shapes = {name: ((rows or {}).get(name, 6), 4) for name in names}
    draw = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(*shapes[name], generator=draw) for name in names}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def order(path: Path) -> list[str]:
    return [row.path for row in gonio.measure(path).layers]


BLOCKS = [f"model.layers.{i}.mlp" for i in range(12)]


def weights(*paths: str) -> list[str]:
    return [f"{path}.weight" for path in paths]


def test_numbers_are_numbers(tmp_path: Path) -> None:
    assert order(saved(tmp_path, weights(*BLOCKS))) == BLOCKS


def test_embedding_first_and_head_last_where_the_configuration_tells_their_rows(tmp_path: Path) -> None:
    names, rows = weights("lm_head", "model.embed", *BLOCKS), {"lm_head.weight": 20, "model.embed.weight": 20}
    assert order(saved(tmp_path, names, rows, vocab_size=20)) == ["model.embed", *BLOCKS, "lm_head"]


def test_without_a_configuration_nothing_is_concluded_from_names(tmp_path: Path) -> None:
    names, rows = weights("lm_head", "model.embed", *BLOCKS), {"lm_head.weight": 20, "model.embed.weight": 20}
    assert order(saved(tmp_path, names, rows)) == ["lm_head", "model.embed", *BLOCKS]


def test_the_only_table_is_where_the_model_begins(tmp_path: Path) -> None:
    blocks = [f"h.{i}.fc" for i in range(11)]
    assert order(saved(tmp_path, weights("wte", *blocks), {"wte.weight": 20}, vocab_size=20)) == ["wte", *blocks]


def test_an_order_of_its_own_stays(tmp_path: Path) -> None:
    """A state dict has the order of the model, whatever its names are."""
    state = {name: torch.randn(6, 4) for name in weights("stem", "body.10", "body.9", "a_head")}
    torch.save(state, tmp_path / "model.pt")
    assert order(tmp_path / "model.pt") == ["stem", "body.10", "body.9", "a_head"]


def test_two_files_in_the_same_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = saved(tmp_path / name, weights(*BLOCKS))
    state = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(state, path)
    found = gonio.measuring.difference(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")
    assert [row.name for row in found.moved] == weights(*BLOCKS)


@pytest.mark.parametrize(
    ("names", "over"),
    [
        (BLOCKS, "depth"),
        (["body", "head", "stem"], "the tensors"),
        (["encoder.0", "encoder.1", "decoder.0", "decoder.1"], "the tensors"),
    ],
)
def test_a_page_speaks_of_depth_only_where_the_order_is_known(names: list[str], over: str, tmp_path: Path) -> None:
    path = saved(tmp_path, weights(*names))
    state = {name: tensor * 1.5 for name, tensor in load_file(path).items()}
    for page in (gonio.measure(path).to_html(), gonio.measure(path, state).to_html()):
        assert f">Over {over}</h2>" in page
        assert (">Over depth<" in page) == (over == "depth")
        assert f"norm over {over}: " in page or f"change over {over}: " in page


def test_a_model_has_a_depth() -> None:
    model = nn.Sequential()
    model.body, model.stem = nn.Linear(4, 4), nn.Linear(4, 4)
    assert ">Over depth</h2>" in gonio.measure(model).to_html()
