"""Ctrl-C that is not lost."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noticed_interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed.

    Python raises KeyboardInterrupt wherever it happens to be. Inside a callback of the garbage collector, which JAX has, the
    exception is printed and dropped: then only this function knows of it."""
    pressed = threading.Event()

    def press(*_) -> None:
        pressed.set()
        raise KeyboardInterrupt

    def unraisable(dropped) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            hook(dropped)

    on_main_thread = threading.current_thread() is threading.main_thread()  # no other can set a handler
    # A background job ignores SIGINT
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed.is_set
        return
    hook, handler = sys.unraisablehook, signal.signal(signal.SIGINT, press)
    sys.unraisablehook = unraisable
    try:
        yield pressed.is_set
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)


@contextmanager
def second_interrupt(say: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C only has something said, the second one interrupts: a terminal sends it to all processes that it runs."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return

    def first(*_) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
