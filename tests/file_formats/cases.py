"""What the tests of all file formats share: one set of weights, equal figures, planted damages, changed bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gonio
from gonio.errors import GonioError
from gonio.measuring.reading.source import contents_of

DRAW = torch.Generator().manual_seed(0)
STATE: dict[str, Tensor] = {f"layers.{i}.weight": torch.randn(12, 20, generator=DRAW) for i in range(3)}


def rows(source: Any, names: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The figures of all tensors by name, without what a file may not say: dtype, notes, kind and marks."""
    made, left = {}, ("name", "path", "notes", "dtype", "kind", "marks")
    for row in gonio.measure(source).to_dict()["tensors"]:
        name = (names or {}).get(row["name"], row["name"])
        made[name] = {key: value for key, value in row.items() if key not in left}
    return made


def assert_equal_figures(
    source: Path,
    state: dict[str, Tensor],
    folder: Path,
    *,
    as_stored: bool = True,
    names: Mapping[str, str] | None = None,
) -> None:
    """A file has the figures, and where it stores torch's own tensors the fingerprints, of the same safetensors.

    Args:
        names: of the file's names those in the state dict, where they differ.
    """
    folder.mkdir(exist_ok=True)
    save_file({name: value.clone().contiguous() for name, value in state.items()}, folder / "model.safetensors")
    found, known = gonio.check(source), gonio.check(folder)
    assert found.verdict.startswith("Intact"), found
    ours = {(names or {}).get(tensor.name, tensor.name): tensor for tensor in found.tensors if not tensor.beside}
    assert {tensor.name for tensor in known.tensors} == set(ours)
    if as_stored:
        assert all(ours[tensor.name].fingerprint == tensor.fingerprint for tensor in known.tensors)
    assert rows(folder) == rows(source, names)
    if names is None:
        assert [change.status for change in gonio.measure(folder, source).tensors] == ["equal"] * len(state)


def changed(raw: bytes, times: int, seed: int = 0) -> Iterator[bytes]:
    """The bytes with some of them changed, cut off, doubled, or swapped: `times` versions."""
    draw = np.random.default_rng(seed)
    for number in range(times):
        data = np.frombuffer(raw, np.uint8).copy()
        # half of all changes hit the first kilobyte or the last one, where headers are
        places = draw.integers(len(data), size=int(draw.integers(1, 9)))
        if number % 2:
            places = places % min(1024, len(data))
        elif number % 4 == 0:
            places = len(data) - 1 - places % min(1024, len(data))
        data[places] = draw.integers(256, size=len(places)) if number % 3 else draw.choice([0, 1, 127, 128, 255])
        if number % 5 == 0:
            data = data[: int(draw.integers(len(data)))]
        elif number % 7 == 0:
            at, size = (int(n) for n in draw.integers(1, 64, size=2))
            data = np.concatenate([data[:at], data[at : at + size], data[at:]])
        yield data.tobytes()


def fuzz(source: Path, file: Path, times: int, *, memory: int = 400) -> int:
    """Read `times` changed versions of a file of a source; how many were refused or had findings.

    Any error but gonio's own fails the test, and so does more than `memory` MB beyond that of before.
    """
    resource = pytest.importorskip("resource", reason="only POSIX counts the memory of a process")
    raw, named = file.read_bytes(), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in changed(raw, times):
        file.write_bytes(data)
        try:
            named += bool(gonio.check(source, jobs=1).findings)
        except GonioError:
            named += 1
        with suppress(GonioError):  # a file that is refused in words; any other error fails
            for entry in contents_of(source).entries:
                with suppress(GonioError):
                    entry.read()
    file.write_bytes(raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < memory * 1000  # kB
    return named


def codes(source: Path) -> set[str]:
    """The codes of what `check` finds, errors and warnings only; of a file that is refused {"refused"}."""
    try:
        return {finding.code for finding in gonio.check(source).findings if finding.level != "info"}
    except GonioError:
        return {"refused"}


Damage = Callable[[Path], Any]
