"""Lines on the placement of the work and the reasons."""

import jax

from mla_jax.base import qtensor, roofline
from mla_jax.base.limits import gib
from mla_jax.base.options import EVERY, OWN_ATTENTION, EvictOptions
from mla_jax.base.qtensor import REORDERED, QTensor
from mla_jax.cache.paged import NOTES, OF_INDEX, PAGE
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.drafting import Drafting
from mla_jax.model.fp8_up import stays_fp8
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.parts import packed_shapes, token_bytes, unpacked_bytes
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.weights.plan import MemoryPlan


def explain(
    model: Transformer,
    formats: dict[str, int],
    planned: MemoryPlan,
    placed: Placement | None = None,
    drafting: Drafting | None = None,
    eviction: EvictOptions | None = None,
    about: str | None = None,
) -> list[str]:
    """The forms of attention and the expert backends that the phases of a request take, with the figures that decide.

    `formats` are the bytes of the weights by number format; `placed` says where the experts are, `drafting` how
    many tokens are guessed, `eviction` which are dropped; `about` is what the file says of itself."""
    prompt = min(model.dispatch.chunk(model), planned.context)
    return [
        _model(model, formats),
        *([f"file: {about}"] if about else []),
        _device(model.dispatch.device),
        *_mesh(planned),
        *_reordered(formats),
        *_unpacked(model),
        *_up(model),
        *_forms(model, prompt, planned.context),
        *_cache(model, planned),
        *_dropped(model, eviction),
        *_retrieval(model, planned.tokens),
        *_chosen_tokens(model),
        *_break_even(model),
        *_placed(model, prompt, placed),
        *_drafted(drafting, planned.rows * planned.shards),
    ]


def _model(model: Transformer, formats: dict[str, int]) -> str:
    config = model.config
    size = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    weights = ", ".join(f"{gib(size)} in {name}" for name, size in formats.items())
    return (
        f"{config.model_type}: {size}, {weights}, computed in {model.dtype} on {model.dispatch.device.name}"
    )


def _reordered(formats: dict[str, int]) -> list[str]:
    """How packed weights are multiplied where a kernel takes them."""
    size = sum(size for name, size in formats.items() if name.endswith(REORDERED))
    how = "multiplied by a kernel that unpacks them in registers, for which their blocks were reordered"
    return [f"packed weights: {gib(size)} {how}"] if size else []


def _unpacked(model: Transformer) -> list[str]:
    """The packed weights that no kernel of a GPU takes: those of other formats, and of sizes that do not fill its tiles."""
    if model.dispatch.device.platform != "gpu":
        return []
    how = "are unpacked before every product, which takes longer than bf16; --dtype bfloat16 unpacks them while loading"
    found = unpacked_bytes(model)
    return [f"packed weights: {gib(size)} in {name} {how}" for name, size in found.items()]


def _up(model: Transformer) -> list[str]:
    """Whether kv_b_proj stays in FP8 where a checkpoint has it so."""
    config = model.config
    if isinstance(model.layers[0].attn.uk.get_value(), QTensor):
        return ["kv_b_proj: stays in FP8; its codes are converted as they are multiplied"]
    block = config.quantization_config and config.quantization_config.weight_block_size
    if not block or not packed_shapes(model) or stays_fp8(qtensor.fp8_format(block), config):
        return []
    head = f"{config.qk_nope_head_dim} + {config.v_head_dim} rows of a head"
    return [
        f"kv_b_proj: unpacked to {model.dtype} while loading; blocks of {block[0]} rows do not fit the {head}"
    ]


def explain_programs(programs: Programs, planned: MemoryPlan) -> str:
    """The programs that are compiled so far, and what they take of what is planned for them."""
    if not programs.compiled:
        return "programs: none is compiled yet"
    taken = f"the largest takes {gib(programs.temporaries)} besides weights and cache"
    return f"programs: {programs.compiled} are compiled; {taken}, and {gib(planned.temporaries)} are planned"


def _device(device: roofline.Device) -> str:
    source = "by the table" if device.known else "a careful guess, for it is not in the table"
    if device.measured:
        source = "measured here"
    reached = f"{device.bandwidth / 1e12:.2f} TB/s of memory, {device.flops / 1e12:,.3g} TFLOP/s"
    return f"{device.name}: {reached}, {device.between * 1e6:.0f} us of overhead per layer; {source}"


def _mesh(planned: MemoryPlan) -> list[str]:
    """The mesh's axes, and the reason for their sizes."""
    if not planned.mesh:
        return [planned.why_mesh] if planned.why_mesh else []
    shards = (
        f"rows are shared by {planned.shards} shards, each with a cache of its own; "
        if planned.shards > 1
        else ""
    )
    return [
        planned.why_mesh or f"mesh {planned.mesh}: as asked",
        f"mesh: {shards}bytes, requests and cache are those of one device",
    ]


def _forms(model: Transformer, prompt: int, context: int) -> list[str]:
    """A line for each phase, with its new tokens and those that they attend to."""
    phases = {
        "prefill": (prompt, prompt),
        "a chunk on a long prefix": (min(64, context), context),
        "decode": (1, context),
    }
    return [_attention(model, phase, new, attended) for phase, (new, attended) in phases.items()]


def _attention(model: Transformer, phase: str, new: int, attended: int) -> str:
    """The form for one row in a phase, who computes it, and its cost next to another form's."""
    dispatch = model.dispatch
    form = dispatch.form_name(model, 1, new, attended)
    implementation = (
        f" by {dispatch.attention_kernel(model, form, 1, new, attended)}" if form in KERNELS else ""
    )
    chosen = "chosen" if dispatch.attention == "auto" else "as asked"
    held = token_bytes(model) if form in OWN_ATTENTION else None
    why = roofline.why_form(dispatch.seen(model.config), dispatch.device, form, 1, new, attended, held)
    over = f"{attended:,}"
    if roofline.chooses(model.config, attended):
        over = f"{model.config.index_topk:,} of {over}"
    return f"{phase} ({new:,} new over {over}): {form}{implementation}, {chosen}: {why}"


def _cache(model: Transformer, planned: MemoryPlan) -> list[str]:
    """The pool's capacity, on the device and on the host, and its format."""
    whose = "of all requests" if model.dispatch.layout.data == 1 else "of the requests of each data shard"
    size = f"{planned.tokens:,} tokens {whose} together, in pages of {PAGE}"
    served = f"up to {planned.rows} requests run at a time"
    read = f"{model.dispatch.chunk(model):,} tokens of their prompts are read at a time"
    lines = [f"cache: {size}; {served}, and {read}"]
    if planned.hosted:
        host = f"{gib(planned.host_cache)} of the host's memory"
        lines.append(f"cache: {planned.hosted:,} tokens that it has no room for stay in {host}")
    if model.dispatch.attention in OWN_ATTENTION:
        own = f"{model.dispatch.attention} caches {token_bytes(model):,.0f} bytes of a token in each layer"
        lines.append(f"cache: {own}; its arithmetic is counted as that of move_elided")
    if model.dispatch.kv_cache == "fp8":
        lines.append("cache: latents in E4M3 with a scale for each 128, rotary keys as computed")
    return lines


def _dropped(model: Transformer, eviction: EvictOptions | None) -> list[str]:
    """Which tokens are dropped, and when."""
    if eviction is None or eviction.evict == "off":
        return []
    every = min(EVERY, eviction.evict_chunk or EVERY)
    within = f"after every {eviction.evict_chunk:,} tokens of a prompt, " if eviction.evict_chunk else ""
    when = f"{within}once a prompt is read, and after every {every} tokens of output"
    among = "layers and their heads" if model.dispatch.caches_heads else "layers"
    keep = eviction.evict_keep
    share = f"{100 * keep:.3g} %" if keep <= 1 else f"{keep:,}"
    rule = f"{share} stay, shared out over {among} by the rule {eviction.evict_budget}"
    return [f"cache: {eviction.evict} drops tokens {when}; {rule}"]


def _retrieval(model: Transformer, tokens: int) -> list[str]:
    """The retrieval policy, and the size of its metadata in a pool of `tokens` tokens."""
    retrieval = model.dispatch.retrieval
    if retrieval is None:
        return []
    pool = jax.eval_shape(lambda: model.new_pool(tokens // PAGE))
    noted = sum(pool[name].size * pool[name].dtype.itemsize for name in NOTES & pool.keys())
    most = retrieval.pages(PAGE) * PAGE
    what = f"{retrieval.policy.name} chooses {most:,} tokens that a decode step reads in each layer"
    window = retrieval.window
    return [
        f"cache: {what}; the first {retrieval.dense} layers read all; what is noted of pages takes {gib(noted)}"
    ] + ([] if window is None else [f"positions: tokens more than {window:,} back are all as far as that"])


def _chosen_tokens(model: Transformer) -> list[str]:
    """How many layers choose how many tokens, and from which length."""
    config = model.config
    if config.index_topk is None:
        return []
    layers, keys = config.num_hidden_layers, _bytes_of_token(model)
    how = " in E4M3, after a Hadamard transform" if model.dispatch.packs_index_keys(config) else ""
    own = sum(config.has_indexer(layer) for layer in range(layers))
    others = f"; the other {layers - own} take the choice of a layer below" if own < layers else ""
    return [
        f"indexers: {own} of {layers} layers choose {config.index_topk:,} tokens for each new one{others}",
        f"indexers: contexts of up to {config.index_topk:,} tokens are attended to as a whole",
        f"indexers: their keys take {keys:,} bytes a token{how}",
    ]


def _bytes_of_token(model: Transformer) -> int:
    """Of the keys of all indexers."""
    pool = jax.eval_shape(lambda: model.new_pool(1))
    return sum(pool[name].size * pool[name].dtype.itemsize for name in OF_INDEX & pool.keys()) // PAGE


def _break_even(model: Transformer) -> list[str]:
    if model.config.index_topk is not None:
        return []  # a long prefix is not read as a whole
    tokens = roofline.break_even(model.config)
    return [f"on a long prefix, rebuilding heads takes fewer FLOPs from {tokens:.0f} new tokens"]


def _placed(model: Transformer, prompt: int, placed: Placement | None) -> list[str]:
    """Where experts are computed, and why there."""
    why, details = (f": {placed.why}", placed.lines()) if placed else ("", [])
    experts = [_experts(model, prompt, placed) + why] if model.config.n_routed_experts else []
    return experts + details


def _experts(model: Transformer, prompt: int, placed: Placement | None) -> str:
    on_host = model.on_host()
    on_device = f"{_backend(model, 1)} for one token, {_backend(model, prompt)} for {prompt:,}"
    further = placed is not None and any(layer >= model.config.num_hidden_layers for layer in placed.host)
    if not on_host:
        idle = "those of MTP's layers on the CPU, which only drafts run; " if further else ""
        return f"experts: {idle}{on_device}"
    everywhere = on_host.keys() >= _expert_layers(model)
    layers = "all layers" if everywhere else _some_layers(len(on_host), further)
    rest = "" if everywhere else f"; {on_device}"
    return f"experts: those of {layers} on the CPU{_host_options(model)}{rest}"


def _expert_layers(model: Transformer) -> set[int]:
    return {i for i in range(model.config.num_hidden_layers) if model.config.is_moe(i)}


def _some_layers(count: int, further: bool) -> str:
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"{layers} and of MTP's" if further else layers


def _host_options(model: Transformer) -> str:
    """How experts on the CPU are computed other than at once and there."""
    dispatch, parts = model.dispatch, []
    if dispatch.defer:
        parts.append(f"{dispatch.defer} of each token's added one layer later")
    if dispatch.stream:
        backend = _backend(model, dispatch.stream, "streamed")
        parts.append(f"with {dispatch.stream:,} tokens or more copied to the device, by {backend}")
    if model.replicated:
        backend = _backend(model, 1, "replicated")
        parts.append(f"{model.replicated:,} of them replicated on the device, by {backend} for one token")
    return "".join(f", {part}" for part in parts)


def _backend(model: Transformer, tokens: int, where: str = "device") -> str:
    name = model.dispatch.backend_name(model, tokens, where)
    return f"{name} by {model.dispatch.expert_kernel(model, tokens, where)}" if name == "ragged" else name


def _drafted(drafting: Drafting | None, rows: int) -> list[str]:
    """How many tokens are guessed for one row, and for `rows` rows."""
    if drafting is None or not drafting.drafter.most:
        return []
    return [drafting.explain(count) for count in (1, rows)]
