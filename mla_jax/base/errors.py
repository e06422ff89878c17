"""The errors a user can meet: one type per cause, each with the exit code of the command line.

The first argument is the finding; every further one is a line of detail: the expectation, the place, the remedy."""


class MlaJaxError(Exception):
    """Base of every error raised on purpose; catch this to catch them all."""

    exit_code = 2

    def __init__(self, finding: str, *details: str):
        super().__init__(finding, *details)

    def __str__(self) -> str:
        return "\n  ".join(str(line) for line in self.args)


class BadRequest(MlaJaxError):
    """A prompt or a sampling parameter that cannot be served."""


class TooLong(BadRequest):
    """A prompt, or a prompt with its answer, that is longer than the context. `context` is its tokens."""

    def __init__(self, finding: str, *details: str, context: int = 0):
        super().__init__(finding, *details)
        self.context = context


class BadFile(MlaJaxError):
    """A file that is damaged, incomplete or of another kind than it claims."""

    exit_code = 3


class BadConfig(MlaJaxError):
    """A config.json that is unreadable or describes no possible model."""

    exit_code = 3


class BadTemplate(MlaJaxError):
    """A chat template that cannot be read or rendered, or takes too long or too much memory."""

    exit_code = 3


class Unsupported(MlaJaxError):
    """A valid input that this version cannot run correctly, so does not run at all."""

    exit_code = 3


class DoesNotFit(MlaJaxError):
    """More memory is needed than there is, or more room on a disk."""

    exit_code = 4


class Overloaded(MlaJaxError):
    """More requests wait than may. `seconds` is about how long to wait before the next try."""

    exit_code = 6

    def __init__(self, finding: str, *details: str, seconds: float = 1.0):
        super().__init__(finding, *details)
        self.seconds = seconds


class ProcessLost(MlaJaxError):
    """One of several processes that share a model is gone, so none of them can go on."""

    exit_code = 5


def shortened(lines: list[str], most: int = 12) -> list[str]:
    """The first few details of many, and how many more there are."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most:,} more"]


def printable(name: str, limit: int = 80) -> str:
    """`name` from an untrusted file as one safe, short line: control characters escaped, the middle cut."""
    shown = name.encode("unicode_escape").decode("ascii") or "''"
    return shown if len(shown) <= limit else f"{shown[: limit // 2]}...{shown[-limit // 4 :]}"


def shown(value: object, limit: int = 80) -> str:
    """Any value from an untrusted file or caller as one safe, short line, whatever its `repr` does.

    Python itself refuses to write a huge integer."""
    try:
        return printable(repr(value), limit)
    except Exception:
        if isinstance(value, int):
            return f"a number of {value.bit_length():,} bits"
        return f"a {type(value).__name__} too deep or with a number too large to show"
