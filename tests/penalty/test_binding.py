"""Which tensors a rule reads, what is left out, and how the penalty says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from gonio import Penalty
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError, NoMatchError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    )


def reads(penalty: Penalty) -> list[str]:
    return [term.label for term in penalty._terms]


def tensors(penalty: Penalty) -> list[str]:
    return [label.split("/")[0] for label in reads(penalty)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, ["0.weight", "3.weight", "5.weight"]),
        (nn.Conv2d, ["0.weight", "3.weight"]),
        ("5", ["5.weight"]),
        ("re:[03]", ["0.weight", "3.weight"]),
        ("type:Linear", ["5.weight"]),
        (gonio.OfType(nn.Conv2d) & ~gonio.Path("0"), ["3.weight"]),
        pytest.param(lambda path, module: getattr(module, "groups", 0) == 1, ["0.weight", "3.weight"], id="function"),
    ],
    ids=str,
)
def test_where_chooses(where: object, expected: list[str]) -> None:
    assert tensors(Penalty(network(), [(where, R.Orthogonality(1.0))])) == expected  # type: ignore[list-item]


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


def test_a_model_that_is_a_layer() -> None:
    assert reads(Penalty(nn.Linear(3, 2), [(None, R.L2(1.0)), (None, R.SelfOrthogonality(1.0))])) == [
        "weight/L2",
        "output/SelfOrthogonality",
    ]


def test_layers_with_several_weights() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=6), "lstm": nn.LSTM(8, 5, proj_size=3)})
    assert tensors(Penalty(model, [(None, R.Orthogonality(1.0))])) == [
        "attention.q_proj_weight",
        "attention.k_proj_weight",
        "attention.v_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "lstm.weight_hr_l0",
    ]
    packed = Penalty(nn.MultiheadAttention(8, 2), [(None, R.Orthogonality(1.0))])
    assert tensors(packed) == ["in_proj_weight", "out_proj.weight"]


def test_tables_only_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    assert tensors(Penalty(model, [(None, R.L2(1.0))])) == ["1.weight"]
    assert tensors(Penalty(model, [(nn.Embedding, R.L2(1.0))])) == ["0.weight"]


# --- what is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", [R.ScaleShift(1.0), R.L2(1.0)], ids=lambda r: type(r).__name__)
def test_scale_before_normalisation_is_left_out_and_said(regularizer: R.WeightRegularizer) -> None:
    penalty = Penalty(network(), [(None, regularizer)])
    assert tensors(penalty) == ["3.weight", "5.weight"]
    assert "skipped: its scale does not matter: 1 normalises its output" in str(penalty)


@pytest.mark.parametrize(
    "regularizer",
    [R.ScaleShift(1.0, before_norm="keep"), R.L2(1.0, before_norm="keep"), R.Orthogonality(1.0)],
    ids=lambda r: type(r).__name__,
)
def test_what_is_kept_before_normalisation(regularizer: R.WeightRegularizer) -> None:
    assert tensors(Penalty(network(), [(None, regularizer)])) == ["0.weight", "3.weight", "5.weight"]


def test_normalisation_is_found_inside_wrappers() -> None:
    wrapped = torch.nn.DataParallel(network())
    assert tensors(Penalty(wrapped, [(None, R.L2(1.0))])) == ["3.weight", "5.weight"]


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


def test_tied_tensors_count_once() -> None:
    """E8: a shared module is one site, a shared Parameter of two modules is one tensor."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    alone = float(Penalty(model, [("a", R.L2(1.0))])().detach())
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    penalty = Penalty(model, [(None, R.L2(1.0))])
    assert float(penalty().detach()) == alone
    assert "b.weight  L2(1)  skipped: is the same tensor as a.weight, which has the term" in str(penalty)


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


def test_a_rule_that_selects_nothing() -> None:
    with pytest.raises(
        NoMatchError, match=r"Orthogonality: where=layer9 matches no suitable module; it selects no module"
    ):
        Penalty(network(), [("layer9", R.Orthogonality(1.0))])


def test_a_rule_that_selects_nothing_it_can_read() -> None:
    with pytest.raises(NoMatchError, match=r"it selects only 2 \(it has no weight with filters\)"):
        Penalty(network(), [(nn.ReLU, R.L2(1.0))])
    with pytest.raises(NoMatchError, match=r"it is no linear or convolution layer"):
        Penalty(nn.LSTM(3, 3), [(nn.LSTM, R.SelfOrthogonality(1.0))])
    with pytest.raises(NoMatchError, match=r"name it in `where` to include it"):
        Penalty(nn.Embedding(3, 3), [(None, R.L2(1.0))])
    with pytest.raises(NoMatchError, match=r"it has no weight with filters"):
        Penalty(nn.LazyLinear(3), [(None, R.L2(1.0))])


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


def test_paths_are_those_of_the_users_model() -> None:
    """F4: what wrappers put in front of a path is not part of it."""
    rules = [(None, R.L2(1.0))]
    for wrap in (nn.DataParallel, lambda model: torch.compile(model, backend="eager")):
        penalty = Penalty(wrap(nn.Sequential(nn.Linear(3, 3))), rules)
        penalty()
        assert list(penalty.values()) == ["0.weight/L2"]


def test_a_rule_that_is_left_with_nothing() -> None:
    with pytest.raises(NoMatchError, match=r"0\.weight \(its scale does not matter: 1 normalises"):
        Penalty(network(), [("0", R.ScaleShift(1.0))])


@pytest.mark.parametrize("rules", [[R.L2(1.0)], [(None, "L2")], [(None, R.L2(1.0), 3)]], ids=str)
def test_rules_are_pairs(rules: list[object]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"takes pairs \(where, regularizer\)"):
        Penalty(network(), rules)  # type: ignore[arg-type]


def test_a_bare_regularizer_is_no_list_of_rules() -> None:
    with pytest.raises(InvalidArgumentError, match=r"found a Orthogonality. .* write Penalty\(model, \[\(None, Orthog"):
        Penalty(network(), R.Orthogonality(1e-4))  # type: ignore[arg-type]


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


def test_short_form() -> None:
    penalty = Penalty(network(), [(None, R.L2(1.0))])
    penalty()
    assert repr(penalty) == "<Penalty: 2 terms, 1 skipped, step 1>"
    assert len(penalty) == 2


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


def test_check_refuses_steps_past_zero() -> None:
    """E1: ηλ larger than the floor allows."""
    model = network()
    penalty = Penalty(model, [("5", R.ScaleShift(1.0))])
    assert penalty.check(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)) == []
    with pytest.raises(InvalidArgumentError, match=r"5\.weight/ScaleShift holds a weight above norm .* found lr=0.1"):
        penalty.check(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert penalty.check(torch.optim.Adam(model.parameters(), lr=0.1)) == []
