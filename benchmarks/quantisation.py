"""What rounding the weights of trained transformers to 4 bits costs, as they are, balanced, and turned.

    python -m benchmarks.quantisation FILE [--models FOLDER]    writes results/quantisation.json

Small transformers of three architectures are trained: two on the characters of a text (FILE; the first nine tenths),
one on handwritten digits. The loss of what is held out is measured, in nats per character or image. Then outliers are
planted that leave the function as it is, and every linear layer is rounded. Trained weights are kept in FOLDER.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gonio
from benchmarks.results import path_of
from gonio.errors import NoMatchError
from gonio.geometry import fake_quantize
from gonio.lab.running.measures.scale import along_principal_axes_
from gonio.surgery.gains import gains_of
from gonio.surgery.symmetries import Factors, block_symmetries

RESULT = path_of("quantisation")
WIDTH, LAYERS, HEADS, LENGTH, BATCH, STEPS, RATE = 128, 2, 4, 64, 16, 600, 3e-3
SEEDS = 2
FORMATS: dict[str, Any] = {"one scale per tensor": "tensor", "per channel": "channel", "per 32 entries": 32}
SPREAD, LARGE, CHANNELS = 2.0, 16.0, 4  # of the planted outliers
MARGIN = 0.02  # what rounding may cost of the loss before anything is to be regained


# --- data and models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Inputs of a model by the name of the argument, with targets, as functions of a number of samples."""

    argument: str
    classes: int
    train: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    calibration: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(**{self.argument: x}).logits.flatten(0, -2), y.flatten())

    @property
    def example(self) -> dict[str, Tensor]:
        return {self.argument: self.train(2, torch.Generator().manual_seed(3))[0]}


def characters(file: Path) -> Data:
    """The characters of a text as numbers, and the next ones; 0 is for characters that are not in it."""
    text = file.read_text(encoding="utf-8")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) + 1 for letter in text])
    cut = len(codes) * 9 // 10

    def batch(part: Tensor, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(part) - LENGTH - 1, (count,), generator=random).tolist()
        pieces = torch.stack([part[start : start + LENGTH + 1] for start in starts])
        return pieces[:, :-1], pieces[:, 1:]

    train, held = partial(batch, codes[:cut]), partial(batch, codes[cut:])
    return Data("input_ids", len(letters) + 1, train, held, train)


def digits() -> Data:
    """Images of 8 × 8."""
    read = load_digits()
    order = torch.randperm(len(read.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(read.images, dtype=torch.float32)[order, None] / 8 - 1, torch.tensor(read.target)[order]

    def batch(rows: slice, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(x[rows]), (count,), generator=random)
        return x[rows][chosen], y[rows][chosen]

    # what the network was trained on, it knows by heart
    return Data("pixel_values", 10, *(partial(batch, slice(*ends)) for ends in ((0, 1200), (1500, None), (1200, 1500))))


def fresh(name: str, classes: int) -> nn.Module:
    """Heads are not tied to embeddings, which are not rounded."""
    import transformers as t  # it is slow to import

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False, "tie_word_embeddings": False}
    if name == "GPT-2":
        own: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, **ends}
        own |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=classes, **own))
    if name == "Llama":
        own = {"num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": LENGTH, **ends}
        return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=classes, **sizes, **own))
    own = {"intermediate_size": 512, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": classes}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, **own))


MODELS = ("GPT-2", "Llama", "ViT")


def trained(name: str, data: Data, folder: Path) -> nn.Module:
    """A model with the weights in the folder, or trained and put there."""
    torch.manual_seed(0)
    model = fresh(name, data.classes)
    file = folder / f"{name}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        share = min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = RATE * share
        optimizer.zero_grad()
        loss = data.loss(model.train(), *data.train(BATCH if name != "ViT" else 4 * BATCH, random))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(name, step, float(loss), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.eval()


# --- planted outliers -------------------------------------------------------------------------------------------------


@torch.no_grad()
def moved_scales(model: nn.Module, example: Any) -> None:
    """Random factors of channels, from value to output, query to key, and up to down where the activation allows it."""
    found = block_symmetries(model, example, traced=False, taken=frozenset())
    random, factors = torch.Generator().manual_seed(1), Factors(found.parameters)
    for each in found.symmetries:
        drawn = torch.randn(each.units, generator=random, dtype=torch.float64)
        factors.scale_(each, torch.exp2(SPREAD * drawn))
    for name in factors.names:
        found.parameters[name].mul_(factors.of(name))


@torch.no_grad()
def large_channels(model: nn.Module, example: Any) -> None:
    """A few columns of what reads each norm are larger, and the gain of the norm is smaller."""
    random = torch.Generator().manual_seed(2)
    able = gains_of(model, example, {id(m) for m in model.modules()})
    for each in able.able:
        old = {name: able.parameters[name] for name in each.tensors}
        gain = old[each.gain].double() + each.added
        gain[torch.randperm(len(gain), generator=random)[:CHANNELS]] /= LARGE
        for name, value in each.values(old, gain).items():
            old[name].copy_(value)


def principal_axes(model: nn.Module, example: Any) -> None:
    """Channels of the stream along the singular vectors of all that reads and writes it: few are large."""
    gonio.fold_(model, example=example, gains=True)
    along_principal_axes_(model, example)


PLANTS: dict[str, tuple[Callable[[nn.Module, Any], None], ...]] = {
    "as trained": (),
    "moved scales": (moved_scales,),
    "large channels": (large_channels,),
    "both of them": (moved_scales, large_channels),
    "principal axes": (principal_axes,),
}


# --- what is done before ----------------------------------------------------------------------------------------------


WAYS = ("balance_", "fold_", "fold_, rotate_", "all three")


def changed(model: nn.Module, verb: str, example: Any, seed: int = 0) -> nn.Module:
    """A copy that a verb changed."""
    model = copy.deepcopy(model)
    if verb == "balance_":
        gonio.balance_(model, example=example)
    elif verb == "fold_":
        with suppress(NoMatchError):  # of gains that are neutral already
            gonio.fold_(model, example=example, gains=True)
    else:
        gonio.rotate_(model, example=example, seed=seed)
    return model


def ways_of(model: nn.Module, example: Any) -> dict[str, list[nn.Module]]:
    """The model as it is, and behind the verbs; with turns, one for each seed."""
    balanced, folded = (changed(model, verb, example) for verb in ("balance_", "fold_"))
    turned, every = (
        [changed(each, "rotate_", example, seed) for seed in range(SEEDS)]
        for each in (folded, changed(balanced, "fold_", example))
    )
    return {"": [model], **dict(zip(WAYS, ([balanced], [folded], turned, every), strict=True))}


def layers(model: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The weights of all linear layers, and whether inputs come first."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module.weight, False
        elif type(module).__name__ == "Conv1D":
            yield module.weight, True


@torch.no_grad()
def rounded(model: nn.Module, per: Any) -> nn.Module:
    """A copy in which every linear layer is rounded to 4 bits."""
    model = copy.deepcopy(model)
    for weight, first in layers(model):
        rows = weight.T if first else weight
        found = fake_quantize(rows.contiguous(), bits=4, per=per)
        weight.copy_(found.T if first else found)
    return model


class Judge:
    """Losses of models on the same held-out and calibration data."""

    def __init__(self, data: Data) -> None:
        random = torch.Generator().manual_seed(5)
        count = 64 if data.argument == "input_ids" else 384
        self.data, self.held, self.calibration = data, data.held(count, random), data.calibration(count // 2, random)

    @torch.no_grad()
    def __call__(self, model: nn.Module, *, held: bool = True) -> float:
        return float(self.data.loss(model, *(self.held if held else self.calibration)))


def measure(name: str, data: Data, folder: Path, found: dict[str, Any]) -> Iterator[None]:
    """For each plant, format and way the losses on held-out and on calibration data, of each seed."""
    plain, judge, example = trained(name, data, folder), Judge(data), data.example
    for plant, changes in PLANTS.items():
        if f"{plant} | {next(iter(FORMATS))}" in found:
            continue
        steps = [copy.deepcopy(plain)]
        for change in changes:
            steps.append(copy.deepcopy(steps[-1]))
            change(steps[-1], example)
        if any(all(map(torch.equal, a.parameters(), b.parameters())) for a, b in pairwise(steps)):
            continue  # the model takes no such outliers
        model = steps[-1]
        ways = ways_of(model, example)
        for form, per in FORMATS.items():
            losses = {way: [judge(rounded(m, per)) for m in models] for way, models in ways.items()}
            seen = {way: [judge(rounded(m, per), held=False) for m in models] for way, models in ways.items()}
            cell = {"float": judge(model), "losses": losses, "seen float": judge(model, held=False), "seen": seen}
            found[f"{plant} | {form}"] = cell
        print(name, plant, flush=True)
        yield


# --- the page ---------------------------------------------------------------------------------------------------------


def cost(cell: dict[str, Any], loss: float) -> float:
    """How much of the loss rounding adds."""
    return loss / cell["float"] - 1


def kept(cell: dict[str, Any]) -> tuple[str, float]:
    """The way of the least loss on calibration data, if rounding costs something there and it is halved; its loss."""
    tried = [(loss, way, number) for way, losses in cell["seen"].items() for number, loss in enumerate(losses)]
    least, way, number = min(tried)
    plain, exact = cell["seen"][""][0], cell["seen float"]
    halves = plain / exact - 1 > MARGIN and least - exact < 0.5 * (plain - exact)
    return (way, cell["losses"][way][number]) if halves else ("", cell["losses"][""][0])


def table(data: dict[str, Any]) -> str:
    """One line per model, outliers and format; costs in percent of the loss, means of the seeds."""
    head = ["model", "outliers", "scales", "loss", "rounded", *WAYS, "kept", "its cost", "regained"]
    lines = [head, ["---", "---", "---", *["--:"] * (len(WAYS) + 2), "---", "--:", "--:"]]
    for name, found in data["models"].items():
        for key, cell in found.items():
            costs = [cost(cell, statistics.fmean(cell["losses"][way])) for way in ("", *WAYS)]
            way, loss = kept(cell)
            back = f"{(costs[0] - cost(cell, loss)) / costs[0]:.0%}" if costs[0] > MARGIN else "–"
            *shown, its = [f"+{each:.1%}" if each >= 0 else f"−{-each:.1%}" for each in (*costs, cost(cell, loss))]
            lines.append([name, *key.split(" | "), f"{cell['float']:.3f}", *shown, way or "as it is", its, back])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a text")
    parser.add_argument("--models", type=Path, default=RESULT.parent / "local" / "quantisation", help="trained weights")
    parser.add_argument("--only", nargs="*", default=MODELS, choices=MODELS, help="some of the models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__, "models": {}}
    for name in options.only:
        data = digits() if name == "ViT" else characters(options.file)
        for _ in measure(name, data, options.models, made["models"].setdefault(name, {})):
            RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
