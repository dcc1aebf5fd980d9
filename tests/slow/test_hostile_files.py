"""Files of every format that were tampered with: read, or refused with one error; no code runs, and memory is bounded.

Bits, bytes, blocks, ends and numbers are changed at random, and calls of a shell are put into pickles, in archives
whose checksums fit. Each file is read in a process of its own. `GONIO_HOSTILE` is the number of files (300).
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import traceback
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pytest

import gonio
from checking.containers import FORMATS, NEEDS, weights
from gonio.errors import GonioError
from lab.processes import exit_code, forked

FILES = int(os.environ.get("GONIO_HOSTILE", "300"))
MEMORY, SECONDS = 2 << 30, 60  # for one file; the healthy ones have a few kilobytes
NUMBERS = ("0", "-1", "1e999", "4294967295", "9223372036854775807", "99999999999999999999", "NaN")
DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, OSError)  # what zipfile raises
CALLS = (b"cposix\nsystem\n(S'touch %s'\ntR.", b"cbuiltins\nexec\n(S'open(%r, \"w\")'\ntR.", b"\x80\x04}(K\x01K\x02u.")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file or folder of each format."""
    made = {}
    for number, (name, write) in enumerate(FORMATS.items()):
        if find_spec(NEEDS.get(name, "torch")) is not None:
            (folder := tmp_path_factory.mktemp(f"healthy{number}") / "m").mkdir()
            made[name] = write(weights(0), folder)
    return made


def tampered(content: bytes, canary: Path, draw: random.Random) -> bytes:
    """With one change at a random place, more often near the beginning, where headers are."""
    at = min(draw.randrange(len(content)), draw.choice([64, 1000, len(content)])) if content else 0
    before, after = content[:at], content[at:]
    match draw.randrange(7):
        case 0:
            return before + bytes([after[0] ^ 1 << draw.randrange(8)]) + after[1:] if after else b""
        case 1:
            return before + draw.randbytes(length := draw.randrange(1, 9)) + after[length:]
        case 2:
            return before
        case 3:
            return before + draw.choice([b"", after[: draw.randrange(64)], draw.randbytes(8)]) + after
        case 4:
            length = draw.randrange(1, 5000)
            return before + bytes(length) + after[length:]
        case 5:
            places = [found.span() for found in re.finditer(rb"\d+", content)]
            start, end = draw.choice(places) if places else (at, at)
            return content[:start] + draw.choice(NUMBERS).encode() + content[end:]
        case _:
            call = draw.choice(CALLS)
            call = call % str(canary).encode() if b"%" in call else call
            return draw.choice([call, before + call + after, content[:-1] + call])


def tamper(path: Path, canary: Path, draw: random.Random) -> None:
    """Change a file; of an archive, in half of the cases, a member that is packed again."""
    content, members = path.read_bytes(), dict[str, bytes]()
    if draw.random() < 0.5:
        with suppress(*DAMAGED), zipfile.ZipFile(BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    if not members:
        path.write_bytes(tampered(content, canary, draw))
        return
    victim = draw.choice([*members, *(name for name in members if name.endswith(".pkl"))])
    members[victim] = tampered(members[victim], canary, draw)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            archive.writestr(name, value)


def read(source: Path, said: Path) -> int:
    """Check and measure it: 0 if both end, or refuse it with one error of ours."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(SECONDS)
    outcome = []
    for act in (gonio.check, gonio.measure):
        try:
            act(source)
            outcome.append("read")
        except GonioError as error:
            outcome.append("refused" if str(error) else "refused without a word")
        except BaseException:
            said.write_text(f"{act.__name__}\n{traceback.format_exc()}")
            return 1
    said.write_text(" ".join(outcome))
    return 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_files_that_were_tampered_with(healthy: dict[str, Path], tmp_path: Path) -> None:
    canary, outcomes, faults = tmp_path / "canary", Counter[str](), list[str]()
    for number in range(FILES):
        draw = random.Random(number)
        name = draw.choice(sorted(healthy))
        shutil.copytree(healthy[name].parent, folder := tmp_path / f"{number}")
        for _ in range(draw.choice([1, 1, 2, 4])):
            tamper(draw.choice(sorted(file for file in folder.rglob("*") if file.is_file())), canary, draw)
        source, said = folder / healthy[name].name, tmp_path / "said"
        said.unlink(missing_ok=True)
        code = exit_code(forked(lambda source=source, said=said: read(source, said)))  # type: ignore[misc]
        words = said.read_text() if said.exists() else f"killed by signal {-code}"
        outcomes[words if code == 0 else "fault"] += 1
        if code:
            faults.append(f"{number} {name}: {words}")
        if canary.exists():
            faults.append(f"{number} {name}: code ran")
            canary.unlink()
        shutil.rmtree(folder)
    assert not faults, "\n".join(faults[:20])
    assert {"read read", "refused refused"} <= set(outcomes)  # both were among them
    assert not any("word" in outcome for outcome in outcomes)
