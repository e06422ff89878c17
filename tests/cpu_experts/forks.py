"""Runs a function in a forked child of the test process, which ends there."""

import os
import signal
import traceback
from collections.abc import Callable

LIMIT = 120  # seconds: a deadlock ends too


def in_a_child(act: Callable[[], object]) -> int:
    """The status of a child that calls `act`: 0 where that gives something true."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's would raise, and the child go on with the tests
        signal.alarm(LIMIT)
        code = 1
        try:
            code = 0 if act() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]
