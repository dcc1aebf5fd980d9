"""Models, state dicts and files: every tensor gets figures or a reason, and nothing is changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gonio import parametrizations
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring import Measurements, measure


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 4)
    )


def same(a: Measurements, b: Measurements, *paths: str) -> None:
    for path in paths:
        first, second = a[path], b[path]
        assert (first.alignment, first.norm_mean, first.sigma_max) == (
            second.alignment,
            second.norm_mean,
            second.sigma_max,
        )


def test_every_tensor_has_a_row_with_figures_or_a_reason() -> None:
    made = model()
    found = measure(made)
    assert [t.name for t in found] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("3.weight", "3.bias", "5.weight", "5.bias"),
    ]
    assert all(t.status == "measured" or t.reason for t in found)
    assert [t.path for t in found.layers] == ["0", "3", "5"]
    assert found.coverage == (
        "Measured: 3 of 11 tensors. Checked only for NaN and infinity: 8 (7 vectors, 1 counter). Skipped: none."
    )
    assert found["3"].pairs == 0
    assert found["3"].alignment is None
    assert found["3.weight"] is found["3"]
    assert "3" in found
    assert "4" not in found


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no tensor named 'conv'.*Did you mean conv1"):
        measure({"conv1.weight": torch.ones(2, 2)})["conv"]


def test_measuring_changes_nothing_and_draws_no_numbers() -> None:
    made = model()
    nn.utils.parametrizations.spectral_norm(made[5])
    made.train()
    before, state = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    modes = [m.training for m in made.modules()]
    for _ in range(3):
        measure(made)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), made.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in made.modules()] == modes
    assert all(p.grad is None for p in made.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())


def test_a_model_its_state_dict_and_its_files_agree(tmp_path: Path) -> None:
    made = model()
    found = measure(made)
    state = made.state_dict()
    save_file(state, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    torch.save({"epoch": 3, "state_dict": state, "args": [1, "a"]}, tmp_path / "m.ckpt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for source in (state, *sorted(tmp_path.iterdir()), str(tmp_path / "m.pt")):
        same(measure(source), found, "0", "5")
    assert measure(tmp_path / "m.ckpt").notes == ("read from 'state_dict' of the checkpoint",)
    assert "depthwise, or of one input channel" in measure(state)["3"].notes
    assert "groups unknown, read as 1" in measure(state)["0"].notes


def test_shards_are_read_tensor_by_tensor_through_their_index(tmp_path: Path) -> None:
    state = model().state_dict()
    names = list(state)
    save_file({n: state[n] for n in names[:4]}, tmp_path / "a.safetensors")
    save_file({n: state[n] for n in names[4:]}, tmp_path / "b.safetensors")
    files = {n: "a.safetensors" if i < 4 else "b.safetensors" for i, n in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {**files, "gone.weight": "c.safetensors", "no.weight": "a.safetensors"}})
    )
    for source in (index, tmp_path):
        found = measure(source)
        same(found, measure(state), "0", "3", "5")
        assert found["gone"].reason == "its shard c.safetensors is missing"
        assert found["no"].reason == "the shard a.safetensors does not hold it"
        assert "Skipped: 2 (gone: its shard c.safetensors is missing, no: the shard" in found.coverage


@pytest.mark.parametrize("wrap", [lambda m: nn.DataParallel(m), torch.compile])
def test_wrapped_models_keep_the_names_of_what_they_wrap(wrap) -> None:
    made = model()
    wrapped = wrap(made)
    assert [t.name for t in measure(wrapped)] == [t.name for t in measure(made)]
    assert [t.name for t in measure(wrapped.state_dict())] == [t.name for t in measure(made)]


def test_tied_weights_are_measured_once_and_the_other_place_is_named() -> None:
    made = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)})
    made["head"].weight = made["embed"].weight
    shared = nn.ModuleList([made["embed"], made["embed"]])
    found = measure(made)
    assert found["embed"].status == "measured"
    assert found["head"].reason == "tied to embed.weight, where it is measured"
    assert measure(shared)["0"].notes == ("also 1.weight",)


@pytest.mark.parametrize("train", [True, False])
def test_parametrized_weights_are_measured_as_the_layer_uses_them(train: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    made = nn.Linear(6, 5).train(train)
    with torch.no_grad():
        made.weight.normal_(generator=generator)
    parametrizations.attach(made, "weight", parametrizations.Sphere())
    found = measure(made)["weight"]
    assert found.norm_quantiles == pytest.approx((1.0,) * 5)
    assert found.kind == "ParametrizedLinear"
    assert found.notes == ("the weight that Sphere computes",)
    torchs = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5), n_power_iterations=50).train(train)
    found = measure(torchs)
    assert found["weight"].sigma_max == pytest.approx(1.0, rel=1e-3)
    assert found["parametrizations.weight.original"].reason == "a part of a parametrization"
    state = measure(torchs.state_dict())
    assert (
        "the tensor that a parametrization computes the weight from" in state["parametrizations.weight.original"].notes
    )


def test_recurrent_and_attention_weights_are_split_into_their_matrices_without_the_model() -> None:
    made = nn.ModuleDict({"l": nn.LSTM(6, 5), "g": nn.GRU(6, 5), "a": nn.MultiheadAttention(12, 2)})
    found, state = measure(made), measure(made.state_dict())
    for path in ("l.weight_ih_l0", "l.weight_hh_l0", "g.weight_ih_l0", "a.in_proj_weight"):
        assert (state[path].groups, state[path].filters) == (found[path].groups, found[path].filters)
        assert state[path].alignment == found[path].alignment


class Adapter(nn.Module):
    """The part of a PEFT layer that is recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return 0.5 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight


def test_adapters_are_measured_alone_and_with_what_they_adapt() -> None:
    made = nn.ModuleDict({"q": Adapter()})
    found = measure(made)
    q = made["q"]
    delta = measure({"w.weight": q.get_delta_weight("default")})["w"]
    assert found["q.lora_BA.default"].frobenius == pytest.approx(delta.frobenius)
    total = measure({"w.weight": q.base_layer.weight + q.get_delta_weight("default")})["w"]
    assert found["q.base_and_lora.default"].alignment == pytest.approx(total.alignment, rel=1e-5)
    state = measure(made.state_dict())
    assert state["q.lora_BA.default"].stable_rank == pytest.approx(delta.stable_rank, rel=1e-4)
    assert "without its scale" in state["q.lora_BA.default"].notes[0]


class Subclass(torch.Tensor):
    """A quantised tensor of another library: it says how to get plain numbers."""

    def dequantize(self) -> torch.Tensor:
        return torch.full((3, 4), 2.0)


class Opaque(torch.Tensor):
    def dequantize(self) -> torch.Tensor:
        raise RuntimeError("needs its own kernel")


HOSTILE = {
    "complex": (lambda: torch.ones(3, 4, dtype=torch.complex64), "skipped", "complex: angles between complex filters"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "skipped", "sparse (sparse_coo): filters are not stored whole"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "skipped", "sparse (sparse_csr)"),
    "packed": (lambda: torch.ones(3, 4, dtype=torch.uint8), "skipped", "uint8: packed or quantised weights"),
    "int8": (lambda: torch.ones(3, 4, dtype=torch.int8), "skipped", "int8: packed or quantised weights"),
    "ids": (lambda: torch.ones(3, 4, dtype=torch.int64), "no filters", "int64, not weights"),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), "no filters", "bool, not weights"),
    "meta": (lambda: torch.ones(3, 4, device="meta"), "skipped", "on the meta device"),
    "empty": (lambda: torch.ones(0, 4), "no filters", "empty: shape (0, 4)"),
    "scalar": (lambda: torch.tensor(1.0), "no filters", "a single number"),
    "vector": (lambda: torch.ones(3), "no filters", "a vector"),
    "6-d": (lambda: torch.ones(1, 1, 1, 1, 1, 2), "no filters", "not called a weight"),
    "float8": (lambda: torch.ones(3, 4).to(torch.float8_e4m3fn), "measured", ""),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8), "measured", ""),
    "subclass": (lambda: torch.ones(3, 4).as_subclass(Subclass), "measured", ""),
    "opaque": (
        lambda: torch.ones(3, 4).as_subclass(Opaque),
        "skipped",
        "quantised (Opaque), and cannot be dequantised",
    ),
    "number": (lambda: 3, "skipped", "not a tensor but int"),
    "one": (lambda: torch.ones(1, 1), "measured", ""),
    "zeros": (lambda: torch.zeros(3, 4), "measured", ""),
    "tiny": (lambda: torch.full((3, 4), 1e-45), "measured", ""),
    "huge": (lambda: torch.full((3, 4), 3e38), "measured", ""),
    "nan": (lambda: torch.full((3, 4), float("nan")), "measured", ""),
    "wide": (lambda: torch.ones(2, 3, 1, 1, 1), "measured", ""),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:quantize_per_tensor")
@pytest.mark.parametrize("name", HOSTILE)
def test_no_kind_of_tensor_stops_the_measurement(name: str) -> None:
    make, status, reason = HOSTILE[name]
    found = measure({"x.weight": make(), "y.weight": torch.eye(3)})
    row = found["x"]
    assert row.status == status
    assert row.reason.startswith(reason)
    assert found["y"].alignment == 0
    for text in (str(found), found.to_json(), found.to_csv(), found.to_markdown(), found.to_html(), found.coverage):
        assert text


def test_lazy_and_quantised_layers_have_rows() -> None:
    found = measure(nn.Sequential(nn.LazyLinear(4)))
    assert found["0"].reason == "a lazy layer that has seen no input yet"

    class Packed(nn.Module):
        def weight(self) -> torch.Tensor:
            return torch.eye(3)

    assert measure(nn.Sequential(Packed()))["0"].alignment == 0


def test_non_finite_values_are_found_counted_and_left_out() -> None:
    weight = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))
    fine = measure({"w.weight": weight[[0, 1, 3, 5]]})["w"]
    weight[2, 1, 2] = float("nan")
    weight[4, 0, 0] = float("inf")
    found = measure({"w.weight": weight})["w"]
    assert (found.nonfinite, found.first_nonfinite) == (2, (2, 1, 2))
    assert found.alignment == pytest.approx(fine.alignment)
    assert found.norm_mean == pytest.approx(fine.norm_mean)
    assert found.sigma_max is None
    assert "2 filters with non-finite entries left out" in found.notes


def test_deep_nesting_and_large_numbers_of_modules() -> None:
    made: nn.Module = nn.Linear(2, 2)
    for _ in range(300):
        made = nn.Sequential(made)
    assert measure(made).layers[0].path == ".".join("0" * 300)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (3, "found int"),
        (torch.ones(2), "found Tensor"),
        ({}, r"found a mapping with the keys \[\]"),
        ({"a": 1}, r"found a mapping with the keys \['a'\]"),
        (None, "found NoneType"),
    ],
)
def test_what_holds_no_tensors_is_refused(source: object, found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=found):
        measure(source)  # type: ignore[arg-type]


def test_progress_is_told_after_each_tensor() -> None:
    seen: list[tuple[int, int]] = []
    measure({"a": torch.ones(2), "b": torch.ones(2)}, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
