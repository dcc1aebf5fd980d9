"""`--help` in the language of the reader: texts of the catalogue, wrapped and aligned by their width in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from gonio.escaping import display_width
from gonio.messages import fixed, joined, local, recognised, say, tag

_Formatter: Any = typer.Context.formatter_class  # typer has its own copy of click, earlier versions import it
_NOT_FIRST = " ，。；：！？、）】》”’…,.;:!?)]}"  # of a line
_FIRST_COLUMN = 30  # at most: a longer name has its text in the next line
# What typer and click write of an option, behind its help and in brackets.
_FACTS = (str(say("default: {value}")), str(say("required")), str(say("env var: {name}")))
_OF_TYPER = (  # its headings and its own options, for the catalogue
    say("Options"),
    say("Arguments"),
    say("Commands"),
    say("Show this message and exit."),
    say("Install completion for the current shell."),
    say("Show completion for the current shell, to copy it or customize the installation."),
)


class LocalFormatter(_Formatter):
    """Click's formatter; in another language than English it looks each paragraph up, and wraps by width."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """The line of the usage."""
        super().write_usage(prog, args, local(say("Usage: {usage}", usage="")))

    def write_heading(self, heading: str) -> None:
        """The title of a list."""
        self.write(f"{'':>{self.current_indent}}{local(say('{name}:', name=fixed(heading)))}\n")

    def write_text(self, text: str) -> None:
        """Paragraphs."""
        if tag() == "en":
            super().write_text(text)
            return
        indent = " " * self.current_indent
        paragraphs = [wrapped(local(each), self.width - len(indent)) for each in paragraphs_of(text)]
        self.write("\n\n".join("\n".join(f"{indent}{line}" for line in lines) for lines in paragraphs) + "\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = _FIRST_COLUMN, col_spacing: int = 2) -> None:
        """Names with their texts, in two columns."""
        if tag() == "en":
            super().write_dl(rows, col_max, col_spacing)
            return
        first = min(max(display_width(name) for name, _ in rows), col_max) + col_spacing
        before = " " * self.current_indent
        for name, text in rows:
            lines = list(wrapped(_of_option(text), max(self.width - first - 2, 10)))
            if display_width(name) > first - col_spacing:
                self.write(f"{before}{name}\n")
                name = ""
            gaps = [f"{name}{' ' * (first - display_width(name))}", *[" " * first] * len(lines)]
            self.write("".join(f"{before}{gap}{line}\n" for gap, line in zip(gaps, lines, strict=False)))


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a help, each on one line, as the catalogue has them."""
    return [" ".join(each.split()) for each in re.split(r"\n\s*\n", text) if each.strip()]


def _of_option(text: str) -> str:
    """The help of an option or a command, and the facts that follow in brackets."""
    found = re.fullmatch(r"(.*?)(?:(?:^|  )\[([^\[\]]*)\])?", text, re.DOTALL)
    said, facts = found.groups() if found else (text, None)
    shown = " ".join(map(local, paragraphs_of(said)))
    if facts is None:
        return shown
    inside = joined([recognised(fact, _FACTS) for fact in facts.split("; ")], "; ")
    return f"{shown}  [{local(inside)}]".strip()


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of at most this width in a terminal, broken at spaces and between wide characters."""
    line = ""
    for part in _parts(text):
        if line and display_width(line) + display_width(part.rstrip()) > width:
            yield line.rstrip()
            line = ""
        line += part.lstrip() if not line else part
    yield line.rstrip()


def _parts(text: str) -> Iterator[str]:
    """What no line break divides: what is in brackets, words, and wide characters with the punctuation behind them."""
    for piece in re.split(r"(\[[^\[\]]*\])", text):
        part = ""
        for character in piece:
            wide = bool(part) and 2 in (display_width(character), display_width(part[-1]))
            if part and not piece.startswith("[") and (wide or part[-1] == " ") and character not in _NOT_FIRST:
                yield part
                part = ""
            part += character
        if part:
            yield part


def _arguments_of(command: Any, ctx: Any) -> list[Any]:
    """Its parameters that are words without a dash."""
    return [each for each in command.get_params(ctx) if each.param_type_name == "argument"]


def _of_usage(argument: Any) -> str:
    """The name of an argument, with `…` if it takes several words, in brackets if it takes none as well."""
    name = f"{argument.metavar or argument.name.upper()}{'…' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


class LocalHelp:
    """A command, or a group of them, whose help is in the language of the reader."""

    format_help: Any

    def get_help(self, ctx: Any) -> str:
        """The help of `--help`."""
        made = LocalFormatter(width=ctx.terminal_width, max_width=ctx.max_content_width)
        self.format_help(ctx, made)
        return str(made.getvalue()).rstrip("\n")


class Command(LocalHelp, TyperCommand):
    """A command of the program."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of its usage as the pages write them: `PATH…` for several, brackets for what can be left out."""
        return [str(self.options_metavar), *map(_of_usage, _arguments_of(self, ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Its arguments, by the words of the usage without their types, and its options."""
        arguments = _arguments_of(self, ctx)
        named = [(_of_usage(each).strip("[]"), each.get_help_record(ctx)[1]) for each in arguments]
        options = [each.get_help_record(ctx) for each in self.get_params(ctx) if each not in arguments]
        for heading, rows in (("Arguments", named), ("Options", [row for row in options if row is not None])):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Its first sentence, for a list of commands."""
        if tag() == "en":
            return super().get_short_help_str(limit)
        return local(paragraphs_of(self.help or "")[0]).partition("。")[0]
