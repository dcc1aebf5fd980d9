"""Nine small networks of other hands, each with a task of its own: images, points and text.

They are trained here, in under a minute each, and used by the tests of damages that no rule was developed on.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from gonio.lab import Split, Task, TrainingConfig

SGD = TrainingConfig(epochs=12, batch_size=32, lr=0.05)
ADAMW = TrainingConfig(epochs=12, batch_size=32, lr=3e-3, optimizer="adamw", weight_decay=0.01)


def conv(inputs: int, outputs: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Plain(nn.Sequential):
    """Convolutions with batch norm, one behind the other."""

    def __init__(self) -> None:
        stem = [conv(1, 24), nn.ReLU(), conv(24, 24), nn.ReLU(), nn.MaxPool2d(2)]
        deep = [conv(24, 48), nn.ReLU(), conv(48, 48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*stem, *deep, nn.Linear(48, 10))


class Residual(nn.Module):
    """Three residual blocks with batch norm, one of them with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 16)
        self.first = nn.ModuleList([conv(16, 16), conv(16, 32, stride=2), conv(32, 32)])
        self.second = nn.ModuleList([conv(16, 16), conv(32, 32), conv(32, 32)])
        self.short = nn.ModuleList([nn.Identity(), conv(16, 32, 1, stride=2), nn.Identity()])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for first, second, short in zip(self.first, self.second, self.short, strict=True):
            x = (second(first(x).relu()) + short(x)).relu()
        return self.head(x.mean((2, 3)))


class Separable(nn.Sequential):
    """Depthwise and pointwise convolutions with batch norm and ReLU6."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [conv(1, 32), nn.ReLU6()]
        for inputs, outputs, stride in ((32, 48, 1), (48, 64, 2), (64, 64, 1)):
            layers += [conv(inputs, inputs, stride=stride, groups=inputs), nn.ReLU6()]
            layers += [conv(inputs, outputs, 1), nn.ReLU6()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Modern(nn.Module):
    """Depthwise convolution, layer norm, wide MLP, and a factor per channel, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 2, 2)
        self.spatial = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(96, 32) for _ in range(3))
        self.gamma = nn.ParameterList(nn.Parameter(torch.full((32,), 0.1)) for _ in range(3))
        self.last = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for spatial, norm, wide, back, gamma in zip(
            self.spatial, self.norms, self.wide, self.back, self.gamma, strict=True
        ):
            inner = norm(spatial(x).permute(0, 2, 3, 1))
            x = x + (gamma * back(F.gelu(wide(inner)))).permute(0, 3, 1, 2)
        return self.head(self.last(x.mean((2, 3))))


class SelfAttention(nn.Module):
    """Four heads with one matrix for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Patches(nn.Module):
    """A vision transformer over patches of 2 × 2 pixels."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.attention = nn.ModuleList(SelfAttention(width) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x))
            x = x + self.back[i](F.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x).mean(1))


class Dense(nn.Sequential):
    """Three hidden layers without any norm."""

    def __init__(self) -> None:
        hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(64, 10))


class Gated(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.GRU(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x.squeeze(1))[0][:, -1])


class Cloud(nn.Module):
    """The same layers for each point, the largest value over the points, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.shared = nn.ModuleList(nn.Conv1d(i, o, 1) for i, o in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:])
        self.hidden, self.norm, self.head = nn.Linear(128, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.shared, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return self.head(self.norm(self.hidden(x.amax(2))).relu())


class Reader(nn.Module):
    """A causal transformer over bytes; its head is its table."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, width), nn.Embedding(128, width)
        for table in (self.table, self.places):
            nn.init.normal_(table.weight, std=0.05)
        block = functools.partial(
            nn.TransformerEncoderLayer, width, 4, 2 * width, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.full((length, length), -torch.inf, device=ids.device).triu(1)
        x = self.table(ids) + self.places(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


# --- tasks and training ---------------------------------------------------------------------------------


@functools.cache
def images(training: TrainingConfig) -> Task:
    """All digits in another split than the built-in task's: 700 to train on, 400 to validate, 697 to test."""
    task = gonio.lab.tasks.digits()
    parts = list(task.splits.values())
    inputs, targets = torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(47))
    train, validation, test = (Split(inputs[index], targets[index]) for index in order.split([700, 400, 697]))
    return replace(
        task, name="images", train=train, validation=validation, test=test, training=training, augment=None, recipes=()
    )


@functools.cache
def clouds(training: TrainingConfig) -> Task:
    return replace(gonio.lab.tasks.points(), name="clouds", training=training)


@functools.cache
def text(training: TrainingConfig) -> Task:
    """The first windows of the built-in task: 512 to train on, 128 to validate, 256 to test."""
    task = gonio.lab.tasks.bytes_()
    parts = zip(task.splits.values(), (512, 128, 256), strict=True)
    train, validation, test = (Split(part.inputs[:count], part.targets[:count]) for part, count in parts)
    return replace(task, name="text", train=train, validation=validation, test=test, training=training)


@dataclass(frozen=True)
class Stranger:
    """How a network is built and trained."""

    make: Callable[[], nn.Module]
    data: Callable[[TrainingConfig], Task]
    training: TrainingConfig

    @property
    def task(self) -> Task:
        return self.data(self.training)


STRANGERS = {
    "plain": Stranger(Plain, images, SGD),
    "residual": Stranger(Residual, images, SGD),
    "separable": Stranger(Separable, images, SGD),
    "modern": Stranger(Modern, images, replace(ADAMW, epochs=25)),
    "patches": Stranger(Patches, images, replace(ADAMW, epochs=25)),
    "dense": Stranger(Dense, images, replace(ADAMW, epochs=20)),
    "gated": Stranger(Gated, images, replace(ADAMW, epochs=25)),
    "cloud": Stranger(Cloud, clouds, replace(SGD, epochs=15)),
    "reader": Stranger(Reader, text, replace(ADAMW, epochs=8, batch_size=16)),
    "tuned": Stranger(Dense, images, replace(ADAMW, epochs=20)),
}


@functools.cache
def base_of(name: str, seed: int = 0) -> nn.Module | None:
    """What a fine-tuned network was before: one that has seen the data twice."""
    return trained("dense", seed, epochs=2) if name == "tuned" else None


@functools.cache
def healthy(name: str, seed: int = 0) -> nn.Module:
    return trained(name, seed, start=copy.deepcopy(base_of(name, seed)))


@torch.enable_grad()
def trained(name: str, seed: int = 0, *, start: nn.Module | None = None, epochs: int | None = None) -> nn.Module:
    """The network of this name after its training, in evaluation mode."""
    stranger = STRANGERS[name]
    task, config = stranger.task, stranger.training
    torch.manual_seed(seed)
    model = start or stranger.make()
    kind = {"sgd": functools.partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}[config.optimizer]
    optimizer = kind(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    count = epochs or config.epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    for epoch in range(count):
        model.train()
        for inputs, targets in task.train.shuffled(
            config.batch_size, seed=seed, epoch=epoch, smallest=2, augment=task.augment, workers=0
        ):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def score(name: str, model: nn.Module) -> float:
    """Points on the test split, which the doctor does not get: accuracy in %, or bits per byte in −1/50."""
    task = STRANGERS[name].task
    with torch.no_grad():
        outputs = torch.cat([model.eval()(inputs) for inputs in task.test.inputs.split(256)])
    if not outputs.isfinite().all():
        return (0.0 if task.metric.direction == "max" else -8.0) / task.sesoi
    value = task.metric.function(outputs, task.test.targets) / task.sesoi
    return value if task.metric.direction == "max" else -value


def given(name: str) -> Task:
    """The task as the doctor gets it: the validation split stands in the place of the test split."""
    task = STRANGERS[name].task
    return replace(task, test=task.validation)
