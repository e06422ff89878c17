"""One engine in each of several processes: process 0's calls are sent to the others, which do the same.

An engine decides by its calls and its programs' results, so all engines send the same programs to their devices in the same
order. Only clocks differ: process 0 measures the times of passes and sends them with each step."""

import contextlib
import dataclasses
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from mla_jax.base.axes import shown_mesh
from mla_jax.base.errors import BadRequest, ProcessLost, Unsupported, shown
from mla_jax.base.files import sampled
from mla_jax.base.options import Options, SamplingParams
from mla_jax.decode.loop import Programs
from mla_jax.decode.store import code
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Request
from mla_jax.engine.text import files_of
from mla_jax.hosts import distributed
from mla_jax.hosts.channel import SILENCE
from mla_jax.hosts.distributed import Processes
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import Plan

PACKAGES = ("jax", "jaxlib", "tokenizers")
SAMPLED = 200  # files that are compared
# Seconds in which the link tells why a program has failed, if the reason is another process
LATE = SILENCE + 5


class LedEngine:
    """Process 0's engine, with those of all others behind it. It has all that an Engine has."""

    def __init__(self, engine: Engine, processes: Processes):
        self._engine, self._processes = engine, processes
        self._busy, self._later = False, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, *, priority: int = 0, streams: bool = False) -> Job:
        """As Engine's; a refused request is not sent to the others."""
        with interrupts_wait():
            job = self._engine.submit(request, priority=priority, streams=streams)
            with self._whole():
                self._tell("submit", request=_as_json(request), priority=priority, streams=streams)
            return job

    def cancel(self, job: Job) -> None:
        """As Engine's. A stream that is forgotten in the middle of a step is cancelled behind it."""
        if self._busy:
            self._later.append(job)
        elif not job.done:
            with self._whole():
                self._tell("cancel", job=job.id)
                self._engine.cancel(job)

    def step(self) -> None:
        """As Engine's."""
        with self._whole():
            times = self._engine.taken_times()
            self._tell("step", times=times)
            self._engine.step(times)

    def reset(self) -> None:
        """As Engine's."""
        with self._whole():
            self._tell("reset")
            self._engine.reset()

    def warm_up(self) -> None:
        """As Engine's."""
        with self._whole():
            self._tell("warm_up")
            self._engine.warm_up()

    def take_load(self) -> np.ndarray:
        """As Engine's."""
        with self._whole():
            self._tell("take_load")
            return self._engine.take_load()

    def logits(self, programs: Programs, tokens: np.ndarray) -> np.ndarray:
        """Of token sequences, by the same program in all processes."""
        with self._whole():
            self._tell("logits", tokens=tokens.tolist())
            return programs.logits_of(tokens)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Work of all processes, done to its end: Ctrl-C waits, and an error ends all of them."""
        if self._processes.code is not None:
            raise ProcessLost(
                "this process has failed, and the others have ended with it", "start all of them again"
            )
        with interrupts_wait(), ending_all(self._processes):
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        for job in self._later[:]:
            self._later.remove(job)
            self.cancel(job)

    def _tell(self, what: str, **given: Any) -> None:
        self._processes.link.tell({"do": what, **given})


def follow(engine: Engine, programs: Programs, processes: Processes) -> None:
    """Does what process 0 tells, until that has ended."""
    jobs: dict[int, Job] = {}

    def submit(request: Any, priority: int, streams: bool) -> None:
        job = engine.submit(_from_json(request), priority=priority, streams=streams)
        jobs[job.id] = job

    actions: dict[str, Callable[..., Any]] = {
        "submit": submit,
        "cancel": lambda job: engine.cancel(jobs[job]),
        "step": lambda times: engine.step([tuple(one) for one in times]),
        "reset": engine.reset,
        "warm_up": engine.warm_up,
        "take_load": engine.take_load,
        "logits": lambda tokens: programs.logits_of(np.asarray(tokens, np.int32)),
    }
    with ending_all(processes):
        while (order := processes.link.orders.get()) is not None:
            actions[order.pop("do")](**order)
            for number in [number for number, job in jobs.items() if job.done]:
                del jobs[number]


@contextlib.contextmanager
def ending_all(processes: Processes) -> Iterator[None]:
    """Any error in one process ends all: they are no longer alike. Where an error of the device is that another process is lost,
    the link says so, and ends this one."""
    try:
        yield
    except Exception as e:
        time.sleep(LATE if isinstance(e, jax.errors.JaxRuntimeError) and not _is_own(e) else 0)
        processes.fail(f"{type(e).__name__}: {e}", 1)
        raise


def _is_own(error: Exception) -> bool:
    """Whether an error of JAX has nothing to do with other processes."""
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C counts once this is done."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pressed: list[tuple] = []
    handler = signal.signal(signal.SIGINT, lambda *given: pressed.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed and callable(handler):
        handler(*pressed[0])


def started(options: Options) -> Processes | None:
    """The processes that the options name, all of which are there then; None for one process.

    Raises BadRequest if they were given different options, and Unsupported for what several processes cannot have."""
    asked = options.processes
    if not asked.several:
        return None
    if options.mesh.device is not None:
        raise Unsupported("device cannot be had with several processes", "it is for a plan; leave it out")
    processes = distributed.start(str(asked.coordinator), asked.processes or 1, asked.process_id or 0)
    if processes.serves:
        raise Unsupported(
            "this process has a model on several hosts already",
            "end it, and start all of them again for another",
        )
    processes.agree(_facts_of_start(options))
    return processes


def refuse_left_out(devices: Devices, processes: Processes) -> None:
    """Raises BadRequest for a mesh without a device of each process."""
    here = {device.process_index for device in devices.mesh.devices.flat}
    if missing := [number for number in range(processes.count) if number not in here]:
        found = f"the mesh {shown_mesh(devices.sizes)} has no device of process {missing[0]}"
        raise BadRequest(found, f"there are {len(jax.devices())} devices in {processes.count} processes")


def _facts_of_start(options: Options) -> dict[str, str]:
    """Options that all processes must have in common, by name; the place of the model's files is each one's own."""
    own = ("model", "process_id", "coordinator", "routing_stats", "host_folder")
    groups = (getattr(options, group.name) for group in dataclasses.fields(options))
    settings = {name: value for group in groups for name, value in vars(group).items() if name not in own}
    versions = {f"the version of {package}": version(package) for package in PACKAGES}
    return {
        **{name: shown(_plain(value)) for name, value in settings.items()},
        "routing_stats": "given" if options.experts.routing_stats is not None else "not given",
        **versions,
        "the code of mla_jax": code()[:16],
    }


def _plain(value: Any) -> Any:
    """A setting as it looks the same in all processes: of objects the class alone."""
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def facts_of_model(checkpoint: Checkpoint, plan: Plan) -> dict[str, str]:
    """Facts of the model and the plan that all processes must have in common, by name."""
    source = checkpoint.source
    tensors = [(name, tensor.format, tensor.shape) for name, tensor in sorted(source.tensors.items())]
    return {
        "config.json": _digest(checkpoint.config),
        "the list of tensors": _digest(tensors),
        "the weights, by samples": sampled(source.files[:SAMPLED]),
        "the tokenizer": _digest(sorted(files_of(source).items())),
        "the mesh": plan.mesh,
        "the cache": f"{plan.tokens} tokens, context {plan.context}",
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _as_json(request: Request) -> dict[str, Any]:
    return {"prompt": request.prompt, "params": _params_as_json(request.params), "ends": request.ends}


def _params_as_json(params: SamplingParams) -> dict[str, Any]:
    """Without `logit_bias`, whose keys are numbers: of that the pairs."""
    bias = params.logit_bias
    return {**vars(params), "logit_bias": None if bias is None else list(bias.items())}


def _from_json(value: dict[str, Any]) -> Request:
    params = dict(value["params"])
    bias = params.pop("logit_bias")
    for name in ("stop", "stop_token_ids"):
        params[name] = tuple(params[name])
    logit_bias = None if bias is None else dict(map(tuple, bias))
    return Request(value["prompt"], SamplingParams(**params, logit_bias=logit_bias), tuple(value["ends"]))
