"""`balance_`: closed forms derived by hand, what pins a scale, optimizers, quantisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog import seeded
from foreign import torchvision_resnet18
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery import balance_, calibrate_, fold_
from networks import ResNet18, images
from surgery.net import Net, tied, trained


def relu_chain(depth: int = 20, width: int = 12, *, orders: int = 7) -> nn.Sequential:
    """A linear-ReLU chain in float64 with biases, whose layers differ by orders of magnitude."""
    layers: list[nn.Module] = []
    for index in range(depth):
        linear = nn.Linear(width, width).double()
        with torch.no_grad():
            scale = 10 ** (index % orders - orders // 2)
            linear.weight.copy_(seeded(width, width, seed=index, dtype=torch.float64) * scale / 3)
            linear.bias.copy_(seeded(width, seed=100 + index, dtype=torch.float64))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def residual() -> nn.Module:
    """Every connection that `balance_` claims to understand, in one network."""

    def forward(m, x):
        x = F.leaky_relu(m.stem(x))
        x = torch.relu(x + m.conv2(m.prelu(m.conv1(x))))
        x = m.drop(torch.flatten(m.pool(F.relu(m.norm(m.up(x)))), 1))
        return m.fc2(F.relu(m.fc1(x)))

    layers = {
        "stem": nn.Conv2d(3, 8, 3, padding=1),
        "conv1": nn.Conv2d(8, 8, 3, padding=1, groups=2),
        "prelu": nn.PReLU(8),
        "conv2": nn.Conv2d(8, 8, 3, padding=1),
        "up": nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
        "norm": nn.BatchNorm2d(4),
        "pool": nn.MaxPool2d(2),
        "drop": nn.Dropout(0.5),
        "fc1": nn.Linear(4 * 16, 10),
        "fc2": nn.Linear(10, 3),
    }
    with torch.no_grad():
        layers["stem"].weight.mul_(1000)
        layers["fc1"].weight.mul_(0.01)
    return trained(Net(forward, **layers)).double()


X = seeded(5, 3, 4, 4, dtype=torch.float64)


def weights(model):
    return [m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))]


def squares(model):
    return [float(w.detach().square().sum()) for w in weights(model)]


def assert_kept(model: nn.Module, x: Tensor, before: Tensor) -> None:
    """The function is the same to 1e-12 of the largest output."""
    assert float((model(x) - before).detach().abs().max() / before.abs().max()) <= 1e-12


def test_layer_level_reaches_the_closed_form():
    model = relu_chain()
    before = squares(model)
    geometric = math.exp(sum(map(math.log, before)) / len(before))
    balance_(model, level="layer")
    assert squares(model) == pytest.approx([geometric] * len(before), rel=1e-9)


@pytest.mark.parametrize("level", ["layer", "neuron"])
def test_every_connection_keeps_the_function(level):
    model = residual()
    before, waste = model(X).detach(), sum(squares(model))
    edited = balance_(model, example=X, level=level)
    assert_kept(model, X, before)
    assert sum(squares(model)) < waste
    assert "was wasted" in str(edited)
    assert "largest deviation" in str(edited)
    moved = {change.path for change in edited.changes}
    assert moved == {"stem", "conv1", "conv2", "up", "norm", "fc1", "fc2"}


NOT_HOMOGENEOUS = [nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.Tanh, nn.AlphaDropout, nn.FeatureAlphaDropout]


@pytest.mark.parametrize("activation", NOT_HOMOGENEOUS)
def test_what_is_not_homogeneous_is_refused_with_the_reason(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), activation(), nn.Linear(3, 3))
    message = rf"no scale is free to move: .*{activation.__name__} \(_1\) is not known to be positively homogeneous"
    with pytest.raises(NotApplicableError, match=message):
        balance_(model)


def doubled() -> Net:
    def forward(m, x):
        y = F.relu(m.a(x))
        return m.b(y), torch.tanh(y)

    return Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))


def tokens() -> Net:
    """(N, T, C) flattened puts the channels fastest: scales per channel would hit the wrong features."""
    return Net(lambda m, x: m.head(m.embed(x).relu().flatten(1)), embed=nn.Linear(3, 4), head=nn.Linear(8, 2))


def repeated() -> nn.Module:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.ReLU(), shared)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (doubled, r"tanh .* is not known to be positively homogeneous"),
        (tokens, "head does not read its channels one by one"),
        (lambda: tied(nn.ReLU()), "shares its weight"),
        (repeated, "runs more than once"),
        (hooked, "0 has forward hooks, which may change its output"),
        (
            lambda: Net(lambda m, x: x if x.sum() > 0 else -x),
            "balance_: cannot balance the model: the model cannot be traced",
        ),
    ],
)
def test_what_pins_a_scale_is_said(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(NotApplicableError, match=message):
        balance_(make())


def test_dead_channels_stay_finite():
    model = relu_chain(3)
    with torch.no_grad():
        model[0].weight[0] = 0
        model[2].weight[:, 1] = 0
    balance_(model)
    assert all(torch.isfinite(w).all() for w in weights(model))


def groups(model: nn.Module) -> list[tuple[list[nn.BatchNorm2d], list[nn.Module]]]:
    """Read off the architecture by hand: the norms that make each tensor, and the layers that read it."""
    found = []
    makers, readers = [model.bn1], []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            readers.append(block.conv1)
            found.append(([block.bn1], [block.conv2]))
            if block.downsample is not None:
                readers.append(block.downsample[0])
                found.append((makers, readers))
                makers, readers = [block.downsample[1]], []
            makers.append(block.bn2)
    return [*found, (makers, [*readers, model.fc])]


def sizes(weight: Tensor) -> Tensor:
    """Sums of squares along the first dimension."""
    return weight.detach().square().reshape(len(weight), -1).sum(1)


def parts(model: nn.Module, *, per_channel: bool) -> list[tuple[Tensor, Tensor]]:
    """Squares of the rows that make and of the columns that read each tensor."""
    found = [
        (sum(sizes(m.weight) for m in made), sum(sizes(r.weight.transpose(0, 1)) for r in read))
        for made, read in groups(model)
    ]
    return found if per_channel else [(made.sum(), read.sum()) for made, read in found]


@pytest.mark.parametrize("make", [ResNet18, pytest.param(lambda: torchvision_resnet18(10), marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["neuron", "layer"])
def test_a_resnet_18_reaches_the_closed_form(level: str, make: Callable[[], nn.Module]) -> None:
    r"""Each tensor's terms are :math:`s^2 P + Q/s^2`, whose least value is :math:`2\sqrt{PQ}`."""
    model, x = trained(make(), spread=1.0).double(), images(2).double()
    before = model(x).detach()
    least = sum(float(2 * (made * read).sqrt().sum()) for made, read in parts(model, per_channel=level == "neuron"))
    start = sum(float(made.sum() + read.sum()) for made, read in parts(model, per_channel=True))
    balance_(model, example=x, level=level)
    reached = sum(float(made.sum() + read.sum()) for made, read in parts(model, per_channel=True))
    assert_kept(model, x, before)
    assert reached == pytest.approx(least, rel=1e-12)
    assert reached < 0.9 * start


def test_a_folded_resnet_18_rests_where_every_channel_is_balanced() -> None:
    """Without norms the scales hang together and there is no closed form; at the least sum rows equal columns."""
    model, x = trained(ResNet18(), spread=1.0).double(), images(2).double()
    fold_(model, example=x)
    before, start = model(x).detach(), sum(squares(model))
    assert "has not converged" not in str(balance_(model, example=x))
    assert_kept(model, x, before)
    block = model.layer1[0]
    stem = [model.conv1, *(b.conv2 for b in model.layer1)]
    readers = [*(b.conv1 for b in model.layer1), model.layer2[0].conv1, model.layer2[0].downsample[0]]
    for made, read in (([block.conv1], [block.conv2]), (stem, readers)):
        rows, columns = (sum(sizes(m.weight) for m in made), sum(sizes(r.weight.transpose(0, 1)) for r in read))
        torch.testing.assert_close(rows, columns, rtol=1e-9, atol=0)
    assert sum(squares(model)) < start


def test_a_shared_norm_moves_nothing() -> None:
    def forward(m, x):
        return m.c(F.relu(m.norm(m.b(F.relu(m.norm(m.a(x)))))))

    a, b, c = (nn.Conv2d(2, 2, 1) for _ in range(3))
    model = Net(forward, a=a, b=b, c=c, norm=nn.BatchNorm2d(2))
    with pytest.raises(NotApplicableError, match="a BatchNorm2d normalises it"):
        balance_(model)
    model.c = nn.Sequential(c, nn.ReLU(), nn.Conv2d(2, 2, 1))
    edited = balance_(model, example=seeded(2, 2, 3, 3))
    assert {change.path for change in edited.changes} == {"c.0", "c.2"}


def test_a_layer_that_reads_what_it_adds_to() -> None:
    """x + f(x): rows and columns of one weight carry the same scales, and a full step would swing for ever."""

    def forward(m, x):
        x = m.enter(x)
        return m.leave(x + m.loop(F.relu(x)))

    enter, loop, leave = (nn.Linear(2, 2, bias=False).double() for _ in range(3))
    with torch.no_grad():
        loop.weight.copy_(torch.tensor([[0.0, 100.0], [1.0, 0.0]]))
        enter.weight.mul_(0.01)
        leave.weight.mul_(0.01)
    balance_(Net(forward, enter=enter, loop=loop, leave=leave), example=seeded(4, 2, dtype=torch.float64))
    made = sizes(enter.weight) + sizes(loop.weight)
    read = sizes(leave.weight.T) + sizes(loop.weight.T)
    torch.testing.assert_close(made, read, rtol=1e-6, atol=0)
    assert float(sizes(loop.weight).max()) < 200


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-30, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-30, weight_decay=0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-30),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-30),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-30),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=1e-30),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-30, momentum=0.9, centered=True),
}


def optimized(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = relu_chain(3, 6, orders=3)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(7):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The changes of the parameters that one training step makes."""
    x, y = seeded(16, 6, seed=8, dtype=torch.float64), seeded(16, 6, seed=9, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_step_of_an_adaptive_optimizer_is_the_same(name: str) -> None:
    model, optimizer = optimized(name)
    expected = step(*copy.deepcopy((model, optimizer)))
    balance_(model, optimizer=optimizer)
    for found, wanted in zip(step(model, optimizer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)


def test_the_next_step_of_adam_is_another_one_if_its_moments_stay() -> None:
    model, optimizer = optimized("Adam")
    expected = step(*copy.deepcopy((model, optimizer)))
    balance_(model)
    found = step(model, optimizer)
    assert max(float((f - w).abs().max() / w.abs().max()) for f, w in zip(found, expected, strict=True)) > 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_next_step_of_sgd_is_scaled_by_the_square_of_the_factor(momentum: float) -> None:
    model = relu_chain(3, 6, orders=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=momentum)
    for _ in range(3):
        step(model, optimizer)
    expected = step(*copy.deepcopy((model, optimizer)))
    before = [p.detach().clone() for p in model.parameters()]
    balance_(model, optimizer=optimizer)
    factors = [p.detach() / b for p, b in zip(model.parameters(), before, strict=True)]
    for found, wanted, s in zip(step(model, optimizer), expected, factors, strict=True):
        torch.testing.assert_close(s * found, wanted, rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "row"}, 'balance_ takes level="neuron" or "layer"; found \'row\''),
        ({"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters())}, "an optimizer that holds none of them"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        balance_(relu_chain(2), **options)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"amsgrad": True}])
def test_state_that_was_loaded_since_is_restored(options: dict[str, Any]) -> None:
    """`load_state_dict` of an optimizer makes new tensors."""
    model = relu_chain(3, 6, orders=3)
    kind = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-6, **options)
    for _ in range(3):
        step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    edited = balance_(model, optimizer=optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    edited.undo_()
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[key][name]) if isinstance(value, Tensor) else value is before[key][name]


def test_wrappers_without_state_of_their_own() -> None:
    model, other = relu_chain(3, 6, orders=3), relu_chain(3, 6, orders=3)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=1e-6, momentum=0.9) for m in (model, other))
    wrapped = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)
    step(model, optimizer)
    step(other, plain)
    balance_(model, optimizer=wrapped)
    balance_(other, optimizer=plain)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"])

    class Averaging:  # it may keep copies of the weights anywhere
        def __init__(self) -> None:
            self.inner, self.param_groups = optimizer, optimizer.param_groups

    with pytest.raises(NotApplicableError, match="what an Averaging stores of it is unknown"):
        balance_(model, optimizer=Averaging())  # type: ignore[arg-type]


def test_state_of_unknown_unit_is_refused_and_nothing_changes() -> None:
    model = relu_chain(3, 6, orders=3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-9)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    balance_(model, optimizer=optimizer).undo_()
    optimizer.state[model[0].weight]["memory"] = torch.zeros(6, 6)
    with pytest.raises(NotApplicableError, match="the unit of 'memory' in the state of LBFGS is unknown"):
        balance_(model, optimizer=optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("verb", [balance_, lambda model: calibrate_(model, [torch.ones(2, 4)])])
def test_a_model_on_the_meta_device_is_refused(verb: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(
        NotApplicableError, match=r"0\.weight is on the meta device and has no values\. Load its weights"
    ):
        verb(model)


def test_the_scale_of_a_layer_before_heads_of_several_tasks_stays() -> None:
    """Another head reads the same features where a setting of the model chooses it."""

    def forward(m, x):
        return m.heads[m.task](F.relu(m.second(F.relu(m.first(x)))))

    layers = {"first": nn.Linear(4, 8), "second": nn.Linear(8, 8)}
    model = Net(forward, **layers, heads=nn.ModuleList(nn.Linear(8, 3) for _ in range(2))).double()
    model.task, x = 1, seeded(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model.first.weight.mul_(100)
        other = model(x)
        model.task = 0
        before, second = model(x), model.heads[0].weight.clone()
        edited = balance_(model)
        torch.testing.assert_close(model(x), before)
        model.task = 1
        torch.testing.assert_close(model(x), other)
    assert torch.equal(model.heads[0].weight, second)
    assert edited.changes, "the scale between the first two layers moves"
