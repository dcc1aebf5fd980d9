"""The program: its commands, its exit codes, and what it prints; results go to stdout, messages to stderr."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import gonio
from gonio.cli import settings
from gonio.cli.helping import LocalHelp
from gonio.cli.options import Lang, source_of
from gonio.errors import (
    ClaimError,
    ConfigError,
    GonioError,
    Interrupted,
    InvalidArgumentError,
    PlanChangedError,
    UnknownNameError,
    closest,
)
from gonio.escaping import aligned, plain, printed, write_text
from gonio.languages import language, language_of
from gonio.messages import LANGUAGES, Message, fixed, joined, local, recognised, said_by, say, tag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gonio.languages import Language

_FORMATS = {"html": say("page"), "json": "JSON", "csv": "CSV", "md": "markdown", "tex": "LaTeX"}


def print_out(text: str, *, err: bool = False) -> None:
    """Print a text or a message, in the language of the reader, without control characters."""
    said = local(text)
    typer.echo(plain(said, longest=len(said)), err=err)


print_err = partial(print_out, err=True)


def show(table: RenderableType) -> None:
    """Print to stdout with colours if it is a terminal (unless NO_COLOR is set), otherwise as plain text."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    print_out(printed(table))


def save(text: str, target: str, what: str) -> None:
    """Write a result to a file, with a message; `-` is stdout."""
    if target == "-":
        typer.echo(text, nl=not text.endswith("\n"))
        return
    try:
        write_text(text if text.endswith("\n") else f"{text}\n", target)
    except OSError as error:  # of a temporary file beside it, or of a device, whose errors have no name
        raise OSError(error.errno, error.strerror, target) from error
    print_err(say("{what} written to {target}", what=fixed(what), target=target))


def made_now() -> dict[str, str]:
    """What a page says of how it came about: this command, and the time."""
    return {"command": shlex.join(["gonio", *sys.argv[1:]]), "date": f"{datetime.now():%Y-%m-%d %H:%M}"}


def check_folder(target: str) -> None:
    """Check before the work that there is a folder for the result."""
    folder = Path(target).parent
    if not folder.is_dir():
        asked, found = say("cannot write {target!r}", target=target), say("no folder {folder!r}", folder=str(folder))
        raise InvalidArgumentError(asked, found, "Create it.")


def check_folders(targets: Mapping[str, str | None], reads: Sequence[str | None] = ()) -> None:
    """:func:`check_folder` of every option that writes a file; none may be of another option, or one that is read.

    Args:
        targets: the file of each option, by its name without dashes.
        reads: words of the command that may name files or folders, such as a checkpoint or FILE.py:FUNCTION.
    """
    written: dict[Path, str] = {}
    for name, target in targets.items():
        if target in (None, "-"):
            continue
        check_folder(str(target))
        asked, file = say("cannot write {target!r}", target=target), Path(str(target)).resolve()
        if file.is_dir():
            raise InvalidArgumentError(asked, say("a folder"), say("Name a file in it."))
        if file.exists() and not file.is_file():  # a device or a pipe takes several
            continue
        if file in written:
            options = joined([f"--{written[file]}", f"--{name}"], last=" and ")
            raise InvalidArgumentError(asked, say("one file for {options}", options=options), "Name another file.")
        written[file] = name
        for word in filter(None, reads):
            if _is_read(file, word):
                found = say("a file that this command reads ({word})", word=word)
                raise InvalidArgumentError(asked, found, "Name another file.")


def _is_read(file: Path, word: str) -> bool:
    """Whether a file is the one that a word names, a shard of it, or a part of the model in the folder it names."""
    from gonio.measuring.reading.shards import KINDS, is_index, weight_map

    if not file.exists():
        return False
    named = [Path(word), *([Path(word.rpartition(":")[0])] if ":" in word else [])]
    if any(path.is_file() and path.samefile(file) for path in named):
        return True
    if named[0].is_file() and is_index(named[0]):
        with suppress(GonioError):  # the command itself says what is wrong with the index
            shards = {named[0].parent / shard for shard in weight_map(named[0])[0].values()}
            return any(shard.is_file() and shard.samefile(file) for shard in shards)
    parts = file.suffix in KINDS or is_index(file) or file.name.endswith("config.json")
    return named[0].is_dir() and file.is_relative_to(named[0].resolve()) and parts


def save_formats(targets: Mapping[str, str | None], writers: Mapping[str, Callable[[], str]]) -> bool:
    """Write a result in each format that has a target; whether any has one."""
    for name, target in targets.items():
        if target is not None:
            save(writers[name](), target, _FORMATS[name])
    return any(target is not None for target in targets.values())


# --- errors and exit codes ------------------------------------------------------------------------------


class ExitCode(IntEnum):
    """Exit codes. A defect of gonio ends with a traceback and 70 (`EX_SOFTWARE`), because 1 means a finding."""

    FINE = 0
    FINDING = 1
    USAGE = 2
    REFUSED = 3
    PARTIAL = 4
    DEFECT = 70
    INTERRUPTED = 75
    CTRL_C = 130
    PIPE = 141


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that no handler takes it for a failure."""


class Commands(LocalHelp, TyperGroup):
    """Runs a command; every ending has one of the exit codes."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program in the language that the command line or the environment asks for."""
        words = args[0] if args else options.get("args")
        with language(asked_language(sys.argv[1:] if words is None else words, os.environ)):
            return super().main(*args, **options)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the words before the command."""
        try:
            return super().make_context(*args, **options)
        except Exception as error:
            if _is_usage_error(error):
                self._near_options(error)
                _finish(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        words = [*(getattr(ctx, "_protected_args", None) or ()), *ctx.args]
        try:
            with _sigterm_raises():
                self._set_defaults(ctx)
                return super().invoke(ctx)
        except BrokenPipeError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
            raise typer.Exit(ExitCode.PIPE) from error
        except (GonioError, OSError) as error:
            print_err(say("gonio: {message}", message=message_of(error)))
            raise typer.Exit(_exit_code(error)) from error
        except KeyboardInterrupt as error:
            print_err(
                say("gonio: stopped by Ctrl-C; rerun the same command to resume")
                if ctx.invoked_subcommand in ("compare", "reproduce")
                else say("gonio: stopped by Ctrl-C")
            )
            raise typer.Exit(ExitCode.CTRL_C) from error
        except Terminated as error:
            print_err(say("gonio: terminated"))
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            if _is_usage_error(error):
                _in_plain_words(error)
                if (refused := _of_file(error)) is not None:
                    print_err(say("gonio: {message}", message=message_of(refused)))
                    raise typer.Exit(ExitCode.REFUSED) from error
                self._near_options(error, words)
                _finish(error)
                raise
            print_err(traceback.format_exc())
            print_err(say("gonio: this is a defect of gonio; please report it with the lines above"))
            raise typer.Exit(ExitCode.DEFECT) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word; for a file or folder in its place the error names `gonio check`."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if args and isinstance(getattr(error, "message", None), str) and Path(args[0]).exists():
                near = f"gonio check {shlex.quote(args[0])}"
                said = say("No such command {name}. Did you mean {near}?", name=repr(args[0]), near=near)
                error.message = said  # type: ignore[attr-defined]
            raise

    def _near_options(self, error: Any, words: Sequence[str] = ()) -> None:
        """Of an unknown option, the file that is meant, its command's most similar one, or other commands' own."""
        name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
        if name is None or context is None or not hasattr(error, "possibilities"):
            return
        having = [f"gonio {each}" for each, command in self.commands.items() if name in options_of(command)]
        near = closest(name, options_of(context.command), count=1)
        files = [word for word in words if word.startswith(name) and Path(word).exists()]
        error.possibilities = None
        if files:
            told = shlex.quote(f"./{files[0]}")
            error.message = say("No such option: {name}. For the file write {file}.", name=name, file=told)
        elif having:
            told = joined(having, last=" and ")
            error.message = say("No such option: {name}. It is one of {commands}.", name=name, commands=told)
        elif near:
            error.message = say("No such option: {name}. Did you mean {near}?", name=name, near=near[0])

    def _set_defaults(self, ctx: Any) -> None:
        """Take the options that a file sets as defaults; with `--show-settings` show all settings and exit."""
        words = [*(getattr(ctx, "_protected_args", None) or ()), *ctx.args]
        if not words or words[0] not in settings.COMMANDS:
            return
        name, command = words[0], self.commands[words[0]]
        if {"-h", "--help"} & {*words}:
            return
        options = {max(p.opts, key=len).lstrip("-"): p.name for p in command.params if p.name != "help"}
        path = settings.named_file(words)
        function = next(each.callback for each in app.registered_commands if each.name == name)
        found = settings.defaults(path, name, settings.settings_of(function, options))
        ctx.default_map, ctx.meta[_FILE] = {name: found}, path
        if settings.SHOW in words:
            given = [word for word in words[1:] if word != settings.SHOW]
            inner = command.make_context(name, given, parent=ctx)
            rows = [(option, inner.params.get(each), _origin(inner, each, path)) for option, each in options.items()]
            print_out(settings.shown(rows, path))
            raise typer.Exit

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with their whole summaries; click would cut them."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])


def options_of(command: Any) -> list[str]:
    """The names of its options, `--help` among them."""
    return [name for parameter in command.params for name in parameter.opts if name.startswith("-")]


_FILE = "gonio.settings"  # of a context, where it has the file that set its defaults
_WORDS = {
    r"^Value error, ": "",
    r"Input should be greater than or equal to (\S+)": r"it must be \1 or more",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
}


def _in_plain_words(error: Any) -> None:
    """The message of an option's value without the words of its validator, and with the nearest choice."""
    text = getattr(error, "message", None)
    if not isinstance(text, str):
        return
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    if found := re.search(r"^'([^']*)' is not one of (.*)\.$", text):
        near = closest(found[1], re.findall(r"'([^']*)'", found[2]), count=1)
        text += f" Did you mean {near[0]!r}?" if near else ""
    error.message = text


def _of_file(error: Any) -> ConfigError | None:
    """The error of a configuration file whose value an option refuses, as one out of its range; else None."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if parameter is None or context is None:
        return None
    path = context.meta.get(_FILE)
    if path is None or source_of(context, parameter.name) != "DEFAULT_MAP":
        return None
    name = max(parameter.opts, key=len).lstrip("-")
    return ConfigError(str(path), [f"[{context.info_name}] {name}: {error.message}"])


# What click says of a command line, longest first where one begins like another.
_USAGE = tuple(
    map(
        str,
        (
            say("Missing argument {name}."),
            say("Missing option {name}."),
            say("Missing parameter {name}."),
            say("No such option: {name}."),
            say("No such command {name}. Did you mean {near}?"),
            say("No such command {name}."),
            say("Got unexpected extra argument(s) ({names})."),
            say("Got unexpected extra argument ({names})."),
            say("Got unexpected extra arguments ({names})."),
            say("Invalid value for {name}: {message}"),
            say("Option {name} requires an argument."),
            say("Option {name} does not take a value."),
            say("{value} is not one of {names}. Did you mean {near}?"),
            say("{value} is not one of {names}."),
            say("{value} is not in the range {range}."),
            say("{value} is not a valid integer."),
            say("{value} is not a valid float."),
            say("it must be {least} or more."),
            say("it must be at most {most}."),
            say("it must be a whole number."),
            say("it must be a number."),
        ),
    )
)


def _is_usage_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("typer.", "click."))


def _finish(error: Any) -> None:
    """End its sentence; let a usage error show itself in the language of the reader; in English click does."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return
    text = getattr(error, "message", None)
    if isinstance(text, str) and text and text[-1] not in ".?!":
        error.message = f"{text}."
    if tag() != "en" and hasattr(error, "show"):
        error.show = partial(_show_usage, error)


def _show_usage(error: Any, file: Any = None) -> None:
    context = getattr(error, "ctx", None)
    if context is not None:
        print_err(say("Usage: {usage}", usage=context.get_usage().partition(":")[2].strip()))
        print_err(say("Try '{command}' for help.", command=f"{context.command_path} {context.help_option_names[0]}"))
        print_err("")
    text = error.format_message()
    print_err(say("Error: {message}", message=text if isinstance(text, Message) else recognised(text, _USAGE)))


def _origin(context: Any, parameter: str, path: Path | None) -> str:
    """Where the value of a parameter comes from."""
    names = {"COMMANDLINE": say("command line"), "DEFAULT_MAP": path.name if path else ""}
    return names.get(source_of(context, parameter), say("default"))


def _exit_code(error: GonioError | OSError) -> ExitCode:
    """A wrong name or value of the command line is a usage error, everything else is refused input."""
    if isinstance(error, Interrupted):
        return ExitCode.INTERRUPTED
    named = isinstance(error, (UnknownNameError, InvalidArgumentError)) and not isinstance(error, ClaimError)
    return ExitCode.USAGE if named else ExitCode.REFUSED


def message_of(error: GonioError | OSError) -> Message:
    """The message with the notes that were added to the error."""
    if isinstance(error, PlanChangedError):
        return _plan_changes(error)
    text = said_by(error)
    if isinstance(error, OSError) and error.strerror:
        text = Message(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    return joined([text, *getattr(error, "__notes__", [])], "\n")


def _plan_changes(error: PlanChangedError) -> Message:
    """The differences of two plans as a table."""
    head = tuple(map(local, (say("setting"), say("study"), say("command"))))
    lines = aligned([head, *((key, old[:60], new[:60]) for key, old, new in error.changes)])
    return say(
        "the study has another plan:\n{lines}\nRepeat the study's settings to resume it, or choose another folder "
        "(-o NEW); only seeds and recipes can be added.",
        lines="\n".join(f"  {line}" for line in lines),
    )


class UserCodeError(GonioError):
    """The user's own code raised an exception."""


@contextmanager
def users_code(*specs: str | None) -> Iterator[None]:
    """Inside, an exception becomes a UserCodeError if one of the specs names the user's own code."""
    from gonio.models.by_name import is_user_code

    named = [spec for spec in specs if spec is not None and is_user_code(spec)]
    try:
        yield
    except (GonioError, OSError):
        raise
    except (Exception, SystemExit) as error:
        if not named:
            raise
        files = [Path(spec.rpartition(":")[0]).resolve() for spec in named]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() in files]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        ran = {(Path(f.filename).resolve(), f.name) for f in frames}
        named = [s for s, file in zip(named, files, strict=True) if (file, s.rpartition(":")[2]) in ran] or named
        raise UserCodeError(
            say(
                "{specs} raised {kind}: {error}{place}",
                specs=joined(named, last=" and "),
                kind=type(error).__name__,
                error=str(error),
                place=place,
            )
        ) from error


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside the block SIGTERM raises :class:`Terminated`; only a main thread can have a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def asked_language(words: Sequence[str], environment: Mapping[str, str]) -> Language:
    """The language of `--lang` among the words of a command line, else the environment's."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name = following if word == "--lang" else word.removeprefix("--lang=")
        if word == "--":
            break
        if word.startswith("--lang") and name in LANGUAGES:
            return "zh" if name == "zh" else "en"
    return language_of(environment)


# --- the program ----------------------------------------------------------------------------------------

app = typer.Typer(
    name="gonio",
    cls=Commands,
    help="Measure and control the norms and angles of neural-network weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's panels would double the time of --help
    context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print_out(f"gonio {gonio.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    lang: Lang = None,
) -> None:
    pass


def main() -> None:
    """Run the program and exit with its code."""
    shell = os.environ.get("_GONIO_COMPLETE", "")
    if shell.endswith("_source"):  # as click spells it; typer reverses the words
        os.environ["_GONIO_COMPLETE"] = f"source_{shell.removesuffix('_source')}"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the descriptor is closed, and no file that is opened later may get it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="replace")  # for an encoding that lacks a character
    try:
        app(prog_name="gonio")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # exiting: a second Ctrl-C would only print a traceback
