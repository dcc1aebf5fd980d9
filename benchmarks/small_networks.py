"""Networks of timm, transformers and torch's recurrent layers, trained on digits or text; in seconds on one core.

Architectures beside those of `treated_networks.py`, with its tasks. A network depends on its name and number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.treated_networks import Kind, Network, images, score, text

__all__ = ["SMALL", "small_network"]

TIMM = (
    *("byobnet", "convnext", "convnext2", "convnext3", "efficientnet", "efficientnet_evos", "efficientnet_gn"),
    *("efficientnet_ln", "mambaout", "resnet", "vit", "vit2", "vit3", "vit4", "coatnet", "nfnet"),
)  # each with the prefix "test_": architectures of one or two blocks per stage
TRANSFORMERS = ("Bert", "GPT2", "Llama", "Electra", "Mamba", "GPTNeoX", "Qwen3", "Albert")
RECURRENT = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU, "bidirectional LSTM": partial(nn.LSTM, bidirectional=True)}
SIDE = 64  # pixels to which the digits' 8 are enlarged for timm
_LIBRARIES: list[Any] = []  # torch forgets operators whose library object is gone


def _libraries() -> tuple[Any, Any]:
    """timm and transformers, beside a torchvision whose wheel names operators of CUDA at import."""
    if torch.version.cuda is None and not _LIBRARIES:
        _LIBRARIES.append(library := torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    import transformers

    return timm, transformers


class Enlarged(nn.Module):
    """A network of images of three channels, on digits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        options = {"img_size": SIDE} if "vit" in name or "coat" in name else {}
        self.body = _libraries()[0].create_model(f"test_{name}", num_classes=10, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.interpolate(x, SIDE, mode="bilinear").expand(-1, 3, -1, -1))


class Read(nn.Module):
    """A transformer that reads bytes; the mean over the window is classified."""

    def __init__(self, name: str, pick: random.Random) -> None:
        super().__init__()
        library, width = _libraries()[1], pick.choice([32, 48])
        options = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
        options |= {"intermediate_size": 2 * width, "max_position_embeddings": 64, "pad_token_id": 0}
        options |= {
            "GPT2": {"n_inner": 2 * width},
            "Albert": {"embedding_size": 32},
            "Electra": {"embedding_size": 32},
            "Mamba": {"state_size": 8, "intermediate_size": 2 * width},
            "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
        }.get(name, {})
        self.body = library.AutoModel.from_config(getattr(library, f"{name}Config")(**options))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).last_hidden_state.mean(1))


class Recurrent(nn.Module):
    """A recurrent layer over the bytes of a window, or over the rows of an image."""

    def __init__(self, make: Callable[..., nn.RNNBase], pick: random.Random, *, bytes_: bool) -> None:
        super().__init__()
        width = pick.choice([32, 48, 64])
        self.embed = nn.Embedding(256, 24) if bytes_ else None
        self.body = make(24 if bytes_ else 8, width, batch_first=True, num_layers=pick.choice([1, 2]))
        self.head = nn.Linear(width * (2 if self.body.bidirectional else 1), 3 if bytes_ else 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.squeeze(1) if self.embed is None else self.embed(x))[0].mean(1))


SMALL: dict[str, Kind] = {
    **{f"transformers {name}": Kind(partial(Read, name), text, 8) for name in TRANSFORMERS},
    **{
        f"{title} {name}": Kind(partial(Recurrent, make, bytes_=task is text), task, epochs)
        for title, task, epochs in (("text", text, 12), ("digits", images, 40))
        for name, make in RECURRENT.items()
    },
    **{
        f"timm test_{name}": Kind(lambda pick, name=name: Enlarged(name), images, 10 if "vit" in name else 6)
        for name in TIMM
    },
}


def small_network(name: str, number: int) -> Network:
    """The network of this architecture with this number."""
    kind, pick = SMALL[name], random.Random(number)
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    model, task = kind.make(pick), kind.task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=pick.choice([1e-3, 2e-3]), weight_decay=pick.choice([0, 0.05]))
    for _ in range(kind.epochs):
        for part in torch.randperm(len(task.train)).split(64):
            optimizer.zero_grad()
            inputs, targets = task.train.take(part)  # type: ignore[arg-type]
            task.loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return Network(name, model.eval(), task, score(model, task))
