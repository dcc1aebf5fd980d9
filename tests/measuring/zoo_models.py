"""Models that were made to break what looks at them, each with the verdict that it should get."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

NAMES = {
    "html": "<script>alert(1)</script><b>",
    "attribute": '" onmouseover="alert(1)',
    "ansi": "\x1b[31mred\x1b]0;title\x07",
    "bidi": "abc\u202egnp\u2066",
    "zero width": "lay\u200ber",
    "null": "a\x00b",
    "path": "../../etc/passwd",
    "windows path": "C:\\Windows\\system32",
    "formula": "=HYPERLINK(1)",
    "markdown": "|a|`b`[x](javascript:1)",
    "newlines": "a\r\nb\nc",
    "spaces": "  ",
    "surrogate": "a\ud800b",
    "long": "x" * 20_000,
    "emoji": "\U0001f469\u200d\U0001f52c",
    "rich markup": "[bold red]x[/]",
    "format": "%s%n{0}{path}",
}


@dataclass(frozen=True)
class Verdict:
    """What the row of one path must say; of a model without tensors there is no row."""

    path: str = "weight"
    status: str = "measured"
    reason: str = ""
    code: str = ""  # of a finding at that path
    said: str = ""  # in the finding


def changed(change: Callable[[Tensor], object], make: Callable[[], nn.Module] = lambda: nn.Linear(6, 5)) -> nn.Module:
    model = make()
    with torch.no_grad():
        change(model.weight)
    return model


class Bag(nn.Module):
    """A module with one parameter of any kind, which no forward uses."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Raises(nn.Linear):
    """Every method that others may call raises."""

    def __init__(self) -> None:
        super().__init__(6, 5)

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no")

    state_dict = named_parameters = named_modules = named_children = forward = extra_repr = get_extra_state = refuse


class RaisingProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", nn.Parameter(torch.ones(2, 2)))

    @property
    def weight(self) -> Tensor:
        raise LookupError("no weight today")


class WeightWithArguments(nn.Module):
    def weight(self, needed: int) -> Tensor:
        return torch.ones(needed, needed)


class AnyAttribute(nn.Linear):
    """Answers every name, as mocks do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("weight", "bias"):  # not registered yet
                raise
            return lambda *_, **__: self


class Falsy(nn.Linear):
    def __len__(self) -> int:
        return 0


class Breaks(nn.Module):
    """A parametrization that cannot compute."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() / 0 if x.numel() > 10**9 else {}[0]


class Hides(torch.Tensor):
    """A tensor that answers nothing."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PermissionError("not this one")


def cyclic(model: nn.Module, inner: nn.Module) -> nn.Module:
    inner.add_module("parent", model)
    return model


def deep() -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(1500):
        model = nn.Sequential(model)
    return model


def broken_parametrization() -> nn.Module:
    model = parametrize.register_parametrization(nn.Linear(6, 5), "weight", nn.Identity(), unsafe=True)
    model.parametrizations.weight[0] = Breaks()
    return model


def own_parametrizations() -> nn.Module:
    """A child that is called as torch's own container is."""
    model = nn.Linear(6, 5)
    model.parametrizations = nn.ModuleDict({"something": nn.Identity()})
    return model


def tied(other: Callable[[nn.Parameter], Any]) -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    model["b"].weight = other(model["a"].weight)
    return model


def old(function: Callable[..., nn.Module], *layers: nn.Module) -> nn.Module:
    """What torch warns of."""
    with warnings.catch_warnings(action="ignore"):
        return function(*(layers or (nn.Linear(6, 5),)))


def fake() -> nn.Module:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return nn.Linear(6, 5)


def misfit(weight: Tensor, **options: Any) -> nn.Module:
    """A convolution whose weight was replaced by hand."""
    model = nn.Conv2d(4, 6, 3, **options)
    model.weight = nn.Parameter(weight)
    return model


def exported() -> nn.Module:
    return torch.export.export(nn.Sequential(nn.Linear(6, 5)), (torch.ones(2, 6),)).module()


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(6, 5)
    model.register_buffer("extra", buffer)
    return model


def named(name: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(6, 5)})


def set_at(place: tuple[int, ...], value: float) -> Callable[[Tensor], object]:
    return lambda w: w.__setitem__(place, value)


NAN, INF = float("nan"), float("inf")
SKIPPED, NONE = "skipped", "no filters"
MODELS: dict[str, tuple[Callable[[], nn.Module], Verdict | None]] = {
    "empty": (nn.Sequential, None),
    "identity": (nn.Identity, None),
    "no inputs": (lambda: Bag(torch.ones(3, 0)), Verdict(status=NONE, reason="empty: shape (3, 0)")),
    "no outputs": (lambda: Bag(torch.ones(0, 3)), Verdict(status=NONE, reason="empty: shape (0, 3)")),
    "one number": (lambda: nn.Linear(1, 1), Verdict()),
    "one embedding": (lambda: nn.Embedding(1, 1), Verdict()),
    "0-d": (lambda: Bag(torch.tensor(2.0)), Verdict(status=NONE, reason="a single number")),
    "1-d": (lambda: Bag(torch.ones(4)), Verdict(status=NONE, reason="a vector")),
    "5-d": (lambda: Bag(torch.randn(3, 2, 1, 2, 2)), Verdict()),
    "9-d": (lambda: Bag(torch.ones(2, *[1] * 8)), Verdict(status=NONE, reason="not called a weight")),
    "a long 1-d": (lambda: Bag(torch.ones(3_000_000)), Verdict(status=NONE, reason="a vector")),
    "a long filter": (lambda: Bag(torch.randn(2, 1_500_000)), Verdict()),
    "very many filters": (lambda: Bag(torch.randn(300_000, 2)), Verdict()),
    "stride 0": (lambda: Bag(torch.randn(1, 40).expand(500, 40)), Verdict(code="G203")),
    "turned": (lambda: Bag(torch.randn(4, 5).T), Verdict()),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), Verdict()),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), Verdict()),
    "transposed": (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), Verdict()),
    "lstm": (lambda: nn.LSTM(3, 4, proj_size=2, bidirectional=True), Verdict("weight_hr_l0_reverse")),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), Verdict()),
    "prelu": (nn.PReLU, Verdict(status=NONE, reason="a vector")),
    "bag": (lambda: nn.EmbeddingBag(5, 4), Verdict()),
    "attention": (lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4), Verdict("k_proj_weight")),
    "circular": (lambda: cyclic(m := nn.Sequential(nn.Linear(6, 5)), m[0]), Verdict("0")),
    "its own child": (lambda: cyclic(m := nn.Linear(6, 5), m), Verdict()),
    "deep": (deep, Verdict(".".join("0" * 1500))),
    "wide": (lambda: nn.ModuleList(nn.Linear(1, 1) for _ in range(300)), Verdict("299")),
    "raises": (Raises, Verdict()),
    "raising property": (RaisingProperty, Verdict("w", NONE, "not known to be")),
    "weight with arguments": (WeightWithArguments, Verdict(status=SKIPPED, reason="cannot be read: ")),
    "any attribute": (lambda: AnyAttribute(6, 5), Verdict()),
    "falsy": (lambda: Falsy(6, 5), Verdict()),
    "broken parametrization": (broken_parametrization, Verdict(status=SKIPPED, reason="cannot be read: 0")),
    "own parametrizations": (own_parametrizations, Verdict()),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 5)), Verdict()),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 5)), Verdict()),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 5)), Verdict()),
    "old weight norm": (lambda: old(nn.utils.weight_norm), Verdict()),
    "old spectral norm": (lambda: old(nn.utils.spectral_norm), Verdict()),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(6, 5), "weight", amount=0.5), Verdict()),
    "tied": (lambda: tied(lambda w: w), Verdict("b", SKIPPED, "tied to a.weight")),
    "tied by memory": (lambda: tied(lambda w: nn.Parameter(w.detach())), Verdict("b", SKIPPED, "tied to a.weight")),
    "lazy": (lambda: nn.LazyConv2d(4, 3), Verdict(status=SKIPPED, reason="a lazy layer that has seen no input")),
    "lazy norm": (nn.LazyBatchNorm2d, Verdict("running_mean", SKIPPED, "a lazy layer")),
    "meta": (lambda: nn.Linear(6, 5, device="meta"), Verdict(status=SKIPPED, reason="on the meta device")),
    "fake": (fake, Verdict(status=SKIPPED, reason="cannot be read: ")),
    "scripted": (lambda: old(torch.jit.script, nn.Sequential(nn.Linear(6, 5), nn.ReLU())), Verdict("0")),
    "exported": (exported, Verdict("0")),
    "traced symbolically": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 5))), Verdict("0")),
    "compiled": (lambda: torch.compile(nn.Linear(6, 5), backend="eager"), Verdict()),
    "in parallel": (lambda: nn.DataParallel(nn.Linear(6, 5)), Verdict()),
    "inference": (lambda: torch.inference_mode()(lambda: nn.Linear(6, 5))(), Verdict()),
    "complex": (lambda: Bag(torch.ones(3, 4, dtype=torch.complex64)), Verdict(status=SKIPPED, reason="complex")),
    "sparse": (lambda: Bag(torch.eye(3).to_sparse()), Verdict(status=SKIPPED, reason="sparse (sparse_coo)")),
    "mkldnn": (lambda: Bag(torch.eye(3).to_mkldnn()), Verdict(status=SKIPPED, reason="sparse (_mkldnn)")),
    "hides": (lambda: with_buffer(torch.ones(2, 2).as_subclass(Hides)), Verdict("extra", SKIPPED, "cannot be read")),
    "boolean buffer": (lambda: with_buffer(torch.ones(2, 2).bool()), Verdict("extra", NONE, "bool, not weights")),
    "integer weight": (lambda: Bag(torch.ones(3, 4, dtype=torch.int64)), Verdict(status=NONE, reason="int64, not")),
    "misfit 2-d": (lambda: misfit(torch.randn(3, 5)), Verdict()),
    "misfit groups": (
        lambda: misfit(torch.randn(3, 2, 3, 3), groups=2),
        Verdict(status=SKIPPED, reason="cannot be read"),
    ),
    "no bias": (lambda: nn.Linear(6, 5, bias=False), Verdict()),
    "frozen": (lambda: nn.Linear(6, 5).requires_grad_(False), Verdict()),
    "zeros": (lambda: changed(lambda w: w.zero_()), Verdict(code="G101", said="every value is 0")),
    "ones": (lambda: changed(lambda w: w.fill_(1), lambda: nn.Linear(30, 20)), Verdict(code="G201")),
    "a dead filter": (lambda: changed(lambda w: w[2].zero_()), Verdict(code="G102", said="1 of 5 filters is 0")),
    "one NaN": (
        lambda: changed(set_at((3, 2), NAN)),
        Verdict(code="G001", said="1 of 30 values is NaN or infinite, the first at [3, 2]"),
    ),
    "one infinity": (lambda: changed(set_at((0, 5), -INF)), Verdict(code="G001", said="the first at [0, 5]")),
    "all NaN": (lambda: changed(lambda w: w.fill_(NAN)), Verdict(code="G001", said="30 of 30")),
    "a NaN among many": (
        lambda: changed(set_at((2, 1_000_000), NAN), lambda: Bag(torch.randn(3, 1_200_000))),
        Verdict(code="G001", said="1 of 3,600,000 values is NaN or infinite, the first at [2, 1000000]"),
    ),
    "a NaN in a statistic": (
        lambda: (m := nn.BatchNorm2d(4)) and (m.running_var.fill_(NAN), m)[1],
        Verdict("running_var", NONE, "a vector", "G001", "4 of 4 values are NaN or infinite, the first at [0]"),
    ),
    "huge": (lambda: changed(lambda w: w.fill_(3e38)), Verdict()),
    "huge in double": (lambda: changed(lambda w: w.fill_(1e300), lambda: nn.Linear(6, 5).double()), Verdict()),
    "largest in half": (lambda: changed(lambda w: w.fill_(65504), lambda: nn.Linear(6, 5).half()), Verdict()),
    "denormal": (lambda: changed(lambda w: w.fill_(1e-45)), Verdict()),
    "least in half": (lambda: changed(lambda w: w.fill_(6e-8), lambda: nn.Linear(6, 5).half()), Verdict()),
    "float8": (lambda: Bag(torch.randn(5, 6).to(torch.float8_e4m3fn)), Verdict()),
    "bfloat16": (lambda: nn.Linear(6, 5).bfloat16(), Verdict()),
    **{
        f"named {kind}": (lambda name=name: named(name), Verdict(name))
        for kind, name in NAMES.items()
        if kind != "path"
    },
}
