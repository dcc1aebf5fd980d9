"""Layers beside those of trained networks: kinds, ranges, what is not known, and faults that are outside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from gonio.languages import language
from gonio.measuring import explain, measure
from gonio.measuring.figures.usual import FIGURES, LEAST, described, kind_of, known, usual, usual_of
from gonio.messages import local
from html_reader import Page


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Linear(64, 32), "matrix 9 to 32"),
        (nn.Linear(64, 33), "matrix 33 to 128"),
        (nn.Conv2d(200, 129, 1), "matrix 129 to 512"),
        (nn.Linear(513, 513), "matrix above 512"),
        (nn.Embedding(300, 16), "matrix 9 to 32"),
        (nn.Conv2d(3, 8, 3), "kernel 1 to 8"),
        (nn.ConvTranspose2d(40, 50, 3), "kernel 33 to 128"),
        (nn.Conv2d(16, 16, 3, groups=16), "depthwise 9 to 32"),
        (nn.Conv2d(16, 16, 3, groups=4), "stacked 1 to 8"),
        (nn.Linear(64, 1), None),
    ],
)
def test_shape_and_groups_tell_the_kind(layer: nn.Module, kind: str | None) -> None:
    row = measure(layer)["weight"]
    assert kind_of(row) == kind
    assert (usual_of(row) is None) == (kind is None)


def test_gates_are_stacked_and_adapters_are_of_no_kind() -> None:
    assert kind_of(measure(nn.LSTM(16, 24))["weight_ih_l0"]) == "stacked 9 to 32"
    factors = {
        "base_model.model.fc.lora_A.weight": torch.randn(4, 64),
        "base_model.model.fc.lora_B.weight": torch.randn(32, 4),
    }
    assert {kind_of(t) for t in measure(factors).tensors} == {None}


def test_every_kind_has_ordered_ranges_of_enough_architectures() -> None:
    assert set(known()) >= {f"matrix {size}" for size in ("1 to 8", "9 to 32", "33 to 128", "129 to 512")}
    assert set(known()) >= {"kernel 9 to 32", "kernel 33 to 128"}
    for kind, bands in known().items():
        assert bands.layers >= bands.networks >= bands.architectures >= LEAST
        assert described(kind)
        assert set(bands.figures) <= set(FIGURES)
        for ends in bands.figures.values():
            assert list(ends) == sorted(ends)


def test_the_ends_are_usual_and_what_is_beyond_is_not() -> None:
    low, *_, high = known()["matrix 9 to 32"].figures["sigma_ratio"]
    places = [usual("matrix 9 to 32", "sigma_ratio", value) for value in (low * 0.99, low, high, high * 1.01)]
    assert [one and one.place for one in places] == ["low", "usual", "usual", "high"]
    assert usual("matrix 9 to 32", "operator_norm", 1.0) is None
    assert usual("stacked above 4096", "alignment", 1.0) is None


def test_the_ranges_of_z_and_stable_rank_are_those_of_alignment_and_spectral_norm() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 60)
    nn.init.normal_(layer.weight, 0.3)
    row = measure(layer)["weight"]
    found = usual_of(row)
    assert found is not None
    z, align = found.figures["alignment_z"], found.figures["alignment"]
    assert z.value == pytest.approx(row.alignment_z)
    deviation = (align.value - 1) / z.value
    assert (1 + z.low * deviation, 1 + z.high * deviation) == pytest.approx((align.low, align.high))
    rank, ratio = found.figures["stable_rank"], found.figures["sigma_ratio"]
    assert rank.value / row.stable_rank_random == pytest.approx(ratio.value**-2)
    assert rank.low / row.stable_rank_random == pytest.approx(ratio.high**-2)
    assert (z.place, rank.place == "low") == (align.place, ratio.place == "high")


def parallel(weight: Tensor) -> Tensor:
    return weight[:1].expand_as(weight) + 1e-3 * weight


def rank_one(weight: Tensor) -> Tensor:
    return torch.outer(weight[:, 0], weight.flatten(1)[0]) if weight.ndim == 2 else parallel(weight)


@pytest.mark.parametrize("plant", [parallel, rank_one])
@pytest.mark.parametrize("layer", [nn.Linear(300, 200), nn.Linear(100, 60), nn.Conv2d(64, 64, 3), nn.Conv2d(16, 32, 3)])
def test_planted_faults_are_unusual(plant: object, layer: nn.Module) -> None:
    torch.manual_seed(0)
    weight = torch.randn_like(layer.weight)
    found = usual_of(measure({"w.weight": plant(weight)})["w"])  # type: ignore[operator]
    assert found is not None
    places = {name: one.place for name, one in found.figures.items()}
    assert {places[name] for name in ("alignment", "alignment_z", "sigma_ratio")} == {"high"}
    assert {places[name] for name in ("stable_rank", "effective_rank")} == {"low"}


@pytest.mark.parametrize("layer", [nn.Linear(300, 200), nn.Conv2d(64, 128, 3)])
def test_untrained_layers_are_below_what_training_raises(layer: nn.Module) -> None:
    torch.manual_seed(0)
    layer.reset_parameters()
    found = usual_of(measure(layer)["weight"])
    assert found is not None
    places = {name: one.place for name, one in found.figures.items()}
    assert {places[name] for name in ("alignment", "alignment_z", "sigma_ratio", "spectrum_distance")} == {"low"}
    assert {places[name] for name in ("stable_rank", "effective_rank")} == {"high"}


# --- shown -----------------------------------------------------------------------------------------------------------


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40), nn.Conv2d(200, 200, 3, groups=2))
    with torch.no_grad():
        made[0].weight.copy_(parallel(made[0].weight))
        nn.init.orthogonal_(made[1].weight)
    return made


def test_the_line_below_the_table_names_layers_and_what_is_not_known() -> None:
    said = " ".join(str(measure(mixed())).split())
    assert "(5 % of their layers lie on each side): align unusually low in 1 of 3 layers (1); align unusually" in said
    assert "align unusually high in 1 of 3 layers (0);" in said
    assert "not known for 1 of 3 layers." in said
    alone = " ".join(str(measure(mixed()[2:])).split())
    assert "Beside trained networks: not known for layers of these kinds and sizes." in alone
    assert "Beside trained" not in str(measure({"step": torch.tensor(1)}))


def test_usual_figures_are_said_to_be_usual() -> None:
    middles = known()["matrix 33 to 128"].figures
    torch.manual_seed(1)
    weight = torch.randn(64, 100) + 0.45 * torch.randn(100)
    weight *= 1 + middles["norm_spread"][2] * torch.linspace(-1.7, 1.7, 64)[:, None]
    assert "align, σ/σ₀ and spread of norms are usual." in " ".join(str(measure({"w.weight": weight})).split())


def test_names_in_the_line_carry_no_control_characters() -> None:
    assert "\x1b" not in str(measure({"\x1b[31mred.weight": torch.ones(40, 40) + torch.eye(40)}))


def test_a_page_has_ranges_beside_figures_and_the_kind_once() -> None:
    found = measure(mixed())
    read = Page(found.to_html())
    cells = list(read.values("data-usual"))
    figures = [one for layer in found.to_dict()["usual"] for one in layer["figures"]]
    assert len(cells) == len(figures)
    assert any(cell[0] in "+−" and "|+" in cell and cell.count("|") == 2 for cell in cells)  # z is signed
    assert any(cell.count("|") == 3 for cell in cells)  # the spread of the norms has a figure of its own
    assert read.text.count("Usual: from the 5th to the 95th percentile of matrices") == 1
    assert "Usual: not known; fewer than 10 architectures have stacked matrices" in read.text
    assert "data-usual" in found._repr_html_()
    assert "(5 % of their layers lie on each side): align unusually low in 1 of 3 layers (1)" in read.text


def test_the_line_and_the_page_are_in_chinese_too() -> None:
    found = measure(mixed())
    with language("zh"):
        assert "与训练好的网络相比（其层在两侧各占 5%）：3 层中有 1 个的" in "".join(str(found).split("\n"))
        read = Page(found.to_html())
        assert "种架构的" in read.text
        assert "Beside trained" not in read.text
        assert "训练好的网络中的通常范围" in explain("z")


def test_json_has_the_place_of_every_layer_of_a_kind() -> None:
    first, second, third = measure(mixed()).to_dict()["usual"]
    assert (first["name"], first["kind"], first["figures"]["alignment"]["place"]) == (
        "0.weight",
        "matrix 33 to 128",
        "high",
    )
    assert first["of"]["architectures"] >= LEAST
    assert set(second["figures"]["coherence"]) == {"place", "value", "low", "high"}
    assert (third["of"], third["figures"]) == (None, {})


def test_a_column_is_explained_with_what_is_usual() -> None:
    kinds = [kind for kind, bands in known().items() if "alignment" in bands.figures]
    lines = explain("z").splitlines()
    assert len(lines) == 1 + len(kinds) > 5
    assert lines[-1].startswith(f"usual in trained networks, {local(described(kinds[-1]))}: align ")
    assert len(explain("Welch").splitlines()) == 1


def test_no_finding_depends_on_what_is_usual() -> None:
    found = measure(nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 150)))
    assert all(layer["figures"]["alignment"]["place"] == "low" for layer in found.to_dict()["usual"])
    assert found.findings == ()


def test_the_ranges_are_read_when_they_are_needed() -> None:
    code = (
        "import gonio, torch; from gonio.measuring.figures.usual import known; n = known.cache_info;"
        "m = gonio.measure(torch.nn.Linear(40, 40)); a = n().currsize; m.to_dict(); print(a, n().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
