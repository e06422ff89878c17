"""One thread works with an engine. Callers on any thread send it messages, and are woken when their requests have news.

The thread lives while there is work. Messages are done between two steps, in the order in which they came. Nothing here waits for
a caller, so a slow one holds up nobody."""

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from mla_jax.base.errors import BadRequest, Overloaded
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.interface import EngineInterface
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import FinishReason

T = TypeVar("T")
Message = Callable[[], None]
Explained = Callable[[], contextlib.AbstractContextManager]
WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()  # all that there are


class Worker:
    """The only user of `engine`. `explained` turns errors of a step into those that callers get.

    At most `most` requests may wait for a row; None is no limit."""

    def __init__(self, engine: EngineInterface, explained: Explained, most: int | None = None):
        self.engine, self._explained, self._most = engine, explained, most
        # Not a Queue: the collector may end a stream while this very thread puts a message
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._is_closed = self._is_stopped = False
        self._sent = 0  # jobs that were submitted and not taken in yet
        self._timed: list[Job] = []  # that have a time limit
        self._between: deque[Message] = deque()  # for when no job is under way
        WORKERS.add(self)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs of `engine.job_of`. Raises Overloaded if too many wait; then none is queued."""
        self._refuse_closed()
        with self._lock:
            self._refuse_overload(len(jobs))
            self._sent += len(jobs)
        self._post(lambda: self._queue(jobs))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Ends jobs that nobody wants any more, soon. It may be called anywhere, by Python's collector too."""
        wanted = [job for job in jobs if not job.done]
        if wanted:
            self.tell(lambda: self._cancel(wanted))

    def tell(self, message: Message) -> None:
        """Does something on the engine's thread, soon, if there is work; from anywhere, as `cancel`."""
        self._inbox.put(message)

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function()`, which may use the engine; raises what it raises."""
        return self._sent_by(self._post, function)

    def between(self, function: Callable[[], T]) -> T:
        """As `call`, once no job is under way: those that have begun are finished first, and the others begin afterwards."""
        return self._sent_by(lambda message: self._post(lambda: self._drain_for(message)), function)

    def _sent_by(self, send: Callable[[Message], None], function: Callable[[], T]) -> T:
        self._refuse_closed()
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(function())
            except BaseException as e:
                found.set_exception(e)

        send(run)
        return found.result()

    def _drain_for(self, message: Message) -> None:
        self._between.append(message)
        self._alone.draining = True

    def _next_between(self) -> None:
        message = self._between.popleft()
        self._alone.draining = bool(self._between)
        message()

    @property
    def _alone(self) -> Engine:
        assert isinstance(self.engine, Engine), "several processes do not drain"
        return self.engine

    def close(self) -> None:
        """Ends all requests and takes no more. What is closed may be closed again."""
        if self._process == os.getpid():
            with contextlib.suppress(BadRequest):  # that it is closed
                self.call(self._close)
            self.join()

    def _close(self) -> None:
        self._is_closed = True
        self.engine.reset()

    def join(self) -> None:
        """Waits for the thread to end. Requests that it has go on until they are done, unless it is closed."""
        thread = self._thread
        if thread is not None and self._process == os.getpid():
            thread.join()

    def stop(self) -> None:
        """Ends the thread after the step that it does, whatever is left."""
        self._is_stopped = True
        self.join()

    def _refuse_closed(self) -> None:
        if self._process != os.getpid():
            raise BadRequest(
                "this LLM was made before the process forked",
                "make it in the process that uses it; a device cannot be shared so",
            )
        if self._is_closed or self._is_stopped:
            raise BadRequest("this LLM is closed")

    def _refuse_overload(self, new: int) -> None:
        stats = self.engine.stats
        free = max(self.engine.rows - stats.running, 0)
        waiting = stats.waiting + self._sent + new - free
        if self._most is not None and waiting > self._most:
            raise Overloaded(
                f"{stats.waiting + self._sent:,} requests wait already",
                f"at most {self._most:,} may; send it again later, or give a larger --max-waiting",
                seconds=stats.seconds_for(waiting - self._most),
            )

    def _post(self, message: Message) -> None:
        self._inbox.put(message)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mla_jax engine", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Messages first, then those that waited for the jobs under way, then a step; it ends where there is none of these."""
        try:
            while not self._has_ended():
                self._do(self._next())
        except BaseException:
            # The engine could not even begin anew: the next message gets another thread
            with self._lock:
                self._thread = None
            raise

    def _next(self) -> Message:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            is_between = self._between and not self._alone.has_begun
            return self._next_between if is_between else self._step

    def _has_ended(self) -> bool:
        with self._lock:
            if self._is_stopped or self._is_idle():
                self._thread = None
            return self._thread is None

    def _is_idle(self) -> bool:
        return self._inbox.empty() and not self._between and not self.engine.busy

    def _do(self, message: Message) -> None:
        """After an error all that wait for an answer get it, and the engine begins anew."""
        try:
            with self._explained():
                message()
        except BaseException as e:  # each caller raises it
            self.engine.fail(e)

    def _step(self) -> None:
        self._timed = [job for job in self._timed if not job.done]
        now = time.monotonic()
        for job in self._timed:
            if job.deadline < now:
                self.engine.cancel(job, FinishReason.TIMEOUT)
        self.engine.step()

    def _queue(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._sent -= len(jobs)
        try:
            self._refuse_closed()  # it may have been closed since they were sent
            self.engine.queue(jobs)
        except BaseException as e:  # those that were not taken in get it, too
            for job in jobs:
                job.fail(e)
            raise
        self._timed += [job for job in jobs if job.request.params.timeout is not None]

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.engine.cancel(job)


@atexit.register
def _stop_all() -> None:
    """Before Python ends: a thread that it ends inside the compiler takes the process with it."""
    for worker in list(WORKERS):
        worker.stop()
