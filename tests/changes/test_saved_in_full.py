"""Weights that peft saves in full beside adapters are compared with those of the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bank.files.case import normal
from gonio.measuring import difference
from gonio.measuring.changes.sources import base_entries, tuned, values_of

OF_PEFT = "base_model.model."
BASE = {
    "model.embed_tokens.weight": normal(48, 16),
    "model.layers.0.q_proj.weight": normal(16, 16, seed=1),
    "model.layers.1.q_proj.weight": normal(16, 16, seed=2),
    "lm_head.weight": normal(48, 16, seed=3),
}
A, B = normal(4, 16, seed=4), normal(16, 4, seed=5)
LORA = {f"{OF_PEFT}model.layers.0.q_proj.lora_{n}.weight": one for n, one in (("A", A), ("B", B))}
HEAD, TABLE = (normal(48, 16, seed=seed) for seed in (6, 7))
ROWS, COLUMNS = normal(4, 48, seed=8), normal(16, 4, seed=9)
# What is saved beside the adapter of one layer, as peft 0.21 names it, and the weights that follow.
SAVED: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {
    "a head": ({f"{OF_PEFT}lm_head.weight": HEAD}, {"lm_head.weight": HEAD}),
    "a head with its original beside it": (
        {f"{OF_PEFT}lm_head.modules_to_save.weight": HEAD,
         f"{OF_PEFT}lm_head.original_module.weight": BASE["lm_head.weight"]}, {"lm_head.weight": HEAD}),
    "an embedding, as save_embedding_layers writes it": (
        {f"{OF_PEFT}model.embed_tokens.modules_to_save.weight": TABLE, f"{OF_PEFT}model.embed_tokens.weight": TABLE,
         f"{OF_PEFT}model.embed_tokens.original_module.weight": BASE["model.embed_tokens.weight"]},
        {"model.embed_tokens.weight": TABLE}),
    "an embedding with an adapter of its own": (
        {f"{OF_PEFT}model.embed_tokens.base_layer.weight": TABLE,
         f"{OF_PEFT}model.embed_tokens.lora_embedding_A": ROWS,
         f"{OF_PEFT}model.embed_tokens.lora_embedding_B": COLUMNS},
        {"model.embed_tokens.weight": TABLE + 2 * (COLUMNS @ ROWS).mT}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_in_full_is_compared(name: str, tmp_path: Path) -> None:
    saved, expected = SAVED[name]
    state = {key: value.clone().contiguous() for key, value in (LORA | saved).items()}
    save_file(state, tmp_path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    expected = BASE | {"model.layers.0.q_proj.weight": BASE["model.layers.0.q_proj.weight"] + 2 * B @ A} | expected
    model = tuned(base_entries(BASE), tmp_path)
    assert model.entries.keys() <= BASE.keys()
    for key, entry in model.entries.items():
        values = values_of(entry, "after")
        assert isinstance(values, Tensor), values
        torch.testing.assert_close(values.double(), expected[key].double(), rtol=1e-5, atol=1e-6)
    found = difference(BASE, tmp_path)
    assert {row.name for row in found.tensors if row.status == "not compared"} == set()
    changed = {key for key in BASE if not torch.equal(BASE[key], expected[key])}
    assert {row.name for row in found.moved} == changed
