"""`check`: is a checkpoint intact, and what is in it."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import nn

from gonio.errors import (
    GonioWarning,
    InvalidArgumentError,
    UnreadableFileError,
    UnsoundStateError,
    listing,
)
from gonio.escaping import html_table, json_data, plain, redact
from gonio.measuring.changes.sources import base_entries
from gonio.measuring.checking.places import CODES, Content, Inventory, Problem, inventory, vectors_of, with_codes
from gonio.measuring.checking.rules import among_others, checked, copied_layers
from gonio.measuring.checking.scan import TensorCheck, scan_all
from gonio.measuring.figures.moments import StateMeasurement
from gonio.measuring.findings.model_rules import of_norms
from gonio.measuring.findings.rules import RULES, Finding, at_least, worst_first
from gonio.measuring.findings.state_rules import judged_states
from gonio.measuring.reading.adapters import (
    Adapter,
    adapters_in,
    faults_of,
    may_hold_adapters,
    unlike_base,
)
from gonio.measuring.reading.configurations import Configurations, stated_in
from gonio.measuring.reading.entry import INTEGERS, StoredTensor, dtype_named, layer_path
from gonio.measuring.reading.fitting import fit_of, fitted, unlike_model
from gonio.measuring.reading.formats import BARE, lost_scale, stored_weights
from gonio.measuring.reading.opened import Watched, link_to_nothing, of_system, without_values
from gonio.measuring.reading.order import in_depth_order
from gonio.measuring.reading.shards import is_index
from gonio.measuring.reading.source import (
    configured,
    name_of,
    of_damaged,
    optimizer_of,
)
from gonio.measuring.reading.stated import two_values, unlike_others
from gonio.measuring.showing.table import Table
from gonio.messages import Message, are, counted, joined, local, say
from gonio.surgery.stated import HEADS, KV_HEADS, LAYERS, WIDTHS

Level = Literal["info", "warn", "error"]

SCHEMA = "gonio.check/1"
FINGERPRINTS = "gonio.fingerprint/1"
LARGEST_FINGERPRINT = 1 << 30  # bytes; that of a million tensors has 150 MB
_SHOWN = 3  # tensors of one rule in print
_NUMBERS = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTHS, "vocabulary": ("vocab_size",)}


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """What a checkpoint holds, from its headers and from the configurations beside it.

    Attributes:
        family: `model_type`, else the architecture, of `config.json`; "" without one.
        parameters: number of entries of the model's tensors, of packed ones as they are stored.
        dtypes: number of the model's tensors by dtype. `beside`: number of tensors that are not the model's.
        layers, heads, kv_heads, width, vocabulary: as in `config.json`; None where it does not say.
        quantisation: the method in `config.json`. `adapter`: the kind in `adapter_config.json`.
    """

    family: str
    parameters: int
    tensors: int
    beside: int
    bytes: int
    files: int
    dtypes: dict[str, int]
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    quantisation: str = ""
    adapter: str = ""

    def __str__(self) -> str:
        """One line, for example `llama, 1.24 billion values in 146 tensors (146 bfloat16), 16 layers`."""
        return str(self.said)

    @property
    def said(self) -> Message:
        """The line as a message."""
        dtypes = joined([f"{n} {plain(dtype, longest=40)}" for dtype, n in self.dtypes.items()])
        size = {"values": _large(self.parameters), "tensors": counted(self.tensors, "tensor"), "dtypes": dtypes}
        held = say("{values} in {tensors} ({dtypes})", **size) if dtypes else say("{values} in {tensors}", **size)
        parts: list[str] = [held]
        parts = [plain(self.family, longest=80), *parts] if self.family else parts
        parts += [counted(self.layers, "layer")] if self.layers is not None else []
        parts += [counted(self.heads, "head")] if self.heads is not None else []
        parts += [say("{n} for keys and values", n=self.kv_heads)] if self.kv_heads not in (None, self.heads) else []
        parts += [say("width {n}", n=self.width)] if self.width is not None else []
        parts += [say("vocabulary {n:,}", n=self.vocabulary)] if self.vocabulary is not None else []
        parts += [say("quantised by {name}", name=plain(self.quantisation, longest=80))] if self.quantisation else []
        parts += [say("adapter of kind {name}", name=plain(self.adapter, longest=80))] if self.adapter else []
        parts += [say("{tensors} beside the model", tensors=counted(self.beside, "tensor"))] if self.beside else []
        return joined([*parts, *([counted(self.files, "file")] if self.files else [])])


@dataclass(frozen=True, repr=False)
class CheckResult(Table[TensorCheck]):
    """Whether a checkpoint is intact, and what it holds: a mapping from paths to rows that prints as a report.

    Attributes:
        source: its name. `contents`: what it holds.
        tensors: one :class:`TensorCheck` per tensor.
        findings: what is wrong or unusual, errors first.
        notes: remarks on how it was read.
        optimizer: one row per parameter of which an optimizer has state.

    Example:
        >>> gonio.check({"w": torch.ones(2)})["w"].constant
        True
    """

    ROW: ClassVar = TensorCheck

    source: str
    contents: CheckpointContents
    tensors: tuple[TensorCheck, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    optimizer: tuple[StateMeasurement, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.level == "info" for finding in self.findings)

    @property
    def verdict(self) -> Message:
        """One sentence."""
        levels = Counter(finding.level for finding in self.findings)
        read = sum(not tensor.reason for tensor in self.tensors)
        counts = [
            counted(levels[level], word) for level, word in (("error", "error"), ("warn", "warning")) if levels[level]
        ]
        said = joined(counts, last=" and ")
        if levels["error"]:
            unfit = all(finding.code == "G719" for finding in self.findings if finding.level == "error")
            if unfit:
                return say("Does not fit the model: {found}.", found=said)
            return say("Damaged: {found}.", found=said)
        if not self.tensors:
            return say("Nothing to check: it holds no tensor.")
        if levels["warn"]:
            return say("Readable, with {found}.", found=said)
        every = counted(len(self.tensors), "tensor")
        if read < len(self.tensors):
            return say("No damage found in {read} of {every}; the others were not checked.", read=read, every=every)
        return say("Intact: {every} {are} there, and every value is finite.", every=every, are=are(read))

    def at_least(self, level: Level) -> bool:
        """Whether there is a finding of this level or above."""
        return bool(at_least(self.findings, level))

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The fingerprint of every tensor that was read, as JSON-able data: what `--save` writes."""
        kept = {t.name: {"dtype": t.dtype, "shape": list(t.shape), "hash": t.fingerprint} for t in self.tensors}
        return {"schema": FINGERPRINTS, "source": self.source, "tensors": kept}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "verdict": self.verdict,
            "intact": self.intact,
            "contents": json_data(asdict(self.contents)),
            "findings": json_data(self.findings),
            "notes": json_data(self.notes),
            "tensors": json_data(self.tensors),
            "optimizer": json_data(self.optimizer),
        }

    def __repr__(self) -> str:
        return f"<CheckResult of {plain(self.source)}: {self.verdict}>"

    def _repr_html_(self) -> str:
        rows = [[local(f.level), f.code, f.path, local(f.found), local(f.do)] for f in self.findings]
        head = [local(say("level")), local(say("code")), local("tensor"), local(say("found")), local(say("do"))]
        notes = [local(self.contents.said), *map(local, self.notes)]
        return html_table(f"{self.source}: {local(self.verdict)}", head, rows, notes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        style = "bold green" if self.intact else "bold red"
        yield Text.assemble((local(self.verdict), style), f" {plain(self.source)}")
        yield Text(local(self.contents.said))
        for note in self.notes:
            yield Text(plain(local(note), longest=500), style="dim")
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.code, finding.level), []).append(finding)
        for (code, _), group in groups.items():
            title, number = local(RULES[code].text.title), local(counted(len(group), "finding"))
            yield Text(f"{local(group[0].level):5} {code}: {title} ({number})", style="bold")
            for finding in group[:_SHOWN]:
                place = plain(finding.path, longest=200) or local("the files")
                yield Text(f"  {place}: {plain(local(finding.found), longest=500)}")
            if len(group) > _SHOWN:
                yield Text(f"  {local(say('and {n} more', n=len(group) - _SHOWN))}")
            yield Text(f"  {local(say('What to do: {do}', do=group[0].do))}", style="dim")
        if groups:
            yield Text(local("Run `gonio explain CODE` for what a finding means."), style="dim")


def _large(count: int) -> Message:
    """The values of parameters and buffers, which a file does not tell apart, in millions or billions from there on."""
    if count >= 10**9:
        return say("{n:.3g} billion values", n=count / 10**9)
    if count >= 10**6:
        return say("{n:.3g} million values", n=count / 10**6)
    return counted(count, "value")


def check(
    source: Content,
    *,
    against: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    describe: Callable[[CheckpointContents], None] | None = None,
) -> CheckResult:
    """Check a checkpoint: is it intact, and what is in it.

    Every tensor of every file is held against its header, the index and the size of the file; then its values are
    read once. No code in a file runs, and memory holds one chunk per thread (of a torch file, maps of it; of another
    format one tensor per thread).

    Args:
        source: a `.safetensors` or torch file, a `.index.json`, a folder with a model, a file or folder of another
            format that `docs/howto/formats.md` lists, or a state dict.
        against: a file of fingerprints (`gonio check --save`), or the `fingerprints` of a result: what changed, was
            added and was removed are findings.
        model: that the checkpoint is for. The tensors that it lacks, that it alone has, and those of another shape are
            findings (G719, G720), as its `load_state_dict` or, of transformers, `from_pretrained` tells; of adapters
            alone, the layers that the model does not have. The model may be on the meta device; it does not change.
        jobs: number of threads; by default one per core, at most 8.
        progress: is called with (bytes done, bytes in all).
        describe: is called with the contents before values are read.

    Raises:
        UnreadableFileError: for a file of which nothing can be read, and for a damaged file of fingerprints.
        InvalidArgumentError: for another source or model, or less than one job.
        MissingExtraError: if the package that reads a file's format is not installed.

    Example:
        >>> state = {f"layers.{i}.down.weight": torch.randn(64, 64) for i in range(8)}
        >>> found = gonio.check(state)
        >>> found.verdict
        'Intact: 8 tensors are there, and every value is finite.'
        >>> state["layers.3.down.weight"] *= 100
        >>> state["layers.5.down.weight"][2, 7] = torch.nan
        >>> [(f.code, f.path) for f in gonio.check(state, against=found.fingerprints).findings]
        [('G001', 'layers.5.down'), ('G710', 'layers.3.down'), ('G710', 'layers.5.down'), ('G709', 'layers.3.down')]
    """
    if jobs is None:
        jobs = min(os.cpu_count() or 1, 8)
    if jobs < 1:
        raise InvalidArgumentError("check(jobs=) takes a number of threads", f"{jobs}", "Pass 1 or more.")
    known = None if against is None else _fingerprints(against)
    held = with_codes(inventory(source))
    watched = Watched(held.files)
    beside = Configurations.beside(held.files)
    adapters, config = _adapters(held, beside)
    unfit, fits = ([], ()) if model is None else _beside_model(held, model, adapters)
    contents = _contents(held, beside)
    if describe is not None:
        describe(contents)
    kinds = [place.values or place.dtype for place in held.places if not place.reason]
    integers = sum(kind == CODES or dtype_named(kind) in INTEGERS for kind in kinds)
    tensors_ = counted(integers, "tensor")
    said = say("checked as integers (packed weights, indices, counters): {tensors}", tensors=tensors_)
    notes = (*fits, *held.notes, said) if integers else (*fits, *held.notes)
    scanned = scan_all(held.places, jobs, progress)
    if masks := sum(tensor.mask for tensor in scanned):
        notes = (*notes, say("additive masks, of 0 and −inf alone: {tensors}", tensors=counted(masks, "tensor")))
    unread = [  # by a reader that found the damage only when it read the values
        Problem("G701", tensor.path, tensor.reason)
        for place, tensor in zip(held.places, scanned, strict=True)
        if tensor.reason and not place.reason
    ]
    unread += watched.changed()
    parts = {part for adapter in adapters for part in adapter.parts}
    known_parts = [replace(t, adapter=True) if t.name in parts and not t.beside else t for t in scanned]
    tensors = among_others(known_parts, padding=beside.padding)
    changes = [] if known is None else list(_changes(tensors, known))
    in_files = None if isinstance(source, Mapping) else config
    states, faults = optimizer_of(source), faults_of(adapters, in_files)
    problems = [*held.problems, *unfit, *beside.problems, *of_damaged(states), *unread, *changes, *faults]
    problems += _unlike_others(held, tensors, beside, None if not adapters else config)
    problems += _without_scale(tensors)
    problems += copied_layers(tensors, {place.name: place.address for place in held.places if place.address})
    rows, of_states, updates = judged_states(states, jobs=jobs, values=False)
    places = {path: place for place, path in enumerate(_in_depth_order(tensors, one_file=len(held.files) < 2))}
    found = checked(tensors, problems)
    rules = {code: number for number, code in enumerate(dict.fromkeys(finding.code for finding in found))}
    along = sorted(found, key=lambda finding: (rules[finding.code], places.get(finding.path, len(places))))
    findings = worst_first([*along, *of_norms(vectors_of(held)), *of_states])
    return CheckResult(name_of(source), contents, tensors, findings, (*notes, *states.notes, *updates), rows)


def _unlike_others(
    held: Inventory, tensors: Sequence[TensorCheck], beside: Configurations, adapting: Mapping[str, Any] | None
) -> list[Problem]:
    """What differs from other blocks and from the configuration, and what has no values.

    Args:
        adapting: the configuration of the adapters; None without any.
    """
    own = {place.name: (place.shape, place.dtype) for place in held.places if not place.beside}
    shapes = {name: shape for name, (shape, _) in own.items()}
    values = {tensor.name: (tensor.dtype, tensor.fingerprint) for tensor in tensors if not tensor.beside}
    found = unlike_others(shapes, held.problems, beside, held.header, adapting)
    found += two_values(shapes, values, beside)
    return [*found, *(without_values(own) if own or not (held.places or held.problems) else [])]


def _beside_model(
    held: Inventory, model: object, adapters: Sequence[Adapter]
) -> tuple[list[Problem], tuple[Message, ...]]:
    """How the tensors of a checkpoint differ from those of a model by names and shapes, and notes on it."""
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise InvalidArgumentError("check(model=) takes a model", found, "Build it, on the meta device if it is large.")
    name_of_model = plain(type(model).__name__, longest=80)
    if adapters and model.state_dict().keys().isdisjoint(part for adapter in adapters for part in adapter.parts):
        unlike = unlike_base(adapters, base_entries(model), name_of_model)
        told = {"model": name_of_model, "adapters": counted(len(adapters), "adapter")}
        return unlike, () if unlike else (say("fits the layers of {model}: {adapters}", **told),)
    known = [place for place in held.places if not place.beside]
    shapes = {place.name: None if place.reason else place.shape for place in known or held.places}
    fit = fit_of(model, shapes)
    if fit.fitting and not known:  # the model is one of several parts of the checkpoint
        fit = replace(fit, unknown=())
    return unlike_model(fit, model, shapes, held.problems), tuple(fitted(fit, model, len(shapes)))


def _in_depth_order(tensors: Sequence[TensorCheck], *, one_file: bool) -> list[str]:
    """The paths of tensors as :func:`gonio.measure` orders them; those of several files follow each other by name."""
    known = {tensor.name: tensor for tensor in tensors}
    listed = list(known) if one_file else sorted(known)
    return [known[name].path for name in in_depth_order({name: known[name].shape for name in listed})]


def _adapters(held: Inventory, beside: Configurations) -> tuple[list[Adapter], Mapping[str, Any]]:
    """The adapters of a checkpoint, whose values are not read, and their configuration."""
    own = {place.name: place for place in held.places if not place.beside and not place.reason}
    about, config = configured(beside.adapter, held.metadata, own)
    if config is None or not may_hold_adapters(own):
        return [], {}
    stored = {name: StoredTensor.unread(place.shape, place.dtype) for name, place in own.items()}
    return adapters_in(stored, config), about


def _without_scale(tensors: Sequence[TensorCheck]) -> Iterator[Problem]:
    """The 8-bit weights that lack the scale that others of the file have."""
    own = {t.name: t for t in tensors if not (t.beside or t.reason)}
    suspects = [name for name, t in own.items() if t.dtype.startswith("float8") and len(t.shape) > 1]
    stored = {name: StoredTensor.unread(t.shape, t.dtype) for name, t in own.items() if suspects}
    for weight in stored_weights(suspects, stored, {}):
        t = own[weight.parts[0]]
        if weight.kind == BARE and (lost := lost_scale(t.dtype, t.largest or 0.0)):
            yield Problem("G715", t.path, lost)


def _contents(held: Inventory, beside: Configurations) -> CheckpointContents:
    config, adapter, quantisation = beside.config, beside.adapter, beside.quantisation
    architectures = config.get("architectures")
    family = config.get("model_type") or (architectures[0] if isinstance(architectures, list) and architectures else "")
    stated = beside.with_text
    numbers = {what: stated_in(stated, names) for what, names in _NUMBERS.items()}
    model = [place for place in held.places if not place.beside]
    method = quantisation.get("quant_method", "unnamed") if quantisation else ""
    return CheckpointContents(
        family=str(family),
        parameters=sum(math.prod(place.shape) for place in model),
        tensors=len(model),
        beside=len(held.places) - len(model),
        bytes=sum(place.size for place in held.places),
        files=sum(not is_index(file) for file in held.files),
        dtypes=dict(Counter(place.dtype for place in model if place.dtype).most_common()),
        quantisation=str(method),
        adapter=str(adapter.get("peft_type", "unnamed")) if adapter else "",
        **numbers,
    )


def _fingerprints(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """(dtype, shape, fingerprint) of each tensor in a file of fingerprints."""
    said = "mapping" if isinstance(source, Mapping) else os.fspath(source)
    try:
        if isinstance(source, Mapping):
            content: Any = source
        elif Path(source).stat().st_size > LARGEST_FINGERPRINT:
            raise ValueError(f"more than {LARGEST_FINGERPRINT} bytes")
        else:
            content = json.loads(Path(source).read_text(encoding="utf-8"))
        if content["schema"] != FINGERPRINTS:
            raise ValueError(f"its schema is {content['schema']!r:.80}")
        return {str(n): _fingerprint(t["dtype"], tuple(t["shape"]), t["hash"]) for n, t in content["tensors"].items()}
    except FileNotFoundError as error:
        why = link_to_nothing(Path(said)) or say("there is no such file")
        raise UnreadableFileError(said, why, "Write it by gonio check --save.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"it holds no fingerprints ({str(error)[:200]})"
        refused = of_system(Path(said), error)
        raise refused or UnreadableFileError(said, found, "Write it by gonio check --save.") from error


def _fingerprint(dtype: Any, shape: tuple[Any, ...], values: Any) -> tuple[str, tuple[int, ...], str]:
    if not isinstance(dtype, str) or not isinstance(values, str) or any(type(n) is not int for n in shape):
        raise ValueError("a dtype, a shape or a hash is of another type")
    return dtype, shape, values


def _changes(tensors: tuple[TensorCheck, ...], known: dict[str, tuple[Any, ...]]) -> Iterator[Problem]:
    """What differs from the fingerprints; a tensor that was not read differs by its header only.

    The values of a new or changed tensor may be those that another name had. Of a tensor whose entries are all one
    number that tells nothing.
    """
    names_of = {values: name for name, values in reversed(known.items())}
    for t in tensors:
        origin = "" if t.constant or not t.fingerprint else names_of.get((t.dtype, t.shape, t.fingerprint), "")
        if t.name not in known:
            said = say("added: it has the values that {name} had", name=plain(origin))
            yield Problem("G710", t.path, said if origin else say("added: it has no fingerprint"))
            continue
        dtype, shape, fingerprint = known[t.name]
        if (dtype, shape) != (t.dtype, t.shape):
            before, now = (f"{d} {'×'.join(map(str, s))}" for d, s in ((dtype, shape), (t.dtype, t.shape)))
            yield Problem(
                "G710", t.path, say("changed from {before} to {now}", before=plain(before, longest=80), now=now)
            )
        elif fingerprint != t.fingerprint:
            said = say("its values are those that {name} had", name=plain(origin))
            yield Problem("G710", t.path, said if origin else say("its values changed"))
    names = {t.name for t in tensors}
    yield from (Problem("G710", layer_path(name), say("removed")) for name in known if name not in names)


def check_before_save(
    state: Mapping[str, Any], *, fail_on: Level = "error", action: Literal["raise", "warn"] = "raise"
) -> CheckResult:
    """Check a state dict before it is saved.

    Args:
        state: the state dict.
        fail_on: the lowest level of a finding that counts.
        action: whether to raise or to warn then.

    Returns:
        The result of :func:`check`.

    Raises:
        UnsoundStateError: if there is such a finding and `action` is `raise`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> _ = model.weight.data.fill_(torch.nan)
        >>> try:
        ...     gonio.measuring.check_before_save(model.state_dict())
        ... except gonio.errors.UnsoundStateError as error:
        ...     print(str(error)[:79])
        check_before_save: the state dict was not saved; G001 in weight: 8 of 8 values
    """
    if action not in ("raise", "warn"):
        raise InvalidArgumentError("check_before_save(action=) takes raise or warn", f"{action!r}", "Pass one of them.")
    found = check(state)
    if bad := at_least(found.findings, fail_on):
        said = listing([f"{f.code} in {plain(f.path, longest=200)}: {f.found}" for f in bad], limit=3)
        if action == "raise":
            raise UnsoundStateError(redact(said))
        warnings.warn(f"the state dict that is saved has findings: {redact(said)}", GonioWarning, stacklevel=2)
    return found
