"""What runs where, and why, in words."""

import jax

from mla_jax.base import roofline
from mla_jax.base.limits import gib
from mla_jax.base.options import EVERY, EvictOptions
from mla_jax.base.qtensor import REORDERED
from mla_jax.cache.paged import NOTES, PAGE
from mla_jax.engine.drafting import Drafting
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.weights.plan import Plan


def explain(
    model: Transformer,
    formats: dict[str, int],
    planned: Plan,
    placed: Placement | None = None,
    drafting: Drafting | None = None,
    eviction: EvictOptions | None = None,
) -> list[str]:
    """The forms of attention and the expert backends that the phases of a request take, with the figures that decide.

    `formats` are the bytes of the weights by number format; `placed` says where the experts are, `drafting` how
    many tokens are guessed, `eviction` which are dropped."""
    context, chunk = planned.context, model.dispatch.chunk(model)
    prompt = min(chunk, context)
    lines = [_model(model, formats), _device(model.dispatch.device), *_reordered(formats)]
    phases = {"prefill": (prompt, prompt), "a chunk on a long prefix": (min(64, context), context), "decode": (1, context)}
    lines += [_attention(model, phase, new, attended) for phase, (new, attended) in phases.items()]
    lines.append(
        f"cache: {planned.tokens:,} tokens of all requests together, in pages of {PAGE}; up to {planned.rows} requests run at a "
        f"time, and {chunk:,} tokens of their prompts are read at a time"
    )
    if planned.hosted:
        size = gib(planned.host_cache)
        lines.append(f"cache: {planned.hosted:,} tokens that it has no room for stay in {size} of the host's memory")
    if model.dispatch.kv_cache == "fp8":
        lines.append("cache: latents in E4M3 with a scale for each 128, rotary keys as computed")
    if eviction is not None and eviction.evict != "off":
        when = f"once a prompt is read, and after every {EVERY} tokens of output"
        share = f"{100 * eviction.evict_keep:.3g} % stay, shared out over layers by the rule {eviction.evict_budget}"
        lines.append(f"cache: {eviction.evict} drops tokens {when}; {share}")
    lines += _retrieval(model, planned.tokens)
    threshold = roofline.break_even(model.config)
    lines.append(f"on a long prefix, rebuilding heads takes fewer FLOPs from {threshold:.0f} new tokens")
    if model.config.n_routed_experts:
        reason = f": {placed.why}" if placed else ""
        lines.append(_experts(model, prompt, placed) + reason)
    if placed:
        lines += placed.lines()
    lines += [drafting.explain(rows) for rows in (1, planned.rows)] if drafting and drafting.drafter.most else []
    return lines


def _model(model: Transformer, formats: dict[str, int]) -> str:
    config = model.config
    size = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    weights = ", ".join(f"{gib(size)} in {name}" for name, size in formats.items())
    return f"{config.model_type}: {size}, {weights}, computed in {model.dtype} on {model.dispatch.device.name}"


def _reordered(formats: dict[str, int]) -> list[str]:
    """How packed weights are multiplied where a kernel takes them."""
    size = sum(size for name, size in formats.items() if name.endswith(REORDERED))
    how = "multiplied by a kernel that unpacks them in registers, for which their blocks were reordered"
    return [f"packed weights: {gib(size)} {how}"] if size else []


def _device(device: roofline.Device) -> str:
    source = "measured here" if device.measured else "by the table"
    reached = f"{device.bandwidth / 1e12:.2f} TB/s of memory, {device.flops / 1e12:,.3g} TFLOP/s"
    return f"{device.name}: {reached}, {device.between * 1e6:.0f} us of overhead per layer; {source}"


def _attention(model: Transformer, phase: str, new: int, attended: int) -> str:
    """The form for one row in a phase, who computes it, and its cost next to another form's."""
    dispatch = model.dispatch
    form = dispatch.form_name(model, 1, new, attended)
    implementation = f" by {dispatch.attention_kernel(model, form, 1, new, attended)}" if form in KERNELS else ""
    chosen = "chosen" if dispatch.attention == "auto" else "as asked"
    why = roofline.why_form(model.config, dispatch.device, form, 1, new, attended)
    return f"{phase} ({new:,} new over {attended:,}): {form}{implementation}, {chosen}: {why}"


def _retrieval(model: Transformer, tokens: int) -> list[str]:
    """Who chooses what a decode step reads, and what is noted for that in a pool of so many tokens."""
    retrieval = model.dispatch.retrieval
    if retrieval is None:
        return []
    pool = jax.eval_shape(lambda: model.new_pool(tokens // PAGE))
    noted = sum(pool[name].size * pool[name].dtype.itemsize for name in NOTES & pool.keys())
    most = retrieval.pages(PAGE) * PAGE
    what = f"{retrieval.policy.name} chooses {most:,} tokens that a decode step reads in each layer"
    return [f"cache: {what}; the first {retrieval.dense} layers read all; what is noted of pages takes {gib(noted)}"]


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
