"""The logits of heads on a batch against a float64 reference, in every form in which attention is written."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from bank.live.transformers_models import CASES, MODELS, made
from catalog import seeded
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.measuring.figures.attention import ONE_TOKEN, logits_on
from gonio.measuring.figures.heads import heads_in, parameters_of
from gonio.surgery import anatomy
from gonio.surgery.facts import Facts, register
from optim.test_clip_qk import FORMS, HEADS, LENGTH, SIZE, WIDTH, Attend, Block, X, grown
from surgery.net import Net
from surgery.test_anatomy_families import LAYOUTS, MAKE

FIGURES = ("largest_logit", "entropy", "entropy_share", "one_token")


def by_hand(logits: Tensor) -> list[tuple[float, ...]]:
    """Of logits (batch, heads, queries, keys) with −∞ for keys that are not allowed, the figures of each head."""
    found = []
    for head in logits.double().unbind(1):
        entropies, most, single = [], [], []
        for row in head.flatten(0, 1).tolist():
            allowed = [x for x in row if x > -math.inf]
            if len(allowed) < 2:
                continue
            weights = [math.exp(x - max(allowed)) for x in allowed]
            shares = [w / sum(weights) for w in weights]
            entropies.append(-sum(p * math.log(p) for p in shares if p))
            most.append(math.log(len(allowed)))
            single.append(max(shares) >= ONE_TOKEN)
        mean = sum(entropies) / len(entropies)
        found.append((float(head.max()), mean, sum(entropies) / sum(most), sum(single) / len(single)))
    return found


def close(heads: Any, expected: list[tuple[float, ...]], rel: float = 1e-5) -> None:
    assert len(heads) == len(expected)
    for head, figures in zip(heads, expected, strict=True):
        assert [getattr(head, name) for name in FIGURES] == pytest.approx(figures, rel=rel, abs=1e-6)


def logits_of(attend: Attend, x: Tensor) -> Tensor:
    """All logits, computed by itself in float64."""
    twin = copy.deepcopy(attend).double()
    q, k, _ = twin.parts(x.double())
    full = q @ k.repeat_interleave(attend.shared, 1).mT / SIZE**0.5
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return (full.masked_fill(later, -torch.inf) if attend.causal else full).detach()


ALL = [*FORMS, (1, "merged", False, False)]


@pytest.mark.parametrize(("shared", "form", "rotary", "causal"), ALL)
def test_every_form_of_attention(shared: int, form: str, rotary: bool, causal: bool) -> None:
    model = grown(Attend(shared, form, rotary=rotary, causal=causal))
    measured = gonio.measure(model, batch=X)
    close(measured.heads, by_hand(logits_of(model.attend, X)))
    assert any(head.one_token for head in measured.heads)
    assert not any("were not measured" in note for note in measured.notes)


@pytest.mark.parametrize(
    ("products", "values"),
    [("bqhd,bkhd->bqhk", "bqhk,bkhd->bqhd"), ("...qhd, ...khd -> ...qhk", "...qhk,...khd->...qhd")],
)
def test_queries_before_heads_in_an_einsum(products: str, values: str) -> None:
    """The dimensions of the logits are not those of the queries."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, SIZE)) for layer in (m.q, m.k, m.v))
        shares = (torch.einsum(products, q, k) * SIZE**-0.5).softmax(-1)
        return m.o(torch.einsum(values, shares, v).flatten(2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"}
    model = Net(forward, **layers)
    with torch.no_grad():
        model.q.weight[:SIZE] *= 30
    q, k = (layer(X).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).double() for layer in (model.q, model.k))
    logits = (q @ k.mT / SIZE**0.5).detach()
    close(gonio.measure(model, batch=X).heads, by_hand(logits))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = gonio.clip_qk_(model, optimizer, limit=1e-3, example=X)
    model(X).sum().backward()
    optimizer.step()
    torch.testing.assert_close(clip.largest()[""].double(), logits.amax((0, 2, 3)), rtol=1e-5, atol=0)


def _masks() -> dict[str, dict[str, Tensor]]:
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[:, 0] = True
    hidden[2, :5] = True
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[1:, 4:] = True
    added = seeded(LENGTH, LENGTH).masked_fill(hidden, -torch.inf)
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": added},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", _masks())
def test_torchs_attention_with_masks(masked: str, need_weights: bool) -> None:
    """What a mask adds to logits belongs to the probabilities."""
    torch.manual_seed(0)
    layer, masks = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), _masks()[masked]
    batch = {"query": X, "key": X, "value": X, "need_weights": need_weights, **masks}
    weight, bias = layer.in_proj_weight.double(), layer.in_proj_bias.double()
    q, k, _ = (X.double() @ weight.T + bias).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
    logits = products = (q @ k.mT / SIZE**0.5).detach()
    if "attn_mask" in masks:
        mask = masks["attn_mask"]
        logits = logits.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if "key_padding_mask" in masks:
        logits = logits.masked_fill(masks["key_padding_mask"][:, None, None], -torch.inf)
    heads, left = logits_on(layer.eval(), batch, anatomy(layer, example=(X, X, X)))
    assert not left
    expected = by_hand(logits)
    if masked == "float" and not need_weights:  # of a fused kernel the largest is that of the products
        most = products.masked_fill(logits == -torch.inf, -torch.inf).amax((0, 2, 3))
        expected = [(float(x), *figures[1:]) for x, figures in zip(most, expected, strict=True)]
    close(heads, expected, rel=1e-4)


def test_a_large_negative_number_is_a_mask() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        logits = q @ k.mT / WIDTH**0.5 + torch.tensor([-10000.0, *[0.0] * (LENGTH - 1)])
        return m.o(logits.softmax(-1) @ v)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Net(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), o=nn.Linear(WIDTH, WIDTH))
    q, k, _ = model.qkv(X).double().chunk(3, -1)
    logits = (q @ k.mT / WIDTH**0.5).detach()[:, None].clone()
    logits[..., 0] = -torch.inf
    close(gonio.measure(model, batch=X).heads, by_hand(logits))


def test_calls_of_one_module_are_counted_together_and_attention_inside_of_attention_once() -> None:
    inner = Attend()

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(m.inner(x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return m.inner(m.o(y))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Net(forward, inner=inner, qkv=nn.Linear(WIDTH, 3 * WIDTH), o=nn.Linear(WIDTH, WIDTH)).eval()
    seen: list[Tensor] = []
    with torch.no_grad(), inner.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        model(X)
        q, k, _ = model.qkv(inner(X)).double().unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
    heads = gonio.measure(model, batch=X).heads
    both = torch.cat([logits_of(inner, x) for x in seen[:2]])
    close([head for head in heads if head.path == "inner"], by_hand(both))
    close([head for head in heads if head.path == ""], by_hand(q @ k.mT / SIZE**0.5))


def test_the_model_and_the_generator_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), 2)
    old, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    expected = copy.deepcopy(model).eval()(X)
    measured = gonio.measure(model, batch=X)
    assert [head.path for head in measured.heads] == [f"layers.{n}.self_attn" for n in (0, 1) for _ in range(HEADS)]
    assert all(head.largest_logit is not None for head in measured.heads)
    assert model.training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model.eval()(X), expected)
    assert all(head.entropy is None for head in gonio.measure(model).heads)


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


def test_a_softmax_of_another_module_than_the_product_is_read() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return m.o((m.softmax(m.scores(q, k) * SIZE**-0.5) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    layers = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "o": nn.Linear(WIDTH, WIDTH), "scores": Scores()}
    model = nn.Sequential(nn.LayerNorm(WIDTH), Net(forward, **layers, softmax=nn.Softmax(-1)))
    q, k, _ = model[1].qkv(model[0](X)).double().unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
    logits = (q @ k.mT / SIZE**0.5).detach()
    heads = gonio.measure(model, batch=X).heads
    assert {head.path for head in heads} == {"1.scores"}
    close(heads, by_hand(logits))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = gonio.clip_qk_(model, optimizer, limit=1e-3, example=X)
    with pytest.raises(AlreadyAppliedError, match=r"cannot be applied twice to '1\.scores'"):
        gonio.clip_qk_(model, optimizer, example=X)
    model(X).sum().backward()
    optimizer.step()
    torch.testing.assert_close(clip.largest()["1.scores"].double(), logits.amax((0, 2, 3)), rtol=1e-5, atol=0)


class Fused(nn.Module):
    """A kernel that is no function of torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exp = ((q @ k.mT) * q.shape[-1] ** -0.5).exp()
        return (exp / exp.sum(-1, keepdim=True)) @ v


def test_what_cannot_be_read_is_noted_with_its_reason() -> None:
    register(Fused, Facts(attends=lambda q, k, v: (q, k, v)))

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return m.o(m.fused(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def twice(m: Any, x: Tensor) -> Tensor:
        for qkv, o in ((m.a, m.b), (m.c, m.d)):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
            x = o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x

    torch.manual_seed(0)
    kernel = Net(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), o=nn.Linear(WIDTH, WIDTH), fused=Fused())
    layers = {n: nn.Linear(WIDTH, WIDTH * (3 if n in "ac" else 1)) for n in "abcd"}
    for model, why in (
        (kernel, "a registered kernel computes its logits, which cannot be read"),
        (Net(twice, **layers), "it multiplies several queries and keys"),
        (Attend(form="merged heads first"), "its heads and its batch are one dimension in which the heads come first"),
    ):
        measured = gonio.measure(model, batch=X)
        assert [head.largest_logit for head in measured.heads] == [None] * len(measured.heads) != []
        assert any(
            note.startswith("Logits of ") and note.endswith(f"were not measured: {why}.") for note in measured.notes
        )
        assert not any("were not measured" in note for note in gonio.measure(model).notes)


def test_large_models_say_how_their_logits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.measuring.figures.structure.LARGEST_UNASKED", 10)
    model = Block(Attend())
    (note,) = [note for note in gonio.measure(model, batch=X).notes if note.startswith("Logits were not measured")]
    assert "extra_figures=('blocks',)" in note
    assert gonio.measure(model, batch=X, extra_figures=("blocks",)).heads[0].entropy is not None


def test_a_batch_unlike_the_example_breaks_nothing() -> None:
    """What is observed has other dimensions than the model of the anatomy; the reason is said."""
    model = Attend(form="merged").eval()
    heads, left = logits_on(model, X, anatomy(model, example=X[:1]))
    assert heads == ()
    assert left[""].endswith("the example has one sample, which does not show their order")


def test_the_table_the_page_and_the_export_have_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    model = grown(Attend(), heads=(1, 2))
    with torch.no_grad():
        model.attend.a.weight[SIZE : 2 * SIZE] *= 10
    measured = gonio.measure(model, batch=X)
    text = str(measured)
    assert "logits of heads in" in text
    assert "2 of 4" in text
    assert "largest logit" in measured.to_html()
    rows = json.loads(measured.to_json())["heads"]
    assert [row["largest_logit"] for row in rows] == [head.largest_logit for head in measured.heads]
    assert "logits of heads in" not in str(gonio.measure(grown(Attend())))
    assert "the logarithm of the number of allowed keys" in gonio.measuring.explain("entropy share")


@pytest.mark.slow
def test_no_logit_of_a_family_is_above_its_bound_and_each_head_has_figures_or_a_reason() -> None:
    """Families of transformers and of timm."""
    families = {case.name: case.make for case in CASES} | {name: MAKE[name] for name in LAYOUTS}
    heads, read, bounded = 0, 0, []
    for name, make in families.items():
        torch.manual_seed(0)
        model, example = make()
        found = anatomy(model.eval(), example=example)
        seen, left = logits_on(model, example, found)
        blocks = {block.path: block.heads for block in found.attention}
        heads += sum(blocks.values())
        assert {path: sum(head.path == path for head in seen) for path in blocks if path not in left} == {
            path: count for path, count in blocks.items() if path not in left
        }
        assert not left.keys() & blocks.keys()
        read += len(seen)
        bounds = {(head.path, head.head): head.logit_bound for head in heads_in(found, parameters_of(model))}
        for head in seen:
            assert head.entropy_share is None or -1e-6 <= head.entropy_share <= 1 + 1e-6
            if (bound := bounds.get((head.path, head.head))) is not None:
                assert (head.largest_logit or 0.0) <= bound, (name, head)
                bounded.append(bound)
    assert read >= 1260
    assert read == heads
    assert len(bounded) >= 880


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "ViT", "Phi-3", "BERT"])
def test_both_implementations_of_a_family_give_the_same(name: str) -> None:
    kind, config, options, inputs = MODELS[name]
    found = []
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(0)
        model, batch = made(kind, config, {**options, "attn_implementation": implementation}, inputs)()
        model.eval()
        example = anatomy(model, example=batch)
        model.config._attn_implementation = implementation
        found.append(logits_on(model, batch, example)[0])
    assert found[0]
    close(found[0], [tuple(getattr(head, each) for each in FIGURES) for head in found[1]], rel=1e-4)


# --- while it trains --------------------------------------------------------------------------------------------------


def trained(tracking: Callable[[nn.Module, torch.optim.Optimizer], Any], steps: int = 5) -> tuple[nn.Module, Any, Any]:
    """A model after some steps, the tracker, and before each step the logits and whether there are hooks."""
    model = grown(Attend())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tracker, seen = tracking(model, optimizer), []
    for step in range(steps):
        x = seeded(3, LENGTH, WIDTH, seed=step)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        seen.append((logits_of(model.attend, x), hooks))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if tracker is not None and tracker.training is None:
            tracker.step()
    return model, tracker, seen


def with_optimizer(model: nn.Module, optimizer: Any) -> gonio.Tracker:
    return gonio.Tracker(model, optimizer=optimizer, every=2, figures="training", also=("attention",), example=X)


def by_itself(model: nn.Module, optimizer: Any) -> gonio.Tracker:
    return gonio.Tracker(model, every=2, also=("attention",))


@pytest.mark.parametrize("tracking", [with_optimizer, by_itself])
def test_a_tracker_records_heads_at_its_interval_and_changes_nothing(tracking: Any) -> None:
    model, tracker, seen = trained(tracking)
    plain, _, _ = trained(lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [bool(hooks) for _, hooks in seen] == [False, True, False, True, False]
    rows = [row for row in tracker.rows if "largest_logit" in row]
    assert [(row["step"], row["layer"]) for row in rows] == [(2, "attend"), (4, "attend")]
    for row in rows:
        expected = by_hand(seen[row["step"] - 1][0])
        close([head for step, head in tracker.heads if step == row["step"]], expected)
        most, entropies, shares, single = zip(*expected, strict=True)
        assert row["largest_logit"] == pytest.approx(max(most), rel=1e-5)
        assert row["entropy"] == pytest.approx(sum(entropies) / HEADS, rel=1e-5)
        assert row["entropy_share"] == pytest.approx(min(shares), rel=1e-4)
        assert row["one_token_heads"] == sum(each >= 0.9 for each in single)
    tracker.undo_()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_forwards_since_the_last_step_count_in_training_mode_and_copies_do_not() -> None:
    model = grown(Attend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("attention",))
    model(X).sum().backward()
    model(2 * X)
    model.eval()(9 * X)
    model.train()
    gonio.measure(model, batch=9 * X)
    for twin in (copy.deepcopy(model), _stored(model)):
        twin(9 * X)
    optimizer.step()
    assert not tracker.heads  # the step changed nothing
    optimizer.param_groups[0]["lr"] = 1e-9
    model(X).sum().backward()
    model(2 * X)
    expected = by_hand(torch.cat([logits_of(model.attend, x) for x in (X, 2 * X)]))
    optimizer.step()
    assert tracker.heads[-1][0] == 2
    close([head for step, head in tracker.heads if step == 2], expected)


def test_logits_under_autocast_are_those_of_the_rounded_queries_and_keys() -> None:
    model = grown(Attend())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    clip = gonio.clip_qk_(model, optimizer, limit=1e-3, example=X)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("attention",))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, _ = model.attend.parts(X)
        model(X).sum().backward()
    assert q.dtype == torch.bfloat16
    logits = (q.double() @ k.double().mT / SIZE**0.5).detach()
    optimizer.step()
    close([head for _, head in tracker.heads], by_hand(logits))
    torch.testing.assert_close(clip.largest()["attend"].double(), logits.amax((0, 2, 3)), rtol=1e-5, atol=0)


def _stored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_a_tracker_keeps_what_rules_find_and_shows_it(tmp_path: Any) -> None:
    model = grown(Attend(), heads=(0, 1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    table = tmp_path / "run.csv"
    tracker = gonio.Tracker(model, table, optimizer=optimizer, every=1, figures="training", also=("attention",))
    for _ in range(2):
        model(30 * X).sum().backward()
        optimizer.step()
    assert {(step, one.code, one.path) for step, one in tracker.findings} == {
        (1, c, "attend") for c in ("G413", "G414")
    }
    page = tracker.to_html()
    assert "logits over time" in page
    assert "attend: the largest logit is" in page
    head, *lines = table.read_text().splitlines()
    assert head.endswith("largest_logit,entropy,entropy_share,one_token_heads")
    assert any(line.startswith("2,attend,") for line in lines)
    assert "largest_logit" in tracker.to_frame().columns


def test_an_attention_unlike_the_example_has_no_rows_and_training_goes_on() -> None:
    model = Attend(form="merged")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("attention",), example=X[:1])
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
    assert tracker.heads == []
    assert any("rotation" in row for row in tracker.rows)


def test_a_compiled_model_has_no_rows_of_attention() -> None:
    model = grown(Attend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("attention",))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(X).sum().backward()
        optimizer.step()
    assert tracker.heads == []
    assert any("rotation" in row for row in tracker.rows)


def test_what_a_tracker_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(NoMatchError, match="also='attention'"):
        gonio.Tracker(model, also=("attention",))
    with pytest.raises(InvalidArgumentError, match=r"Tracker\(\) measures steps with optimizer="):
        gonio.Tracker(Block(Attend()), also=("attention", "initial_angle"))
    kernel = Attend(form="merged heads first")
    with pytest.raises(NoMatchError, match="one dimension in which the heads come first"):
        gonio.Tracker(kernel, also=("attention",), example=X)
    monkeypatch.setattr("gonio.measuring.training.attention.is_sharded", lambda _: True)
    with pytest.raises(NotApplicableError, match="cannot find the attention of the model: its parameters are sharded"):
        gonio.Tracker(Block(Attend()), also=("attention",))
