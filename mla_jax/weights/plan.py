"""The memory plan of a model, worked out from shapes alone, and whether it fits."""

from dataclasses import dataclass
from math import prod

from mla_jax.base import roofline
from mla_jax.base.axes import shown_mesh
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.base.limits import free_memory, gib
from mla_jax.base.qtensor import QTensor
from mla_jax.cache.paged import COPIED, COPIES, PAGE
from mla_jax.hosts import distributed
from mla_jax.mesh.devices import Devices
from mla_jax.model import grouped
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.parts import packed_shapes, page_bytes, parts_of
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.offload.streaming import scratch_bytes
from mla_jax.weights.fill import IN_MEMORY
from mla_jax.weights.load import ON_DEVICE, Checkpoint

GRAPHS = 1 << 30  # bytes that CUDA graphs and the workspaces of libraries take on a GPU
PROGRAMS, PROGRAMS_PER_LAYER = 300 << 20, 13 << 20  # bytes, measured with 3 to 27 layers on JAX 0.10.2
TEXTS = 4  # of the size of the rows' texts, in int32: these, and what is compared
ROWS = 64  # requests that run at a time, unless memory is planned for more
# Tokens of the cache on a CPU, unless more are asked for: there it would take the memory of all else
CPU_TOKENS = 16_384


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device, for `batch` sequences of `context` tokens each, and the pool that is made.

    On a mesh these are bytes of one of its devices. Sequences are shared by the data shards: rows and tokens are those of one."""

    weights: int
    host: int  # of experts in the host's memory; on a CPU a part of the weights
    cache: int  # of `held` sequences of `context` tokens
    temporaries: int
    available: int
    context: int
    longest: int  # the largest context that fits
    tokens: int  # that the pool holds, of all sequences together
    batch: int = 1
    shards: int = 1  # that share the sequences
    mesh: str = ""  # such as data=4,tensor=2; empty for one device
    why_mesh: str = ""  # in a sentence, where the user left the choice
    loading: int = 0  # of the host's memory, for what is read and not on a device yet
    host_cache: int = 0  # of pages in the host's memory
    host_free: int = 0  # that the rest leaves there, where such pages are asked for
    hosted: int = 0  # tokens of these pages

    @property
    def needed(self) -> int:
        return self.weights + self.cache + self.temporaries

    @property
    def fits(self) -> bool:
        return self.needed <= self.available and self.tokens >= self.held * self.context

    @property
    def held(self) -> int:
        """Sequences of the batch that one shard holds."""
        return held(self.batch, self.shards)

    @property
    def rows(self) -> int:
        """Requests that run at a time, on one shard."""
        return max(ROWS, self.held)

    def lines(self) -> list[str]:
        """A table, and what to change when it does not fit."""
        rows = {
            "weights": self.weights,
            **({"experts on the host": self.host} if self.host else {}),
            f"cache of {f'{self.held} x ' * (self.held > 1)}{self.context:,} tokens": self.cache,
            "temporaries, about": self.temporaries,
            **({"pages on the host": self.host_cache} if self.host_cache else {}),
            "needed": self.needed,
            "available": self.available,
            **({"read at a time, on the host": self.loading} if self.mesh else {}),
        }
        return [
            *([f"mesh {self.mesh}: per device"] if self.mesh else []),
            *(f"{name:<28}{size:>12}" for name, size in zip(rows, map(gib, rows.values()), strict=True)),
            self._verdict(),
            *self.advice(),
        ]

    def _verdict(self) -> str:
        if not self.longest:
            return "not even a short context fits"
        cache = f"the cache of each of {self.shards} shards" if self.shards > 1 else "the cache"
        together = (
            f"; {cache} holds {self.tokens:,} tokens of up to {self.rows} sequences" if self.fits else ""
        )
        return f"largest context that fits: {self.longest:,} tokens{together}"

    def advice(self) -> list[str]:
        if self.host_cache > self.host_free:
            return [
                f"it does not fit the host: the model leaves {gib(self.host_free)} free; give less as --host-cache"
            ]
        if self.fits:
            return []
        if self.needed <= self.available:
            given = self.tokens * self.shards
            return [
                f"it does not fit: --cache-tokens {given} is less than {self.batch} x {self.context:,} tokens"
            ]
        if self.longest:
            return [
                f"it does not fit: ask for --context {self.longest} or less, or free memory with a larger --memory-fraction"
            ]
        more = "a mesh with more devices along tensor" if self.mesh else "a device with more memory"
        return [f"it does not fit: take --dtype bfloat16, a larger --memory-fraction, or {more}"]

    def refuse(self) -> None:
        """Raises DoesNotFit unless the context that is asked for fits, and the pages on the host."""
        if not self.longest:
            raise DoesNotFit("the model does not fit the device's memory", *self.lines())
        if not self.fits:
            raise DoesNotFit(f"a cache of {self.batch} x {self.context:,} tokens does not fit", *self.lines())
        if self.host_cache > self.host_free:
            raise DoesNotFit(f"pages of {gib(self.host_cache)} do not fit the host's memory", *self.lines())


def memory_plan(
    checkpoint: Checkpoint,
    context: int | None = None,
    batch: int = 1,
    placement: Placement = ON_DEVICE,
    cache_tokens: int | None = None,
    drafts: int = 0,
    keeps_text: bool = False,
    host_cache: float = 0.0,
) -> MemoryPlan:
    """The plan for `batch` sequences of `context` tokens, by default as long as the model allows and as fits.

    The pool has `cache_tokens` tokens; by default, on a GPU, as many as fit and as all rows can use. A pass reads up to `drafts`
    guesses of each row, which may be looked up in the rows' texts. `host_cache` is in GiB. Data shards of a mesh share all that.
    Raises BadRequest if the host's part is less than a page."""
    layout, most = checkpoint.layout, checkpoint.config.max_position_embeddings
    shards = layout.data
    asked = None if cache_tokens is None else -(-cache_tokens // layout.data)
    model, batch_here = checkpoint.model(placement), held(batch, layout.data)
    rows = max(ROWS, batch_here)
    on_cpu = checkpoint.device.platform == "cpu"
    page = page_bytes(model)
    free, page_of_shard = available(checkpoint.devices), page * page_parts(model)
    host, hosted = checkpoint.bytes(placement, host=True), _host_pages(host_cache / shards, page_of_shard)
    weights = checkpoint.bytes(placement) + (-(-host // layout.devices) if on_cpu else 0)
    temporary = temporaries(model, rows, drafts)
    temporary += TEXTS * 4 * rows * (context or most) if keeps_text else 0
    temporary += _choosing(model, rows, pages_for(context or most))
    temporary += 2 * COPIES * COPIED * page if hosted else 0
    fitting = max(free - weights - temporary, 0) // page * PAGE
    longest = min(most, fitting // batch_here)
    chosen = context or max(1, min(longest, _usual_context(most, batch_here, asked, on_cpu)))
    tokens = pages_for(asked) * PAGE if asked else _pool_tokens(chosen, batch_here, fitting, on_cpu)
    on_host = layout.devices * (weights + tokens // PAGE * page + temporary) if on_cpu else host
    return MemoryPlan(
        weights=weights,
        host=host,
        cache=pages_for(chosen) * batch_here * page,
        temporaries=temporary,
        available=free,
        context=chosen,
        longest=longest,
        tokens=tokens,
        batch=batch,
        shards=shards,
        mesh=shown_mesh(layout.sizes) if layout.devices > 1 else "",
        loading=IN_MEMORY * checkpoint.largest_piece(placement),
        host_cache=hosted * page_of_shard * shards,
        host_free=max(free_memory() - on_host, 0) if hosted else 0,
        hosted=hosted * PAGE,
    )


def held(batch: int, shards: int) -> int:
    """Of `batch` sequences, those that one of the data shards holds at most."""
    return -(-batch // shards)


def _usual_context(most: int, batch: int, cache_tokens: int | None, on_cpu: bool) -> int:
    """The context where none is asked for and memory is no matter."""
    if on_cpu:
        return min(CPU_TOKENS, cache_tokens or CPU_TOKENS) // batch
    return min(most, cache_tokens or most)


def _pool_tokens(context: int, batch: int, fitting: int, on_cpu: bool) -> int:
    """Tokens of the pool where no number is asked for: at least those of `batch` sequences."""
    row = pages_for(context) * PAGE
    useful = CPU_TOKENS if on_cpu else row * max(ROWS, batch)
    return max(min(useful, fitting), row * batch)


def _host_pages(size: float, page: int) -> int:
    """Pages that fit `size` GiB."""
    count = int(size * 2**30) // page
    if size and not count:
        raise BadRequest(
            f"host_cache is {size:g} GiB, but a page takes {gib(page)}",
            f"give at least {page / 2**30:.2g}, or 0",
        )
    return count


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def page_parts(model: Transformer) -> int:
    """Devices of a shard that have different parts of a page: of its tokens, and of the heads where these are cached."""
    layout = model.dispatch.layout
    return layout.context * (layout.tensor if model.dispatch.caches_heads else 1)


def tokens_that_fit(model: Transformer, available: float, rows: int = ROWS) -> int:
    """Tokens of cache of one data shard that fit `available` bytes of each device, besides weights and passes of `rows` rows."""
    free = available - parts_of(model).weight_bytes - temporaries(model, rows)
    return int(max(free, 0)) // page_bytes(model) * PAGE


def temporaries(model: Transformer, rows: int, drafts: int = 0) -> int:
    """About the most bytes that one step takes in addition to weights and pool.

    Attention over a block of the cache, activations of experts, unpacked weights, experts copied from the host, logits; on a CPU
    also what tracing and compiling take, on a mesh what devices send each other."""
    config, itemsize = model.config, model.dtype.itemsize
    tokens = max(model.dispatch.chunk(model), rows)
    copied = scratch_bytes(config, itemsize, tokens) if 0 < model.dispatch.stream <= tokens else 0
    logits = 4 * 4 * rows * _words(model) * (1 + drafts)
    seen = 2 * rows * config.vocab_size
    parts = (
        max(_attention(model, rows, 1), _attention(model, 1, tokens)),
        _expert_activations(model, tokens),
        _unpacked(model, tokens),
        _exchanged(model, tokens),
        copied,
        logits,
        seen,
        _programs(model),
    )
    return sum(parts)


def _words(model: Transformer) -> int:
    """Words of the vocabulary whose logits one device computes."""
    return (model.embed if model.head is None else model.head).get_value().shape[0]


def _attention(model: Transformer, rows: int, new: int) -> int:
    """Scores and rebuilt heads of a block; for a kernel also the heads of the new tokens, and sums in float32 that are merged."""
    config, dispatch, itemsize = model.dispatch.seen(model.config), model.dispatch, model.dtype.itemsize
    name = dispatch.form_name(model, rows, new, max(new, PAGE))
    slots, scored = dispatch.block_slots(model, name, rows, new), new
    own = 0
    if name in KERNELS:
        scored, heads, value = 0, config.num_attention_heads, config.v_head_dim
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        own = rows * new * heads * (itemsize * (2 * query + value) + 3 * 4 * value)
    return own + roofline.block_bytes(config, rows, scored, slots, itemsize)


def _choosing(model: Transformer, rows: int, pages: int) -> int:
    """Bytes of retrieval, where each row chooses among `pages` pages: their summaries, and scores of heads in float32, twice.

    Also the keys and queries of a chunk by which pages are summed up."""
    if model.dispatch.retrieval is None:
        return 0
    config, vectors = model.config, model.dispatch.retrieval.policy.vectors
    width = config.kv_lora_rank + config.qk_rope_head_dim
    chunk = model.dispatch.chunk(model) + 2 * rows * PAGE
    itemsize = model.dtype.itemsize
    scores = 2 * 4 * model.dispatch.seen(config).num_attention_heads
    choosing = rows * pages * (vectors * width * itemsize + scores)
    return max(choosing, chunk * (2 * width * itemsize + 2 * 4 * PAGE))


def _expert_activations(model: Transformer, tokens: int) -> int:
    """Of the widest MLP: a device's own experts over all shards' tokens, or its part of a dense one over those of its own."""
    config, layout = model.config, model.dispatch.layout
    backend, everywhere = model.dispatch.backend_name(model, tokens), tokens * layout.data
    pairs = everywhere * 2 * (config.num_experts_per_tok or 0)
    if backend == "dense":
        pairs = everywhere * (config.n_routed_experts or 0) // layout.devices
    elif backend == "ragged" and layout.devices > 1:  # a block at a time
        pairs = min(pairs, max(2 * grouped.AT_ONCE, grouped.ROOM * pairs // layout.devices))
    widest = max(pairs * (config.moe_intermediate_size or 0), tokens * _mlp_width(model))
    return 3 * widest * model.dtype.itemsize


def _mlp_width(model: Transformer) -> int:
    """A device's part of a dense MLP."""
    size, parts = model.config.intermediate_size, model.dispatch.layout.tensor
    return size // parts if size % parts == 0 else size


def _exchanged(model: Transformer, tokens: int) -> int:
    """Tokens of all shards that come to the experts, those that are sent to several devices, and the sums of both."""
    config, layout = model.config, model.dispatch.layout
    if layout.devices == 1 or not config.n_routed_experts:
        return 0
    own = -(-tokens // (layout.tensor * layout.context))
    sent = own * min(layout.devices, config.num_experts_per_tok or 1)
    return 2 * (tokens * layout.data + sent) * config.hidden_size * model.dtype.itemsize


def _unpacked(model: Transformer, tokens: int) -> int:
    """The largest packed matrix as numbers, or as codes that are reordered when it is loaded, which take hardly more; the backend
    "dense" unpacks the three stacks of a layer's experts."""
    quantized = packed_shapes(model)
    sizes = [prod(shape[-2:]) for shape in quantized]
    if model.dispatch.backend_name(model, tokens) == "dense":
        sizes += [3 * prod(shape) for shape in quantized if len(shape) == 3]
    return model.dtype.itemsize * max(sizes, default=0)


def _programs(model: Transformer) -> int:
    """Bytes of tracing, XLA's compiler and its programs where they share the memory with the model."""
    if model.dispatch.device.platform != "cpu":
        return GRAPHS if model.dispatch.device.platform == "gpu" else 0
    return (PROGRAMS + PROGRAMS_PER_LAYER * model.config.num_hidden_layers) // model.dispatch.layout.devices


def logits_bytes(model: Transformer, rows: int, tokens: int) -> int:
    """About the most that float32 logits of `rows` sequences of `tokens` tokens take, with the activations of one forward pass.

    Nothing is read in chunks there, and without a cache no kernel attends: attention scores are `[B N T T]`."""
    config, dispatch, itemsize = model.config, model.dispatch, model.dtype.itemsize
    heads, every = dispatch.seen(config).num_attention_heads, rows * tokens
    scores = 3 * 4 * rows * heads * tokens * tokens
    width = (
        2 * config.qk_nope_head_dim + 2 * config.qk_rope_head_dim + config.v_head_dim + config.kv_lora_rank
    )
    dense = dispatch.backend_name(model, every) == "dense"
    chosen = (config.n_routed_experts or 0) if dense else 2 * (config.num_experts_per_tok or 0)
    widest = max(chosen * (config.moe_intermediate_size or 0), config.intermediate_size)
    activations = every * itemsize * (4 * config.hidden_size + max(heads * width, 3 * widest))
    head = model.head[...] if model.head is not None else None
    written = 2 if isinstance(head, QTensor) and head.reordered else 1  # its kernel's sums are transposed
    return written * 4 * every * config.vocab_size + scores + activations


def available(devices: Devices) -> int:
    """Bytes that may be taken of each device, of the fullest one of all processes; devices on a CPU share its free memory."""
    on_cpu, processes = devices.platform == "cpu", distributed.running()
    free = free_memory() // len(devices.mesh.local_devices) if on_cpu else devices.free_bytes() or 0
    return free if processes is None else processes.least(free)
