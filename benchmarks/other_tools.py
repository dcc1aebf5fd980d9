"""What other tools say of the same faults: planted one by one in a small network, each tool run before and after.

`python -m benchmarks.other_tools` writes benchmarks/results/other_tools.json and the tables of README; with
`--table` the tables only. It needs `pip install weightwatcher wandb torchinfo peft transformers`; W&B runs offline.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gonio

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "other_tools.json"
MARKS = "<!-- tools -->\n", "<!-- /tools -->"
Said = tuple[str, str]  # what a tool warns of, and all that it shows


def dead(model: nn.Module) -> None:
    """Half of the filters of conv2 are 0."""
    model.conv2.weight.data[:16] = 0


def twice(model: nn.Module) -> None:
    """One filter of conv3 is a multiple of another."""
    model.conv3.weight.data[1] = -2 * model.conv3.weight.data[0]


def negative(model: nn.Module) -> None:
    """A running variance of norm1 is negative."""
    model.norm1.running_var[5] = -0.1


FAULTS = {"dead": dead, "twice": twice, "negative": negative}


def by_gonio(source: Any) -> Said:
    """Findings, and the whole table."""
    found = gonio.measure(source)
    return " ".join(f"{finding.code} {finding.path}" for finding in found.findings), str(found)


def by_weightwatcher(source: Any) -> Said:
    """The column of warnings, and all columns, of the default analysis."""
    import weightwatcher

    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = weightwatcher.WeightWatcher(model=source).analyze()
    logging.disable(logging.NOTSET)
    return " ".join(table["warning"]), table.to_csv()


def by_wandb(source: Any) -> Said:
    """Everything that `watch(log="all")` logs in one step; there are no warnings."""
    import wandb

    logged: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(console="off", silent=True))
        wandb.watch(source, log="all", log_freq=1)
        log = run._log
        run._log = lambda data, *rest, **options: (logged.update(data), log(data, *rest, **options))[1]
        torch.manual_seed(0)
        source.eval()(torch.randn(4, 1, 8, 8)).nan_to_num().sum().backward()
        run.log({})
        run.finish()
    shown = {
        re.sub(r"graph_\d+", "", name): [list(map(float, each.histogram)), list(map(float, each.bins))]
        for name, each in logged.items()
        if name.startswith("parameters/")
    }
    return "", json.dumps(shown, sort_keys=True)


def by_torchinfo(source: Any) -> Said:
    """The summary."""
    import torchinfo

    return "", str(torchinfo.summary(source, input_size=(4, 1, 8, 8), verbose=0))


TOOLS: dict[str, Callable[[Any], Said]] = {
    "gonio": by_gonio, "weightwatcher": by_weightwatcher, "wandb": by_wandb, "torchinfo": by_torchinfo,
}  # fmt: skip


def network(plant: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """The same network each time, with a fault or without."""
    torch.manual_seed(0)
    model = gonio.models.digits_cnn()
    if plant is not None:
        plant(model)
    return model


def reads_a_file(tool: Callable[[Any], Said]) -> bool:
    """Whether it takes the path of a state dict, without a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "weights.safetensors")
        from safetensors.torch import save_file

        save_file(network().state_dict(), path)
        try:
            return bool(tool(path)[1])
        except (Exception, SystemExit):
            return False


def intruders() -> dict[str, Any]:
    """The counts of intruder dimensions that peft prints and gonio measures, of one adapter with large factors."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.intruders import reduce_intruder_dimension
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base, said = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128)), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(f"{folder}/base")
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(f"{folder}/lora")
        found = gonio.measure(f"{folder}/base", f"{folder}/lora")
        reduce_intruder_dimension(adapted, logging_sink=said.append)
    ours = {name: row.intruders for name, row in found.items() if row.intruders is not None}
    return {"peft": [line for line in said if "Intruders" in line], "gonio": ours}


def tracked() -> bool:
    """Whether a Tracker has figures of every layer after one step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    return {"conv1", "conv2", "conv3", "fc1", "fc2"} <= {row["layer"] for row in tracker.rows}


@dataclass(frozen=True)
class Words:
    """The table in one language."""

    head: str
    rows: dict[str, str]
    cells: dict[Any, str]


ENGLISH = Words(
    "asked",
    {
        "file": "reads a file without its model",
        "dead": "half of the filters of a layer are 0",
        "twice": "one filter is a multiple of another",
        "negative": "a running variance is negative",
        "intruders": "intruder dimensions of a LoRA adapter",
        "training": "figures while it trains",
        "alpha": "power law of the spectrum (α)",
        "shapes": "output shapes, multiply-adds",
    },
    {True: "yes", False: "no", "intruders": "counts", "peft": "counts, reduces", None: "–"}
    | {word: word for word in ("warns", "figures differ", "no difference", "figures", "histograms")},
)
CHINESE = Words(
    "问题",
    {
        "file": "没有模型代码也能读文件",
        "dead": "一层中一半卷积核为 0",
        "twice": "一个卷积核是另一个的倍数",
        "negative": "运行方差为负",
        "intruders": "LoRA 适配器的入侵维度",
        "training": "训练过程中的数值",
        "alpha": "谱的幂律指数（α）",
        "shapes": "输出形状与乘加次数",
    },
    {True: "能", False: "不能", "intruders": "计数", "peft": "计数并削减", None: "–", "warns": "给出警告"}
    | {"figures differ": "数值不同", "no difference": "无差别", "figures": "逐层数值", "histograms": "直方图"},
)
PAGES = {ROOT / "README.md": ENGLISH, ROOT / "README.zh-CN.md": CHINESE}


def with_table(text: str, words: Words) -> str:
    """A page with the table of the committed results between its comments."""
    made = json.loads(RESULTS.read_text(encoding="utf-8"))
    names = {"gonio": "gonio", "weightwatcher": "WeightWatcher", "wandb": "W&B `watch`", "torchinfo": "torchinfo"}
    titles = [f"{shown} {made['versions'][name]}" for name, shown in (names | {"peft": "peft"}).items()]
    lines = [[words.head, *titles], ["---"] * 6]
    agree = sorted(made["intruders"]["gonio"].values()) == [int(line.split()[-1]) for line in made["intruders"]["peft"]]
    if not agree:
        raise ValueError("gonio and peft count other intruder dimensions: the row of the table is wrong")
    for row, title in words.rows.items():
        tools = made["tools"]
        cells: list[Any] = [tools[name].get(row, False) for name in names]
        cells.append(False if row == "file" else None)
        if row == "training":
            cells[0], cells[2] = ("figures" if cells[0] else False), ("histograms" if cells[2] else False)
        if row == "intruders":
            cells = ["intruders", None, None, None, "peft"]
        lines.append([title, *(words.cells[cell] for cell in cells)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + table + MARKS[1] + rest.partition(MARKS[1])[2]


def measured() -> None:
    """Run every tool on every fault, and write what differed."""
    made: dict[str, Any] = {"versions": {name: version(name) for name in (*TOOLS, "peft", "torch")}, "tools": {}}
    for name, tool in TOOLS.items():
        warned, shown = tool(network())
        row: dict[str, Any] = {"file": reads_a_file(tool)}
        for fault, plant in FAULTS.items():
            now, figures = tool(network(plant))
            row[fault] = "warns" if now != warned else "figures differ" if figures != shown else "no difference"
        row["alpha"], row["shapes"] = "alpha" in shown, "[4, 16, 8, 8]" in shown
        made["tools"][name] = row
        print(name, row)
    made["tools"]["gonio"]["training"], made["tools"]["wandb"]["training"] = (
        tracked(),
        "parameters/" in by_wandb(network())[1],
    )
    made["intruders"] = intruders()
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, unless only the tables are wanted, and write the tables."""
    if "--table" not in sys.argv:
        measured()
    for page, words in PAGES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), words), encoding="utf-8")


if __name__ == "__main__":
    main()
