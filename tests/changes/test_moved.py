"""Weights that a conversion put in another order: layers, experts, copies, in the same dtype or rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gonio
from catalog import seeded
from gonio.measuring import changes, difference

State = dict[str, Tensor]


def layers(count: int = 4) -> State:
    """Layers of one shape, and norms, which look alike."""
    weights = {f"h.{i}.fc.weight": seeded(24, 16, seed=i, dtype=torch.float32) for i in range(count)}
    return weights | {
        f"h.{i}.norm.weight": 1 + 0.01 * seeded(16, seed=9 + i, dtype=torch.float32) for i in range(count)
    }


def in_order(state: State, order: list[int]) -> State:
    """The state with the layer `order[i]` in the place i."""
    return {name: state[f"h.{order[int(name[2])]}{name[3:]}"] for name in state}


def told(base: State, after: State) -> dict[str, tuple[str, str]]:
    """The form of each weight that changed, and where it was."""
    return {t.name: (t.form, t.moved_from) for t in difference(base, after).moved if len(t.shape) > 1}


def test_layers_that_changed_places_are_named() -> None:
    base = layers()
    found = difference(base, in_order(base, [0, 2, 1, 3]))
    assert told(base, in_order(base, [0, 2, 1, 3])) == {
        "h.1.fc.weight": ("moved", "h.2.fc.weight"),
        "h.2.fc.weight": ("moved", "h.1.fc.weight"),
    }
    codes = [(finding.code, finding.path) for finding in found.findings if finding.code != "G503"]
    assert codes == [("G508", "h.1.fc"), ("G508", "h.2.fc")], "and no change that is larger than its base"
    assert found.findings[0].found == "it has the values of h.2.fc.weight in the base"


def test_a_copied_layer_is_named_and_the_layer_that_was_copied_is_equal() -> None:
    base = layers()
    assert told(base, in_order(base, [0, 1, 2, 2])) == {"h.3.fc.weight": ("moved", "h.2.fc.weight")}


def test_a_deeper_model_names_the_layers_that_were_copied() -> None:
    """Depth up-scaling (SOLAR): the upper layers follow once more, some of them trained on, one set to zeros."""
    base = layers()
    after = base | {f"h.{i + 2}{name[3:]}": base[name] for i in (2, 3) for name in base if name.startswith(f"h.{i}")}
    after |= {"h.6.fc.weight": base["h.3.fc.weight"] + 0.1, "h.7.fc.weight": torch.zeros(24, 16)}
    base |= {"gone.weight": torch.zeros(24, 16)}
    found = difference(base, after)
    assert {row.name: row.moved_from for row in found.tensors if row.moved_from} == {
        "h.4.fc.weight": "h.2.fc.weight",
        "h.5.fc.weight": "h.3.fc.weight",
    }
    assert found["h.4.fc"].reason == "only after"
    assert found.notes == ("only after, with the values of weights of the base: h.4.fc of h.2.fc, h.5.fc of h.3.fc",)
    assert "G508" not in {finding.code for finding in found.findings}, "nothing of the base is in another place"


def test_a_model_without_one_of_its_layers() -> None:
    """The last layer has the values of one that is gone."""
    base = layers()
    shorter = {name: value for name, value in in_order(base, [0, 2, 3, 3]).items() if not name.startswith("h.3")}
    assert told(base, shorter) == {
        "h.1.fc.weight": ("moved", "h.2.fc.weight"),
        "h.2.fc.weight": ("moved", "h.3.fc.weight"),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_rounded_too(dtype: torch.dtype) -> None:
    base = layers()
    after = {name: value.to(dtype) for name, value in in_order(base, [1, 0, 2, 3]).items()}
    moved = {"h.0.fc.weight": ("moved", "h.1.fc.weight"), "h.1.fc.weight": ("moved", "h.0.fc.weight")}
    assert told(base, after) == moved | {f"h.{i}.fc.weight": ("rounded", "") for i in (2, 3)}
    assert told({name: value.to(dtype) for name, value in base.items()}, in_order(base, [1, 0, 2, 3])).items() >= (
        moved.items()
    )


def test_experts_and_the_rows_of_their_router() -> None:
    base = {f"experts.{i}.up.weight": seeded(24, 16, seed=i, dtype=torch.float32) for i in range(4)}
    base["router.weight"] = seeded(4, 16, seed=7, dtype=torch.float32)
    after = {f"experts.{i}.up.weight": base[f"experts.{(i + 1) % 4}.up.weight"] for i in range(4)}
    after["router.weight"] = base["router.weight"].roll(-1, 0)
    found = {finding.path: finding.code for finding in difference(base, after).findings}
    assert found == {f"experts.{i}.up": "G508" for i in range(4)} | {"router": "G505"}


def test_models_that_have_nothing_in_common_and_almost_equal_weights_are_not_moved() -> None:
    base, other = (
        layers(),
        {name: seeded(*value.shape, seed=50 + i) for i, (name, value) in enumerate(layers().items())},
    )
    assert {form for form, _ in told(base, other).values()} == {"full"}
    after = in_order(base, [1, 0, 2, 3])
    after["h.0.fc.weight"] = after["h.0.fc.weight"].clone()
    after["h.0.fc.weight"][3, 4] += 1e-3
    assert told(base, after) == {"h.0.fc.weight": ("full", ""), "h.1.fc.weight": ("moved", "h.0.fc.weight")}


def test_files_in_processes_and_several_models(tmp_path: Path) -> None:
    base = layers()
    for name, state in (("base", base), ("after", in_order(base, [1, 0, 2, 3]))):
        save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "after")]
    alone, spread = difference(*paths), difference(*paths, jobs=2)
    assert [t.moved_from for t in alone.tensors] == [t.moved_from for t in spread.tensors]
    assert sum(bool(t.moved_from) for t in alone.tensors) == 2
    tuned = {name: value + 0.01 for name, value in base.items()}
    first, second = changes(paths[0], paths[1], tuned).models
    assert first["h.0.fc"].moved_from == "h.1.fc.weight"
    assert not any(t.moved_from for t in second.tensors)


def test_the_rule_is_explained() -> None:
    assert "Layers or experts changed places" in gonio.measuring.explain("G508")
