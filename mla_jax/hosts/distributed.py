"""Several processes as one run of JAX: started once in each process, and held together by a link.

JAX aborts with a long C++ trace when the coordinator's connection drops. Here it goes through `proxy`, whose connections stay
open, so that the link's error comes first."""

import atexit
import contextlib
import json
import os
import re
import secrets
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mla_jax.base.errors import BadRequest, MlaJaxError, ProcessLost, Unsupported, shown
from mla_jax.hosts import channel
from mla_jax.hosts.channel import PATIENCE, Ended, Link

KEY = "mla_jax/link"  # where process 0 tells the others of its link
# NCCL connects two GPUs when the first long message goes between them. If it takes memory for that by cuMem, its default, GPUs
# of two processes wait for each other forever: seen with NCCL 2.28.9 and messages of 2 MB between H200s (2026-11-26).
CONNECTS = "NCCL_CUMEM_ENABLE", "0"
LEAVING = 30  # seconds that a process which has ended waits for the others

_running: "list[Processes]" = []  # none, or the one: JAX starts once in a process


class Processes:
    """All processes of a run, as one of them sees them."""

    def __init__(self, process: int, count: int, link: Link):
        self.process, self.count, self.link = process, count, link
        self.serves = False  # whether the model is there: the others follow process 0 then
        self.code: int | None = None  # with which this process ends, once it has failed

    @property
    def leads(self) -> bool:
        return self.process == 0

    @property
    def name(self) -> str:
        return f"process {self.process} of {self.count}, on {socket.gethostname()},"

    def same(self, value: Any) -> Any:
        """Process 0's value in all of them, as JSON has it."""
        if self.leads:
            self.link.tell(value)
            return value
        if (found := self.link.orders.get()) is None:
            raise ProcessLost("process 0 has ended before the model was loaded")
        return found

    def least(self, number: int) -> int:
        """The smallest of all their numbers."""
        return self._of_all(number, lambda numbers: min(numbers.values()))

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises BadRequest, in all of them, if one has other facts than process 0."""
        if found := self._of_all(dict(facts), _differences):
            advice = "give all of them the same options, files and versions"
            raise BadRequest("the processes do not agree", *found, advice)

    def _of_all(self, value: Any, made: Callable[[dict[int, Any]], Any]) -> Any:
        """The result that process 0 has made of the values of all, by process; in all of them."""
        if self.leads:
            return self.same(made({0: value, **self.link.answers()}))
        self.link.answer(value)
        return self.same(None)

    def fail(self, words: str, code: int) -> None:
        """Ends the others, with these words of why; this process ends with `code`."""
        if self.code is None:
            self.link.fail(f"{self.name} has ended: {words}")
        self.code = code

    def end(self) -> None:
        """When Python ends: if all is well, all of them do together."""
        if self.code is None and not self.link.over.is_set() and not (self.leads and self.serves):
            self.fail("it leads no longer" if self.leads else "it follows no longer", 1)
        if self.code is not None:
            _flush_streams()
            os._exit(self.code)  # without the others JAX would wait for them
        self.link.close()
        jax.distributed.shutdown()


def running() -> Processes | None:
    """The processes of which this is one; None if it is alone."""
    return _running[0] if _running else None


def fail(error: BaseException, code: int) -> None:
    """Where this is one of several processes, ends the others, which cannot go on without it."""
    if _running and not isinstance(error, ProcessLost):
        _running[0].fail(str(error) or type(error).__name__, code)


@contextlib.contextmanager
def together():
    """An error in here ends all processes."""
    try:
        yield
    except MlaJaxError as e:
        fail(e, e.exit_code)
        raise


def _restoring(ended: Ended) -> Ended:
    """`ended`, before which the terminal is set back: a line editor does not get to do that."""
    if not sys.__stdin__ or not sys.__stdin__.isatty():
        return ended
    settings = termios.tcgetattr(0)

    def with_terminal(error: ProcessLost) -> None:
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(0) == os.getpgrp():  # a job in the background would be stopped
                termios.tcsetattr(0, termios.TCSANOW, settings)
        ended(error)

    return with_terminal


def start(coordinator: str, count: int, process: int) -> Processes:
    """Waits until all processes are there; raises BadRequest, or Unsupported if they do not come.

    JAX must not have been used before. A second call returns what the first did."""
    if _running:
        return _running[0]
    host, port = _address(coordinator)
    if not jax.distributed.is_initialized():
        _initialize(host, port, count, process)
    _running.append(Processes(process, count, _linked(host, count, process, _restoring(_say_and_exit))))
    atexit.register(_running[0].end)
    return _running[0]


def _initialize(host: str, port: int, count: int, process: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    os.environ.setdefault(*CONNECTS)
    address = f"{host}:{port}"
    bound = f"{host}:{port}" if host in channel.LOCAL else None
    if process:
        _await(host, port)
        address = f"127.0.0.1:{proxy(host, port)}"
    given: dict[str, Any] = {"initialization_timeout": int(PATIENCE), "shutdown_timeout_seconds": LEAVING}
    given["cluster_detection_method"] = "deactivate"  # what Slurm's would find: one device a process
    try:
        jax.distributed.initialize(address, count, process, coordinator_bind_address=bound, **given)
    except RuntimeError as e:
        raise _explained(e, f"the {count} processes have not come together at {host}:{port}") from e


def _explained(error: RuntimeError, late: str) -> MlaJaxError:
    if "must be called before" in str(error):
        advice = "with several processes make the LLM before anything else uses JAX"
        return BadRequest("JAX is in use already", advice)
    alike = "each needs the same --coordinator and --processes, and its own --process-id"
    return Unsupported(late, alike, str(error)[:300])


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if not (_is_host(host) and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16):
        expected = "expected HOST:PORT of process 0, such as node1:8476"
        raise BadRequest(f"coordinator is {shown(coordinator)}", expected)
    return host, int(port)


def _is_host(host: str) -> bool:
    try:
        return bool(host.encode("idna")) and host.isprintable() and " " not in host
    except UnicodeError:
        return False


def _await(host: str, port: int) -> None:
    """Until process 0 listens."""
    until, why = time.monotonic() + PATIENCE, ""
    while time.monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as e:
            why = str(e)
            time.sleep(0.2)
    advice = "is it running, with the same --coordinator?"
    raise Unsupported(f"process 0 does not answer at {host}:{port}", why, advice)


def _linked(host: str, count: int, process: int, ended: Ended) -> Link:
    """This process's end of the link. Its port and token are in what JAX keeps for all processes."""
    from jax._src.distributed import global_state  # there is no public way to the values that processes share

    shared: Any = global_state.client
    if process:
        told = json.loads(shared.blocking_key_value_get(KEY, int(1000 * PATIENCE)))
        return channel.connect((host, told["port"]), process, count, told["token"], ended)
    server, token = channel.listen(host), secrets.token_hex(32)
    shared.key_value_set(KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
    return channel.accept(server, count, token, ended)


def proxy(host: str, port: int) -> int:
    """A port of this machine that leads to another one. Its connections stay open when that one is gone."""
    # jax_enable_recoverability (JAX 0.10 and 0.12) is no substitute: it saves process 0 from the loss of others, but they still
    # abort without process 0. Nor is jaxlib's missed_heartbeat_callback: no absl::Status can be given to Python.
    server = socket.create_server(("127.0.0.1", 0))
    _thread(_serve, server, (host, port))
    return server.getsockname()[1]


def _serve(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection(address, timeout=30)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        _thread(_pass_on, near, far)
        _thread(_pass_on, far, near)


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    """Forwards bytes; those for a closed end are read and dropped. The end of a connection is not forwarded."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):
                to.sendall(data)


def _thread(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, name="proxy", daemon=True).start()


def _differences(facts: dict[int, Mapping[str, str]]) -> list[str]:
    """A line for each process whose facts are not those of process 0."""
    return [line for process, theirs in facts.items() if (line := _difference(process, theirs, facts[0]))]


def _difference(process: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The facts in which a process differs, in a line; empty if none."""
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    found = (
        f"{name} is {theirs.get(name, 'not known')} there, {ours.get(name, 'not known')} in process 0"
        for name in names
    )
    return f"process {process}: {'; '.join(found)}" if names else ""


def _say_and_exit(error: ProcessLost) -> None:
    """Ends this process from another thread: the main one may hang in a program of all devices, which nobody can interrupt."""
    flushing = threading.Thread(target=_flush_streams, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread starts once Python ends
        flushing.start()
        flushing.join(1)  # the main thread may be in the middle of a line
    with contextlib.suppress(OSError):
        os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))
    os._exit(error.exit_code)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
