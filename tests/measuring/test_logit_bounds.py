"""The bounds of logits that `measure` gives: by hand, above every logit found by ascent on inputs, and close to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from bank.live.transformers_models import CASES
from catalog import seeded
from gonio.geometry import logit_bound
from gonio.measuring.figures.heads import heads_in, parameters_of
from gonio.surgery import Attention, anatomy
from gonio.surgery.equivalent import call
from gonio.surgery.products import Product, Products
from surgery.net import Net

WIDTH, HEADS, SIZE = 12, 2, 6
X = seeded(2, 5, WIDTH, dtype=torch.float64)
MEASURED = 2e-3  # relative: the norms and factors of a block are measured


def turned(x: Tensor, entries: int = SIZE) -> Tensor:
    """Rotary positions over the first entries, paired by halves."""
    half = entries // 2
    z = torch.complex(x[..., :half], x[..., half:entries])
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(half)
    z = z * torch.polar(torch.ones(()).double(), angles.double())
    return torch.cat([z.real, z.imag, x[..., entries:]], -1)


def attend(
    m: Any, x: Tensor, y: Tensor | None = None, *, after: Callable[[Any, Tensor, Tensor], Any] = lambda m, q, k: (q, k),
    logits: Callable[[Tensor], Tensor] = lambda t: t / SIZE**0.5,
) -> Tensor:  # fmt: skip
    y = x if y is None else y
    q, k, v = (layer(t).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer, t in ((m.q, x), (m.k, y), (m.v, y)))
    q, k = after(m, q, k)
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    out: Tensor = m.o((logits(q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
    return out


def net(compute: Callable[[Any, Tensor], Tensor], norm: nn.Module, *, kv: int = HEADS, **more: nn.Module) -> Any:
    rows = {"q": HEADS * SIZE, "k": kv * SIZE, "v": kv * SIZE}
    layers = {name: nn.Linear(WIDTH, count) for name, count in rows.items()}
    model = Net(compute, norm=norm, **layers, o=nn.Linear(HEADS * SIZE, WIDTH), **more).double()
    for seed, p in enumerate(model.parameters()):
        p.data = seeded(*p.shape, seed=seed, dtype=torch.float64)
    return model


def by_head(m: Any, name: str) -> Tensor:
    return getattr(m, name).weight.detach().unflatten(0, (-1, SIZE))


def by_hand(m: Any, **options: Any) -> Tensor:
    """The bound of the formula; the gain and shift of `norm`, and the biases, are the model's."""
    biases = {f"{n}_bias": getattr(m, n[0]).bias.detach().unflatten(0, (-1, SIZE)) for n in ("query", "key")}
    given = {"gain": m.norm.weight.detach(), **biases} | options
    return logit_bound(by_head(m, "q"), by_head(m, "k"), **given)


def bounds(model: nn.Module) -> list[float | None]:
    return [head.logit_bound for head in gonio.measure(model, batch=X).heads]


def _plain(m: Any, x: Tensor) -> Tensor:
    return attend(m, m.norm(x))


def _rotary(m: Any, x: Tensor) -> Tensor:
    return attend(m, m.norm(x), after=lambda m, q, k: (turned(q), turned(k)), logits=lambda t: 0.7 * t)


def _normed(m: Any, x: Tensor) -> Tensor:
    return attend(m, m.norm(x), after=lambda m, q, k: (turned(m.of_q(q)), turned(m.of_k(k))))


def rms() -> nn.Module:
    return nn.RMSNorm(WIDTH)


def test_a_layer_norm_with_biases() -> None:
    model = net(_plain, nn.LayerNorm(WIDTH))
    expected = by_hand(model, norm="layer", shift=model.norm.bias.detach())
    assert bounds(model) == pytest.approx(expected.tolist(), rel=MEASURED)


def test_rotary_positions_shared_keys_and_a_scale() -> None:
    model = net(_rotary, rms(), kv=1)
    assert bounds(model) == pytest.approx(by_hand(model, rotary="half", scale=0.7).tolist(), rel=MEASURED)


def test_tokens_that_are_zero_say_nothing() -> None:
    model = net(_rotary, nn.RMSNorm(WIDTH))
    for layer in (model.q, model.k):
        layer.bias.data.zero_()
    some = X.clone()
    some[0, 1] = 0
    assert [head.logit_bound for head in gonio.measure(model, batch=some).heads] == pytest.approx(
        by_hand(model, rotary="half", scale=0.7).tolist(), rel=MEASURED
    )


def test_norms_of_queries_and_keys() -> None:
    model = net(_normed, rms(), of_q=nn.RMSNorm(SIZE), of_k=nn.RMSNorm(SIZE))
    gains = {"query_gain": model.of_q.weight.detach(), "key_gain": model.of_k.weight.detach()}
    assert bounds(model) == pytest.approx(by_hand(model, rotary="half", **gains).tolist(), rel=MEASURED)


def test_norms_that_are_functions_of_torch() -> None:
    """Of a parameter, of none, and of queries and keys; one of an expression is not known."""

    def of_input(m: Any, x: Tensor) -> Tensor:
        return attend(m, F.layer_norm(x, (WIDTH,), m.norm.weight, m.norm.bias))

    model = net(of_input, nn.LayerNorm(WIDTH))
    expected = by_hand(model, norm="layer", shift=model.norm.bias.detach())
    assert bounds(model) == pytest.approx(expected.tolist(), rel=MEASURED)
    model = net(lambda m, x: attend(m, F.rms_norm(x, (WIDTH,))), rms())
    assert bounds(model) == pytest.approx(by_hand(model, gain=torch.ones(WIDTH)).tolist(), rel=MEASURED)

    def of_heads(m: Any, x: Tensor) -> Tensor:
        last = lambda t, norm: F.rms_norm(t, (SIZE,), norm.weight)  # noqa: E731
        return attend(m, x, after=lambda m, q, k: (turned(last(q, m.of_q)), turned(last(k, m.of_k))))

    model = net(of_heads, rms(), of_q=nn.RMSNorm(SIZE), of_k=nn.RMSNorm(SIZE))
    gains = {"query_gain": model.of_q.weight.detach(), "key_gain": model.of_k.weight.detach()}
    assert bounds(model) == pytest.approx(by_hand(model, rotary="half", **gains).tolist(), rel=MEASURED)
    model = net(lambda m, x: attend(m, F.rms_norm(x, (WIDTH,), 1 + m.norm.weight)), rms())
    assert bounds(model) == [None] * HEADS


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("compute", [_plain, _rotary])
def test_layers_that_normalise_queries_and_keys(compute: Any, trained: bool) -> None:
    """Also where both gains are 1, as at the start, and the results of both norms are equally long."""
    model = net(compute, rms())
    gonio.swap_(model, gonio.surgery.qk_norm(model, example=X))
    gains = {"query_gain": model.q.query_gain, "key_gain": model.k.key_gain}
    for seed, gain in enumerate(gains.values() if trained else ()):
        gain.data += 0.5 * seeded(SIZE, seed=seed)
    options = {"rotary": "half", "scale": 0.7} if compute is _rotary else {}
    expected = by_hand(model, **{name: gain.detach() for name, gain in gains.items()}, **options)
    assert bounds(model) == pytest.approx(expected.tolist(), rel=MEASURED)
    assert min(ratios(model, X)) >= 1


def test_a_norm_of_the_queries_of_all_heads() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        q, k = (norm(layer(m.norm(x))) for norm, layer in ((m.of_q, m.q), (m.of_k, m.k)))
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in (q, k, m.v(x)))
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model = net(compute, rms(), of_q=nn.RMSNorm(HEADS * SIZE), of_k=nn.RMSNorm(HEADS * SIZE))
    product = (model.of_q.weight * model.of_k.weight).detach().unflatten(0, (HEADS, SIZE)).abs().amax(-1)
    assert bounds(model) == pytest.approx((product * HEADS * SIZE / SIZE**0.5).tolist(), rel=MEASURED)


def test_positions_that_turn_a_part_of_a_head() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        return attend(m, m.norm(x), after=lambda m, q, k: (turned(q, 4), turned(k, 4)))

    model = net(compute, rms())
    (block,) = anatomy(model, example=X).attention
    assert block.logits is not None
    assert block.logits.turned == (0, 1, 0, 1, 4, 5)
    assert all(a <= b * 1.002 for a, b in zip(bounds(model), by_hand(model, rotary=True).tolist(), strict=True))  # type: ignore[operator]


def test_the_gain_is_that_of_the_norm_that_is_read() -> None:
    """Two norms give the same values, and only one of them is read."""
    model = net(lambda m, x: _plain(m, x) + 0 * m.other(x), rms(), other=rms())
    model.other.load_state_dict(model.norm.state_dict())
    (block,) = anatomy(model, example=X).attention
    assert block.logits is not None
    assert block.logits.query.part is not None
    assert block.logits.query.part.tensor == "norm.weight"


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.inner(m.norm(x)) + m.inner(m.other(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: attend(m, x),  # no norm
        lambda m, x: attend(m, m.norm(x) + 1),
        lambda m, x: attend(m, m.norm(x), after=lambda m, q, k: (F.elu(q) + 1, F.elu(k) + 1)),
        lambda m, x: attend(m, m.norm(x), logits=lambda t: 5 * (t / 5).tanh()),
        lambda m, x: attend(m, m.norm(x), logits=lambda t: t * torch.arange(1, 6)),
        lambda m, x: attend(m, m.norm(x), after=lambda m, q, k: (q * torch.arange(1, 6)[:, None], k)),
        lambda m, x: attend(m, m.norm(x), after=lambda m, q, k: (q * torch.arange(1, 7), k)),
    ],
    ids=["none", "shifted", "features", "cap", "by key", "by position", "by entry"],
)
def test_no_bound_where_the_logits_are_not_known(compute: Any) -> None:
    assert bounds(net(compute, rms())) == [None] * HEADS


def test_no_bound_of_a_block_that_reads_several_norms() -> None:
    """Its first call, or its last one, alone would have a bound."""
    inner = net(lambda m, x: attend(m, x), rms())
    model = Net(_twice, inner=inner, norm=nn.RMSNorm(WIDTH), other=nn.RMSNorm(WIDTH)).double()
    assert set(bounds(model)) == {None}


def test_the_table_has_the_largest_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    model = net(_plain, nn.LayerNorm(WIDTH))
    assert "logits up to" in str(gonio.measure(model, batch=X))


# --- against logits ---------------------------------------------------------------------------------------------------


class Seen(Products):
    """The products of queries and keys of a forward, by the path of the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pairs: list[tuple[str, Tensor, Tensor]] = []
        self._hooks: list[Any] = []
        for path, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self.stack.append(path)))
            self._hooks.append(module.register_forward_hook(lambda *_: self.stack.pop() and None))

    def found(self, product: Product, args: Any, kwargs: Any) -> None:
        self.pairs.append((product.path, product.query, product.key))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def logits_of(model: nn.Module, example: Any, block: Attention) -> Tensor:
    """The largest absolute logit of each head, over all pairs of positions."""
    seen = Seen(model)
    with seen:
        call(model, example)
    seen.end()
    query, key = next((q, k) for path, q, k in seen.pairs if path == block.path)
    for dim in range(query.ndim - 2):
        key = key.repeat_interleave(query.shape[dim] // key.shape[dim], dim)
    assert block.logits is not None
    largest = (query @ key.mT * block.logits.scale).abs().amax((-2, -1))
    if not block.places[0]:
        return largest.amax().reshape(1)
    dims = [dim + 2 for dim in block.places[0]]
    largest = largest.movedim(dims, list(range(-len(dims), 0))).flatten(largest.ndim - len(dims))
    largest = largest.reshape(-1, largest.shape[-1]).amax(0)
    order = torch.tensor(block.places[1])
    return largest.new_zeros(block.heads).scatter_reduce(0, order, largest, "amax")


def ascended(model: nn.Module, example: Any, block: Attention, steps: int) -> Tensor:
    """The largest logits of each head that Adam finds by changing what the norms before read."""
    assert block.logits is not None
    parts = [side.part for side in (block.logits.query, block.logits.key)]
    paths = {part.tensor.rpartition(".")[0] for part in parts if part is not None}
    inputs: dict[str, Tensor] = {}

    def replaced(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> Any:
            if path not in inputs:
                inputs[path] = seeded(*args[0].shape, seed=len(inputs)).to(args[0]).requires_grad_()
            return (inputs[path] * 1, *args[1:])

        return hook

    hooks = [model.get_submodule(path).register_forward_pre_hook(replaced(path)) for path in paths]
    best = logits_of(model, example, block).detach()
    optimizer = torch.optim.Adam(inputs.values(), lr=0.1)
    for _ in range(steps):
        found = logits_of(model, example, block)
        best = torch.maximum(best, found.detach())
        (gradient,) = [-(found.log().sum())]
        gradient.backward(inputs=list(inputs.values()))
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return best


def ratios(model: nn.Module, example: Any, steps: int = 40) -> list[float]:
    """Bound over the largest logit found, of all heads with a bound."""
    found, made = anatomy(model, example=example), []
    of_heads = heads_in(found, parameters_of(model))
    for block in found.attention:
        if block.logits is not None and block.logits.query.part is not None:
            most = [head.logit_bound for head in of_heads if head.path == block.path]
            logits = ascended(model, example, block, steps)
            made += [b / float(x) for b, x in zip(most, logits, strict=True) if b is not None]
    return made


def after_training(model: nn.Module, example: Any) -> nn.Module:
    """It learns a random output."""
    model.train()
    optimizer, target = torch.optim.Adam(model.parameters(), lr=0.02), None
    for _ in range(60):
        out = call(model, example)
        out = out if isinstance(out, Tensor) else next(t for t in out.values() if t.is_floating_point())
        target = seeded(*out.shape).to(out) if target is None else target
        optimizer.zero_grad()
        (out - target).square().mean().backward()
        optimizer.step()
    return model.eval()


KINDS = {
    "layer norm": (_plain, nn.LayerNorm(WIDTH), {}),
    "rotary": (_rotary, rms(), {}),
    "normed": (_normed, rms(), {"of_q": nn.RMSNorm(SIZE), "of_k": nn.RMSNorm(SIZE)}),
}


@pytest.mark.parametrize("name", KINDS)
def test_no_logit_is_above_the_bound_and_the_largest_is_near(name: str) -> None:
    compute, norm, more = KINDS[name]
    found = ratios(net(compute, norm, **more), X)
    assert len(found) == HEADS
    assert min(found) >= 1
    assert statistics.median(found) < 2


@pytest.mark.slow
def test_the_bounds_of_families_of_transformers() -> None:
    """Random and trained ones: the bound is above every logit, and its median less than 1.5 times the largest."""
    every: list[float] = []
    families = 0
    for case in CASES:
        for prepare in (lambda m, x: m, after_training):
            torch.manual_seed(0)
            model, example = case.make()
            found = ratios(prepare(model.eval(), example), example)
            every += found
        families += bool(found)
    assert families >= 40
    assert min(every) >= 1
    assert statistics.median(every) < 1.5
    assert statistics.quantiles(every, n=20)[-1] < 3
