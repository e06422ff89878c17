"""Programs of a model: traced and compiled once for each set of shapes, or read from where an earlier process stored them.

A call waits for its program. `prepare` has the programs of one request compiled concurrently, before the request starts."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.decode.store import Store
from mla_jax.model.transformer import Transformer

THREADS = 4  # that compile; XLA adds threads of its own for each program


class Waits:
    """When callers waited for programs to be traced, compiled or read, as spans of `time.perf_counter`.

    `listener` is called with True when a wait for the compiler begins, and with False when it ends."""

    def __init__(self):
        self.spans: list[tuple[float, float]] = []
        self.listener: Callable[[bool], Any] | None = None
        self._compiling = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((start, time.perf_counter()))
            self._tell(False)

    def compiling(self) -> None:
        """Says that the present wait is for the compiler."""
        self._tell(True)

    def _tell(self, compiling: bool) -> None:
        if self.listener is not None and compiling != self._compiling:
            self.listener(compiling)
        self._compiling = compiling


class Shared(NamedTuple):
    """What the programs of one model share. Without a store no program outlives the process."""

    pool: ThreadPoolExecutor
    waits: Waits
    store: Store | None

    @classmethod
    def of(cls, store: Store | None = None) -> "Shared":
        return cls(ThreadPoolExecutor(THREADS, thread_name_prefix="compile"), Waits(), store)


class Call(NamedTuple):
    """The arguments of a call, told apart: what the program is compiled for, and what it is given."""

    key: tuple
    args: tuple
    kw: dict[str, Any]


class Program:
    """A function of a model, compiled for the shapes it is called with; in full float32 where the weights are (no TF32).

    `function` is `(model, *args, **kw)`; `options` are those of `jax.jit`, which counts the model as argument 0. The weights are
    passed as a flat tuple: to flatten an `nnx.State` at each call takes milliseconds."""

    def __init__(self, function: Callable, model: Transformer, shared: Shared | None = None, **options: Any):
        graph, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        self.weights: tuple[jax.Array, ...] = tuple(leaves)
        self.precision = "highest" if model.dtype == jnp.float32 else None
        self.shared, self.options = shared or Shared.of(), options
        plain = functools.partial(function)
        self.name, self._settings = plain.func.__name__, plain.keywords
        self._compiled: dict[tuple, Future[jax.stages.Compiled]] = {}

        def merged(weights, *args, **kw):
            return function(nnx.merge(graph, jax.tree.unflatten(structure, weights)), *args, **kw)

        # JAX's cache must not find what an older version of the code compiled, which could not be stored again: see store.py
        merged.__name__ = self.name if self.shared.store is None else f"{self.name}_{self.shared.store.version}"
        self.jitted = jax.jit(merged, **options)

    def __call__(self, *args, **kw):
        """The function's value. Arguments are arrays of JAX or NumPy, except static ones."""
        call = self._call(args, kw)
        if call.key not in self._compiled:
            with self.shared.waits.record():
                self._start(call, args, kw).result()
        return self._compiled[call.key].result()(self.weights, *call.args, **call.kw)

    def start(self, *args, **kw) -> Future[jax.stages.Compiled]:
        """The compiled program for such arguments, once it is there. Arguments may be `jax.ShapeDtypeStruct`s."""
        call = self._call(args, kw)
        return self._compiled.get(call.key) or self._start(call, args, kw)

    def lower(self, *args, **kw) -> jax.stages.Lowered:
        """For XLA's own account of the program: its text, costs and memory."""
        with jax.default_matmul_precision(self.precision):
            return self.jitted.lower(self.weights, *args, **kw)

    def _call(self, args: tuple, kw: dict[str, Any]) -> Call:
        numbers, names = (self.options.get(option, ()) for option in ("static_argnums", "static_argnames"))
        statics = {str(i): arg for i, arg in enumerate(args, 1) if i in numbers} | {n: kw[n] for n in names if n in kw}
        given = tuple(arg for i, arg in enumerate(args, 1) if i not in numbers)
        named = {name: arg for name, arg in kw.items() if name not in names}
        leaves, tree = jax.tree.flatten((given, named))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return Call((tuple(statics.items()), tree, shapes), given, named)

    def _start(self, call: Call, args: tuple, kw: dict[str, Any]) -> Future[jax.stages.Compiled]:
        """Traces here, or leaves it to a thread to read what is stored; compiles in a thread."""
        store = self.shared.store
        name = "" if store is None else store.name(self.name, self._settings, self.options, self.precision, call.key)
        if store is not None and store.has(name):
            future = self.shared.pool.submit(lambda: store.load(name) or self._compile(self.lower(*args, **kw), name))
        else:
            self.shared.waits.compiling()
            future = self.shared.pool.submit(self._compile, self.lower(*args, **kw), name)
        self._compiled[call.key] = future
        future.add_done_callback(lambda done: self._compiled.pop(call.key, None) if done.exception() else None)
        return future

    def _compile(self, lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
        store = self.shared.store
        return lowered.compile() if store is None else store.compile(lowered, name)
