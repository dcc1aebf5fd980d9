"""One pass over the values of a tensor: NaN and infinity, rows, norm, largest entry, fingerprint.

A chunk of 2¹⁷ entries is read into a buffer that stays in the cache, and everything is computed from there. Several
threads read four chunks at a time, because each call of NumPy or torch waits for the interpreter: with two threads
that is 1.4 times as fast, with one it is slower. NaN, infinity and the largest entry come from one comparison of
integers: without its sign, a floating-point number is ordered as the integer with the same bits. Rows are the slices
along the first dimension. Chunks depend on the shape alone, and squares are summed chunk by chunk, so that the result
does not depend on the file, the alignment or the number of threads.

A fingerprint is a multilinear hash of 64 bits, Σ wᵢ·mᵢ mod 2⁶⁴ with fixed random odd mᵢ over the words of each row,
then over the rows. Any change of one word changes it; other changes escape it with a probability below 2⁻³⁰. It is
computed 10 to 20 times as fast as BLAKE2b (D. Lemire, O. Kaser, 'Strongly universal string hashing is fast', The
Computer Journal 57, 2014, section 3) and does not protect from forgery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import hypot, inf, prod, sqrt
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from gonio.errors import GonioError, cause_of
from gonio.execution import one_thread
from gonio.measuring.checking.places import Place
from gonio.measuring.figures.tensor import LISTED
from gonio.measuring.reading.entry import dtype_named, holds_variances, is_mask, layer_path

CHUNK = 1 << 17  # entries; a chunk of bfloat16 is 256 kB
ROW = 64  # bytes; shorter rows are alike by chance, so that rows are not compared
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {  # integers of the same size, without the sign, infinity
    torch.float64: (torch.int64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
}
_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_STEP = numpy.uint64(0x9E37_79B9_7F4A_7C15)  # odd: joins the hashes of the pieces of a long row
_SMALL = 1 << 18  # bytes; with tensors below it threads wait for the interpreter most of the time
_ALIGNMENT = 64  # bytes, of memory of torch
_FINE = (1e-15, 1e15)  # the largest entry of a chunk whose squares are summed as they are, in float32 or float64


@dataclass(frozen=True, kw_only=True)
class TensorCheck:
    """What the values of a tensor are.

    Attributes:
        name: its key. `file`: the file that holds it; "" for a tensor in memory.
        beside: whether it is not of the model, as the optimizer's state in a trainer's checkpoint. `state`: whether it
            is such a state, whose rows are no filters: of tokens that never occurred they are 0.
        integers: whether its entries are integers or packed, so that there is no norm and no NaN.
        nonfinite: number of NaN and infinite values; `first_nonfinite`: index of the first one.
        norm, largest: Frobenius norm, and largest absolute value, of the finite values.
        rows: slices along the first dimension that were compared; 0 if they were not (vectors, rows below 64 bytes).
        zero_rows, constant_rows, equal_rows: rows that are 0; rows of one other value; other rows that equal an
            earlier one.
        row: the index of the first zero row, or of the first constant one; `pair`: those of two equal rows.
        zero_indices, constant_indices: the indices of these rows, the first thousand of each. `equal_pairs`: each row
            that equals an earlier one, and that one, the first thousand.
        layer: of a tensor with equal rows or rows of zeros, whether rows are the filters of a layer: it is called a
            weight, and has more than two dimensions, a bias, or siblings. Rows of a table can be equal because their
            tokens never occur.
        padding: of a matrix with rows of zeros, or with equal ones, the rows of which one is 0 if it is an embedding
            with padding; empty if it cannot be one.
        negative: number of negative values of a tensor that holds running variances; 0 for any other.
        adapter: whether it is a part of an adapter: rows of B that no gradient has reached are 0.
        zero, constant: whether every value is 0; whether all values are the same.
        mask: whether every value is 0 or −inf, as in the additive masks of attention; such values are not counted as
            infinite, and rows are not compared.
        fingerprint: 64 bits of a hash of its bytes, in hexadecimal; empty if it was not read.
        siblings: number of tensors with the same name up to numbers in it, and with the same shape.
        ratio: root mean square of its values divided by the median of its siblings; None without siblings.
        distance: |log ratio| divided by the spread of the siblings, 1.4826 times their median absolute deviation.
        reason: why its values were not checked.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    beside: bool = False
    state: bool = False
    integers: bool = False
    nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    norm: float | None = None
    largest: float | None = None
    rows: int = 0
    zero_rows: int = 0
    constant_rows: int = 0
    equal_rows: int = 0
    row: int | None = None
    pair: tuple[int, int] | None = None
    zero_indices: tuple[int, ...] = ()
    constant_indices: tuple[int, ...] = ()
    equal_pairs: tuple[tuple[int, int], ...] = ()
    layer: bool = False
    padding: tuple[int, ...] = ()
    negative: int = 0
    adapter: bool = False
    zero: bool = False
    constant: bool = False
    mask: bool = False
    fingerprint: str = ""
    siblings: int = 0
    ratio: float | None = None
    distance: float | None = None
    reason: str = ""

    @property
    def path(self) -> str:
        """See the paths of :class:`gonio.measuring.TensorMeasurement`."""
        return layer_path(self.name)

    @property
    def entries(self) -> int:
        return prod(self.shape)


def scan_all(places: Sequence[Place], jobs: int, progress: Callable[[int, int], None] | None) -> list[TensorCheck]:
    """The check of each tensor, by `jobs` threads, by one if they are small; progress is (bytes done, bytes in all)."""
    total, done, made = sum(place.size for place in places), 0, []
    jobs = jobs if total > _SMALL * len(places) else 1
    # one thread of torch in each of ours
    with one_thread(), ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for place, found in zip(places, pool.map(partial(scan, together=1 if jobs == 1 else 4), places), strict=True):
            made.append(found)
            done += place.size
            if progress is not None:
                progress(done, total)
    return made


def scan(place: Place, together: int = 1) -> TensorCheck:
    """The check of one tensor; one that cannot be read has the reason.

    Args:
        together: chunks that are read at a time.
    """
    header = {name: getattr(place, name) for name in ("name", "file", "dtype", "shape", "beside", "state", "reason")}
    if place.reason or not prod(place.shape):
        return TensorCheck(**header)
    # Dtypes that torch does not have (4 and 6 bits) are checked as bytes.
    known, entries = dtype_named(place.values or place.dtype), prod(place.shape)
    dtype = known or torch.uint8
    factor = 2 if dtype in _PARTS else 1
    dtype = torch.uint8 if dtype is torch.bool else _PARTS.get(dtype, dtype)
    rows = place.shape[0] if len(place.shape) > 1 and place.size // place.shape[0] >= ROW else 1
    columns = entries // rows * factor
    if known is None:
        rows, columns = 1, place.size
    statistics = _Statistics(dtype, rows, columns, together, variances=holds_variances(place.name))
    try:
        with place.open() as read:
            for first, last, start, stop in _pieces(rows, columns, together):
                chunk = statistics.chunk(last - first, stop - start)
                read((first * columns + start) * dtype.itemsize, chunk.raw)
                statistics.add(chunk, slice(first, last), start)
    except (GonioError, OSError) as error:
        return TensorCheck(**header | {"reason": cause_of(error)})
    return TensorCheck(**header, **statistics.result(place.shape, factor))


def _pieces(rows: int, columns: int, together: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, last row, first column, last column) of what is read: whole rows, or pieces of one long row."""
    if columns <= CHUNK:
        step = CHUNK // columns * together
        yield from ((row, min(row + step, rows), 0, columns) for row in range(0, rows, step))
        return
    for row in range(rows):
        yield from ((row, row + 1, start, min(start + CHUNK, columns)) for start in range(0, columns, CHUNK))


@cache
def _multipliers() -> numpy.ndarray[Any, numpy.dtype[numpy.uint64]]:
    """Random odd numbers of 64 bits, the same in every version: a bit generator's raw stream is fixed."""
    return numpy.random.PCG64(0).random_raw(2 * CHUNK) | numpy.uint64(1)


def _mixed(words: Any) -> Any:
    """Words of 64 bits whose high bits reach the low ones; otherwise two changes of a highest bit would cancel."""
    mixed = words >> numpy.uint64(32)
    mixed ^= words
    return mixed


@cache
def _bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of a positive number, which are ordered as the numbers are."""
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(_BITS[dtype][0]))


def _of_bits(bits: int, dtype: torch.dtype) -> float:
    return float(torch.tensor(bits, dtype=_BITS[dtype][0], device="cpu").view(dtype))


class _Chunk(NamedTuple):
    """The buffer of what is read at a time, as what is computed from it sees it.

    Attributes:
        raw: its bytes. words: the same as unsigned integers, by row.
        stored: the same as values in one row; numbers: these, or of values in 8 bits the place of their copies in
            float32; bits: the numbers as integers of their size, by row.
    """

    raw: Any
    words: Any
    stored: Tensor
    numbers: Tensor
    bits: Any


class _Statistics:
    """Statistics of the rows of a tensor, chunk by chunk."""

    def __init__(self, dtype: torch.dtype, rows: int, columns: int, together: int, *, variances: bool = False) -> None:
        self._rows = max(CHUNK // columns, 1)  # of a chunk
        size = min(rows * columns, self._rows * together * columns if columns <= CHUNK else CHUNK)
        # memory of torch is aligned to 64 bytes, so that sums do not depend on the file
        self._buffer = torch.empty(size * dtype.itemsize, dtype=torch.uint8, device="cpu")
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._dtype, self._columns, self._floating = dtype, columns, dtype.is_floating_point
        self._numbers = dtype if dtype in _BITS else torch.float32
        self._copies = torch.empty(
            size if self._floating and dtype not in _BITS else 0, device="cpu", dtype=torch.float32
        )  # of 8 bits, in float32
        self._wide = torch.empty(
            min(size, CHUNK) if dtype.itemsize == 2 else 0, device="cpu", dtype=torch.float32
        )  # a chunk in float32
        self._zero, self._constant = numpy.ones(rows, bool), numpy.ones(rows, bool)
        self._hash = numpy.zeros(rows, numpy.uint64)
        self._first: Any = None  # of each row the bits of its first entry
        self._norm, self._largest = 0.0, 0  # the largest magnitude: of floating-point numbers its bits
        self._fine = tuple(_bits_of(limit, self._numbers) for limit in _FINE)
        self._nonfinite, self._minus, self._place = 0, 0, -1
        self._variances, self._negative = variances, 0

    def chunk(self, rows: int, columns: int) -> _Chunk:
        """The buffer for so many rows of so many entries; the next bytes are to be read into `raw`."""
        made = self._chunks.get((rows, columns))
        if made is None:
            raw = self._buffer[: rows * columns * self._dtype.itemsize]
            width = raw.numel() // rows
            unit = next(unit for unit in (8, 4, 2, 1) if width % unit == 0)
            words = raw.numpy().view(f"u{unit}").reshape(rows, -1)
            stored = raw.view(self._dtype)
            numbers = self._copies[: rows * columns] if len(self._copies) else stored
            bits = (numbers.view(_BITS[numbers.dtype][0]) if self._floating else numbers).numpy().reshape(rows, -1)
            made = self._chunks[rows, columns] = _Chunk(raw.numpy(), words, stored, numbers, bits)
        return made

    def add(self, chunk: _Chunk, rows: slice, start: int) -> None:
        """A chunk: these rows, from this column on."""
        words = _mixed(chunk.words) if chunk.words.itemsize == 8 else chunk.words.astype(numpy.uint64)
        self._hash[rows] = self._hash[rows] * _STEP + words.dot(_multipliers()[: words.shape[1]])
        if chunk.numbers is not chunk.stored:
            chunk.numbers.copy_(chunk.stored)
        self._add_constants(chunk.bits, rows, start)
        if self._floating:
            self._add_numbers(chunk, rows, start)
        else:
            self._zero[rows] &= ~chunk.bits.any(1)
            self._largest = max(self._largest, abs(int(chunk.bits.min())), abs(int(chunk.bits.max())))

    def _add_constants(self, bits: Any, rows: slice, start: int) -> None:
        if self._first is None:
            self._first = numpy.zeros(len(self._zero), bits.dtype)
        if not start:
            self._first[rows] = bits[:, 0]
        first, constant = self._first[rows], self._constant[rows]
        for column in (bits.shape[1] // 2, -1):  # two entries exclude almost every row
            constant &= bits[:, column] == first
            if not constant.any():
                return
        left = numpy.flatnonzero(constant)
        constant[left] = (bits[left] == first[left, None]).all(1)

    def _add_numbers(self, chunk: _Chunk, rows: slice, start: int) -> None:
        _, mask, _ = _BITS[self._numbers]
        magnitude = numpy.bitwise_and(chunk.bits, chunk.bits.dtype.type(mask))
        largest, width = magnitude.max(1), magnitude.shape[1]
        self._zero[rows] &= largest == 0
        for first in range(0, len(largest), self._rows):
            part = slice(first, first + self._rows)
            values = chunk.numbers[first * width : part.stop * width]
            place = (rows.start + first) * self._columns + start
            self._add_values(values, magnitude[part], int(largest[part].max()), place)

    def _add_values(self, values: Tensor, magnitude: Any, top: int, place: int) -> None:
        """The numbers of one chunk, of which `top` is the largest magnitude and `place` the index of the first."""
        _, _, infinity = _BITS[self._numbers]
        if top >= infinity:
            bad = magnitude >= infinity
            if self._place < 0:
                self._place = place + int(bad.argmax())
            self._nonfinite += int(bad.sum())
            self._minus += int((values == -inf).sum())
            magnitude[bad] = 0
            top = int(magnitude.max())
            values = values.double().masked_fill(torch.from_numpy(bad.reshape(-1)), 0.0)
        self._largest = max(self._largest, top)
        if self._variances:
            self._negative += int((values < 0).sum())
        if values.dtype not in (torch.float32, torch.float64):
            values = self._wide[: len(values)].copy_(values)
        scale = 1.0
        if top and not self._fine[0] < top < self._fine[1]:
            scale = _of_bits(top, self._numbers)
            values = values.double() / scale
        elif values.data_ptr() % _ALIGNMENT:
            values = values.clone()
        self._norm = hypot(self._norm, scale * sqrt(float(torch.dot(values, values))))

    def result(self, shape: tuple[int, ...], factor: int) -> dict[str, Any]:
        """The fields of :class:`TensorCheck`; a complex entry is two numbers (`factor`)."""
        zero, constant = self._zero, self._constant & ~self._zero
        largest = _of_bits(self._largest, self._numbers) if self._floating else self._largest
        found: dict[str, Any] = {
            "integers": not self._floating,
            "nonfinite": self._nonfinite,
            "negative": self._negative,
            "norm": self._norm if self._floating else None,
            "largest": largest,
            "zero": bool(zero.all()),
            "constant": bool(self._constant.all()) and bool((self._first == self._first[0]).all()),
            "fingerprint": _joined(self._hash),
        }
        if not largest and is_mask(shape, self._nonfinite, self._minus):
            return found | {"nonfinite": 0, "mask": True, "norm": None, "largest": None}
        if self._place >= 0:
            found["first_nonfinite"] = tuple(int(i) for i in numpy.unravel_index(self._place // factor, shape))
        if len(zero) > 1 and self._floating:
            found |= {"rows": len(zero)} | _special(zero, constant) | _copies(self._hash, ~zero & ~constant)
        return found


def _special(zero: Any, constant: Any) -> dict[str, Any]:
    """The rows that are 0, and those of one other value."""
    zeros, constants = numpy.flatnonzero(zero), numpy.flatnonzero(constant)
    first = zeros if zeros.size else constants
    return {
        "zero_rows": zeros.size,
        "constant_rows": constants.size,
        "row": int(first[0]) if first.size else None,
        "zero_indices": tuple(zeros[:LISTED].tolist()),
        "constant_indices": tuple(constants[:LISTED].tolist()),
    }


def _copies(hashes: Any, others: Any) -> dict[str, Any]:
    """The rows that equal an earlier one, of those that are not special."""
    rows = numpy.flatnonzero(others)
    order = rows[numpy.argsort(hashes[rows], kind="stable")]
    same = hashes[order[1:]] == hashes[order[:-1]]
    equal = numpy.flatnonzero(same)
    if not equal.size:
        return {}
    starts = numpy.maximum.accumulate(numpy.where(same, 0, numpy.arange(1, len(order))))
    copies = numpy.column_stack((order[equal + 1], order[starts[equal]]))
    copies = copies[numpy.argsort(copies[:, 0])][:LISTED].tolist()
    return {
        "equal_rows": equal.size,
        "pair": (copies[0][1], copies[0][0]),
        "equal_pairs": tuple((row, earlier) for row, earlier in copies),
    }


def _joined(hashes: Any) -> str:
    """The fingerprint of a tensor from those of its rows."""
    joined, multipliers = numpy.zeros(1, numpy.uint64), _multipliers()
    for start in range(0, len(hashes), len(multipliers)):
        part = _mixed(hashes[start : start + len(multipliers)])
        joined = joined * _STEP + part.dot(multipliers[: len(part)])
    return f"{int(joined[0]):016x}"
