"""What `gonio measure` finds of damages that were planted in healthy networks, and how often it fires on healthy ones.

    python -m benchmarks.planted_damage [healthy networks] [damaged networks]

Every damage is planted in the first, the middle and the last layer of networks of six architectures
(`healthy_networks.py`), where it applies. The checkpoint alone is measured first, then the model, then the model with a
batch of 64 images that it was not trained on. A damage is found if a warning or an error is reported that the same
network did not have before. Damages that leave weights as likely as trained ones are marked as hidden beforehand. The
result is benchmarks/results/planted_damage.json, from which `benchmarks.tables` fills a page's `planted_damage` block.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.false_alarms import store
from benchmarks.healthy_networks import ARCHITECTURES, LEARNT, accuracy, batch, digits, healthy
from benchmarks.results import FOLDER
from gonio.measuring import Finding, measure

RESULT = FOLDER / "planted_damage.json"
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)
Plant = Callable[[nn.Module, nn.Module, Tensor], None]  # damages one layer of a model that takes these inputs
MODES = ("checkpoint", "model", "model and batch")


class NotHereError(Exception):
    """The network has no such place."""


@dataclass(frozen=True)
class Damage:
    """One kind of damage: `plant` changes one layer in place, or raises NotHereError.

    Attributes:
        kinds: the layers in which it is planted.
        hidden: why no figure of one network can show it; empty if one should.
    """

    name: str
    plant: Plant
    kinds: tuple[type[nn.Module], ...] = WEIGHTED
    hidden: str = ""


def some_rows(layer: nn.Module, share: float) -> Tensor:
    """The first filters of a layer, a share of them and at least one."""
    weight: Tensor = layer.weight
    return weight[: max(1, round(share * len(weight)))]


def scaled(share: float, factor: float) -> Plant:
    return lambda model, layer, inputs: some_rows(layer, share).mul_(factor)


def copied(share: float, sign: float) -> Plant:
    def plant(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
        taken = some_rows(layer, share)
        layer.weight[-len(taken) :] = sign * taken

    return plant


def entry(name: str, value: float) -> Plant:
    """One entry of a parameter or buffer."""

    def plant(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
        tensor = getattr(layer, name, None)
        if tensor is None:
            raise NotHereError
        tensor.view(-1)[tensor.numel() // 2] = value

    return plant


def each(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """A whole parameter or buffer."""

    def plant(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
        tensor = getattr(layer, name, None)
        if tensor is None:
            raise NotHereError
        tensor.copy_(change(tensor.clone()))

    return plant


def of_rank(rank: int) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        if len(s) <= 2 * rank:
            raise NotHereError
        low = (u[:, :rank] * s[:rank]) @ v[:rank]
        return (low * (s.norm() / s[:rank].norm())).view_as(weight)

    return change


def moved(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
    """Scale moved to this layer from the next one; ReLU, pooling and flattening between them keep the function."""
    layers = list(model) if isinstance(model, nn.Sequential) else []
    if layer not in layers:
        raise NotHereError
    after = layers[layers.index(layer) + 1 :]
    following = next((part for part in after if part.state_dict()), None)
    if not isinstance(following, WEIGHTED) or any(isinstance(part, nn.GELU) for part in after):
        raise NotHereError
    layer.weight.mul_(100)
    layer.bias.mul_(100)
    following.weight.div_(100)


def reset(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
    torch.manual_seed(1)
    layer.reset_parameters()


def forgotten(model: nn.Module, norm: nn.Module, inputs: Tensor) -> None:
    norm.reset_running_stats()


def before_relu(model: nn.Module, layer: nn.Module) -> None:
    """Only a layer with a bias right before a ReLU can have units that a bias has killed."""
    layers = list(model) if isinstance(model, nn.Sequential) else []
    if layer not in layers[:-1] or layer.bias is None or not isinstance(layers[layers.index(layer) + 1], nn.ReLU):
        raise NotHereError


def dead(share: float) -> Plant:
    """Units whose bias is so far down that no image activates them."""

    def plant(model: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
        before_relu(model, layer)
        outputs: list[Tensor] = []
        with layer.register_forward_hook(lambda _, __, output: outputs.append(output)):
            model(inputs)
        highest = outputs[0].transpose(0, 1).flatten(1).amax(1)
        some = slice(round(share * len(highest)))
        layer.bias[some] -= highest[some] + 1

    return plant


def transposed(weight: Tensor) -> Tensor:
    if weight.dim() > 1 and weight.shape[0] == weight.shape[1]:
        return weight.transpose(0, 1)
    raise NotHereError


def shuffled(weight: Tensor) -> Tensor:
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))
    return weight.flatten()[order].view_as(weight)


def permuted(weight: Tensor) -> Tensor:
    return weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))]


def noisy(share: float) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        return weight + share * weight.square().mean().sqrt() * noise

    return change


BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d)
ORDINARY = "the weights are as likely as those that training finds"
AFTER_NORM = f"{ORDINARY}; batch norms behind the layer show it by their running statistics"
DAMAGES = (
    Damage("one weight NaN", entry("weight", float("nan"))),
    Damage("one weight infinite", entry("weight", float("inf"))),
    Damage("one bias NaN", entry("bias", float("nan"))),
    Damage("one running mean NaN", entry("running_mean", float("nan")), BATCH_NORM),
    Damage("one running variance negative", entry("running_var", -0.1), BATCH_NORM),
    Damage("one running variance infinite", entry("running_var", float("inf")), BATCH_NORM),
    Damage("running variances × 100", each("running_var", lambda v: 100 * v), BATCH_NORM),
    Damage("running variances / 100", each("running_var", lambda v: v / 100), BATCH_NORM),
    Damage("running means of other data", each("running_mean", lambda v: v + 5), BATCH_NORM),
    Damage("running statistics reset", forgotten, BATCH_NORM),
    Damage("norm's gain 0", each("weight", torch.zeros_like), NORMS),
    Damage("norm's gain × 100", each("weight", lambda w: 100 * w), NORMS),
    Damage("norm's shift −1000", each("bias", lambda b: b - 1000), BATCH_NORM),
    Damage("one filter 0", scaled(0, 0.0)),
    Damage("half of the filters 0", scaled(0.5, 0.0)),
    Damage("all weights 0", scaled(1, 0.0)),
    Damage("one filter / 100,000", scaled(0, 1e-5)),
    Damage("a quarter of the filters / 100,000", scaled(0.25, 1e-5)),
    Damage("one filter × 100", scaled(0, 100.0)),
    Damage("one filter a copy of another", copied(0, 1.0)),
    Damage("one filter the negative of another", copied(0, -1.0)),
    Damage("half of the filters copies", copied(0.5, 1.0)),
    Damage("all filters equal", each("weight", lambda w: w[:1].expand_as(w))),
    Damage("rank 1", each("weight", of_rank(1))),
    Damage("rank 2", each("weight", of_rank(2))),
    Damage("a common offset of 3 rms", each("weight", lambda w: w + 3 * w.square().mean().sqrt())),
    Damage("scale 100 moved to the layer", moved),
    Damage("weights × 100", each("weight", lambda w: 100 * w)),
    Damage("weights / 1000", each("weight", lambda w: w / 1000)),
    Damage("all units dead", dead(1)),
    Damage("nine of ten units dead", dead(0.9)),
    Damage("re-initialised", reset, hidden=AFTER_NORM),
    Damage("weights shuffled", each("weight", shuffled), hidden=AFTER_NORM),
    Damage("filters in another order", each("weight", permuted), hidden=AFTER_NORM),
    Damage("transposed", each("weight", transposed), hidden=AFTER_NORM),
    Damage("sign reversed", each("weight", torch.neg), hidden=AFTER_NORM),
    Damage("noise of the weights' own size", each("weight", noisy(1.0)), hidden=AFTER_NORM),
    Damage("one bit per weight", each("weight", lambda w: w.sign() * w.abs().mean()), hidden=AFTER_NORM),
    Damage("a tenth of the units dead", dead(0.1), hidden="trained networks have such units"),
)


@dataclass(frozen=True)
class Planted:
    """One damage in one place of one network."""

    damage: Damage
    place: str
    model: nn.Module
    path: str


def layers_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Module]]:
    """The layers that run themselves: torch's attention reads the weight of its output projection."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, kinds) and "self_attn" not in path
    ]


@torch.no_grad()
def planted(model: nn.Module, inputs: Tensor) -> Iterator[Planted]:
    """Every damage in the first, the middle and the last layer in which it can be."""
    for damage in DAMAGES:
        paths = [path for path, _ in layers_of(model, damage.kinds)]
        places = {"first": 0, "middle": len(paths) // 2, "last": len(paths) - 1} if paths else {}
        for place, index in places.items():
            if index in list(places.values())[: list(places).index(place)]:
                continue
            twin = copy.deepcopy(model)
            try:
                damage.plant(twin, twin.get_submodule(paths[index]), inputs)
            except NotHereError:
                continue
            yield Planted(damage, place, twin, paths[index])


def alarms(model: nn.Module, mode: str) -> set[tuple[str, str]]:
    """Code and path of the warnings and errors, and of G410, a remark because it is harmless for random numbers."""
    source = model.state_dict() if mode == "checkpoint" else model
    found: tuple[Finding, ...] = measure(source, batch=batch() if mode == MODES[2] else None).findings
    return {(finding.code, finding.path) for finding in found if finding.level != "info" or finding.code == "G410"}


def tried(networks: int) -> list[dict[str, Any]]:
    """One record for each planted damage: where, how it was found, and the network's accuracy."""
    made: list[dict[str, Any]] = []
    for number in range(100, 100 + networks):  # those that the rules were written with have smaller numbers
        name, model, score = healthy(number)
        before = {mode: alarms(model, mode) for mode in MODES}
        for case in planted(model, digits()[0]):
            record = {
                "damage": case.damage.name,
                "place": case.place,
                "architecture": name,
                "accuracy": accuracy(case.model) - score,
                "found by": None,
                "codes": [],
            }
            for mode in MODES:
                new = alarms(case.model, mode) - before[mode]
                if new:
                    record |= {"found by": mode, "codes": sorted({code for code, _ in new})}
                    break
            made.append(record)
        print(f"{number - 99} of {networks} networks damaged", file=sys.stderr, flush=True)
    return made


def false_alarms(networks: int) -> dict[str, Any]:
    """What is reported on networks without a damage."""
    learnt, fired = 0, []
    scores = []
    for number in range(1000, 1000 + networks):
        name, model, score = healthy(number)
        if score < LEARNT:
            continue
        learnt += 1
        scores.append(score)
        codes = sorted({code for mode in MODES for code, _ in alarms(model, mode)})
        if codes:
            fired.append({"architecture": name, "codes": codes})
    return {"networks": learnt, "least accuracy": min(scores), "fired": fired}


def table(found: dict[str, Any]) -> str:
    """The result as a page's table: one line per kind of damage, those that are hidden below."""
    records = found["damages"]
    seen = [record for record in records if record["damage"] not in found["hidden"]]
    caught = sum(record["found by"] is not None for record in seen)
    well = found["healthy"]
    lines = ["| damage | planted | found | by | rules | accuracy lost where not found |", "|---|--:|--:|---|---|--:|"]
    for hidden in (False, True):
        names = dict.fromkeys(record["damage"] for record in records)
        lines += [_line(name, records, hidden) for name in names if (name in found["hidden"]) == hidden]
    return "\n".join(
        [
            *lines,
            "",
            f"{caught} of {len(seen)} damages found ({caught / len(seen):.1%}), of {len({r['damage'] for r in seen})} "
            f"kinds in {len({(r['damage'], r['architecture'], r['place']) for r in seen})} kinds, architectures and "
            f"places, in {found['damaged networks']} networks; {len(well['fired'])} of {well['networks']} healthy "
            f"networks with a warning or an error. ¹ No figure of one network can show it in general: the weights are "
            f"as likely as those that training finds. torch {found['torch']}.",
        ]
    )


def _line(name: str, records: list[dict[str, Any]], hidden: bool) -> str:
    mine = [record for record in records if record["damage"] == name]
    caught = [record for record in mine if record["found by"] is not None]
    lost = [-record["accuracy"] for record in mine if record["found by"] is None]
    by = ", ".join(mode for mode in MODES if any(record["found by"] == mode for record in caught)) or "–"
    codes = ", ".join(sorted({code for record in caught for code in record["codes"]})) or "–"
    median = f"{100 * statistics.median(lost):.0f} %" if lost else "–"
    return f"| {name}{' ¹' if hidden else ''} | {len(mine)} | {len(caught)} | {by} | {codes} | {median} |"


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    count, damaged = (int(words[0]), int(words[1])) if words else (120, 12)
    records = tried(damaged)
    result = {
        "torch": torch.__version__,
        "architectures": list(ARCHITECTURES),
        "damaged networks": damaged,
        "hidden": {damage.name: damage.hidden for damage in DAMAGES if damage.hidden},
        "healthy": false_alarms(count),
        "damages": records,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    store_rates(result["healthy"])
    print(RESULT.name)


def store_rates(healthy: dict[str, Any]) -> None:
    """For the rules that judge activations, which `gonio explain` then shows."""
    alarms = {code: sum(code in case["codes"] for case in healthy["fired"]) for code in ("G409", "G410")}
    store(alarms, healthy["networks"], "healthy trained networks, each with a batch of its training data")


if __name__ == "__main__":
    main(sys.argv[1:])
