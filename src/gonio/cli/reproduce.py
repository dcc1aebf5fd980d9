"""`gonio reproduce`: what papers claim, tried on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli import options
from gonio.cli.app import check_folders, print_err, print_out, save, show, users_code
from gonio.cli.compare import exit_if_partial
from gonio.errors import GonioError, InvalidArgumentError
from gonio.escaping import aligned, write_text
from gonio.messages import counted, local, say

if TYPE_CHECKING:
    from gonio.lab.claims import Claim, ClaimOptions, ClaimResults

_FOLDER = Path("gonio-claims")

_Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Claims of the catalogue, claim files, or PACKAGE:CLAIM; default: all quick ones.", metavar="CLAIM"
    ),
]
_List = Annotated[bool, typer.Option("--list", help="List the claims, and stop.")]
_Full = Annotated[bool, typer.Option("--full", help="The full experiments: minutes to hours.")]
_Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", help="Seeds of each claim; default: the claim's own, with --full at least 12.", min=1, max=1000
    ),
]
_FirstSeed = Annotated[
    int, typer.Option("--first-seed", help="First seed. Choose new seeds to repeat independently.", min=0, max=2**62)
]
_Device = Annotated[
    str, typer.Option("--device", help="What the runs compute on: cpu, cuda, cuda:N or mps.", metavar="DEVICE")
]
_Task = Annotated[str | None, typer.Option("--task", help="Your own task, as for gonio compare.", metavar="TASK")]
_Model = Annotated[str | None, typer.Option("--model", help=f"{options.MODEL_HELP}.", metavar="MODEL")]
_Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Folder of Fashion-MNIST or CIFAR-10, or file of text, for claims on them.", metavar="FOLDER"
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the runs and their estimated time, and stop.")]
_Output = Annotated[Path, typer.Option("-o", "--output", help="Folder of the studies.", metavar="STUDY")]


def reproduce(
    names: _Names = None,
    *,
    list_claims: _List = False,
    full: _Full = False,
    seeds: _Seeds = None,
    first_seed: _FirstSeed = 0,
    jobs: options.Runs = None,
    device: _Device = "cpu",
    task: _Task = None,
    model: _Model = None,
    data: _Data = None,
    dry_run: _DryRun = False,
    json: options.Json = None,
    output: _Output = _FOLDER,
) -> None:
    """Try what papers claim about these methods, and judge each claim by paired runs and an exact test.

    Without arguments: every quick claim, on handwritten digits. Each claim is a study in a folder of its own; rerun
    the same command to resume.
    """
    from gonio.lab.claims import ClaimOptions, load_claims
    from gonio.lab.claims.experiment import command_of

    check_folders({"json": json}, [*(names or []), task, model, data])
    if json is not None and (list_claims or dry_run):
        found = "--list" if list_claims else "--dry-run"
        raise InvalidArgumentError("--json writes the verdicts of runs", found, "Leave one of them out.")
    claims: Sequence[Claim] = load_claims(names or ())
    called = {claim.name: name for name, claim in zip(dict.fromkeys(names or ()), claims, strict=False)}
    if list_claims:
        _list({called.get(claim.name, claim.name): claim for claim in claims} | ({} if names else _shipped()))
        return
    claims = [claim for claim in claims if names or full or claim.budget == "quick"]
    chosen = ClaimOptions(
        full=full, seeds=seeds, first_seed=first_seed, device=device, task=task, model=model, data=data,
        sources=called,
    )  # fmt: skip
    if dry_run:
        with users_code(task, model):
            _show_plans(claims, chosen, jobs)
        return
    beside = {"--data": data, "-o": output if output != _FOLDER else None}
    _run(claims, chosen, output, jobs=jobs, json=json, command=command_of(names or (), chosen, beside))


def _shipped() -> dict[str, Claim]:
    """The claims of installed packages by what a command calls them; what is wrong with others goes to stderr."""
    from gonio.lab.claims import load_claim, shipped_files, useless_entry_points

    found = {}
    for name in shipped_files():
        try:
            found[name] = load_claim(name)
        except GonioError as error:
            print_err(say("{name} is left out: {error}", name=name, error=str(error)))
    for point in useless_entry_points():
        print_err(say("the entry point {point} of gonio.claims leads to no claims", point=point))
    return found


def _list(claims: Mapping[str, Claim]) -> None:
    """One line per claim: seed document, budget, scope, name, the verdict in the committed runs, and sentence."""
    from gonio.lab.claims import recorded
    from gonio.lab.showing.claims import sentence_of

    rows = [
        (c.seed, "–" if c.budget == "none" else c.budget, c.scope, name, recorded(name)[0], sentence_of(c))
        for name, c in claims.items()
    ]
    print_out("\n".join(aligned([tuple(map(local, row)) for row in rows])))


def _show_plans(claims: Sequence[Claim], chosen: ClaimOptions, jobs: int | None) -> None:
    """Runs and estimated time of each claim, from a few training steps of each arm."""
    from gonio.lab.claims.experiment import check_data, plan_claim, unfair_plan
    from gonio.lab.planning.dry_run import plan_seconds
    from gonio.lab.running.engines import default_jobs
    from gonio.pages.tables import duration

    check_data(claims, chosen)
    at_once, total = jobs or default_jobs(), 0.0
    for claim in claims:
        if claim.budget == "none":
            print_out(say("{name}: not tried: {not_tried}", name=claim.name, not_tried=claim.not_tried))
            continue
        plan = plan_claim(claim, chosen)
        seconds = plan_seconds(plan, at_once)
        total += seconds
        arms, seeds_of = counted(len(plan.recipes), "arm"), counted(len(plan.seeds), "seed")
        size = say("{arms} × {seeds}", arms=arms, seeds=seeds_of)
        print_out(
            say(
                "{name}: {size}, task {task}, about {time}{too_few}",
                name=claim.name,
                size=size,
                task=plan.task,
                time=duration(seconds),
                too_few=_too_few(claim, len(plan.seeds)),
            )
        )
        if unfair := unfair_plan(claim, plan, full=chosen.full):
            print_out(unfair)
    if all(claim.budget == "none" for claim in claims):
        return
    print_out(say("in all about {time} with {runs} at a time", time=duration(total), runs=counted(at_once, "run")))


def _too_few(claim: Claim, seeds: int) -> str:
    """A hint where no result of so many seeds could be clear after the correction for the claims of a family."""
    from gonio.lab.claims import families
    from gonio.lab.judging.statistics import enough

    size = max([1, *(len(of) for of in families().values() if claim.name in of)])
    least = enough(size)
    short = seeds < least and claim.scope != "identity"
    return say("; {least} seeds or more can decide it", least=least) if short else ""


def _run(
    claims: Sequence[Claim], chosen: ClaimOptions, output: Path, *, jobs: int | None, json: str | None, command: str
) -> None:
    """Run the studies, show the verdicts and write the page."""
    from gonio.lab import watcher_for
    from gonio.lab.claims import claims_in, try_claims
    from gonio.lab.showing.claims import claim_line, claims_html, claims_json, claims_text

    if not claims:
        raise InvalidArgumentError("reproduce needs a claim", "none", "See gonio reproduce --list.")
    watcher = watcher_for(sys.stderr)
    with users_code(chosen.task, chosen.model):
        found = try_claims(
            claims, output, options=chosen, jobs=jobs, watcher=watcher, command=command,
            each=lambda one: watcher.said(claim_line(one)),
        )  # fmt: skip
    show(claims_text(found))
    # claims of earlier calls stay on the page: no verdict depends on which were tried together
    every = claims_in(output) or found
    page = write_text(claims_html(replace(every, command=command)), output / "claims.html")
    print_out(say("\npage: {page}", page=page))
    if json is not None:
        save(claims_json(found), json, "JSON")
    if chosen.model is None:
        print_err(
            say(
                "on a model of your own: gonio check FILE, gonio measure FILE --html page.html, "
                "and gonio reproduce CLAIM --model FILE.py:FUNCTION"
            )
        )
    _check_complete(found)


def _check_complete(found: ClaimResults) -> None:
    """Exit with 4 if runs failed or are missing."""
    parts = ("planned", "failed", "refused", "missing")
    planned, failed, refused, missing = (sum(getattr(one, part) for one in found.results) for part in parts)
    exit_if_partial(planned - missing, failed=failed, refused=refused, missing=missing)
