"""Files of flax: equal figures, axes by the bias, planted damages, changed bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from file_formats.cases import STATE, assert_equal_figures, codes, fuzz
from gonio.errors import UnreadableFileError
from gonio.messages import local

msgpack = pytest.importorskip("msgpack")
NAMES = {f"params.Dense_{i}.kernel": name for i, name in enumerate(STATE)}


def packed(value: Any) -> Any:
    """An array as `flax.serialization._msgpack_ext_pack` writes it."""
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgpack.ExtType(1, msgpack.packb((tuple(value.shape), name, raw), use_bin_type=True))
    if isinstance(value, complex):
        return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
    return value


def save(path: Path, tree: Any) -> Path:
    path.write_bytes(msgpack.packb(tree, default=packed, strict_types=True))
    return path


def params(change: Callable[[Tensor], Any] = lambda value: value) -> dict[str, Any]:
    return {f"Dense_{i}": {"bias": torch.ones(12), "kernel": change(v.T)} for i, v in enumerate(STATE.values())}


STATE_AND_BIASES = {**STATE, **{name.replace("weight", "bias"): torch.ones(12) for name in STATE}}
ALL_NAMES = {**NAMES, **{name.replace("kernel", "bias"): own.replace("weight", "bias") for name, own in NAMES.items()}}


def in_pieces(value: Tensor) -> dict[str, Any]:
    """As flax stores an array of more than 1 GiB."""
    flat = value.contiguous().reshape(-1)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): n for i, n in enumerate(value.shape)},
        "chunks": {str(i): piece for i, piece in enumerate(flat.split(100))},
    }


@pytest.mark.parametrize("change", [lambda value: value, in_pieces])
def test_equal_weights_have_equal_figures(tmp_path: Path, change: Callable[[Tensor], Any]) -> None:
    source = save(tmp_path / "m.msgpack", {"params": params(change)})
    assert_equal_figures(source, STATE_AND_BIASES, tmp_path / "safe", as_stored=False, names=ALL_NAMES)


def test_the_state_of_the_optimizer_is_beside(tmp_path: Path) -> None:
    state = {"0": {"mu": params(), "nu": params(), "count": torch.tensor(3)}, "1": {}}
    tree = {"step": 3, "params": params(), "opt_state": state, "rate": 0.1, "phase": 1j, "note": "x", "flags": [1, 2]}
    source = save(tmp_path / "m.msgpack", tree)
    assert_equal_figures(source, STATE_AND_BIASES, tmp_path / "safe", as_stored=False, names=ALL_NAMES)
    assert gonio.check(source).contents.beside == 13
    assert gonio.measure(source).notes == ("not weights but the optimizer's: 13 tensors",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_are_read_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    source = save(tmp_path / "m.msgpack", {"params": params(lambda value: value.to(dtype))})
    state = {name: value.to(dtype) if value.ndim == 2 else value for name, value in STATE_AND_BIASES.items()}
    assert_equal_figures(source, state, tmp_path / "safe", as_stored=False, names=ALL_NAMES)


def test_kernels_of_convolutions_are_read_with_their_outputs_last(tmp_path: Path) -> None:
    made = nn.Conv2d(6, 8, 3)
    kernel = made.weight.detach().permute(2, 3, 1, 0)
    source = save(tmp_path / "m.msgpack", {"Conv_0": {"kernel": kernel, "bias": torch.ones(8)}})
    found, known = gonio.measure(source)["Conv_0.kernel"], gonio.measure(made).tensors[0]
    assert (found.shape, found.dim, found.norm_mean) == (known.shape, known.dim, known.norm_mean)


def test_what_no_bias_tells_is_unknown(tmp_path: Path) -> None:
    tree = {"a": {"kernel": torch.ones(4, 5)}, "b": {"kernel": torch.ones(4, 4), "bias": torch.ones(4)},
            "c": {"embedding": torch.ones(9, 4)}, "d": {"kernel": torch.eye(5, 4), "bias": torch.ones(5)},
            "e": {"kernel": torch.ones(4, 2, 3), "bias": torch.ones(2, 3)}}  # fmt: skip
    found = gonio.measure(save(tmp_path / "m.msgpack", tree))
    for name in ("a.kernel", "b.kernel", "c.embedding", "e.kernel"):
        assert found[name].reason == "no bias tells which dimension holds its outputs"
    assert found["d.kernel"].shape == (5, 4)  # outputs first, as Conv1D of transformers stores them
    told = {"f": {"kernel": torch.eye(4, 7), "bias": torch.ones(7)}, "b": tree["b"]}
    assert gonio.measure(save(tmp_path / "m.msgpack", told))["b.kernel"].status == "measured"


def raw_of(array: Any) -> bytes:
    return bytes(msgpack.packb({"params": {**params(), "new": array}}, default=packed, strict_types=True))


def ext(payload: Any, kind: int = 1) -> Any:
    return msgpack.ExtType(kind, payload if isinstance(payload, bytes) else msgpack.packb(payload))


BYTES = bytes(48)
GOOD = raw_of(torch.ones(3))
DAMAGES: dict[str, tuple[bytes, str]] = {
    "cut off at the end": (GOOD[:-1], "refused"),
    "cut off in the middle": (GOOD[:1500], "refused"),
    "an empty file": (b"", "refused"),
    "no map": (b"\x93\x01\x02\x03", "refused"),
    "a byte that msgpack does not use": (b"\xc1" + GOOD[1:], "refused"),
    "bytes after the end": (GOOD + b"\x00\x00", "G705"),
    "fewer bytes than entries": (raw_of(ext(((4, 4), "float32", BYTES))), "G704"),
    "more bytes than entries": (raw_of(ext(((2, 2), "float32", BYTES))), "G704"),
    "a tensor of terabytes": (raw_of(ext(((1 << 40, 4), "float32", BYTES))), "G704"),
    "a negative size": (raw_of(ext(((-3, 4), "float32", BYTES))), "refused"),
    "a size that is no number": (raw_of(ext((("a", 4), "float32", BYTES))), "refused"),
    "an array without bytes": (raw_of(ext(((3, 4), "float32", 7))), "refused"),
    "an array that ends before its extension": (raw_of(ext(
        msgpack.packb(((3, 4), "float32", BYTES)) + b"\x00")), "refused"),
    "pieces of several dtypes": (raw_of({**in_pieces(torch.ones(300)), "chunks": {
        "0": torch.ones(150), "1": torch.ones(150).double()}}), "refused"),
    "a piece that is missing": (raw_of({**in_pieces(torch.ones(300)), "chunks": {"0": torch.ones(150)}}), "G704"),
    "a key that occurs twice": (b"\x82\xa1a" + msgpack.packb(packed(torch.ones(2))) + b"\xa1a\x01", "G703"),
    "maps without end": (b"\x81\xa1a" * 2000, "refused"),
    "a map of four billion keys": (b"\xdf\xff\xff\xff\xff\xa1a\x01", "refused"),
    "a value that is not finite": (raw_of(torch.tensor([1.0, torch.nan])), "G001"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages_are_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "m.msgpack").write_bytes(GOOD)
    assert codes(tmp_path / "m.msgpack") == set()
    raw, code = DAMAGES[kind]
    (tmp_path / "m.msgpack").write_bytes(raw)
    assert code in codes(tmp_path / "m.msgpack")
    if code == "refused":
        with pytest.raises(UnreadableFileError, match="not an intact file"):
            gonio.measure(tmp_path / "m.msgpack")
    else:
        gonio.measure(tmp_path / "m.msgpack")


def test_a_wrong_number_of_bytes_is_told_in_the_language_of_the_reader(tmp_path: Path) -> None:
    (tmp_path / "m.msgpack").write_bytes(raw_of(ext(((4, 4), "float32", BYTES))))
    (finding,) = gonio.check(tmp_path / "m.msgpack").findings
    assert finding.found == "48 bytes are stored for 16 entries, which take 64"
    with gonio.language("zh"):
        assert local(finding.found) == "为 16 个元素存了 48 字节，应为 64 字节"


def test_arrays_of_other_dtypes_are_named(tmp_path: Path) -> None:
    source = save(tmp_path / "m.msgpack", {"a": ext(((2,), "object", bytes(16))), "b": ext(((2,), "U3", bytes(24)))})
    assert {tensor.reason for tensor in gonio.check(source).tensors} == {
        "torch has no dtype for object", "torch has no dtype for U3"}  # fmt: skip


@pytest.mark.parametrize("times", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int) -> None:
    source = save(tmp_path / "m.msgpack", {"params": params()})
    assert fuzz(source, source, times) > 0
