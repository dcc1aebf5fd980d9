"""Regular expressions of a file, matched in a bounded number of steps.

The module `re` takes exponential time for some expressions, and a file may hold any. Here an expression becomes an
automaton without backtracking: its states are sets of places in the expression, as the bits of a number.

Literals, `.`, classes, alternatives, groups, repetitions, `^`, `$`, and looking ahead at the beginning of the whole
expression are understood; any other expression is refused.

References: V. Glushkov, "The abstract theory of automata", Russian Mathematical Surveys 16, 1961.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_LONGEST, _PLACES, _PARTS, _DEPTH = 1000, 500, 5000, 40  # characters, places, parts, groups in one another
_KEPT = 20_000  # moves of an automaton that are remembered
_NEW, _READ = 200, 200  # steps that a move which is not remembered takes, and a part of an expression
_START, _END = "start", "end"  # symbols before and after the characters of a text
_AHEAD = re.compile(r"(\^?)\(\?([=!])")
_SINGLE = re.compile(r"\\[dDwWsS]|\\[^\w\s]|[^\\()\[\]{}|*+?^$]|\[\^?(?:\\[dDwWsS]|\\[^\w\s]|[^\\\[\]])+\]", re.DOTALL)
_OF_SETS = re.compile(r"--|&&|~~|\|\|")  # in classes, where later versions of Python may read them otherwise
_TIMES = re.compile(r"(?:([*+?])|\{(\d{1,3})(?:(,)(\d{0,3}))?\})\??")  # a lazy repetition matches the same texts


@dataclass
class Budget:
    """The steps that remain for all matches of a file."""

    left: int

    def spend(self, steps: int) -> None:
        """Raises: ValueError, if fewer steps remain."""
        self.left -= steps
        if self.left < 0:
            raise ValueError("its patterns take too many steps")


class Pattern:
    """An expression, matched from the beginning of a text as `re.match` does.

    Attributes:
        steps: that it took to read it.

    Raises:
        ValueError: for an expression that is not valid, or not understood.

    Example:
        >>> from gonio.measuring.reading.patterns import Budget, Pattern
        >>> pattern, budget = Pattern(r".*\\.(?:1[0-5])\\..*gate"), Budget(100_000)
        >>> pattern.matches("layers.12.gate_proj", budget), pattern.matches("layers.2.gate_proj", budget)
        (True, False)
    """

    def __init__(self, text: str) -> None:
        refused = f"the pattern {text[:60]!r} is not understood"
        self._ahead: list[tuple[_Automaton, bool]] = []
        self.steps = 0
        try:
            rest = text if len(text) <= _LONGEST else "("
            while ahead := _AHEAD.match(rest):
                reader = _Expression(rest, ahead.end())
                self._ahead.append((reader.automaton(reader.either(0), ")"), ahead[2] == "="))
                self.steps += _READ * reader.parts
                rest = f"{ahead[1]}{rest[reader.at + 1 :]}"
            reader = _Expression(rest, 0)
            self._rest = reader.automaton(reader.sequence(0) if self._ahead else reader.either(0), "")
            self.steps += _READ * reader.parts
            re.compile(text)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            raise ValueError(refused) from error

    def matches(self, text: str, budget: Budget) -> bool:
        """Whether the text begins with a match. Raises: ValueError, if the budget does not last."""
        ahead = all(one.begins(text, budget) == wanted for one, wanted in self._ahead)
        return ahead and self._rest.begins(text, budget)


class _Part(NamedTuple):
    """A part of an expression: whether it matches the empty text, and the places where it begins and ends."""

    empty: bool
    first: int = 0
    last: int = 0


@dataclass
class _Automaton:
    """The places of an expression: what each of them matches, and the places that may follow it."""

    tests: list[Callable[[str], object]] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    whole: _Part = field(default_factory=lambda: _Part(True))
    known: dict[tuple[int, str], tuple[int, bool]] = field(default_factory=dict)

    def begins(self, text: str, budget: Budget) -> bool:
        """Whether a text begins with a match."""
        state, ended = self._anchored(self.whole.first, budget, _START, *([] if text else [_END]))
        budget.spend(len(text))
        for symbol in text:
            if ended or not state or self.whole.empty:
                return ended or self.whole.empty
            state, ended = self.known.get((state, symbol)) or self._moved(state, symbol, budget)
        return ended or self.whole.empty or self._anchored(state, budget, _END)[1]

    def _anchored(self, state: int, budget: Budget, *symbols: str) -> tuple[int, bool]:
        """As :meth:`_moved` for anchors, which take no character: the places before them wait on."""
        while True:
            moves = [self._moved(state, symbol, budget) for symbol in symbols]
            reached = state
            for moved, _ in moves:
                reached |= moved
            if any(ended for _, ended in moves) or reached == state:
                return state, any(ended for _, ended in moves)
            state = reached

    def _moved(self, state: int, symbol: str, budget: Budget) -> tuple[int, bool]:
        """The places that wait for the next symbol after this one, and whether a match ends here."""
        budget.spend(_NEW + state.bit_count())
        matched = [place for place in _places(state) if self.tests[place](symbol)]
        moved = 0
        for place in matched:
            moved |= self.follow[place]
        if len(self.known) >= _KEPT:
            self.known.clear()
        found = self.known[state, symbol] = (moved, any(self.whole.last >> place & 1 for place in matched))
        return found


def _places(state: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(f"{state:b}")) if bit == "1"]


class _Expression:
    """Reads an expression from a place in it, part by part.

    Attributes:
        at: the character that is read next. `parts`: that were read, again where they are repeated.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at, self.parts = text, at, 0
        self._made = _Automaton()

    def automaton(self, whole: _Part, closed: str) -> _Automaton:
        """What was read; it has to end before this bracket, or with the text."""
        if self.text[self.at : self.at + 1] != closed:
            raise ValueError("a part is not understood")
        self._made.whole = whole
        return self._made

    def either(self, depth: int) -> _Part:
        """Alternatives."""
        made = self.sequence(depth)
        while self.text.startswith("|", self.at):
            self.at += 1
            other = self.sequence(depth)
            made = _Part(made.empty or other.empty, made.first | other.first, made.last | other.last)
        return made

    def sequence(self, depth: int) -> _Part:
        """Parts one after the other."""
        made = _Part(True)
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            made = self._joined(made, self._repeated(depth))
        return made

    def _joined(self, one: _Part, other: _Part) -> _Part:
        for place in _places(one.last):
            self._made.follow[place] |= other.first
        first = one.first | (other.first if one.empty else 0)
        return _Part(one.empty and other.empty, first, other.last | (one.last if other.empty else 0))

    def _repeated(self, depth: int) -> _Part:
        begin, part = self.at, self._atom(depth)
        times = _TIMES.match(self.text, self.at)
        if times is None:
            return part
        end, (sign, low, comma, high) = times.end(), times.groups()
        least = int(low) if low else int(sign == "+")
        most = int(high) if high else 1 if sign == "?" else None if sign or comma else least
        made = _Part(True)
        for number in range(1 if most is None and not least else least if most is None else most):
            if number:  # the part again, with places of its own
                self.at = begin
                part = self._atom(depth)
            if most is None and number == max(least, 1) - 1:
                self._joined(part, part)
            made = self._joined(made, part._replace(empty=True) if number >= least else part)
        self.at = end
        return made

    def _atom(self, depth: int) -> _Part:
        self.parts += 1
        if self.parts > _PARTS or depth > _DEPTH:
            raise ValueError("it has too many parts")
        for sign, symbol in (("^", _START), ("$", _END)):
            if self.text.startswith(sign, self.at):
                self.at += 1
                return self._place(symbol.__eq__)
        if self.text.startswith("(", self.at):
            self.at += 3 if self.text.startswith("(?:", self.at) else 1
            made = self.either(depth + 1)
            if not self.text.startswith(")", self.at):
                raise ValueError("a group is not closed")
            self.at += 1
            return made
        single = _SINGLE.match(self.text, self.at)
        if single is None or (len(single[0]) > 2 and _OF_SETS.search(single[0])):
            raise ValueError("a part is not understood")
        self.at = single.end()
        return self._place(re.compile(single[0]).fullmatch)

    def _place(self, test: Callable[[str], object]) -> _Part:
        number = len(self._made.tests)
        if number == _PLACES:
            raise ValueError("it is too long")
        self._made.tests.append(test)
        self._made.follow.append(0)
        return _Part(False, 1 << number, 1 << number)
