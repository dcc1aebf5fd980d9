"""rotate_: values by hand, the same function, exact undo, what stays and why, models of torch and transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from bank.live import timm_models, transformers_models
from catalog import seeded
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry import quantization_error
from gonio.surgery import rotate, rotate_
from gonio.surgery.rotate import hadamard
from gonio.surgery.symmetries import Confirmed
from gonio.surgery.turns import STREAM, Slot, Turn, random_turn
from surgery.net import Net, between_channels

IDS = torch.arange(12).reshape(2, 6) % 7


class Lm(nn.Module):
    """A decoder of one block with grouped values, whose forward cannot be traced."""

    def __init__(
        self, norm: Callable[[], nn.Module] = lambda: nn.RMSNorm(8, elementwise_affine=False), *, tied: bool = False
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, 8), nn.Parameter(torch.zeros(6, 8))
        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()
        self.q, self.kv, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 9, bias=False)
        for seed, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=seed, dtype=torch.float64)
        if tied:
            self.head.weight = self.table.weight

    def stream(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.places

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stream(ids)
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (z.unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1) for z in self.kv(y).chunk(2, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


def changed(old: nn.Module, new: nn.Module) -> set[str]:
    theirs = dict(old.named_parameters())
    return {name for name, p in new.named_parameters() if not torch.equal(p, theirs[name])}


def assert_same(old: nn.Module, new: nn.Module, x: Any, within: float = 1e-12) -> None:
    assert gonio.equivalent(old, new, example=x).relative <= within


STREAM_OF = {"table.weight", "places", "q.weight", "kv.weight", "o.weight", "o.bias", "up.weight", "down.weight"}
STREAM_OF |= {"down.bias", "head.weight"}
VALUES_OF = {"kv.weight", "kv.bias", "o.weight"}


def test_the_stream_is_multiplied_wherever_it_is_written_or_read() -> None:
    model = Lm()
    old = copy.deepcopy(model)
    edited = rotate_(model, ("stream",), example=IDS, seed=3)
    assert changed(old, model) == STREAM_OF
    q = torch.linalg.lstsq(old.table.weight, model.table.weight).solution.T  # E' = EQᵀ
    near = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(q @ q.T, torch.eye(8, dtype=torch.float64), **near)
    torch.testing.assert_close(q.abs(), torch.full_like(q, 8**-0.5), **near)  # a Hadamard matrix
    torch.testing.assert_close(model.places, old.places @ q.T, **near)
    for layer in ("q", "kv", "up", "head"):
        torch.testing.assert_close(getattr(model, layer).weight, getattr(old, layer).weight @ q.T, **near)
    for layer in ("o", "down"):
        torch.testing.assert_close(getattr(model, layer).weight, q @ getattr(old, layer).weight, **near)
        torch.testing.assert_close(getattr(model, layer).bias, q @ getattr(old, layer).bias, **near)
    assert_same(old, model, IDS)
    assert_same(old, model, (IDS + 2) % 9)
    edited.undo_()
    assert not changed(old, model)


def test_values_turn_by_head_and_all_heads_that_share_them_follow() -> None:
    model = Lm()
    old = copy.deepcopy(model)
    edited = rotate_(model, ("values",), example=IDS)
    assert changed(old, model) == VALUES_OF
    assert torch.equal(model.kv.weight[:8], old.kv.weight[:8])  # keys
    turns = []
    for group in (0, 1):
        rows, columns = slice(8 + 4 * group, 12 + 4 * group), slice(8 * group, 8 * group + 4)
        q = torch.linalg.lstsq(old.kv.weight[rows].T, model.kv.weight[rows].T).solution.T
        turns.append(q)
        torch.testing.assert_close(model.kv.bias[rows], q @ old.kv.bias[rows])
        for shift in (0, 4):
            mine = slice(columns.start + shift, columns.stop + shift)
            torch.testing.assert_close(model.o.weight[:, mine], old.o.weight[:, mine] @ q.T)
    assert not torch.allclose(turns[0], turns[1])
    assert_same(old, model, IDS)
    assert [str(change.what) for change in edited.changes] == [
        "weight, bias turned by 2 Hadamard matrices of 4",
        "weight turned by 2 Hadamard matrices of 4",
    ]


@pytest.mark.parametrize("turn", ["hadamard", "random"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_at_once(turn: Any, dtype: torch.dtype) -> None:
    model = Lm().to(dtype)
    old = copy.deepcopy(model)
    edited = rotate_(model, example=IDS, turn=turn)
    assert changed(old, model) == STREAM_OF | VALUES_OF
    assert_same(old, model, IDS, {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.1))
    edited.undo_()
    assert not changed(old, model)


def test_a_layer_norm_takes_turns_that_keep_means_and_its_shift_turns() -> None:
    def norm() -> nn.Module:
        return nn.LayerNorm(8)

    model = Lm(norm)
    for each in (model.norm1, model.norm2, model.norm3):
        nn.init.ones_(each.weight)
    old = copy.deepcopy(model)
    edited = rotate_(model, ("stream",), example=IDS)
    assert "turned by a random matrix that keeps means of 8" in edited.changes[0].what
    assert {"norm1.bias", "norm2.bias", "norm3.bias"} <= changed(old, model)
    torch.testing.assert_close(model.table.weight.mean(1), old.table.weight.mean(1))
    assert_same(old, model, IDS)
    assert_same(old, model, (IDS + 2) % 9)


def test_gains_are_folded_first() -> None:
    model = Lm(lambda: nn.RMSNorm(8))
    message = (
        r"rotate_: cannot turn the model: the stream of places stays: it passes a norm whose gain is not one "
        r"number \(norm1, norm2, norm3\); gonio.fold_\(model, gains=True\) merges gains"
    )
    with pytest.raises(NotApplicableError, match=message):
        rotate_(model, ("stream",), example=IDS)
    old = copy.deepcopy(model)
    gonio.fold_(model, example=IDS, gains=True)
    rotate_(model, ("stream",), example=IDS)
    assert_same(old, model, IDS)


def test_a_tied_head_turns_once_and_stays_tied() -> None:
    model = Lm(tied=True)
    old = copy.deepcopy(model)
    rotate_(model, example=IDS)
    assert model.head.weight is model.table.weight
    assert_same(old, model, IDS)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_tied_head_behind_a_gain(norm: Callable[[int], nn.Module]) -> None:
    """E(g ∘ n) is EQᵀ(g ∘ Qn) for one number g alone: no weight of a tied head can take another gain."""
    model = Lm(lambda: norm(8), tied=True)
    gonio.fold_(model, example=IDS, gains=True)
    why = (
        r"the stream of places stays: it passes a norm whose gain is not one number \(norm3\), and table.weight, "
        r"which reads it, is a table of embeddings, too; give the head a weight of its own, and gonio.fold_"
    )
    with pytest.raises(NotApplicableError, match=why):
        rotate_(model, ("stream",), example=IDS)
    free = copy.deepcopy(model)
    free.head.weight = nn.Parameter(free.head.weight.detach().clone())
    gonio.fold_(free, example=IDS, gains=True)
    with torch.no_grad():
        model.norm3.weight.fill_(-1.5)
    for each in (model, free):
        old = copy.deepcopy(each)
        rotate_(each, example=IDS)
        assert {"table.weight", "places", *(["head.weight"] if each is free else [])} <= changed(old, each)
        assert_same(old, each, IDS)
        assert_same(old, each, (IDS + 2) % 9)
    assert model.head.weight is model.table.weight


def test_a_large_channel_is_spread() -> None:
    model = Lm()
    with torch.no_grad():
        model.up.weight[:, 3] *= 50
    before = quantization_error(model.up.weight, bits=4)
    rotate_(model, ("stream",), example=IDS)
    assert quantization_error(model.up.weight, bits=4) < 0.7 * before


# --- what stays -------------------------------------------------------------------------------------------------------


class Other(Lm):
    """Whose stream is written or read by other means, too."""

    def __init__(
        self, stream: Callable[[Any, Tensor], Tensor] | None = None, *, share: bool = False, **parts: Any
    ) -> None:
        super().__init__()
        self.how = stream
        for name, part in parts.items():
            setattr(self, name, part)
        if share:
            self.spare.weight = self.head.weight
        self.double()

    def stream(self, ids: Tensor) -> Tensor:
        x = super().stream(ids)
        return x if self.how is None else self.how(self, x)


class Returning(Lm):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.stream(ids)


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an output": (Returning, "it is an output of the model"),
    "an activation": (lambda: Other(lambda m, x: x.tanh()), "reads something else than a sum of layers' outputs"),
    "a constant": (lambda: Other(lambda m, x: x + torch.linspace(0, 9, 8)), "reads something else than a sum"),
    "a gain": (lambda: Other(lambda m, x: x * m.gain, gain=nn.Parameter(seeded(8))), "reads something else than a sum"),
    "a fixed gain": (lambda: Other(lambda m, x: x * torch.linspace(1, 2, 8)), "the outputs change if it turns"),
    "a rectifier": (lambda: Other(lambda m, x: x.relu()), "the outputs change if it turns"),
    "mixed channels": (lambda: Other(lambda m, x: x.flip(-1)), "reads something else than a sum"),
    "not run": (lambda: Other(spare=nn.Linear(8, 8)), "spare.weight had no part in the run, and may belong to it"),
    "not run, shared": (
        lambda: Other(spare=nn.Linear(8, 9), share=True),
        "spare did not run, and shares a tensor of it",
    ),
    "a fixed weight": (lambda: Other(lambda m, x: x + F.linear(x, m.up.weight[:8].tanh())), "reads something else"),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_is_said_and_values_turn(name: str) -> None:
    make, why = STAY[name]
    model = make()
    old = copy.deepcopy(model)
    edited = rotate_(model, example=IDS)
    assert changed(old, model) == VALUES_OF
    (note,) = [note for note in edited.notes if note.startswith("the stream of ")]
    assert why in note
    assert_same(old, model, IDS)
    with pytest.raises(NotApplicableError, match=r"rotate_: cannot turn the model: the stream of \S+ stays: "):
        rotate_(model, ("stream",), example=IDS)


def test_values_that_are_not_only_averaged_stay() -> None:
    model = Lm()
    model.o.register_forward_pre_hook(lambda module, args: (args[0] * torch.linspace(1, 2, 16),))
    with pytest.raises(NotApplicableError, match="the values of the model stay: the outputs change if it turns"):
        rotate_(model, ("values",), example=IDS)


def test_values_that_are_clipped_stay_though_the_run_does_not_reach_the_clip() -> None:
    """Both of two clipped entries can be below the limit where their turned ones are not."""
    model = Lm()
    model.kv.register_forward_hook(lambda module, args, out: out.clamp(-100, 100))
    why = "the values of the model stay: the next layer reads what is not proportional to the values"
    with pytest.raises(NotApplicableError, match=why):
        rotate_(model, ("values",), example=IDS)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_small_effect_is_no_rounding_of_a_part_that_computes_in_float32(size: float) -> None:
    """Attention between channels mixes values; a norm in float32 makes outputs that are rounded more coarsely."""
    mixed = Net(
        lambda m, x: x.float().double() + size * between_channels(m, F.layer_norm(x.float(), (8,)).double()),
        qkv=nn.Linear(8, 24),
        proj=nn.Linear(8, 8),
    ).double()
    with pytest.raises(NotApplicableError, match=r"the values of the model stay: the outputs change if it turns"):
        rotate_(mixed, ("values",), example=seeded(2, 6, 8, dtype=torch.float64))


def test_parametrized_weights_stay() -> None:
    model = Lm()
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="up")
    old = copy.deepcopy(model)
    edited = rotate_(model, example=IDS)
    assert "up.weight" not in changed(old, model)
    assert any(note.startswith("the stream of places stays") for note in edited.notes)


def test_frozen_weights_turn_and_stay_frozen() -> None:
    model = Lm(tied=True)
    model.places = None  # a frozen parameter that is added is not seen
    model.stream = model.table.forward
    model.requires_grad_(False)
    old = copy.deepcopy(model)
    rotate_(model, example=IDS)
    assert changed(old, model) >= {"table.weight", "down.weight"}
    assert not any(p.requires_grad for p in model.parameters())


def test_other_arguments_are_refused() -> None:
    for what in ("values", (), ("keys",)):
        with pytest.raises(InvalidArgumentError, match="rotate_ turns 'values', 'stream', or both; found"):
            rotate_(Lm(), what, example=IDS)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match='rotate_ takes turn="hadamard" or "random"; found \'givens\''):
        rotate_(Lm(), example=IDS, turn="givens")  # type: ignore[arg-type]
    with pytest.raises(NotApplicableError, match="it has no attention, and no stream that a norm reads"):
        rotate_(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(NotApplicableError, match=r"is found by running the model, and .*Pass example="):
        rotate_(nn.Transformer(8, 2, 1, 1, 12, batch_first=True))


def test_a_wrong_turn_is_undone_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Lm()
    slots = ((Slot("up.weight", 0, tuple(range(12))), Slot("down.weight", 1, tuple(range(12)))),)
    wrong = Confirmed((Turn(STREAM, "the stream", 12, slots),), dict(model.named_parameters()), {})
    monkeypatch.setattr(rotate, "turns_of", lambda *args: wrong)
    old = copy.deepcopy(model)
    with pytest.raises(NotApplicableError, match=r"rotate_: cannot turn .*the outputs changed: largest dev"):
        rotate_(model, example=IDS)
    assert not changed(old, model)


# --- matrices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 40, 96, 128])
def test_hadamard_matrices(size: int) -> None:
    found = hadamard(size)
    assert found is not None
    assert bool((found.abs() == 1).all())
    assert torch.equal(found @ found.T, size * torch.eye(size, dtype=torch.float64))


def test_sizes_without_a_hadamard_matrix_turn_at_random() -> None:
    assert [size for size in range(1, 30) if hadamard(size) is not None] == [1, 2, 4, 8, 12, 16, 20, 24]
    block = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).double()
    assert "turned by 2 random matrices of 3" in str(rotate_(block))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_random_turns_are_orthogonal_and_keep_means(size: int) -> None:
    for keeps in (False, True):
        q = random_turn(size, torch.Generator().manual_seed(0), keeps_mean=keeps)
        torch.testing.assert_close(q @ q.T, torch.eye(size, dtype=torch.float64))
        if keeps:
            torch.testing.assert_close(q.sum(1), torch.ones(size, dtype=torch.float64))


# --- models of torch, timm and transformers ---------------------------------------------------------------------------

CASES = {case.name: case for case in (*transformers_models.CASES, *timm_models.CASES)}
QUICK = ("Llama",)
# By family, whether the stream turns once gains are folded; the values turn in all of them.
STREAMS = {
    **dict.fromkeys(("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Granite", "GPT-NeoX", "Phi"), True),
    **dict.fromkeys(("Llama, tied", "Gemma", "Gemma 2", "GPT-2", "BERT", "DistilBERT", "BART", "ModernBERT"), False),
}


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("Llama, tied", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tied", [True, False])
def test_families_with_a_tied_head(name: str, tied: bool) -> None:
    model, example = CASES[name].trained()
    if tied:
        gains = [p for n, p in model.named_parameters() if n in ("transformer.ln_f.weight", "model.norm.weight")]
        gains[0].data.fill_(1.5)
    else:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    old = copy.deepcopy(model)
    gonio.fold_(model, example=example, gains=True)
    edited = rotate_(model, ("stream",), example=example)
    assert not [note for note in edited.notes if "stay" in note]
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert_same(old, model, example, 1e-9 if name == "GPT-2" else 1e-5)  # norms of Llama compute in float32
    assert_same(old, model, {"input_ids": (example["input_ids"] + 5) % 24}, 1e-9 if name == "GPT-2" else 1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in STREAMS])
def test_families(name: str) -> None:
    model, example = CASES[name].trained()
    old = copy.deepcopy(model)
    gonio.fold_(model, example=example, gains=True)
    edited = rotate_(model, example=example)
    assert any("stream" in note for note in edited.notes) is not STREAMS[name], str(edited)
    assert_same(old, model, example, 1e-5)  # norms of transformers compute in float32
