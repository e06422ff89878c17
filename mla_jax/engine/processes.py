"""One engine in each of several processes: process 0's calls are sent to the others, which do the same.

An engine decides by its calls and its programs' results, so all engines send the same programs to their devices in the same
order. Only clocks differ: process 0 measures the times of passes and sends them with each step."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from mla_jax.base.axes import shown_mesh
from mla_jax.base.errors import BadRequest, ProcessLost, Unsupported, shown
from mla_jax.base.files import sampled
from mla_jax.base.options import Options, SamplingParams
from mla_jax.decode.store import code
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.text import files_of
from mla_jax.hosts import distributed
from mla_jax.hosts.channel import SILENCE
from mla_jax.hosts.distributed import Processes
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import MemoryPlan

PACKAGES = ("jax", "jaxlib", "tokenizers")
SAMPLED = 200  # files that are compared
# Seconds in which the link tells why a program has failed, if the reason is another process
LATE = SILENCE + 5


class LedEngine:
    """Process 0's engine, which the engines of all other processes follow. Its methods are Engine's."""

    def __init__(self, engine: Engine, processes: Processes):
        self._engine, self._processes = engine, processes
        self.rows, self.stats, self.drafting = engine.rows, engine.stats, engine.drafting

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def job_of(self, request: Request, *, priority: int = 0, streams: bool = False) -> Job:
        if request.params.logits is not None:
            raise Unsupported("logits with several processes", "a function cannot be told to the others")
        return self._engine.job_of(request, priority=priority, streams=streams)

    def queue(self, jobs: Sequence[Job]) -> None:
        told = [(_as_json(job.request), job.priority, job.streams) for job in jobs]
        self._do("queue", jobs, told=told)

    def fail(self, error: BaseException) -> None:
        """An error of one process ends all, so nothing begins anew; those that wait here are told."""
        self._engine.fail(error)

    def cancel(self, job: Job, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if not job.done:
            self._do("cancel", job, reason, told=(job.id, reason))

    def step(self) -> None:
        self._do("step", self._engine.taken_times())

    def reset(self) -> None:
        self._do("reset")

    def warm_up(self, grammars: bool = False) -> None:
        self._do("warm_up", grammars)

    def take_load(self) -> np.ndarray:
        return self._do("take_load")

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self._do("logits", tokens, told=tokens.tolist())

    def _do(self, name: str, *given: Any, told: Any = None) -> Any:
        """Has all engines do the same. `told` stands for an argument that JSON does not have."""
        if self._processes.code is not None:
            found = "this process has failed, and the others have ended with it"
            raise ProcessLost(found, "start all of them again")
        with ending_all(self._processes):
            self._processes.link.tell([name, *(given if told is None else [told])])
            return getattr(self._engine, name)(*given)


def follow(engine: Engine, processes: Processes) -> None:
    """Does as process 0 tells, until that has ended."""
    jobs: dict[int, Job] = {}
    calls = _calls(engine, jobs)
    with ending_all(processes):
        while (order := processes.link.orders.get()) is not None:
            name, *given = order
            calls[name](*given)
            for number in [number for number, job in jobs.items() if job.done]:
                del jobs[number]


def _calls(engine: Engine, jobs: dict[int, Job]) -> dict[str, Callable[..., Any]]:
    """The methods that process 0 may call, with arguments as JSON has them. `jobs` are those that are not done, by id."""

    def queue(told: list[list[Any]]) -> None:
        found = [
            engine.job_of(_from_json(one), priority=priority, streams=streams)
            for one, priority, streams in told
        ]
        engine.queue(found)
        jobs.update({job.id: job for job in found})

    return {
        "queue": queue,
        "cancel": lambda told: engine.cancel(jobs[told[0]], FinishReason(told[1])),
        "step": lambda times: engine.step([tuple(one) for one in times]),
        "reset": engine.reset,
        "warm_up": engine.warm_up,
        "take_load": engine.take_load,
        "logits": lambda tokens: engine.logits(np.asarray(tokens, np.int32)),
    }


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
        found = "this process has a model on several hosts already"
        raise Unsupported(found, "end it, and start all of them again for another")
    processes.agree(_facts_of_start(options))
    return processes


def refuse_left_out(devices: Devices, processes: Processes) -> None:
    """Raises BadRequest for a mesh without a device of each process."""
    here = {device.process_index for device in devices.mesh.devices.flat}
    if missing := [number for number in range(processes.count) if number not in here]:
        found = f"the mesh {shown_mesh(devices.sizes)} has no device of process {missing[0]}"
        raise BadRequest(found, f"there are {len(jax.devices())} devices in {processes.count} processes")


def _facts_of_start(options: Options) -> dict[str, str]:
    """Options and versions that all processes must have in common, by name; the place of the model's files is each one's own."""
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


def facts_of_model(checkpoint: Checkpoint, plan: MemoryPlan) -> dict[str, str]:
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
    grammar = request.params.grammar
    params = vars(request.params) | {
        "grammar": None if grammar is None else {grammar.kind: grammar.definition}
    }
    return {"prompt": request.prompt, "params": params, "ends": request.ends}


def _from_json(value: dict[str, Any]) -> Request:
    """JSON has lists instead of tuples, and texts as keys."""
    given = value["params"].items()
    params: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in given}
    if bias := params["logit_bias"]:
        params["logit_bias"] = {int(token): number for token, number in bias.items()}
    return Request(value["prompt"], SamplingParams(**params), tuple(value["ends"]))
