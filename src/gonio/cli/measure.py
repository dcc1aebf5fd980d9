"""`gonio measure`: norms, angles and spectra of a model or checkpoint, against chance."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import typer

from gonio.cli import options
from gonio.cli.app import ExitCode, check_folders, made_now, print_err, save_formats, show
from gonio.cli.progressing import progress
from gonio.errors import InvalidArgumentError
from gonio.messages import Message, fixed, local, say

if TYPE_CHECKING:
    from gonio.measuring import Changes, Differences, Finding, Measurements, Suppression, Widths

_SHOWN = 10  # findings on stderr
_BATCH = 32  # samples that models of several widths see


def measure(
    context: typer.Context,
    source: options.Source,
    after: options.After = None,
    *,
    model: options.OfCheckpoint = None,
    seed: options.Seed = 0,
    batch: options.Batch = None,
    html: options.Html = None,
    json: options.Json = None,
    csv: options.Csv = None,
    md: options.Md = None,
    base: options.Base = None,
    key: options.Key = None,
    headers: options.Headers = False,
    engine: options.Where = "local",
    jobs: options.Jobs = 1,
    journal: options.Journal = None,
    no_cache: options.NoCache = False,
    also: options.Also = None,
    deep: options.Deep = False,
    fail_on: options.FailOn = None,
    ignore: options.Ignore = None,
    config: options.Config = None,
    widths: options.Widths = None,
    task: options.Task = "bytes",
) -> None:
    """Measure norms, angles and spectra of the weights, compared with random weights.

    Checkpoints are read as data: no code in them runs. A configuration file can suppress findings by code
    (ignore = ["G405"]) and by layer ([per-layer-ignores] with "head.*" = ["G101"]).
    """
    from gonio.cli.checkpoint import read, restored_model
    from gonio.cli.inputs import read_source
    from gonio.cli.settings import suppression
    from gonio.measuring.cache import cache_folder

    targets = {"html": html, "json": json, "csv": csv, "md": md}
    check_folders({**targets, "journal": journal}, [source, *(after or []), model, batch, base, config])
    whole: dict[str, Any] = {"--model": model, "--batch": batch, "--base": base, "--fail-on": fail_on}
    whole |= {"--ignore": ignore, "--config": config, "--also": also, "--deep": deep}
    spread = {"--engine": engine != "local", "--jobs": jobs > 1, "--journal": journal}
    how: dict[str, Any] = {"engine": engine, "jobs": jobs, "journal": journal}
    if widths is not None:
        _refuse("--widths", {**whole, **spread, "--headers": headers, "--key": key, "a second source": after})
        _widths(source, widths, task, seed, targets)
        return
    options.refuse_unused(context, "task", say("no --widths"))
    if after:
        _refuse("two sources", {**whole, "--fail-on": None, "--headers": headers})
        _changes(context, [read_source(word, seed=seed, key=key) for word in (source, *after)], how, targets, fail_on)
        return
    _refuse("--headers", {**whole, **spread, "--html": html, "--csv": csv, "--md": md} if headers else {})
    _refuse("--model", {"--base": base, **spread} if model else {})
    first = read_source(source, seed=seed, key=key) if model is None else restored_model(read(source, key=key), model)
    based = None if base is None else read_source(base, seed=seed)
    _check_effect(context, [based, first if model is None else source])
    if headers:
        _write_outline(first, json)
        return
    suppressing = suppression(config, ignore or [])
    how |= {"extra_figures": [figure.value for figure in also or []], "deep": deep}
    how |= {"batch": _example(first, batch), "base": based}
    how |= {"cache": None if no_cache or journal else cache_folder(os.environ)}
    _one(first, _notes(first, source, model, seed), how, suppressing, targets, fail_on)


def _check_effect(context: typer.Context, sources: Sequence[Any]) -> None:
    """Refuse --seed where no source is a model that is built, and --key where none is a file."""
    from gonio.measuring.reading.source import CheckpointPart

    files = [isinstance(each, (str, os.PathLike, CheckpointPart)) for each in sources if each is not None]
    if all(files):
        options.refuse_unused(context, "seed", say("files alone, whose weights are not random"))
    if not any(files):
        options.refuse_unused(context, "key", say("no checkpoint, which may hold several state dicts"))


def _notes(first: Any, source: str, model: str | None, seed: int) -> tuple[str, ...]:
    """What a reader has to know of weights that were drawn."""
    from gonio.models.by_name import is_user_code

    drawn = not isinstance(first, (str, os.PathLike)) and model is None and not is_user_code(source)
    return (say("random weights (seed {seed}), not trained ones", seed=seed),) if drawn else ()


def _one(
    source: Any,
    notes: tuple[str, ...],
    how: dict[str, Any],
    suppressing: Suppression | None,
    targets: dict[str, str | None],
    fail_on: options.Level | None,
) -> None:
    from gonio import measuring

    with progress("measuring") as update:
        found = measuring.measure(source, progress=update, **how)
    found = replace(found, notes=(*notes, *found.notes))
    if suppressing is not None:
        found = suppressing.applied(found, None if isinstance(source, (str, os.PathLike)) else source)
    if _write(found, targets):
        _summarise(found.verdict, found.findings)
    fail_at(found.findings, fail_on)


def _example(source: Any, batch: str | None) -> Any:
    """The batch that a model is to run on; None for none."""
    from gonio.cli.inputs import check_runs, read_batch

    if batch is None:
        return None
    example = read_batch(batch)
    if isinstance(source, (str, os.PathLike)):
        raise InvalidArgumentError("--batch runs a model", "a file alone", "Add --model FILE.py:FACTORY.")
    check_runs(source, example)
    return example


def _changes(
    context: typer.Context,
    sources: list[Any],
    how: dict[str, Any],
    targets: dict[str, str | None],
    fail_on: options.Level | None,
) -> None:
    from gonio import measuring

    _check_effect(context, sources)
    if len(sources) > 2:
        _refuse("more than two sources", {"--journal": how.pop("journal")})
    with progress("comparing") as update:
        found: Differences | Changes = measuring.measure(*sources, **how, progress=update)
    findings = found.all_findings if isinstance(found, measuring.Changes) else found.findings
    if _write(found, targets):
        _summarise(found.verdict, findings)
    fail_at(findings, fail_on)


def _widths(source: str, sizes: str, task: str, seed: int, targets: dict[str, str | None]) -> None:
    from gonio import measuring
    from gonio.cli.inputs import build_of_width
    from gonio.lab import tasks

    words = sizes.split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1 << 20 for word in words):
        raise InvalidArgumentError(
            "--widths takes whole numbers joined by commas", f"{sizes!r:.80}", "Write 64,128,256."
        )
    made, seeds = tasks.resolve(task), count(seed)
    batch = made.train.inputs[:_BATCH], made.train.targets[:_BATCH]
    found = measuring.widths(
        lambda width: build_of_width(source, width, seed=next(seeds)), [int(w) for w in words], batch, loss=made.loss
    )
    _write(found, targets)


def _refuse(mode: str, given: dict[str, Any]) -> None:
    """Refuse options that cannot be combined with a mode."""
    for name, value in given.items():
        if value:
            raise InvalidArgumentError(
                say("{name} cannot be combined with {mode}", name=name, mode=mode), "both", "Leave one of them out."
            )


def _write(found: Measurements | Differences | Changes | Widths, targets: dict[str, str | None]) -> bool:
    """Write the requested formats, or show the table; whether any format was requested."""
    page = partial(found.to_html, **made_now())
    writers: dict[str, Callable[[], str]] = {
        "html": page,
        "json": found.to_json,
        "csv": found.to_csv,
        "md": found.to_markdown,
    }
    saved = save_formats(targets, writers)
    if not saved:
        show(found)
    return saved


def _write_outline(source: Any, json: str | None) -> None:
    from gonio import measuring

    outline = measuring.outline(source)
    if not save_formats({"json": json}, {"json": outline.to_json}):
        show(outline)


def _summarise(verdict: Message, found: Sequence[Finding]) -> None:
    """The verdict and the first findings, to stderr."""
    print_err(verdict)
    for finding in found[:_SHOWN]:
        path = finding.path or local("the model")
        print_err(f"{local(finding.level):5} {finding.code}  {path}: {local(finding.found)}")
    if len(found) > _SHOWN:
        print_err(say("… and {n} more", n=len(found) - _SHOWN))


def fail_at(found: Sequence[Finding], fail_on: options.Level | None) -> None:
    """Exit with 1 if there is a finding of a level or above."""
    from gonio.measuring.findings.rules import at_least

    if fail_on is not None and (counted := len(at_least(found, fail_on))):
        told = {"n": counted, "s": "s" if counted > 1 else "", "level": fixed(fail_on)}
        print_err(say("{n} finding{s} at or above {level}", **told))
        raise typer.Exit(ExitCode.FINDING)
