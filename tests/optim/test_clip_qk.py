"""clip_qk_: the logits of every head against a float64 reference, and what a step does to the heads."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from bank.live.transformers_models import MODELS, made
from catalog import seeded
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError

HEADS, SIZE, WIDTH, LENGTH = 4, 6, 24, 7


def _slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def turned(x: Tensor) -> Tensor:
    """Rotary positions, pairs (i, i + size/2)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] / 10 ** (torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2).to(x), angles.sin().repeat(1, 2).to(x)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attend(nn.Module):
    """Grouped attention in the forms that models write it in; nothing in it has a telling name."""

    def __init__(self, shared: int = 1, form: str = "kernel", *, rotary: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.shared, self.form, self.rotary, self.causal = shared, form, rotary, causal
        rows = HEADS * SIZE
        self.a, self.b, self.c = nn.Linear(WIDTH, rows), *(nn.Linear(WIDTH, rows // shared) for _ in range(2))
        self.d = nn.Linear(rows, WIDTH)

    def parts(self, x: Tensor) -> list[Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.a, self.b, self.c))
        return [turned(q), turned(k), v] if self.rotary else [q, k, v]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.form in ("merged", "merged heads first"):  # batch and heads are one dimension
            q, k, v = (t.transpose(0, 1) if "first" in self.form else t for t in (q, k, v))
            y = ((q.flatten(0, 1) * SIZE**-0.5) @ k.flatten(0, 1).mT).softmax(-1) @ v.flatten(0, 1)
            y = y.unflatten(0, q.shape[:2])
            y = y.transpose(0, 1) if "first" in self.form else y
        elif self.form == "kernel":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.shared > 1)
        else:
            k, v = (t.repeat_interleave(self.shared, 1) for t in (k, v))
            logits = torch.einsum("bhid,bhjd->bhij", q, k) if self.form == "einsum" else q @ k.transpose(-1, -2)
            logits = logits * SIZE**-0.5
            if self.causal:
                logits = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), float("-inf"))
            y = logits.softmax(-1) @ v
        return self.d(y.transpose(1, 2).flatten(2))

    def logits(self, x: Tensor) -> Tensor:
        """The largest of each head, computed by itself in float64."""
        twin = copy.deepcopy(self).double()
        q, k, _ = twin.parts(x.double())
        full = q @ k.repeat_interleave(self.shared, 1).mT / SIZE**0.5
        if self.causal:
            full = full.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        return full.amax((0, 2, 3)).detach()


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.head = attend, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(x + self.attend(x)))


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps change nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def grown(attend: Attend, *, heads: tuple[int, ...] = (1, 2)) -> Block:
    """Some heads have logits that are much larger than those of others."""
    torch.manual_seed(0)
    for layer in attend.children():
        layer.reset_parameters()
    with torch.no_grad():
        for head in heads:
            attend.a.weight[head * SIZE : (head + 1) * SIZE] *= 50 * (head + 1)
    return Block(attend)


X = seeded(3, LENGTH, WIDTH)
FORMS = [
    (shared, form, rotary, causal)
    for shared in (1, 2, 4)
    for form in ("kernel", "product", "einsum")
    for rotary, causal in ((False, False), (True, True))
]


@pytest.mark.parametrize(("shared", "form", "rotary", "causal"), FORMS)
def test_logits_above_the_limit_are_at_the_limit_and_other_heads_stay_to_the_bit(
    shared: int, form: str, rotary: bool, causal: bool
) -> None:
    model = grown(Attend(shared, form, rotary=rotary, causal=causal))
    attend, optimizer = model.attend, still(model)
    limit = 4.0
    clip = gonio.clip_qk_(model, optimizer, limit=limit, example=X)
    before, old = attend.logits(X), copy.deepcopy(model.state_dict())
    assert ((before > limit) == torch.tensor([False, True, True, False])).all()
    model(X)
    optimizer.step()
    after = attend.logits(X)
    seen, factors = clip.largest()["attend"].double(), clip.factors()["attend"].double()
    over = before > limit
    torch.testing.assert_close(seen[over], before[over], rtol=1e-5, atol=0)
    torch.testing.assert_close(factors, torch.where(over, limit / before, 1.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(after[over], torch.full_like(after[over], limit), rtol=1e-5, atol=0)
    assert torch.equal(after[~over], before[~over])
    new = model.state_dict()
    for head in range(HEADS):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        factor = factors[head] if shared > 1 else factors[head].sqrt()
        for name in ("attend.a.weight", "attend.a.bias"):
            torch.testing.assert_close(new[name][rows], (old[name][rows] * factor).float(), rtol=1e-5, atol=0)
            assert torch.equal(new[name][rows], old[name][rows]) == (not over[head])
        if shared == 1:
            torch.testing.assert_close(new["attend.b.weight"][rows], (old["attend.b.weight"][rows] * factor).float())
    untouched = [n for n in new if not n.startswith("attend.a") and (shared > 1 or not n.startswith("attend.b"))]
    assert all(torch.equal(new[name], old[name]) for name in untouched)


def test_heads_in_one_dimension_with_the_batch() -> None:
    model = grown(Attend(form="merged"))
    optimizer = still(model)
    clip = gonio.clip_qk_(model, optimizer, limit=1e6, example=X[:2])
    model(X)
    optimizer.step()
    torch.testing.assert_close(clip.largest()["attend"].double(), model.attend.logits(X), rtol=1e-5, atol=0)
    clip.undo_()
    gonio.clip_qk_(model, optimizer, example=X[:1])
    with pytest.raises(NotApplicableError, match="the example has one sample, which does not show their order"):
        model(X)
    first = grown(Attend(form="merged heads first"))
    with pytest.raises(NoMatchError, match="one dimension in which the heads come first"):
        gonio.clip_qk_(first, still(first), example=X)


def test_below_the_limit_nothing_changes_to_the_bit_and_the_bound_is_none_of_the_logits() -> None:
    model = grown(Attend())
    optimizer, old = still(model), copy.deepcopy(model.state_dict())
    clip = gonio.clip_qk_(model, optimizer, limit=1e6)
    model(X)
    optimizer.step()
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    assert (clip.largest()["attend"] >= model.attend.logits(X)).all()
    assert (clip.factors()["attend"] == 1).all()


def test_the_largest_of_all_training_forwards_since_the_last_step_counts() -> None:
    model = grown(Attend(form="product"))
    optimizer = still(model)
    clip = gonio.clip_qk_(model, optimizer, limit=1e6)
    model(X)
    model(2 * X)
    model.eval()(9 * X)
    model.train()
    optimizer.step()
    torch.testing.assert_close(clip.largest()["attend"].double(), model.attend.logits(2 * X), rtol=1e-5, atol=0)
    model(X)
    optimizer.step()
    torch.testing.assert_close(clip.largest()["attend"].double(), model.attend.logits(X), rtol=1e-5, atol=0)


def _masks() -> dict[str, dict[str, Tensor]]:
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[:, 0] = True
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[:, 0] = True
    return {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(hidden, -torch.inf)},
        "padding": {"key_padding_mask": padding},
        "by head": {"attn_mask": hidden.expand(3 * HEADS, -1, -1)},
    }


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", ["", "bool", "float", "padding", "by head"])
def test_torchs_attention_with_masks(masked: str, need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    optimizer = still(layer)
    x = X.clone()
    x[:, 0] = 30 * x[:, 0]  # a key that the masks exclude
    clip = gonio.clip_qk_(layer, optimizer, limit=1e-3, example=(X, X, X))
    layer(x, x, x, need_weights=need_weights, **_masks().get(masked, {}))
    weight, bias = layer.in_proj_weight.double(), layer.in_proj_bias.double()
    q, k, _ = (x.double() @ weight.T + bias).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
    logits = (q @ k.mT / SIZE**0.5)[..., 1 if masked else 0 :]
    optimizer.step()
    torch.testing.assert_close(clip.largest()[""].double(), logits.amax((0, 2, 3)).detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_kernels_in_other_dtypes(dtype: torch.dtype) -> None:
    """The bound by norms, which is computed before the logits, in at least float32."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=dtype)
    optimizer, x = still(layer), X.to(dtype)
    clip = gonio.clip_qk_(layer, optimizer, limit=1e-3, example=(x, x, x))
    layer(x, x, x, need_weights=False)
    weight, bias = layer.in_proj_weight.double(), layer.in_proj_bias.double()
    q, k, _ = (x.double() @ weight.T + bias).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
    expected = (q @ k.mT / SIZE**0.5).amax((0, 2, 3)).detach()
    optimizer.step()
    torch.testing.assert_close(
        clip.largest()[""].double(), expected, rtol=1e-5 if dtype == torch.float64 else 0.05, atol=0
    )


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", *_slow("GPT-2", "ViT", "Phi-3", "DeepSeek V3", "BERT")])
def test_models_of_transformers_reach_the_limit(name: str, kind: str) -> None:
    model_kind, config, options, inputs = MODELS[name]
    model, batch = made(model_kind, config, {**options, "attn_implementation": kind}, inputs)()
    model.eval()  # no dropout
    for module in model.modules():
        module.training = not isinstance(module, nn.Dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 3 if parameter.ndim > 1 else parameter)
    optimizer = still(model)
    measured = gonio.clip_qk_(model, optimizer, limit=1e-9, example=batch)
    model.config._attn_implementation = kind
    model(**batch)
    optimizer.step()
    first = measured.largest()
    assert all((values > 0).all() for values in first.values())
    path = next(iter(first))
    measured.undo_()
    again = gonio.clip_qk_(model, optimizer, limit=1e-9, where=lambda p, _: p == path, example=batch)
    model(**batch)
    optimizer.step()
    torch.testing.assert_close(again.largest()[path], torch.full_like(first[path], 1e-9), rtol=1e-3, atol=0)


REFUSED = {
    "Qwen3": "a norm follows its queries or keys",
    "Gemma 2": "not proportional to its queries",
    "MPT": "not proportional to its queries",
    "Swin v2": "a norm follows its queries or keys",
}


@pytest.mark.parametrize("name", ["Qwen3", *_slow("Gemma 2", "MPT", "Swin v2")])
def test_logits_that_the_rows_do_not_scale_are_refused_by_name(name: str) -> None:
    model, batch = made(*MODELS[name])()
    with pytest.raises(NoMatchError, match=f"clip_qk_: no module is suitable; found .*{REFUSED[name]}"):
        gonio.clip_qk_(model, still(model), example=batch)


def test_what_cannot_be_clipped_is_noted_or_refused() -> None:
    model = nn.ModuleDict({"one": Attend(), "two": Attend()})
    model.forward = lambda x: model["two"](model["one"](x))  # type: ignore[method-assign]
    optimizer = still(model["one"])
    clip = gonio.clip_qk_(model, optimizer, example=X)
    assert [change.path for change in clip.changes] == ["one"]
    assert "two stays: two.a.weight is not in the optimizer" in str(clip)
    with pytest.raises(
        NotApplicableError, match=r"cannot clip logits of layer 'two' \(Attend\): two.a.weight is not in"
    ):
        gonio.clip_qk_(model, optimizer, where="*", example=X)
    clip.undo_()
    gonio.hold_(model, optimizer, where="one.a")
    with pytest.raises(NoMatchError, match=r"one \(one.a.weight is held by hold_\)"):
        gonio.clip_qk_(model, optimizer, example=X)


def test_attention_inside_a_compiled_part_is_refused_by_name() -> None:
    """Its modules are not called."""
    model = nn.Sequential(torch.compile(Attend(), backend="eager"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NoMatchError, match=r"0 \(it is inside a compiled part, which does not call its modules\)"):
        gonio.clip_qk_(model, still(model), example=X)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_weights_of_two_attentions_are_refused() -> None:
    model = nn.ModuleDict({"one": Attend(), "two": Attend()})
    model["two"].a = model["one"].a
    model.forward = lambda x: model["two"](model["one"](x))  # type: ignore[method-assign]
    with pytest.raises(NoMatchError, match=r"one and two \(another attention has the same weights\)"):
        gonio.clip_qk_(model, still(model), example=X)


def test_undo_ends_it_and_a_second_one_is_refused() -> None:
    model = grown(Attend())
    optimizer = still(model)
    clip = gonio.clip_qk_(model, optimizer, limit=1.0)
    with pytest.raises(AlreadyAppliedError, match=r"clip_qk_: cannot be applied twice to 'attend'; found a clip"):
        gonio.clip_qk_(model, optimizer)
    clip.undo_()
    old = copy.deepcopy(model.state_dict())
    model(X)
    optimizer.step()
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    second = gonio.clip_qk_(model, optimizer, limit=1.0)
    del optimizer, second
    gonio.clip_qk_(model, still(model))  # the optimizer of the other one is gone


def test_copies_of_a_model_are_not_observed() -> None:
    model = grown(Attend())
    optimizer = still(model)
    gonio.clip_qk_(model, optimizer, limit=1.0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other = still(twin)
        before = twin.attend.logits(X)
        twin(X)
        other.step()
        assert torch.equal(twin.attend.logits(X), before)


def test_a_clip_without_effect_says_so() -> None:
    model = grown(Attend())
    optimizer = still(model)
    gonio.clip_qk_(model, optimizer)
    optimizer.step()
    optimizer.step()
    with pytest.raises(NotApplicableError, match=r"clip_qk_: cannot clip logits of the model: no logit was observed"):
        optimizer.step()


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), True, "100"])
def test_limits(limit: Any) -> None:
    model = grown(Attend())
    with pytest.raises(InvalidArgumentError, match=re.escape(f"is a positive number; found {limit!r}")):
        gonio.clip_qk_(model, still(model), limit=limit)


def test_a_diverging_run_stays_at_the_limit() -> None:
    """At a large rate the logits grow without the clip; with it no step leaves one above the limit."""

    def largest(clipped: bool) -> float:
        model = grown(Attend(rotary=True, causal=True), heads=())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        target = 100 * seeded(3, LENGTH, 3, seed=1)
        if clipped:
            gonio.clip_qk_(model, optimizer, limit=5.0)
        for _ in range(30):
            optimizer.zero_grad()
            (model(X) - target).square().mean().backward()
            optimizer.step()
        return float(model.attend.logits(X).max())

    assert largest(False) > 20
    assert largest(True) < 10  # the clip acts on the logits before the step


def test_checkpointing_and_exceptions_leave_no_mode_behind() -> None:
    model = grown(Attend(form="product"))
    optimizer = still(model)
    clip = gonio.clip_qk_(model, optimizer, limit=1e6)
    fails: list[Callable[[], Any]] = [lambda: model.attend(torch.randn(2, 3)), lambda: model.attend(None)]
    for call in fails:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call()
        assert not torch.overrides._get_current_function_mode_stack()
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    optimizer.step()
    torch.testing.assert_close(clip.largest()["attend"].double(), model.attend.logits(X), rtol=1e-5, atol=0)
    assert not torch.overrides._get_current_function_mode_stack()


def test_biases_of_torchs_separate_weights_are_those_of_their_rows() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(12, 3, kdim=6, vdim=7, batch_first=True)
    with torch.no_grad():
        model.in_proj_bias.copy_(seeded(36))
    inputs, before = (seeded(2, 5, 12), seeded(2, 4, 6), seeded(2, 4, 7)), model.in_proj_bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = gonio.clip_qk_(model, optimizer, limit=1e-3, example=inputs)
    model(*inputs)[0].sum().backward()
    optimizer.step()
    factors = clip.factors()[""].sqrt().repeat_interleave(4)
    assert bool((factors < 1).all())
    torch.testing.assert_close(model.in_proj_bias.detach(), before * torch.cat([factors, factors, torch.ones(12)]))
