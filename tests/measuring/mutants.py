"""Measure mutated safetensors headers, in a process of its own: `python -m measuring.mutants FOLDER FIRST COUNT`.

Prints one line per mutant, so that one that hangs or crashes is known by its number.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from gonio.errors import GonioError
from gonio.measuring import measure

__all__ = ["main", "mutant"]

STATE = {"a.weight": torch.ones(4, 3), "b": torch.ones(2), "c.weight": torch.zeros(2, 2, 1, 1)}
TOKENS = (b"-1", b"0", b"1e99", b"null", b"[]", b"{}", b'"', b"F64", b"BOOL", b"18446744073709551616", b"[", b",,")


def mutant(number: int) -> bytes:
    """The mutant of this number: bytes changed, cut, doubled or replaced by what parsers stumble over."""
    rng = random.Random(number)
    made = bytearray(save(STATE))
    head = 8 + int.from_bytes(made[:8], "little")
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        place = rng.randrange(min(head, len(made)))
        match rng.randrange(5):
            case 0:
                made[place] = rng.randrange(256)
            case 1:
                made[place] = rng.choice(b'abcxyz"{}[],:0123456789')
            case 2:
                made[place : place + rng.randrange(6)] = rng.choice(TOKENS)
            case 3:
                made[place:place] = made[place : place + rng.randrange(40)]
            case _:
                made[:8] = rng.choice([rng.randrange(1 << 64), rng.randrange(2 * head)]).to_bytes(8, "little")
    return bytes(made[: rng.randrange(1, len(made)) if rng.random() < 0.1 else len(made)])


def main(folder: Path, first: int, count: int) -> None:
    path = folder / "mutant.safetensors"
    for number in range(first, first + count):
        path.write_bytes(mutant(number))
        try:
            found = measure(path)
            outcome = f"measured {len(found)}"
        except GonioError:
            outcome = "refused"
        sys.stdout.write(f"{number} {outcome}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
