"""Typed errors with stable codes: what is wrong, where in the kernel, which limit, and what to do.

Every error of the simulator and the model carries a `code` that never changes its meaning; messages are part of the
interface and are tested whole. Nothing raised by numpy, json or struct reaches a user through this package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that change the direction of text, and lone surrogates."""
LONGEST_MESSAGE = 400
LONGEST_PATH = 200
"""Characters of a path in a message."""


def shown(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return a text with its control characters escaped for a terminal, except tabs and line ends.

    If the text has more than `most` characters, its middle is replaced by an ellipsis.
    """
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} … {text[len(text) - most // 3 :]}"
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(error: BaseException) -> str:
    """Return an error as one line for a terminal: its code or, without one, its type, and its message's first line."""
    text = str(error).split("\n")[0]
    return shown(text if isinstance(error, NkwError) else f"{type(error).__name__}: {text}")


@dataclass(frozen=True, slots=True)
class Location:
    """Line of the user's kernel, or only a function.

    `file` is empty for a location without a line, such as a replayed launch.
    """

    file: str
    line: int
    function: str

    @property
    def file_line(self) -> str:
        """File and line as FILE:LINE, or the name of the function if there is no line."""
        return f"{self.file}:{self.line}" if self.file else self.function

    def __str__(self) -> str:
        return f"{self.file_line} in {self.function}" if self.file else self.function


def format_location(where: Location | None, callers: Sequence[Location]) -> list[str]:
    """Return the lines of a message that say where an error is: the kernel's line, then its callers, innermost first.

    At most 6 callers are listed. The lines are indented, and the list is empty if nothing is known.

    Args:
        where: The kernel's line, if it is known.
        callers: Lines that called it.
    """
    lines = [f"  at {where}"] if where else []
    lines += [f"  called at {caller}" for caller in callers[:_MOST_CALLERS]]
    if len(callers) > _MOST_CALLERS:
        lines.append(f"  and {len(callers) - _MOST_CALLERS} callers more")
    return lines


_MOST_CALLERS = 6


class NkwError(Exception):
    """Base of all errors of NKI Workbench; `code` is stable, and `where` is the kernel's line if it is known."""

    def __init__(self, code: str, message: str, where: Location | None = None) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.where = where
        self.callers: tuple[Location, ...] = ()
        """Lines that called the kernel's line, innermost first, if it is in a helper of the kernel."""

    def __str__(self) -> str:
        return "\n".join([f"[{self.code}] {self.message}", *self.format_location()])

    def format_location(self) -> list[str]:
        """Return the indented lines of the message that say where the error is, as the function `format_location`."""
        return format_location(self.where, self.callers)


class InvalidArgument(NkwError, ValueError):
    """Error of a value from the user that no chip and no kernel accepts."""


class NoVerdict(NkwError):
    """Error of a user's code that ended or failed before it returned a result, so there is no verdict."""


class Unsupported(NkwError):
    """Error of a documented name or combination that this simulator does not implement, with the reason."""


class Deadlock(NkwError):
    """Error of a launch in which all cores that have not finished wait for another core."""


class RendezvousMismatch(NkwError):
    """Error of a collective, a sendrecv or a barrier whose members disagree on its operation, shapes or groups."""


class NkiValidationError(NkwError):
    """Error of a kernel that breaks a rule of the hardware; `nki.isa` documents the error under this name."""


class RuleViolation(NkiValidationError, AssertionError):
    """Error of one instruction that breaks one rule.

    The class is also an AssertionError, because the official simulator raises AssertionError and tests for it expect
    that. The planner sets the instruction and its operands, and `issue` sets the kernel's line.
    """

    def __init__(
        self, rule: Callable[..., object], seen: str | Callable[[], str], limit: str = "", hint: str = ""
    ) -> None:
        """Create the error of a rule function.

        Args:
            rule: The rule function, registered by `rule`.
            seen: The values that break the rule, or a function that returns them when the error is printed.
            limit: The limit, if it differs from the rule's.
            hint: What to do, if it differs from the rule's.
        """
        super().__init__(get_code(rule), get_sentence(rule))
        self._seen = seen
        self.limit = limit or rule.limit  # type: ignore[attr-defined]
        self.hint = hint or rule.hint  # type: ignore[attr-defined]
        self.instruction = ""
        self.operands: Mapping[str, str] = {}

    @property
    def seen(self) -> str:
        """Values that break the rule, as text."""
        if not isinstance(self._seen, str):
            self._seen = self._seen()
        return self._seen

    def __str__(self) -> str:
        head = f"[{self.code}] {self.instruction + ': ' if self.instruction else ''}{self.message}"
        lines = [head, f"  seen:  {self.seen}"]
        if self.limit:
            lines.append(f"  limit: {self.limit}")
        lines += [f"  {name} = {text}" for name, text in self.operands.items()]
        if self.hint:
            lines.append(f"  try:   {self.hint}")
        return "\n".join([*lines, *self.format_location()])


class OutOfBounds(RuleViolation, IndexError):
    """Error of an access outside of its tensor; also an IndexError, which the Beta 1 simulator raised."""


RULES: dict[str, str] = {}
"""Sentences of rules by code, which the command `explain` prints."""


def rule(
    code: str, *, limit: str = "", hint: str = ""
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator that registers a rule function under a stable code.

    The first line of the function's docstring is the sentence that the rule enforces. The function gets the attributes
    `code`, `limit` and `hint`, and its sentence is stored in `RULES`.

    Args:
        code: The code. An assertion fails if another rule has it.
        limit: Default limit in messages about violations.
        hint: Default text of what to do.
    """

    def register(function: Callable[..., object]) -> Callable[..., object]:
        assert code not in RULES, f"rule code {code} is used twice"
        assert function.__doc__, f"rule {function.__name__} states no sentence"
        RULES[code] = function.__doc__.strip().splitlines()[0]
        function.code, function.limit, function.hint = code, limit, hint  # type: ignore[attr-defined]
        return function

    return register


def get_code(rule_function: Callable[..., object]) -> str:
    """Return the stable code of a rule function."""
    return rule_function.code  # type: ignore[attr-defined]


def get_sentence(rule_function: Callable[..., object]) -> str:
    """Return the sentence that a rule function enforces."""
    return RULES[get_code(rule_function)]
