"""What differs from saved fingerprints: values that changed, and values that another name had."""

from __future__ import annotations

import torch
from torch import Tensor

import gonio
from catalog import seeded

STATE = {f"h.{i}.weight": seeded(24, 16, seed=i, dtype=torch.float32) for i in range(3)} | {
    "gain": torch.ones(24),
    "bias": torch.zeros(24),
}


def told(state: dict[str, Tensor], before: dict[str, Tensor] = STATE) -> dict[str, str]:
    """What is found of each path, without the remarks on values."""
    found = gonio.check(state, against=gonio.check(before).fingerprints)
    return {finding.path: finding.found for finding in found.findings if finding.code == "G710"}


def test_layers_that_changed_places() -> None:
    swapped = {**STATE, "h.1.weight": STATE["h.2.weight"], "h.2.weight": STATE["h.1.weight"]}
    assert told(swapped) == {
        "h.1": "its values are those that h.2.weight had",
        "h.2": "its values are those that h.1.weight had",
    }


def test_a_tensor_under_another_name() -> None:
    renamed = {name.replace("h.2", "h.3"): value for name, value in STATE.items()}
    assert told(renamed) == {"h.3": "added: it has the values that h.2.weight had", "h.2": "removed"}


def test_new_values_are_only_told_as_changed() -> None:
    changed = {**STATE, "h.1.weight": STATE["h.1.weight"] + 1, "h.4.weight": seeded(24, 16, seed=9)}
    assert told(changed) == {"h.1": "its values changed", "h.4": "added: it has no fingerprint"}


def test_values_of_which_every_entry_is_the_same_are_nobodys() -> None:
    assert told({**STATE, "gain": torch.zeros(24), "shift": torch.ones(24)}) == {
        "gain": "its values changed",
        "shift": "added: it has no fingerprint",
    }
