"""Which files a measurement of a checkpoint reads; others beside it, such as what it writes, do not change it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gonio.measuring.reading.distributed import is_distributed
from gonio.measuring.reading.kinds import KINDS
from gonio.measuring.reading.shards import weight_map
from gonio.measuring.reading.source import CONFIGURATIONS, Source, files_in
from gonio.measuring.reading.zero_files import is_zero


def files_read(source: Source) -> Iterator[tuple[str, Path]]:
    """The files that a measurement reads, each with its name.

    Raises: OSError for a source that is no file, or of a kind that is not kept.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise OSError("no file")
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    for file in files_in(path)[0] if path.is_dir() else [path]:
        if file.is_dir() and (is_distributed(file) or is_zero(file)):
            yield from ((each.relative_to(file).as_posix(), each) for each in sorted(file.rglob("*")) if each.is_file())
        elif file.suffix == ".onnx" or not file.name.endswith(KINDS):
            raise OSError("its values may lie in other files")
        else:
            yield file.name, file
            if file.name.endswith(".index.json"):
                shards = sorted({*weight_map(file)[0].values()})
                yield from ((shard, file.parent / shard) for shard in shards if (file.parent / shard).exists())
    yield from ((name, folder / name) for name in CONFIGURATIONS if (folder / name).is_file())
