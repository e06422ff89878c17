"""Bytes that passes take besides weights and pool, worked out from shapes alone."""

from math import prod

from mla_jax.base import roofline
from mla_jax.base.qtensor import QTensor
from mla_jax.cache import retrieve
from mla_jax.cache.paged import PAGE
from mla_jax.model import grouped
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.parts import packed_shapes, page_bytes, parts_of
from mla_jax.model.transformer import Transformer
from mla_jax.offload.streaming import scratch_bytes

WORKSPACES = 256 << 20  # bytes that libraries of a GPU take, such as cuBLAS
PROGRAMS, PROGRAMS_PER_LAYER = 300 << 20, 13 << 20  # bytes, measured with 3 to 27 layers on JAX 0.10.2
ROWS = 64  # requests that run at a time, unless memory is planned for more


def tokens_that_fit(model: Transformer, available: float, rows: int = ROWS) -> int:
    """Tokens of cache of one data shard that fit `available` bytes of each device, besides weights and passes of `rows` rows."""
    free = available - parts_of(model).weight_bytes - temporaries(model, rows)
    return int(max(free, 0)) // page_bytes(model) * PAGE


def temporaries(model: Transformer, rows: int, drafts: int = 0, drafting_rows: int | None = None) -> int:
    """About the most bytes that one step takes in addition to weights and pool.

    Attention over a block of the cache, activations of experts, unpacked weights, experts copied from the host, logits; also what
    compiling takes, and on a mesh what devices send each other. `drafts` are guessed for up to `drafting_rows` of the rows."""
    config, itemsize = model.config, model.dtype.itemsize
    drafting = rows if drafting_rows is None else min(rows, drafting_rows)
    chosen = max(rows, drafting * (1 + drafts))  # tokens of which a pass has logits
    tokens = max(model.dispatch.chunk(model) + rows, chosen)
    copied = scratch_bytes(config, itemsize, tokens) if 0 < model.dispatch.stream <= tokens else 0
    logits = 4 * 4 * chosen * _words(model)
    seen = 2 * rows * config.vocab_size
    parts = (
        max(
            _attention(model, rows, 1),
            _attention(model, max(drafting, 1), 1 + drafts),
            _attention(model, 1, tokens),
        ),
        _expert_activations(model, tokens),
        _unpacked(model, tokens),
        _exchanged(model, tokens),
        copied,
        logits,
        seen,
        _programs(model, rows),
    )
    return sum(parts)


def _head(model: Transformer) -> tuple[int, ...]:
    """The shape of one device's part of the head: words of the vocabulary whose logits it computes, and the model's width."""
    return (model.embed if model.head is None else model.head).get_value().shape


def _words(model: Transformer) -> int:
    return _head(model)[0]


def _attention(model: Transformer, rows: int, new: int) -> int:
    """Scores and rebuilt heads of a block; for a kernel the heads of the new tokens, and sums in float32 that are merged.

    A kernel over what is cached rebuilds nothing."""
    config, dispatch, itemsize = model.dispatch.seen(model.config), model.dispatch, model.dtype.itemsize
    name = dispatch.form_name(model, rows, new, max(new, PAGE))
    slots, scored = dispatch.block_slots(model, name, rows, new), new
    own = 0
    if name in KERNELS:
        scored, heads, value = 0, config.num_attention_heads, config.v_head_dim
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        own = rows * new * heads * (itemsize * (2 * query + value) + 3 * 4 * value)
    if name not in ("kernel_latents", "kernel_naive"):
        own += roofline.block_bytes(config, rows, scored, slots, itemsize)
    return max(own, _choosing_tokens(model, rows, new))


def _choosing_tokens(model: Transformer, rows: int, new: int) -> int:
    """Scores of an indexer, or what attention makes of the chosen tokens, and where these are; 0 without indexers."""
    config, dispatch, itemsize = model.dispatch.seen(model.config), model.dispatch, model.dtype.itemsize
    if config.index_topk is None:
        return 0
    name = dispatch.form_name(model, rows, new, config.index_topk + 1)
    sizes = roofline.choice_sizes(config, dispatch.device.platform, name, rows, new, itemsize)
    scored = min(new, sizes.choosing) * roofline.scored_bytes(config, sizes.slots)
    scored += sizes.slots * roofline.key_bytes(config, itemsize)
    if sizes.attending is None:  # queries and outputs of the kernel, in the latents' space
        read = new * config.num_attention_heads * 3 * config.kv_lora_rank * itemsize
    else:
        read = min(new, sizes.attending) * config.index_topk * roofline.chosen_bytes(config, name, itemsize)
    return rows * (max(scored, read) + 4 * new * config.index_topk)


def choosing(model: Transformer, rows: int, pages: int) -> int:
    """Bytes of retrieval, where each row chooses among `pages` pages: their summaries, and scores of heads in float32, twice, for
    a block of rows.

    Also the keys and queries of a chunk by which pages are summed up."""
    if model.dispatch.retrieval is None:
        return 0
    config, vectors = model.config, model.dispatch.retrieval.policy.vectors
    width = config.kv_lora_rank + config.qk_rope_head_dim
    chunk = model.dispatch.chunk(model) + 2 * rows * PAGE
    itemsize = model.dtype.itemsize
    scores = 2 * 4 * model.dispatch.seen(config).num_attention_heads
    summaries = pages * vectors * width * itemsize
    choosing = min(rows, retrieve.rows_at_once(summaries)) * (summaries + pages * scores)
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


def _programs(model: Transformer, rows: int) -> int:
    """Bytes of XLA's compiler. On a CPU tracing and programs share the memory with the model; on a GPU the compiler times matmuls
    while other programs run, of which the logits of these rows are the largest."""
    platform = model.dispatch.device.platform
    if platform == "gpu":
        return WORKSPACES + prod(_head(model)) * model.dtype.itemsize + 4 * rows * _words(model)
    if platform != "cpu":
        return 0
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
