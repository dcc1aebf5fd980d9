"""Which tensors a rule reads, what is left out, and how the penalty says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio import Penalty
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.editing.where import Where
from gonio.errors import InvalidArgumentError, NoMatchError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    )


def reads(penalty: Penalty) -> list[str]:
    return [term.label for term in penalty._terms]


def tensors(penalty: Penalty) -> list[str]:
    return [label.split("/")[0] for label in reads(penalty)]


EMBEDDED = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
ATTENTION = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=6), "lstm": nn.LSTM(8, 5, proj_size=3)})
SEPARATE = [f"attention.{name}" for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")]
RECURRENT = [f"lstm.weight_{name}_l0" for name in ("ih", "hh", "hr")]


@pytest.mark.parametrize(
    ("model", "where", "expected"),
    [
        (network(), None, ["0.weight", "3.weight", "5.weight"]),
        (network(), nn.Conv2d, ["0.weight", "3.weight"]),
        (network(), gonio.OfType(nn.Conv2d) & ~gonio.Path("0"), ["3.weight"]),
        (network(), lambda path, module: getattr(module, "groups", 0) == 1, ["0.weight", "3.weight"]),
        (nn.Linear(3, 2), None, ["weight"]),
        (ATTENTION, None, [*SEPARATE, *RECURRENT]),
        (nn.MultiheadAttention(8, 2), None, ["in_proj_weight", "out_proj.weight"]),
        (EMBEDDED, None, ["1.weight"]),
        (EMBEDDED, nn.Embedding, ["0.weight"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_where_chooses(model: nn.Module, where: Where, expected: list[str]) -> None:
    assert tensors(Penalty(model, [(where, R.Orthogonality(1.0))])) == expected


def test_every_rule_applies_to_all_that_it_selects() -> None:
    rules = [(None, R.Orthogonality(1.0)), ("5", R.L2(1.0)), ("5", R.L2(2.0)), (nn.Conv2d, R.SelfOrthogonality(1.0))]
    assert reads(Penalty(network(), rules)) == [
        "0.weight/Orthogonality",
        "3.weight/Orthogonality",
        "5.weight/Orthogonality",
        "5.weight/L2",
        "5.weight/L2#2",
        "0.output/SelfOrthogonality",
        "3.output/SelfOrthogonality",
    ]


# --- what is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("regularizer", [R.ScaleShift(1.0), R.L2(1.0)], ids=lambda r: type(r).__name__)
def test_scale_before_normalisation_is_left_out_and_said(
    regularizer: R.WeightRegularizer, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """F4: what wrappers put in front of a path is not part of it."""
    penalty = Penalty(wrap(network()), [(None, regularizer)])
    assert tensors(penalty) == ["3.weight", "5.weight"]
    assert "skipped: its scale does not matter: 1 normalises its output" in str(penalty)
    kept = Penalty(wrap(network()), [(None, replace(regularizer, before_norm="keep"))])
    assert tensors(kept) == ["0.weight", "3.weight", "5.weight"]


def test_a_model_that_cannot_be_traced_is_said_to_be() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x)) if x.sum() > 0 else x

    penalty = Penalty(Branching(), [(None, R.L2(1.0))])
    assert tensors(penalty) == ["layer.weight"]
    assert "note: the model cannot be traced (TraceError" in str(penalty)
    assert "exclude them in `where`" in str(penalty)


def test_activations_that_are_not_homogeneous_are_said() -> None:
    """E3: where moving scale changes the function, invariance under it means nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    lines = str(Penalty(model, [(None, R.ScaleShift(1e-3))])).splitlines()
    assert [("gelu follows, which is not homogeneous" in line) for line in lines[1:]] == [False, True, False]


def test_weights_that_start_at_zero_are_left_out_of_the_logarithm() -> None:
    model = network()
    nn.init.zeros_(model[5].weight)
    penalty = Penalty(model, [(None, R.ScaleShift(1.0))])
    assert tensors(penalty) == ["3.weight"]
    assert "skipped: is zero at the start" in str(penalty)
    assert "5.weight" in tensors(Penalty(model, [(None, R.L2(1.0))]))


@pytest.mark.parametrize(
    ("parametrization", "regularizer", "refused"),
    [
        (P.WeightStandardization(), R.Orthogonality(1e-2), True),
        (P.WeightStandardization(), R.Orthogonality(1e-2, filters="unit"), False),
        (P.WeightStandardization(), R.Orthogonality(1e-2, diagonal=False), False),
        (P.WeightStandardization(), R.L2(1e-2), False),
        (P.WeightNorm(), R.Orthogonality(1e-2), False),
        (P.Sphere(), R.Orthogonality(1e-2), False),
        (P.SpectralNorm(), R.Orthogonality(1e-2), False),
    ],
    ids=str,
)
def test_a_term_on_norms_that_a_parametrization_fixes_is_refused(
    parametrization: P.Parametrization, regularizer: R.WeightRegularizer, refused: bool
) -> None:
    torch.manual_seed(0)
    model = network()
    gonio.parametrize_(model, parametrization, where="3")
    if refused:
        match = r'norms of 7\.28 in 3\.weight, which its parametrization fixes\. Pass filters="unit"'
        with pytest.raises(InvalidArgumentError, match=match):
            Penalty(model, [("3", regularizer)])
    else:
        assert Penalty(model, [("3", regularizer)])().isfinite()


def test_tied_tensors_count_once() -> None:
    """E8: a shared module is one site, a shared Parameter of two modules is one tensor."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    alone = float(Penalty(model, [("a", R.L2(1.0))])().detach())
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    penalty = Penalty(model, [(None, R.L2(1.0))])
    assert float(penalty().detach()) == alone
    assert "b.weight  L2(1)  skipped: is the same tensor as a.weight, which has the term" in str(penalty)


def test_a_tied_tensor_is_left_out_only_if_its_owner_has_the_term() -> None:
    """The layer in front of the normalisation is skipped, but not the one whose scale matters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU())
    model[2].weight = model[0].weight
    assert tensors(Penalty(model, [(None, R.L2(1.0))])) == ["2.weight"]


def test_frozen_weights_are_passed_over_while_they_are_frozen() -> None:
    model = network()
    penalty = Penalty(model, [(None, R.Orthogonality(1.0)), ("3", R.SelfOrthogonality(1.0))])
    model[3].requires_grad_(False)
    model(torch.randn(4, 3, 8, 8))
    penalty()
    assert set(penalty.values()) == {"0.weight/Orthogonality", "5.weight/Orthogonality"}
    assert str(penalty).count("frozen: has no effect") == 2
    model[3].requires_grad_(True)
    model(torch.randn(4, 3, 8, 8))
    penalty()
    assert {label.split("/")[0] for label in penalty.values()} == {"0.weight", "3.weight", "3.output", "5.weight"}


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rule", "match"),
    [
        (network(), ("layer9", R.Orthogonality(1.0)), r"where=layer9 selects no module"),
        (network(), (nn.ReLU, R.L2(1.0)), r"it selects only 2 \(it has no weight with filters\)"),
        (network(), ("0", R.ScaleShift(1.0)), r"0\.weight \(its scale does not matter: 1 normalises"),
        (nn.LSTM(3, 3), (nn.LSTM, R.SelfOrthogonality(1.0)), r"it is no linear or convolution layer"),
        (nn.Embedding(3, 3), (None, R.L2(1.0)), r"name it in `where` to include it"),
        (nn.LazyLinear(3), (None, R.L2(1.0)), r"it is lazy; run one batch first"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_rule_that_reads_nothing(model: nn.Module, rule: tuple[Where, R.Regularizer], match: str) -> None:
    with pytest.raises(NoMatchError, match=match):
        Penalty(model, [rule])


def test_deep_shared_and_lazy_modules_are_bound() -> None:
    """F6: 300 levels of nesting, one layer under two names, one that has seen no input yet."""
    shared = nn.Linear(3, 3)
    inner = model = nn.Sequential(shared, nn.LazyLinear(3), shared)
    for _ in range(300):
        model = nn.Sequential(model)
    with Penalty(model, [(None, R.SelfOrthogonality(1.0)), (None, R.L2(1.0))]) as penalty:
        inner(torch.ones(4, 3))  # torch's own forward does not go that deep
        assert penalty().isfinite()
        labels = list(penalty.values())
    assert [label.removeprefix("0." * 300) for label in labels if "L2" in label] == ["0.weight/L2"]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([R.L2(1.0)], r"takes pairs \(where, regularizer\)"),
        ([(None, R.L2(1.0), 3)], r"takes pairs \(where, regularizer\)"),
        (R.Orthogonality(1e-4), r"found an Orthogonality. .* write Penalty\(model, \[\(None, Orthog"),
    ],
)
def test_rules_are_pairs(rules: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        Penalty(network(), rules)


def test_no_hook_is_left_by_a_rule_that_fails() -> None:
    model = network()
    with pytest.raises(NoMatchError, match="layer9"):
        Penalty(model, [(None, R.SelfOrthogonality(1.0)), ("layer9", R.L2(1.0))])
    assert not any(module._forward_hooks for module in model.modules())


# --- the table ------------------------------------------------------------------------------------


def test_table() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 8))
    nn.init.ones_(model[2].weight)
    penalty = Penalty(
        model,
        [
            (None, R.Orthogonality(1e-4, diagonal=False, every=2)),
            (None, R.ScaleShift(1e-3)),
            ("2", R.SelfOrthogonality(0.1)),
        ],
    )
    model(torch.ones(3, 4))
    penalty()
    assert str(penalty).splitlines() == [
        "Penalty: 4 terms, 1 skipped",
        "  0.weight  Orthogonality(0.0001, every=2, diagonal=False)",
        "  2.weight  Orthogonality(0.0001, every=2, diagonal=False)",
        "  2.weight  ScaleShift(0.001, floor=0.2)                    "
        "constant below norm 0.2; safe for lr / (1 - momentum)² up to 10",
        "  2.output  SelfOrthogonality(0.1)                          "
        "3 samples for 8 filters: not all their angles can be told apart, and the spread does not fall below 0.33",
        "  0.weight  ScaleShift(0.001)                               "
        "skipped: its scale does not matter: 1 normalises its output",
    ]
    assert repr(penalty) == "<Penalty: 4 terms, 1 skipped, step 1>"


# --- optimizers -----------------------------------------------------------------------------------


def test_check_finds_what_the_optimizer_does_twice_or_not_at_all() -> None:
    model = network()
    penalty = Penalty(model, [(None, R.L2(1e-4)), (None, R.Orthogonality(1e-4))])
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    assert penalty.check(good) == []
    decayed = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    assert penalty.check(decayed) == [
        "3.weight/L2: the optimizer's weight decay shrinks this weight as well",
        "5.weight/L2: the optimizer's weight decay shrinks this weight as well",
    ]
    partial = torch.optim.SGD(model[:5].parameters(), lr=0.1)
    assert penalty.check(partial) == [
        "5.weight/L2: the optimizer does not have this weight, so the term has no effect here",
        "5.weight/Orthogonality: the optimizer does not have this weight, so the term has no effect here",
    ]


def test_check_finds_a_penalty_above_the_loss() -> None:
    model = network()
    penalty, optimizer = (
        Penalty(model, [("5", R.L2(1e-3)), (nn.Conv2d, R.L2(10.0))]),
        torch.optim.SGD(model.parameters()),
    )
    with pytest.raises(InvalidArgumentError, match=r"takes the penalty of the last call; found none\. Call it first"):
        penalty.check(optimizer, loss=1.0)
    total = float(penalty().detach())
    assert penalty.check(optimizer, loss=1.01 * total) == []
    assert penalty.check(optimizer) == []
    label, most = max(penalty.values().items(), key=lambda item: item[1])
    (said,) = penalty.check(optimizer, loss=torch.tensor(0.5 * total))
    assert said == (
        f"the penalty is {total:.3g} and the loss {0.5 * total:.3g}, so that training follows the penalty; lower its "
        f"strengths, most of all that of {label} ({most:.3g})"
    )


def test_check_refuses_steps_past_zero() -> None:
    """E1: ηλ larger than the floor allows."""
    model = network()
    penalty = Penalty(model, [("5", R.ScaleShift(1.0))])
    assert penalty.check(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)) == []
    with pytest.raises(InvalidArgumentError, match=r"5\.weight/ScaleShift holds a weight above norm .* found lr=0.1"):
        penalty.check(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert penalty.check(torch.optim.Adam(model.parameters(), lr=0.1)) == []


@pytest.mark.parametrize("inner", [False, True])
def test_outputs_of_attention(inner: bool) -> None:
    """`nn.MultiheadAttention` never calls its output projection, so a rule for every layer leaves it out."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) if inner else layer
    penalty = Penalty(model, [(None, R.SelfOrthogonality(1.0))])
    (model(torch.randn(5, 2, 8)).sum() + penalty()).backward()
    assert {key.split(".output")[0].split(".")[-1] for key in penalty.values()} == {"linear1", "linear2"}
    penalty.undo_()
    with pytest.raises(NoMatchError, match=r"out_proj \(nn\.MultiheadAttention uses its weight without calling"):
        Penalty(model, [("*out_proj", R.SelfOrthogonality(1.0))])


@dataclass(frozen=True)
class Nothing(R.base.Regularizer):
    """A class of the user that is neither one of weights nor one of outputs."""


@pytest.mark.parametrize("regularizer", [R.base.Regularizer(1.0), Nothing(1.0), R.base.Regularizer])
def test_a_regularizer_that_reads_nothing_is_refused(regularizer: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="one that reads weights or outputs, such as Orthogonality"):
        Penalty(nn.Linear(3, 3), [(None, regularizer)])


@pytest.mark.parametrize("act", [Penalty.__call__, Penalty.add_grads_])
def test_a_replaced_layer_ends_the_penalty(act: Callable[[Penalty], object]) -> None:
    """The output layer or a whole block is replaced, as in transfer learning: its old weight is no part of the loss."""
    for path in ("0", "1"):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
        penalty = Penalty(model, [(None, R.L2(1.0))])
        act(penalty)
        model.set_submodule(path, nn.Identity())
        with pytest.raises(InvalidArgumentError, match=r"found (0\.)?\d, which the model does not have any more"):
            act(penalty)


def test_a_layer_that_moved_or_hands_on_its_weight_keeps_its_term() -> None:
    model = network()
    penalty = Penalty(model, [("5", R.L2(1.0))])
    before = float(penalty().detach())
    model[5] = nn.Sequential(model[5], nn.Dropout())  # as adapters wrap a layer
    gonio.swap_(model, gonio.nn.DecoupledLinear.from_linear)
    assert float(penalty().detach()) == before
    copied, copied_penalty = copy.deepcopy((model, penalty))
    nn.init.zeros_(copied[5][0].weight)
    assert float(copied_penalty().detach()) == 0


@pytest.mark.parametrize("regularizer", [R.L2(1.0), R.HypersphericalEnergy(1.0), R.SelfOrthogonality(1.0)])
def test_weights_of_inference_mode_are_refused_where_gradients_are_wanted(regularizer: R.base.Regularizer) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    penalty = Penalty(model, [("1", regularizer)])
    match = r"Penalty\(\) needs weights with which torch computes gradients; found 1.weight, which was made in"
    with pytest.raises(InvalidArgumentError, match=match):
        penalty()
    if isinstance(regularizer, R.base.WeightRegularizer):
        with pytest.raises(InvalidArgumentError, match=match):
            penalty.add_grads_()
        with pytest.raises(InvalidArgumentError, match=r"needs weights .*found a weight, which was made in inference"):
            regularizer(model[1].weight)
        with torch.no_grad():
            assert float(penalty()) == float(regularizer(model[1].weight))
    assert all(parameter.grad is None for parameter in model.parameters())
