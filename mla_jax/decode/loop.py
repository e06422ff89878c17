"""Generation as jitted programs: `prefill` (a chunk of the prompts), `begin` (the first token), `run` (any number of steps).

`run` is one while_loop of as many steps as it is told, so generating everything and streaming a few tokens at a time are the same
program. The state is one pytree, donated: nothing of it returns to the host until asked for."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from mla_jax.base.batch import Batch
from mla_jax.cache.latent import Cache
from mla_jax.decode.programs import Program, Shared
from mla_jax.decode.sampling import OUTPUT, PROMPT, Sampling, choose
from mla_jax.decode.store import Store
from mla_jax.model.transformer import Transformer
from mla_jax.offload import experts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A batch being generated. Rows end one by one; the rest go on undisturbed."""

    cache: Cache
    last: Float[Array, "B D"]  # hidden state of each row's last token
    position: Int[Array, " B"]  # of the next token
    seen: UInt8[Array, "B W"]
    tokens: Int[Array, "B C"]  # generated so far
    logprobs: Float[Array, "B C"]
    top_logprobs: Float[Array, "B C J"]
    top_ids: Int[Array, "B C J"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]  # tokens a row may generate
    ends: Int[Array, "B M"]  # token ids that end it, -1 for none
    done: Bool[Array, " B"]
    finite: Bool[Array, " B"]  # false once a row's logits were not
    sampling: Sampling
    load: Int[Array, "moe X"] | None = None  # how often each expert of each layer that has some was chosen, where that is counted


def new_state(
    model: Transformer,
    slots: int,
    capacity: int,
    alternatives: int,
    limit: Int[Array, " B"],
    ends: Int[Array, "B M"],
    sampling: Sampling,
    counts: bool = False,
) -> State:
    """A batch of which nothing is known yet. `slots` bounds prompt and output together, `capacity` the output."""
    rows, config, dtype = limit.shape[0], model.config, model.dtype
    layers = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    return State(
        cache=model.new_cache(rows, slots),
        last=jnp.zeros((rows, config.hidden_size), dtype),
        position=jnp.zeros(rows, jnp.int32),
        seen=jnp.zeros((rows, config.vocab_size), jnp.uint8),
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        logprobs=jnp.zeros((rows, capacity)),
        top_logprobs=jnp.zeros((rows, capacity, alternatives)),
        top_ids=jnp.zeros((rows, capacity, alternatives), jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
        limit=limit,
        ends=ends,
        done=limit <= 0,
        finite=jnp.ones(rows, bool),
        sampling=sampling,
        load=jnp.zeros((layers, config.n_routed_experts or 0), jnp.int32) if counts else None,
    )


def prefill(
    model: Transformer, state: State, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], span: int | None = None
) -> State:
    """Reads a chunk of the prompts behind what the cache holds already. Rows may bring less than the chunk, or nothing."""
    positions = state.position[:, None] + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    hidden, cache, aux = model(tokens, Batch(positions, mask, span), state.cache, collect=state.load is not None)
    brought = mask.sum(1, dtype=jnp.int32)
    end = jnp.argmax(jnp.where(mask, positions, -1), axis=1)
    last = jnp.where(brought[:, None] > 0, jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0], state.last)
    rows = jnp.arange(tokens.shape[0])[:, None]
    seen = state.seen.at[rows, jnp.where(mask, tokens, state.seen.shape[1])].set(PROMPT, mode="drop")
    load = counted(state, aux)
    return dataclasses.replace(state, cache=cache, last=last, position=state.position + brought, seen=seen, load=load)


def counted(state: State, aux: dict[str, list[Array]]) -> Int[Array, "moe X"] | None:
    """What experts were chosen so far, with those of one more step."""
    return None if state.load is None else state.load + jnp.stack(aux["load"]).astype(jnp.int32)


def choose_next(model: Transformer, state: State) -> State:
    """Chooses one more token for every open row, and ends the rows that are full, at an end token, or not finite."""
    with jax.named_scope("unembed"):
        logits = model.unembed(state.last)
    with jax.named_scope("choose"):
        token, fit = choose(logits, state.seen, state.position, state.sampling)
    state = _record(state, logits, token, takes=~state.done & fit)
    ended = (token[:, None] == state.ends).any(1) | (state.count >= state.limit)
    return dataclasses.replace(state, done=state.done | ended | ~fit, finite=state.finite & (fit | state.done))


def step(model: Transformer, state: State) -> State:
    """Reads the newest token of every open row and chooses the next."""
    rows, is_open = jnp.arange(state.count.shape[0]), ~state.done
    newest = state.tokens[rows, state.count - 1]
    batch = Batch(state.position[:, None], is_open[:, None])
    hidden, cache, aux = model(newest[:, None], batch, state.cache, collect=state.load is not None)
    last, load = jnp.where(is_open[:, None], hidden[:, 0], state.last), counted(state, aux)
    return choose_next(model, dataclasses.replace(state, cache=cache, last=last, position=state.position + is_open, load=load))


def run(model: Transformer, state: State, steps: Int[Array, ""]) -> State:
    """Up to `steps` more tokens a row; stops early when every row has ended."""

    def unfinished(carry: tuple[Array, State]) -> Array:
        taken, state = carry
        return (taken < steps) & ~state.done.all()

    return jax.lax.while_loop(unfinished, lambda carry: (carry[0] + 1, step(model, carry[1])), (jnp.int32(0), state))[1]


def _record(state: State, logits: Float[Array, "B W"], token: Int[Array, " B"], takes: Bool[Array, " B"]) -> State:
    rows, slot = jnp.arange(token.shape[0]), jnp.where(takes, state.count, state.tokens.shape[1])

    def put(buffer: Array, value: Array) -> Array:
        return buffer.at[rows, slot].set(value, mode="drop")

    normal = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, ids = jax.lax.top_k(normal, state.top_ids.shape[2])
    word = jnp.where(takes, token, state.seen.shape[1])
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, token),
        logprobs=put(state.logprobs, jnp.take_along_axis(normal, token[:, None], axis=1)[:, 0]),
        top_logprobs=put(state.top_logprobs, top),
        top_ids=put(state.top_ids, ids),
        count=state.count + takes,
        seen=state.seen.at[rows, word].set(state.seen[rows, token] | OUTPUT, mode="drop"),
    )


# On a CPU, XLA computes bfloat16 and packed weights in float32. By default it converts all weights before a loop begins, and all
# layers' weights before the first is used: a float32 copy of the model. With these options each weight is converted where it is
# used, which also takes less time (two cores, 0.9 GiB in bfloat16, 40 tokens: 1.5 s instead of 2.7, 0.06 GiB instead of 1.8).
CONVERT_LATE = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
# On a GPU, kernels that do not depend on each other run concurrently inside a CUDA graph, such as shared and routed experts: 10 %
# less time for a decode step of V2-Lite's shape on an H200, 1 and 8 rows.
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
OPTIONS: dict[str, dict[str, str]] = {"cpu": CONVERT_LATE}  # of the compiler, by platform: for every program,
LOOP_OPTIONS = {"cpu": CONVERT_LATE, "gpu": CONCURRENT}  # and for the decode loop


def logits(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
    """Of whole sequences, nothing cached."""
    return model.unembed(model(tokens, Batch.dense(*tokens.shape))[0])


class Programs:
    """The programs of one model. Each is compiled once a shape; bucketed lengths repeat shapes.

    With `counts` they count how often each expert is chosen, which costs a kernel or two a layer. They are stored in `folder`, if
    one is given, and read from there at the next start, except where they call experts on the host by their addresses."""

    def __init__(self, model: Transformer, counts: bool = False, folder: Path | None = None):
        self.chunk, self.device = functools.partial(model.dispatch.chunk, model), model.dispatch.device
        self._calls_host = bool(model.on_host())
        shared = Shared.of(None if folder is None or self._calls_host else Store.of(folder, model))
        self.waits = shared.waits
        options, loop_options = (table.get(self.device.platform) for table in (OPTIONS, LOOP_OPTIONS))
        self.new = Program(functools.partial(new_state, counts=counts), model, shared, static_argnums=(1, 2, 3))
        self.prefill = Program(prefill, model, shared, static_argnames=("span",), donate_argnums=(1,), compiler_options=options)
        self.begin = Program(choose_next, model, shared, donate_argnums=(1,), compiler_options=options)
        self.run = Program(run, model, shared, donate_argnums=(1,), compiler_options=loop_options)
        self.logits = Program(logits, model, shared, compiler_options=options)

    def prepare(self, state: State, chunks: Iterable[tuple[int, int]], decodes: bool = True) -> None:
        """Compiles concurrently what a request takes: `chunks` of its prompt, as (tokens, span), and whether it decodes.

        It returns once all are there: what a GPU's compiler measures must not run with a prompt."""
        rows, steps = state.count.shape[0], jax.ShapeDtypeStruct((), jnp.int32)
        for program in (self.run, self.prefill, self.begin):
            program.refresh()
        with self.waits.record():
            started = [self.run.start(state, steps)] if decodes else []  # the largest first
            for tokens, span in dict.fromkeys(chunks):
                shapes = [jax.ShapeDtypeStruct((rows, tokens), dtype) for dtype in (jnp.int32, bool)]
                started.append(self.prefill.start(state, *shapes, span=span))
            started.append(self.begin.start(state))
            for future in started:
                future.result()

    def check(self) -> None:
        """Raises what went wrong with experts on the host: programs of a GPU run on when a call fails, with NaN."""
        if self._calls_host:
            experts.check()
