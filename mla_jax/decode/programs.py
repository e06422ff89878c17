"""Programs of a model: traced and compiled once for each set of shapes, or read from where an earlier process stored them.

A call waits for its program. `start` has it traced and compiled in a thread: who calls other programs is not held up."""

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.decode.model_weights import Weights
from mla_jax.decode.packing import pack, unpack
from mla_jax.decode.store import Built, ProgramStore, is_ours
from mla_jax.model.transformer import Transformer

THREADS = 4  # that compile; XLA adds threads of its own for each program
# What exported programs may call although JAX does not promise that its later versions know it.
UNSTABLE = [jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")]


class Waits:
    """When callers waited for programs to be traced, compiled or read, as spans of `time.perf_counter`."""

    def __init__(self):
        self.spans: list[tuple[float, float]] = []
        self._begun: float | None = None  # when who waits now began to

    @property
    def seconds(self) -> float:
        """For how long somebody waits now."""
        return 0.0 if self._begun is None else time.perf_counter() - self._begun

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        if self._begun is not None:  # within another wait
            yield
            return
        self._begun = start = time.perf_counter()
        try:
            yield
        finally:
            self._begun = None
            self.spans.append((start, time.perf_counter()))


class Shared(NamedTuple):
    """Threads, waits and store that the programs of one model share. Without a store no program outlives the process.

    Programs are traced one at a time, in the order in which they were asked for. Tracing is Python's work, which threads do not
    make faster. So the compiler begins sooner."""

    pool: ThreadPoolExecutor
    waits: Waits
    store: ProgramStore | None
    tracer: ThreadPoolExecutor  # a single thread

    @classmethod
    def of(cls, store: ProgramStore | None = None) -> "Shared":
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")
        return cls(pool, Waits(), store, ThreadPoolExecutor(1, thread_name_prefix="trace"))


class ProgramKey(NamedTuple):
    """The key of a compiled program: values of static arguments, and structure and shapes of the others."""

    static: tuple
    donated: Any
    sent: Any
    shapes: tuple


class Call(NamedTuple):
    """Arguments of a call: the program's key, and the arrays."""

    key: ProgramKey
    donated: list[Any]  # arrays of the device, or their shapes
    sent: list[jax.Array | np.ndarray]  # from the host


class Started(NamedTuple):
    """A program that is being traced and compiled, or read from where it is stored."""

    traced: threading.Event  # or read
    built: Future[Built]


class Program:
    """A function of a model, compiled for the shapes it is called with; in full float32 where the weights are (no TF32).

    `function` is `(model, *args)`: first `donated` arguments, trees of arrays on the device, whose memory it takes; then up to
    `static` numbers, for each of which it is compiled anew; then trees of arrays of the host, sent as one array, which have an
    axis of data shards in front where there are several. On a mesh the function is one device's."""

    def __init__(
        self,
        function: Callable,
        weights: Weights,
        shared: Shared | None = None,
        *,
        donated: int = 0,
        static: int = 0,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.weights, self.spread = weights, weights.spread
        self.precision = "highest" if weights.dtype == jnp.float32 else None
        self.shared, self.function = shared or Shared.of(), functools.partial(function)
        self.donated, self.static = donated, static
        self.compiler_options = (compiler_options or {}) | self.spread.compiler_options
        self._started: dict[ProgramKey, Started] = {}

    def __call__(self, *args: Any) -> Any:
        """The function's value."""
        call = self._call(args)
        future = self._begun(call).built
        if not future.done():
            with self.shared.waits.record():
                wait([future])
        built = future.result()
        packed = self._packed([np.asarray(array) for array in call.sent])
        return jax.tree.unflatten(built.structure, built.compiled(self.weights.flat, call.donated, packed))

    def _packed(self, sent: list[np.ndarray]) -> Any:
        """The arrays from the host, as one array."""
        shards = self.spread.shards
        packed = pack(sent, 1) if shards > 1 and sent else pack(sent)
        return packed if self.spread.mesh is None else self.spread.send(packed.reshape(shards, -1))

    def start(self, *args: Any) -> Future[Built]:
        """The program for such arguments, once it is compiled. In the place of an array a `jax.ShapeDtypeStruct` will do."""
        return self._begun(self._call(args)).built

    def trace(self, *args: Any) -> Future[Built]:
        """As `start`, but returns once the program is traced: that is Python's work, and holds up what Python does beside it."""
        started = self._begun(self._call(args))
        started.traced.wait()
        return started.built

    @property
    def count(self) -> int:
        """Programs that are compiled, or about to be."""
        return len(self._started)

    @property
    def temporaries(self) -> int:
        """The most bytes that one of them takes besides its arguments, of those that are compiled."""
        builds = [started.built for started in list(self._started.values())]
        there = [one.result() for one in builds if one.done() and not one.exception()]
        return max((built.temporaries for built in there), default=0)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """For XLA's own account of the program: its text, costs and memory."""
        return self._lower(self._call(args))[0]

    def _call(self, args: tuple) -> Call:
        behind = self.donated + self.static
        donated, first = jax.tree.flatten(args[: self.donated])
        sent, other = jax.tree.flatten(args[behind:])
        of_one = [self._for_one(leaf) for leaf in sent]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in (*donated, *of_one))
        return Call(ProgramKey(args[self.donated : behind], first, other, shapes), donated, sent)

    def _for_one(self, leaf: Any) -> Any:
        """The shape of an array from the host, for one data shard."""
        if self.spread.shards == 1 or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

    def _begun(self, call: Call) -> Started:
        """Begins to load the program where it is stored, or else to trace and compile it, in a thread, unless that is begun."""
        key = call.key
        if started := self._started.get(key):
            return started
        # Shapes alone: the arrays may be donated to another program meanwhile
        shapes = Call(
            key, [_shape_of(array) for array in call.donated], [self._for_one(leaf) for leaf in call.sent]
        )
        traced = threading.Event()
        future = self.shared.pool.submit(contextvars.copy_context().run, self._build, shapes, traced)
        self._started[key] = started = Started(traced, future)
        future.add_done_callback(lambda done: self._started.pop(key, None) if done.exception() else None)
        return started

    def store_of(self, static: tuple = ()) -> ProgramStore | None:
        """Where a program is stored; nowhere with code of a user's own, which the file's name does not tell."""
        return self.shared.store if is_ours((self.function.keywords, static)) else None

    def _build(self, call: Call, traced: threading.Event) -> Built:
        store = self.store_of(call.key.static)
        name = None if store is None else self._file(call.key, store)
        try:
            if store is not None and name is not None and store.has(name) and (found := store.load(name)):
                return found
            in_context = contextvars.copy_context().run
            lowered, structure = self.shared.tracer.submit(in_context, self._lower, call).result()
        finally:
            traced.set()
        if store is None or name is None:
            return Built.of(lowered, structure)
        return store.compile(lowered, structure, name)

    def _file(self, key: ProgramKey, store: ProgramStore) -> str:
        options = self.function.keywords, self.donated, self.compiler_options, self.precision
        return store.name(self.function.func.__name__, *map(repr, (key, *options)))

    def export(self, platform: str, kept: Callable[[Transformer], tuple], *sent: Any) -> jax.export.Exported:
        """The program as an artefact, for one of JAX's platforms, which need not be here. `kept` makes the donated arguments, the
        first ones, of one device, from its part of the model; it is only traced. The others are `sent`."""
        local, found = self.weights.local_model(), []

        def made() -> list[jax.Array]:
            leaves, structure = jax.tree.flatten(tuple(kept(local)))
            found.append(structure)
            return leaves

        donated = self.spread.whole(jax.eval_shape(made))
        call = self._call((*[()] * self.donated, *sent))
        call = call._replace(key=call.key._replace(donated=found[-1]), donated=donated)
        jitted, given, _ = self._jitted(call)
        with jax.default_matmul_precision(self.precision):
            return jax.export.export(jitted, platforms=[platform], disabled_checks=UNSTABLE)(*given)

    def _lower(self, call: Call) -> tuple[jax.stages.Lowered, Any]:
        """The program before it is compiled, and the structure of its value."""
        jitted, given, found = self._jitted(call)
        with jax.default_matmul_precision(self.precision):
            return jitted.lower(*given), found[-1]

    def _jitted(self, call: Call) -> tuple[Any, tuple[Any, Any, Any], list[Any]]:
        """The program before it is traced, its arguments, and where tracing leaves the structure of its value."""
        key, found, of_one = call.key, [], [self._for_one(leaf) for leaf in call.sent]

        def flat(
            weights: tuple[jax.Array, ...], donated: list[jax.Array], sent: jax.Array
        ) -> list[jax.Array]:
            model = nnx.merge(self.weights.graph, jax.tree.unflatten(self.weights.structure, weights))
            of_host = jax.tree.unflatten(key.sent, unpack(sent, of_one))
            value = self.function(model, *jax.tree.unflatten(key.donated, donated), *key.static, *of_host)
            leaves, structure = jax.tree.flatten(value)
            found.append(structure)
            return leaves

        flat.__name__ = self.function.func.__name__
        # Another version of the code must not find this program in JAX's cache: see `Store.compile`
        if self.shared.store is not None:
            flat.__name__ += f"_{self.shared.store.version}"
        program = self.spread.on_each(flat)
        program.__name__ = flat.__name__
        jitted = jax.jit(program, donate_argnums=1, compiler_options=self.compiler_options)
        sent = self.spread.sent(jax.eval_shape(pack, of_one))
        return jitted, (self.weights.flat, call.donated, sent), found


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array, and where it is."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    sharding = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=array.weak_type)
