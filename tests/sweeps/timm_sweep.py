"""Every model of timm that fits, through all of gonio: one JSON line per model, resumable.

    make sweep                          the passage of `passage.walk`
    PYTHONPATH=tests python -m sweeps.timm_sweep meta|weights --out FILE       `gonio measure` alone
    PYTHONPATH=tests python -m sweeps.timm_sweep certify --count 332 --out tests/sweeps/timm_certified.jsonl

Each model runs in a process of its own with a time limit; the same command run again goes on where the
last one stopped. Models come in the order of `timm_models.tsv` (name, parameters), smallest first, which
`--list` writes anew for the installed version. The last outcome is `timm_outcome.txt`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch
from torch import Tensor, nn

from catalog import seeded
from foreign import timm
from sweeps.certify_timm import certified
from sweeps.measure_timm import MOST_PARAMETERS, on_meta, with_weights
from sweeps.passage import walk

LISTED = Path(__file__).with_name("timm_models.tsv")
# What each run of the tests goes through: 30 models of as many designs, a second each.
SMALL = (
    *("test_byobnet", "test_coatnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet"),
    *("test_efficientnet_evos", "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_maxvit"),
    *("test_nfnet", "test_resnet", "test_vit", "test_vit2", "test_vit3", "test_vit4", "test_vit_relpos"),
    *("starnet_s050", "dla46_c", "edgenext_xx_small", "ese_vovnet19b_slim_dw", "lcnet_035", "mnasnet_small"),
    *("mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "mobilevitv2_050", "semnasnet_050"),
    "tinynet_e",
)
SIZES = (64, 96, 128, 160, 192, 224, 256, 288, 299, 384)


def models() -> list[tuple[str, int]]:
    """(name, parameters) of the models that fit, smallest first."""
    rows = [line.split("\t") for line in LISTED.read_text(encoding="utf-8").splitlines()]
    return [(name, int(count)) for name, count in rows]


def sample(count: int) -> list[str]:
    """So many names, evenly from small to large."""
    listed = models()
    return [name for name, _ in listed[:: max(1, len(listed) // count)]][:count]


def build(name: str, *, batch: int = 2) -> tuple[nn.Module, Tensor]:
    """A model with random weights and a batch of the smallest images that it takes."""
    torch.manual_seed(0)
    failed: Exception | None = None
    for size, options in _attempts(name):
        try:
            model = timm().create_model(name, pretrained=False, num_classes=10, **options).eval()
            channels = model.pretrained_cfg.get("input_size", (3, 0, 0))[0]
            x = seeded(batch, channels, size, size)
            with torch.no_grad():
                model(x)
                model.train()(x)  # some sizes leave one value per channel, which a batch norm refuses
        except Exception as error:  # what a model makes of a size that it does not take
            failed = error
            continue
        return model.eval(), x
    raise RuntimeError(f"no input size works, last: {failed}")


def _attempts(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    cfg = timm().get_pretrained_cfg(name)
    declared = cfg.input_size[-1] if cfg is not None else 224
    for size in (64, 96, 128):
        if cfg is not None and cfg.fixed_input_size:
            yield size, {"img_size": size}
    for size in sorted({*SIZES, declared}):
        if size < declared and not (cfg is not None and cfg.fixed_input_size):
            yield size, {}
    yield declared, {}


def _measured(figures: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """The row of a sweep that measures alone."""
    try:
        return {"model": name, "steps": {"measure": "passed"}, "figures": figures(name)}
    except Exception as error:  # the outcome of this model; the sweep goes on
        return {"model": name, "steps": {"measure": f"failed: {type(error).__name__}: {error}"[:400]}}


# sweep -> the row of a model, from its name, a folder for files, and whether each verb is undone too
SWEEPS: dict[str, Callable[[str, Path, bool], dict[str, Any]]] = {
    "passage": lambda name, folder, verbs: walk(name, lambda: build(name), folder, verbs=verbs).to_dict(),
    "meta": lambda name, folder, verbs: _measured(on_meta, name),
    "weights": lambda name, folder, verbs: _measured(with_weights, name),
    "certify": lambda name, folder, verbs: certified(name, lambda: build(name)),
}


def _child(sweep: str, name: str, verbs: bool, seconds: int, folder: str, send: Connection) -> None:
    torch.set_num_threads(1)
    # of its own time, because a machine may have others to serve
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    send.send(SWEEPS[sweep](name, Path(folder), verbs))


def run(sweep: str, name: str, *, seconds: int, verbs: bool, folder: str) -> dict[str, Any]:
    """One model in a process of its own, with so many seconds of processor time."""
    timm()  # imported once, here, so that each process has it
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(sweep, name, verbs, seconds, folder, send))
    child.start()
    send.close()
    try:
        return dict(receive.recv())
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return {"model": name, "steps": {"all": f"unfinished: {seconds} s of processor time are over"}}
        return {"model": name, "steps": {"all": f"failed: the process ended with {child.exitcode}"}}
    finally:
        child.kill()
        child.join()


def write_list() -> None:
    """Name and size of every model up to the limit, from models without memory."""
    rows = []
    for name in timm().list_models():
        try:
            with torch.device("meta"):
                model = timm().create_model(name, pretrained=False)
        except Exception as error:  # some constructors compute with values that a meta tensor has not
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows.append((sum(p.numel() for p in model.parameters()), name))
    chosen = sorted((count, name) for count, name in rows if count <= MOST_PARAMETERS)
    LISTED.write_text("".join(f"{name}\t{count}\n" for count, name in chosen), encoding="utf-8")


def summary(rows: list[dict[str, Any]], *, wanted: int) -> str:
    """Counts of outcomes by step, and every failure by name."""
    outcomes: dict[str, Counter[str]] = {}
    untraced = sum(bool(row.get("traced")) for row in rows)
    norms = sum(row.get("figures", {}).get("norms folded", 0) for row in rows)
    libraries = " and ".join(f"{name} {version(name)}" for name in ("timm", "torch"))
    lines = [f"{len(rows)} of {wanted} models, with {libraries}"]
    lines.append(f"  {untraced} cannot be traced by torch.fx as a whole; {norms} norms folded")
    for row in rows:
        for step, outcome in row["steps"].items():
            outcomes.setdefault(step, Counter())[outcome.split(":")[0]] += 1
    lines += [f"  {step}: {', '.join(f'{n} {what}' for what, n in count.items())}" for step, count in outcomes.items()]
    for kind in ("float32", "float64"):
        deviations = [
            row["figures"][key] for row in rows if (key := f"fold deviation {kind}") in row.get("figures", {})
        ]
        if deviations:
            lines.append(f"  largest fold deviation in {kind}: {max(deviations):.2g} relative")
    bad = [(row["model"], s, o) for row in rows for s, o in row["steps"].items() if not o.startswith(("passed", "ref"))]
    return "\n".join([*lines, *(f"  {name}: {step}: {outcome}" for name, step, outcome in bad)])


def main(words: list[str] | None = None) -> int:
    """The command; 1 if any step of any model failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=SWEEPS, nargs="?", default="passage")
    parser.add_argument("--out", type=Path, default=Path("timm-sweep.jsonl"))
    parser.add_argument("--count", type=int, default=300, help="how many models, evenly from small to large")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time per model")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no model is begun")
    parser.add_argument("--verbs", action="store_true", help="apply and undo each verb too")
    parser.add_argument("--list", action="store_true", help="write the list of models and stop")
    options = parser.parse_args(words)
    if options.list:
        write_list()
        return 0
    wanted = sample(options.count) if options.sweep in ("passage", "certify") else timm().list_models()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done, start = {row["model"] for row in rows}, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        for name in wanted:
            if name in done or time.monotonic() - start > options.budget:
                continue
            rows.append(run(options.sweep, name, seconds=options.seconds, verbs=options.verbs, folder=folder))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            print(f"{len(rows)}/{len(wanted)} {name}", file=sys.stderr)
    print(summary(rows, wanted=len(wanted)))
    return int(any(outcome.startswith("failed") for row in rows for outcome in row["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
