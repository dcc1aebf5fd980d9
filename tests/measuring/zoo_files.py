"""Files and state dicts that were made to break what reads them, each with the verdict that it should get."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from measuring.zoo_models import Verdict

WELL = {"w.weight": torch.eye(3)}


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(**changes: object) -> dict[str, Any]:
    return {"w.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


def raw(content: bytes, suffix: str = ".safetensors") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / f"model{suffix}"
        path.write_bytes(content)
        return path

    return make


def saved(content: Any, *, zipped: bool = True) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(content, folder / "model.pt", _use_new_zipfile_serialization=zipped)
        return folder / "model.pt"

    return make


class Plain:
    """An object of a class of a user."""


class Runs:
    """A pickle that runs code where pickles are trusted."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


GADGETS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda canary: Runs(os.system, f"touch {canary}"),
    "exec": lambda canary: Runs(exec, f"open({canary!r}, 'w')"),
    "eval": lambda canary: Runs(eval, f"open({canary!r}, 'w')"),
    "open": lambda canary: Runs(open, canary, "w"),
    "exec beside a tensor": lambda canary: {"v": torch.ones(2), "w": Runs(exec, f"open({canary!r}, 'w')")},
    "getattr": lambda _: Runs(getattr, Runs(__import__, "os"), "system"),
    "torch.load": lambda canary: Runs(torch.load, canary),
}


def code(gadget: Callable[[str], Any], *, zipped: bool) -> Callable[[Path], Path]:
    return lambda folder: saved({"state_dict": gadget(str(folder / "canary"))}, zipped=zipped)(folder)


def index(content: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.safetensors.index.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        save_file(WELL, folder / "1.safetensors")
        return path

    return make


def archive(entries: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "model.pt", "w", how) as file:
            for name, content in entries.items():
                file.writestr(name, content)
        return folder / "model.pt"

    return make


def cut(keep: float) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = saved({"w.weight": torch.ones(100, 100)})(folder)
        os.truncate(path, int(keep * path.stat().st_size))
        return path

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder / "model.safetensors"


def loop(folder: Path) -> Path:
    (folder / "model.pt").symlink_to(folder / "model.pt")
    return folder / "model.pt"


def folder_called_file(folder: Path) -> Path:
    (folder / "model.safetensors").mkdir()
    return folder / "model.safetensors"


def appended(folder: Path) -> Path:
    path = saved(WELL)(folder)
    with path.open("ab") as file:
        file.write(b"MZ" * 500)
    return path


INTACT, DATA = "not an intact file of its kind", b"\x00" * 16
ONLY_DATA = "damaged|holds more than tensors"
FILES: dict[str, tuple[Callable[[Path], Path], str | Verdict | None]] = {
    "empty": (raw(b""), INTACT),
    "an empty checkpoint": (raw(b"", ".pt"), r"it is empty \(0 bytes\)\. Save it again"),
    "a log": (raw(b"loss 0.3\n", ".pt"), r"it begins with b'loss'\. Save model\.state_dict\(\)"),
    "seven bytes": (raw(b"\x01" * 7), INTACT),
    "a header beyond the file": (raw(struct.pack("<Q", 1 << 40) + b"{}"), INTACT),
    "the largest header": (raw(struct.pack("<Q", (1 << 64) - 1) + b"{}"), INTACT),
    "a header of 0": (raw(struct.pack("<Q", 0)), INTACT),
    "no JSON": (raw(header(b"not json")), INTACT),
    "a list": (raw(header([])), INTACT),
    "a deep list": (raw(header(b"[" * 100_000)), INTACT),
    "not UTF-8": (raw(header(b"\xff\xfe{}")), INTACT),
    "no data": (raw(header(tensor())), INTACT),
    "one byte short": (raw(header(tensor(), b"\x00" * 15)), INTACT),
    "one byte long": (raw(header(tensor(), b"\x00" * 17)), INTACT),
    "ten gigabytes declared": (raw(header(tensor(shape=[50_000, 50_000], data_offsets=[0, 10**10]), DATA)), INTACT),
    "another shape": (raw(header(tensor(shape=[3, 3]), DATA)), INTACT),
    "a negative shape": (raw(header(tensor(shape=[-2, -2]), DATA)), INTACT),
    "an overflowing shape": (raw(header(tensor(shape=[1 << 63, 4]), DATA)), INTACT),
    "a product that wraps": (raw(header(tensor(shape=[1 << 32, 1 << 32, 4]), DATA)), INTACT),
    "backwards": (raw(header(tensor(data_offsets=[16, 0]), DATA)), INTACT),
    "before the start": (raw(header(tensor(data_offsets=[-16, 0]), DATA)), INTACT),
    "overlapping": (raw(header({**tensor(), "v": tensor()["w.weight"]}, DATA)), INTACT),
    "a hole": (raw(header(tensor(data_offsets=[16, 32]), b"\x00" * 32)), INTACT),
    "an unknown dtype": (raw(header(tensor(dtype="F128"), DATA)), INTACT),
    "no dtype": (raw(header({"w": {"shape": [2], "data_offsets": [0, 8]}}, b"\x00" * 8)), INTACT),
    "metadata of another kind": (raw(header({"__metadata__": {"a": [1]}, **tensor()}, DATA)), INTACT),
    "a page of HTML": (raw(b"<!DOCTYPE html><html>404</html>"), "it is a page of HTML"),
    "a pointer to large storage": (
        raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "a pointer of Git LFS",
    ),
    "well": (raw(header(tensor(), struct.pack("<4f", 1, 0, 0, 1))), Verdict("w")),
    "padded": (raw(header(json.dumps(tensor()).encode() + b"   ", struct.pack("<4f", 1, 0, 0, 1))), Verdict("w")),
    "no dimension": (raw(header(tensor(shape=[], data_offsets=[0, 4]), b"\x00" * 4)), Verdict("w", "no filters")),
    "no entry": (raw(header(tensor(shape=[0, 5], data_offsets=[0, 0]))), Verdict("w", "no filters", "empty")),
    "a NaN": (
        raw(header(tensor(), struct.pack("<4f", 1, 0, float("nan"), 1))),
        Verdict("w", code="G001", said="[1, 0]"),
    ),
    "a name of markup": (
        raw(header({"<script>\x1b[1m": tensor()["w.weight"]}, DATA)),
        Verdict("<script>\x1b[1m", "measured"),
    ),
    "no tensors": (raw(header({})), None),
    "a pipe": (pipe, "it is a pipe or a device"),
    "a loop of links": (loop, "it is a link to .*, which leads back to it"),
    "a device": (lambda _: Path("/dev/zero"), "it is a pipe or a device"),
    "a folder called a file": (folder_called_file, "it is empty"),
    "an unknown kind": (raw(b"x", ".xyz"), "its kind '.xyz' is not known"),
    "capitals": (raw(b"x", ".SAFETENSORS"), "is not known"),
    **{
        f"{name}, {'zipped' if zipped else 'of the old format'}": (code(gadget, zipped=zipped), ONLY_DATA)
        for name, gadget in GADGETS.items()
        for zipped in (True, False)
    },
    "a model and its class": (saved(torch.nn.Linear(2, 2)), Verdict("weight")),
    "objects alone": (saved({"args": Plain()}), r"an object of \S*Plain\. Code in a file is never run here"),
    "a raw pickle": (raw(pickle.dumps(WELL), ".pt"), ONLY_DATA),
    "a list of tensors": (saved([torch.ones(2)]), "looks for named tensors"),
    "a number": (saved(3), "looks for named tensors"),
    "nothing": (saved(None), "looks for named tensors"),
    "a tensor": (saved(torch.ones(2, 2)), "looks for named tensors"),
    "half of a checkpoint": (cut(0.5), r"the end of the archive is missing\. Copy, download or save it again"),
    "a checkpoint without its last byte": (cut(0.9999), ONLY_DATA),
    "a checkpoint with more behind it": (appended, Verdict("w")),
    "an empty archive": (archive({}), ONLY_DATA),
    "another archive": (archive({"word/document.xml": b"<x/>"}), ONLY_DATA),
    "an archive that climbs": (archive({"../../canary": b"x", "a/data.pkl": b"."}), ONLY_DATA),
    "a bomb": (archive({"a/data.pkl": b"\x00" * 30_000_000}, zipfile.ZIP_DEFLATED), "would unfold to 30000000 bytes"),
    "a compressed one": (archive({"a/data.pkl": pickle.dumps({"a": [0] * 99})}, zipfile.ZIP_DEFLATED), "would unfold"),
    "strides that repeat a row": (
        saved({"w.weight": torch.randn(1, 4).expand(10**8, 4)}),
        Verdict("w", "skipped", "cannot be read: a tensor has 400,000,000 entries, of which 4 are stored"),
    ),
    "strides that repeat one number": (
        saved({"w.weight": torch.zeros(1).expand(10**6, 10**6)}, zipped=False),
        Verdict("w", "skipped", "cannot be read: a tensor has 1,000,000,000,000 entries, of which 1 are stored"),
    ),
    "an old bomb": (raw(pickle.dumps({"x": b"\x00" * 10**6}), ".bin"), ONLY_DATA),
    "a pickle without end": (raw(b"\x80\x02}q\x00", ".pth"), ONLY_DATA),
    "a deep pickle": (raw(b"\x80\x02" + b"(" * 200_000 + b".", ".ckpt"), ONLY_DATA),
    "an index of a number": (index({"weight_map": 3}), "not an index with a weight_map"),
    "an index that is cut": (index('{"weight_map": {"a": '), "not an index with a weight_map"),
    "an index that climbs": (index({"weight_map": {"a": "../x.safetensors"}}), "a file outside its folder"),
    "an index from the root": (index({"weight_map": {"a": "/etc/passwd"}}), "a file outside its folder"),
    "an index to itself": (
        index({"weight_map": {"a": "model.safetensors.index.json"}}),
        Verdict("a", "skipped", "its shard"),
    ),
    "an index to nothing": (index({"weight_map": {"a": "9.safetensors"}}), Verdict("a", "skipped", "its shard 9")),
    "an index to another name": (index({"weight_map": {"a": "1.safetensors"}}), Verdict("a", "skipped", "the shard 1")),
    "an index of other types": (
        index({"weight_map": {"w.weight": 1}}),
        Verdict("w", "skipped", "its shard 1 is missing"),
    ),
}


class Odd:
    """A value of a class that prints badly."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Subclass(torch.Tensor):
    """A quantised tensor of another library: it says how to get plain numbers."""

    def dequantize(self) -> torch.Tensor:
        return torch.full((3, 4), 2.0)


class Opaque(torch.Tensor):
    def dequantize(self) -> torch.Tensor:
        raise RuntimeError("needs its own kernel")


def skipped(reason: str) -> Verdict:
    return Verdict("w", "skipped", reason)


STATES: dict[str, tuple[Callable[[], Any], Verdict | None]] = {
    "csr": (lambda: {"w.weight": torch.eye(3).to_sparse_csr()}, skipped("sparse (sparse_csr)")),
    "bytes": (lambda: {"w.weight": torch.ones(3, 4, dtype=torch.uint8)}, skipped("uint8: packed or quantised weights")),
    "int8": (lambda: {"w.weight": torch.ones(3, 4, dtype=torch.int8)}, skipped("int8: packed or quantised weights")),
    "quantised": (
        lambda: {"w.weight": torch.quantize_per_tensor(torch.eye(3, 4), 0.1, 0, torch.qint8)},
        Verdict("w"),
    ),
    "subclass": (lambda: {"w.weight": torch.ones(3, 4).as_subclass(Subclass)}, Verdict("w")),
    "opaque": (
        lambda: {"w.weight": torch.ones(3, 4).as_subclass(Opaque)},
        skipped("quantised (Opaque), and cannot be dequantised"),
    ),
    "numbers as keys": (lambda: {0: torch.eye(3), (1, 2): torch.eye(3)}, Verdict("0")),
    "no key": (lambda: {"": torch.eye(3), "weight": torch.eye(3)}, Verdict()),
    "dots": (lambda: {"...": torch.eye(3), ".weight": torch.eye(3)}, Verdict("...", "no filters")),
    "other values": (
        lambda: {"w": torch.eye(3), "x": Odd(), "y": [1]},
        Verdict("x", "skipped", "not a tensor but Odd"),
    ),
    "names that become one": (
        lambda: {"_orig_mod.a.weight": torch.eye(3), "a.weight": torch.eye(3)},
        Verdict("_orig_mod.a"),
    ),
    "an adapter without its half": (lambda: {"a.lora_A.weight": torch.eye(2, 3)}, Verdict("a.lora_A")),
    "an adapter of vectors": (
        lambda: {"a.lora_A.weight": torch.ones(2), "a.lora_B.weight": torch.ones(2)},
        Verdict("a.lora_A", "no filters"),
    ),
    "packed without scales": (
        lambda: {"a.qweight": torch.ones(4, 8, dtype=torch.int32)},
        Verdict("a.qweight", "skipped", "int32: packed"),
    ),
    "packed with scales of nothing": (
        lambda: {
            "a.qweight": torch.ones(4, 8, dtype=torch.int32),
            "a.qzeros": torch.ones(0, 8, dtype=torch.int32),
            "a.scales": torch.ones(0, 8),
        },
        Verdict("a.qweight", "skipped", "int32: packed"),
    ),
    "scales of another shape": (
        lambda: {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3, 3)},
        Verdict("a", "skipped", "float8_e4m3fn, and how a.weight_scale scales it is not known"),
    ),
    "a recurrent weight alone": (lambda: {"weight_ih_l0": torch.randn(12, 5)}, Verdict("weight_ih_l0")),
    "a terabyte of one number": (
        lambda: {"w.weight": torch.zeros(1).expand(10**6, 10**6)},
        Verdict("w", "skipped", "expanded: 1,000,000,000,000 entries, of which 1 are stored"),
    ),
    "views of one memory": (
        lambda: {f"{i}.weight": torch.randn(9, 9)[: i + 1, ::2] for i in range(4)},
        Verdict("3"),
    ),
}
