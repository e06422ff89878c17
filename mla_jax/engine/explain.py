"""What runs where, and why, in words."""

from mla_jax.base import roofline
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.weights.plan import gib


def explain(model: Transformer, formats: dict[str, int], context: int, placed: Placement | None = None) -> list[str]:
    """The forms of attention and the expert backends that the phases of a request take, with the figures that decide.

    `formats` are the bytes of the weights by number format; `placed` says where experts lie."""
    config, dispatch, prompt = model.config, model.dispatch, min(1024, context)
    phases = {"prefill": (prompt, prompt), "a chunk on a long prefix": (min(64, context), context), "decode": (1, context)}
    size = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    held = ", ".join(f"{gib(held)} in {name}" for name, held in formats.items())
    lines = [f"{config.model_type}: {size}, {held}, computed in {model.dtype} on {dispatch.device.name}"]
    by = "measured here" if dispatch.device.measured else "by the table"
    reached = f"{dispatch.device.bandwidth / 1e12:.2f} TB/s of memory, {dispatch.device.flops / 1e12:,.3g} TFLOP/s"
    lines.append(f"{dispatch.device.name}: {reached}, {dispatch.device.between * 1e6:.0f} us a layer beside; {by}")
    said = "chosen" if dispatch.attention == "auto" else "as asked"
    for phase, (new, attended) in phases.items():
        form = dispatch.form_name(model, 1, new, attended)
        why = roofline.why_form(config, dispatch.device, form, 1, new, attended)
        by = f" by {dispatch.attention_kernel(model, form, 1, new, attended)}" if form in KERNELS else ""
        lines.append(f"{phase} ({new:,} new over {attended:,}): {form}{by}, {said}: {why}")
    if dispatch.kv_cache == "fp8":
        lines.append("cache: latents in E4M3 with a scale for each 128, rotary keys as computed")
    lines.append(f"on a long prefix, rebuilding heads takes fewer FLOPs from {roofline.break_even(config):.0f} new tokens")
    if config.n_routed_experts:
        lines.append(_experts(model, prompt, placed) + (f": {placed.why}" if placed else ""))
    lines += placed.lines() if placed else ()
    if model.mtp:
        lines.append(f"MTP layers loaded: {len(model.mtp)}; decoding does not draft with them yet")
    return lines


def _experts(model: Transformer, prompt: int, placed: Placement | None) -> str:
    layers, on_host = model.config.num_hidden_layers, model.on_host()
    one, many = (_backend(model, tokens) for tokens in (1, prompt))
    on_device = f"{one} for one token, {many} for {prompt:,}"
    further = placed is not None and any(layer >= layers for layer in placed.host)
    if not on_host:
        return "experts: " + "those of MTP's layers on the CPU, which decoding does not run; " * further + on_device
    deferred = f", {model.dispatch.defer} of a token's a layer later" if model.dispatch.defer else ""
    some = f"{len(on_host)} layer{'s' * (len(on_host) > 1)}" + " and of MTP's" * further
    some = "all layers" if on_host.keys() >= {i for i in range(layers) if model.config.is_moe(i)} else some
    if model.dispatch.stream:
        by = _backend(model, model.dispatch.stream, "streamed")
        deferred += f", with {model.dispatch.stream:,} tokens or more brought to the device, by {by}"
    if model.replicated:
        by = _backend(model, 1, "replicated")
        deferred += f", {model.replicated:,} of them replicated on the device, by {by} for one token"
    return f"experts: those of {some} on the CPU{deferred}" + (f"; {on_device}" if some != "all layers" else "")


def _backend(model: Transformer, tokens: int, where: str = "device") -> str:
    name = model.dispatch.backend_name(model, tokens, where)
    return f"{name} by {model.dispatch.expert_kernel(model, tokens, where)}" if name == "ragged" else name
