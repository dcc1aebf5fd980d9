"""qk_norm with swap_: what is normalised, against other code; what stays, with the reason; and the undo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gonio
from bank.live import timm_models, transformers_models
from catalog import norms, seeded
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.nn import QKNormLinear
from gonio.surgery import anatomy, facts, qk_norm
from laws.snapshot import Snapshot, assert_restored
from surgery.net import Net, between_channels
from surgery.test_anatomy import Kernel, _with_kernel
from tolerances import close

CASES = {case.name: case for case in (*transformers_models.CASES, *timm_models.CASES)}
X = seeded(2, 5, 8)


def bytes_of(count: int = 9) -> Tensor:
    return torch.arange(2 * count).reshape(2, count) % 251


def of_bank(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, example = CASES[name].make()
    return model.eval(), example


def of_bytes() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return gonio.models.byte_transformer(width=16).eval(), bytes_of()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "bytes": of_bytes,
    **{name: lambda name=name: of_bank(name) for name in ("Llama", "Qwen2", "GPT-NeoX", "vit_tiny_patch16_224")},
}


def run(model: nn.Module, example: Any) -> Tensor:
    out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, Tensor) else out[0]


class Logits(TorchFunctionMode):
    """The largest |logit| of softmax and of fused kernels, without masks; of positions there are none."""

    largest = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            self._see(q.double() @ k.double().mT / q.shape[-1] ** 0.5)
        elif getattr(func, "__name__", "") == "softmax":
            self._see(args[0][args[0] > -1e30])
        return func(*args, **(kwargs or {}))

    def _see(self, logits: Tensor) -> None:
        self.largest = max(self.largest, float(logits.abs().max()))


def largest_logit(model: nn.Module, example: Any) -> float:
    with torch.no_grad(), Logits() as seen:
        run(model, example)
    assert seen.largest > 0
    return seen.largest


def swapped(model: nn.Module, example: Any, **options: Any) -> gonio.surgery.Edited:
    return gonio.swap_(model, qk_norm(model, example=example), **options)


def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def separate(between: Callable[..., Any] = lambda q, k: (q, k), *, heads: int = 2, **layers: nn.Module) -> Net:
    """Attention of heads of 4 whose queries and keys pass a function."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (heads, 4)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        return attend(m, *between(q, k), v)

    return Net(forward, **{**{name: nn.Linear(8, 8) for name in "qkvo"}, **layers})


# --- what is normalised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_below_the_bound_whatever_the_weights_are(name: str) -> None:
    model, example = MODELS[name]()
    size = anatomy(model, example=example).attention[0].head_size
    control = copy.deepcopy(model)
    paths = [change.path for change in swapped(model, example).changes]
    for each in (model, control):
        for path in paths:
            each.get_submodule(path).weight.data.mul_(1000)
    assert largest_logit(control, example) > 10 * size**0.5
    assert largest_logit(model, example) <= size**0.5 * (1 + 1e-5)
    assert run(model, example).isfinite().all()
    blocks = anatomy(model, example=example).attention
    assert blocks
    assert all(block.normed for block in blocks)


@pytest.mark.parametrize("name", ["bytes", "vit_tiny_patch16_224"])
def test_a_fused_layer_computes_what_hooks_on_it_compute(name: str) -> None:
    model, example = MODELS[name]()
    plain = copy.deepcopy(model)
    swapped(model, example)
    for path, layer in model.named_modules():
        if isinstance(layer, QKNormLinear):
            with torch.no_grad():
                layer.query_gain.add_(0.3 * seeded(*layer.query_gain.shape))
            width, size = layer.in_features, len(layer.query_gain)
            assert layer.query == tuple((n, n + size) for n in range(0, width, size))
            assert layer.key == tuple((width + a, width + b) for a, b in layer.query)
            hook = lambda module, inputs, output, layer=layer: norms.qk_norm(layer, inputs[0])  # noqa: E731
            plain.get_submodule(path).register_forward_hook(hook)
    torch.testing.assert_close(run(model, example), run(plain, example), **close(torch.float32))


def test_a_llama_becomes_a_qwen3() -> None:
    """Rows, rotary positions and shared keys: transformers' own model with norms gives the same logits."""
    llama, example = of_bank("Llama")
    qwen, _ = of_bank("Qwen3")
    edited = gonio.swap_(llama, qk_norm(llama, example=example, eps=llama.config.rms_norm_eps))
    assert len(edited) == 2 * llama.config.num_hidden_layers
    with torch.no_grad():
        for seed, name in enumerate(n for n, _ in llama.named_parameters() if n.endswith("_gain")):
            llama.get_parameter(name).add_(0.3 * seeded(8, seed=seed))
    state = {
        name.replace("q_proj.query_gain", "q_norm.weight").replace("k_proj.key_gain", "k_norm.weight"): value
        for name, value in llama.state_dict().items()
    }
    assert qwen.config.rms_norm_eps == llama.config.rms_norm_eps
    qwen.load_state_dict(state)
    torch.testing.assert_close(run(llama, example), run(qwen, example), **close(torch.float32))


@pytest.mark.parametrize("name", ["BERT", "T5", "OPT", "ALBERT", "swin_tiny_patch4_window7_224"])
def test_other_families(name: str) -> None:
    model, example = of_bank(name)
    swapped(model, example)
    assert all(block.normed for block in anatomy(model, example=example).attention)


def test_a_model_in_bfloat16() -> None:
    model, example = of_bytes()
    swapped(model.bfloat16(), example)
    assert model.blocks[0].qkv.query_gain.dtype == torch.bfloat16
    assert run(model, example).isfinite().all()


@pytest.mark.parametrize(
    "between",
    [
        lambda q, k: (q, k),
        lambda q, k: (3 * q, k / 2),  # constants keep lengths equal
        lambda q, k: (q.flip(-1), k.flip(-1)),
        lambda q, k: (q, k.roll(1, -2)),
    ],
)
def test_what_may_lie_between(between: Callable[..., Any]) -> None:
    model = separate(between)
    assert [change.path for change in swapped(model, X).changes] == ["q", "k"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_of_two_rows(dtype: torch.dtype) -> None:
    """Some are short by chance, beside which an eps would be seen."""
    model = gonio.models.byte_transformer(width=8, depth=5).to(dtype)
    assert len(swapped(model, bytes_of(40))) == 5


def test_weights_of_zero_are_no_obstacle() -> None:
    model = separate()
    for layer in (model.q, model.k):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert len(swapped(model, X)) == 2


def test_a_registered_kernel_gets_normalised_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_STATED", dict(facts._STATED))
    heads_first = lambda *tensors: tuple(t.transpose(1, 2) for t in tensors)  # noqa: E731
    facts.register(Kernel, facts.Facts(attends=heads_first, returns=lambda y: y.transpose(1, 2)))
    model = _with_kernel(Kernel())
    assert [change.path for change in swapped(model, X).changes] == ["a", "b"]


# --- the edit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "Llama"])
def test_the_factory_changes_nothing_and_undo_restores_to_the_bit(name: str) -> None:
    model, example = MODELS[name]()
    model.train()
    before = Snapshot.of(model, example)
    generator = torch.get_rng_state()
    factory = qk_norm(model, example=example)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_restored(before, Snapshot.of(model, example))
    edited = gonio.swap_(model, factory)
    assert not torch.equal(run(model, example), before.outputs[0])
    edited.undo_()
    assert_restored(before, Snapshot.of(model, example))
    gonio.swap_(model, factory).undo_()  # the same one again
    assert_restored(before, Snapshot.of(model, example))


def test_parameters_are_the_same_and_the_optimizer_gets_the_gains() -> None:
    model, example = of_bytes()
    weights = [block.qkv.weight for block in model.blocks]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    edited = swapped(model, example, optimizer=optimizer)
    layers = [block.qkv for block in model.blocks]
    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))
    assert not any("new parameters" in note for note in edited.notes)
    run(model, example).square().sum().backward()
    optimizer.step()
    assert all(bool((gain != 1).any()) for layer in layers for gain in (layer.query_gain, layer.key_gain))
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    edited.undo_()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_without_the_optimizer_the_note_counts_the_gains() -> None:
    model, example = of_bytes()
    assert swapped(model, example).notes == (
        "4 new parameters: build the optimizer after this edit, or pass optimizer=",
    )


def test_gains_of_frozen_layers_are_frozen() -> None:
    model = separate()
    model.q.requires_grad_(False)
    swapped(model, X)
    assert not model.q.query_gain.requires_grad
    assert model.k.key_gain.requires_grad


def test_a_clip_refuses_what_is_normalised() -> None:
    model, example = of_bytes()
    swapped(model, example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NoMatchError, match="a norm follows its queries or keys, so that their scale has no effect"):
        gonio.clip_qk_(model, optimizer, example=example)


def test_twice_is_refused() -> None:
    model, example = of_bytes()
    factory = qk_norm(model, example=example)
    gonio.swap_(model, factory)
    with pytest.raises(AlreadyAppliedError, match=r"qk_norm: .* 'blocks.0.qkv'; found a QKNormLinear there already"):
        qk_norm(model, example=example)
    with pytest.raises(
        AlreadyAppliedError, match=r"swap_: .* 'blocks.0.qkv'; found a QKNormLinear of the same factory"
    ):
        gonio.swap_(model, factory)


def test_where_chooses_and_names_what_it_selected_beside() -> None:
    model, example = of_bytes()
    edited = swapped(model, example, where="blocks.0.*")
    assert [change.path for change in edited.changes] == ["blocks.0.qkv"]
    assert "blocks.0.out, blocks.0.up, blocks.0.down stay: it computes no queries or keys" in str(edited)


def test_attention_that_stays_is_noted_and_other_layers_are_not() -> None:
    torchs = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(separate(), separate(lambda q, k: (q.relu(), k)), torchs, nn.Linear(8, 3))
    edited = swapped(model, X)
    assert [change.path for change in edited.changes] == ["0.q", "0.k"]
    notes = [note for note in edited.notes if "new parameters" not in note and "fast path" not in note]
    assert notes == [
        "2.self_attn stays: 2.self_attn.in_proj_weight is a tensor of a MultiheadAttention, not the weight of a Linear",
        "1 stays: its queries or keys are not what its layers compute, so that a norm there does not set their length",
    ]


def test_a_layer_of_another_model_is_refused_by_the_factory() -> None:
    model = separate()
    factory = qk_norm(model, example=X)
    assert isinstance(factory(model.q), QKNormLinear)
    for layer in (model.v, copy.deepcopy(model).q, nn.Linear(2, 2)):
        with pytest.raises(
            NotApplicableError, match="it computes no queries or keys of the model that qk_norm was given"
        ):
            factory(layer)
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="q")
    with pytest.raises(NotApplicableError, match="it has got a forward or a parametrization of its own"):
        factory(model.q)


# --- what is refused --------------------------------------------------------------------------------------------------


class _Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _by_entry(m: Any, x: Tensor) -> Tensor:
    """Entry by entry of the heads: the rows of a head are not adjacent."""
    q, k, v = (layer(x).unflatten(-1, (4, 2)).permute(0, 3, 1, 2) for layer in (m.q, m.k, m.v))
    return attend(m, q, k, v)


def _from_two(m: Any, x: Tensor) -> Tensor:
    """A query is the sum of two layers, as with an adapter."""
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (m.q(x) + m.more(x), m.k(x), m.v(x)))
    return attend(m, q, k, v)


def _read(m: Any, x: Tensor) -> Tensor:
    """A function reads the weight of the queries: a layer in its place is not called."""
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (F.linear(x, m.q.weight, m.q.bias), m.k(x), m.v(x)))
    return attend(m, q, k, v)


def _keys_are_values(m: Any, x: Tensor) -> Tensor:
    """What one attention has as keys, the next one has as values."""
    q, k, v, u, w = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.q, m.k, m.v, m.u, m.w))
    return attend(m, q, k, v) + m.p(F.scaled_dot_product_attention(u, w, k).transpose(1, 2).flatten(2))


def _of_two_sizes(m: Any, x: Tensor) -> Tensor:
    """The same queries and keys, once as two heads and once as four."""

    def cut(heads: int, *layers: str) -> list[Tensor]:
        return [getattr(m, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for name in layers]

    more = F.scaled_dot_product_attention(*cut(4, "q", "k", "w")).transpose(1, 2).flatten(2)
    return attend(m, *cut(2, "q", "k", "v")) + m.p(more)


def _tied() -> Net:
    model = separate()
    model.o.weight = model.q.weight
    return model


def _layers(names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8) for name in names} | {"o": nn.Linear(8, 8)}


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch's attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "self_attn.in_proj_weight is a tensor of a MultiheadAttention, not the weight of a Linear",
    ),
    "a norm of the model": (
        lambda: separate(lambda q, k: (F.rms_norm(q, (4,)), F.rms_norm(k, (4,)))),
        "a norm follows its queries or keys already",
    ),
    "a subclass": (lambda: separate(q=_Twice(8, 8)), "q is a subclass of Linear with a forward of its own"),
    "rows apart": (lambda: Net(_by_entry, **_layers("qkv")), "the rows of a head are not adjacent in q.weight"),
    "two layers": (
        lambda: Net(_from_two, more=nn.Linear(8, 8), **_layers("qkv")),
        "several layers compute the queries or keys of a head",
    ),
    "a tied weight": (_tied, "another layer has the weight q.weight too"),
    "heads of two sizes": (
        lambda: Net(_of_two_sizes, **_layers("qkvwp")),
        "q.weight compute several of queries, keys and values, or heads of several sizes",
    ),
    "an activation": (lambda: separate(lambda q, k: (F.gelu(q), k)), "are not what its layers compute"),
    "positions": (lambda: separate(lambda q, k: (q, k + torch.arange(5.0)[:, None])), "are not what its layers"),
    "positions of queries": (lambda: separate(lambda q, k: (q * torch.arange(1, 6.0)[:, None], k)), "are not what"),
    "more keys": (
        lambda: separate(lambda q, k: (q, torch.cat([k[..., :1, :] * 0, k[..., 1:, :]], -2))),
        "are not what its layers compute",
    ),
    "between channels": (
        lambda: Net(between_channels, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8)),
        "are not what its layers compute",
    ),
    "read, not called": (lambda: Net(_read, **_layers("qkv")), "are not what its layers compute"),
    "no attention": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "no module of the model is suitable"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_normalised_is_refused_with_the_reason(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(NoMatchError, match=f"^qk_norm: .*{message}"):
        qk_norm(make(), example=X)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GPT-2", "transformer.h.0.attn.c_attn.weight is a tensor of a Conv1D, not the weight of a Linear"),
        ("DeepSeek V3", "its heads share a part of the keys"),
        ("OLMo 2", "a norm follows its queries or keys already"),
        ("Falcon", "is a subclass of Linear with a forward of its own"),
        ("WavLM", "are not what its layers compute"),
    ],
)
def test_families_that_cannot(name: str, message: str) -> None:
    model, example = of_bank(name)
    with pytest.raises(NoMatchError, match=message):
        qk_norm(model, example=example)


def test_what_shares_a_layer_with_attention_that_stays_stays() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.first(x) + m.second(x)

    shared = nn.Linear(8, 8)
    model = Net(forward, first=separate(k=shared), second=separate(lambda q, k: (q.relu(), k), k=shared))
    with pytest.raises(NoMatchError, match=r"first \(second, which stays, has the same first.k.weight\)"):
        qk_norm(model, example=X)
    fine = Net(forward, first=separate(k=shared), second=separate(k=shared))
    assert len(swapped(fine, X)) == 3
    mixed = Net(_keys_are_values, **_layers("qkvuwp"))
    with pytest.raises(NoMatchError, match=r"rows of k.weight compute several of queries, keys and values"):
        qk_norm(mixed, example=X)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="QKNormLinear: eps must be positive; found 0"):
        qk_norm(separate(), example=X, eps=0)
