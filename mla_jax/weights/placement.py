"""Where routed experts lie: on the device as long as they fit, then layer by layer on the host; from bytes and measured rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from mla_jax.base import roofline
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, printable
from mla_jax.base.options import ExpertOptions
from mla_jax.model.stream import CHUNK, held_bytes
from mla_jax.weights import host, measure
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import gib, host_memory, plan, score_bytes

PREDICTED = -1  # experts to defer
HELD, ROWS = 1024, (1, 8)  # tokens and rows that rates are predicted for
ROOM = 8192  # tokens for whose cache experts leave the device, if the user does not say how many


@dataclass(frozen=True)
class Placement:
    """`host` are the layers whose routed experts the CPU computes, MTP's after the model's; `why` and `lines` are words."""

    host: tuple[int, ...]
    why: str
    lines: tuple[str, ...] = ()


def place(checkpoint: Checkpoint, wanted: ExpertOptions, context: int | None = None) -> Placement:
    """Decides, and tells the checkpoint. Experts leave the device from the last layer on.

    Raises BadRequest, Unsupported, or DoesNotFit if the host has too little memory."""
    movable = checkpoint.layers_with_experts
    _check(wanted, len(movable), checkpoint.config.num_experts_per_tok or 1)
    asked = wanted.host_layers is not None or wanted.experts != "auto"
    if asked:
        most = len(movable) if wanted.experts == "host" else 0
        count, why = most if wanted.host_layers is None else wanted.host_layers, "as asked"
    else:
        count, why = _fewest(checkpoint, context, movable, streams=wanted.stream_tokens != 0)
    chosen = tuple(movable[len(movable) - count :])
    checkpoint.defer = max(wanted.defer, 0)
    if not chosen:
        return Placement(chosen, why)
    try:
        host.refuse_without_library()
    except Unsupported as e:
        if asked:
            raise
        return Placement((), f"{why}; they stay on the device, for {'; '.join(map(str, e.args))}")
    checkpoint.place(chosen, wanted.host_precision)
    if wanted.host_folder is None:  # what is mapped from files the system can give up and read again
        _refuse_without_memory(checkpoint)
    rates = measure.host(checkpoint.precision_on_host(min(chosen)))
    checkpoint.stream = _stream_tokens(checkpoint, rates) if wanted.stream_tokens is None else wanted.stream_tokens
    if wanted.defer == PREDICTED:
        checkpoint.defer = _defer(checkpoint, rates)
    return Placement(chosen, why, tuple(_predicted(checkpoint, rates)))


def _fewest(checkpoint: Checkpoint, context: int | None, movable: list[int], streams: bool) -> tuple[int, str]:
    """How many layers' experts must leave a device, so that the rest fits beside the cache, and beside what then `streams`."""
    if checkpoint.target.platform == "cpu":
        return 0, "there is no other memory"
    whole = plan(checkpoint, context or min(ROOM, checkpoint.config.max_position_embeddings))
    if whole.fits:
        return 0, f"all fits: {gib(whole.needed)} of {gib(whole.available)}"
    freed = accumulate(checkpoint.expert_bytes(layer) for layer in reversed(movable))
    room = held_bytes(checkpoint.config, checkpoint.dtype.itemsize, min(CHUNK, whole.context)) if streams else 0
    over = whole.needed - whole.available + room
    count = next((n for n, size in enumerate(freed, 1) if size >= over), len(movable))
    return count, f"{gib(whole.needed)} are needed for {whole.context:,} tokens, {gib(whole.available)} are there"


def _check(wanted: ExpertOptions, layers: int, chosen: int) -> None:
    from cpu_experts.layout import FORMATS

    if wanted.host_layers is not None and not 0 <= wanted.host_layers <= layers:
        raise BadRequest(f"host_layers is {wanted.host_layers}", f"the model has {layers} layers with experts")
    if wanted.experts == "host" and not layers:
        raise BadRequest("this model has no routed experts to lie on the host")
    if wanted.host_precision is not None and wanted.host_precision not in FORMATS:
        raise BadRequest(f"host_precision {printable(wanted.host_precision)} is not known", "known: " + ", ".join(FORMATS))
    if not PREDICTED <= wanted.defer < chosen:
        left = f"a token has one more expert, which stays; {PREDICTED} stands for as many as are predicted to gain"
        raise BadRequest(f"defer is {wanted.defer}, expected 0 to {chosen - 1}", left)
    if wanted.stream_tokens is not None and wanted.stream_tokens < 0:
        raise BadRequest(f"stream_tokens is {wanted.stream_tokens}, expected 0 or more", "0 stands for never")


def _refuse_without_memory(checkpoint: Checkpoint) -> None:
    """Stacks are packed layer by layer: the host holds all that is packed and one layer not yet."""
    config, largest = checkpoint.config, max(checkpoint.expert_bytes(layer) for layer in checkpoint.host)
    each = [host.packed_bytes(config, checkpoint.precision_on_host(layer)) for layer in checkpoint.host]
    held = (config.n_routed_experts or 0) * sum(each)
    if held + largest > (free := host_memory()):
        raise DoesNotFit(
            "the experts do not fit the host's memory",
            f"{len(checkpoint.host)} layers take {gib(held)} and {gib(largest)} while they are packed; {gib(free)} are free",
            "take a lower host_precision, or a machine with more memory",
        )


def _stream_tokens(checkpoint: Checkpoint, rates: roofline.Host) -> int:
    """Predicted; never where the device is the host."""
    if checkpoint.device.platform == "cpu":
        return 0
    return roofline.stream_tokens(checkpoint.config, checkpoint.device, rates, _packed_bytes(checkpoint))


def _packed_bytes(checkpoint: Checkpoint) -> int:
    """Of an expert in the first layer on the host."""
    return host.packed_bytes(checkpoint.config, checkpoint.precision_on_host(min(checkpoint.host)))


def _defer(checkpoint: Checkpoint, rates: roofline.Host) -> int:
    """For a row alone, whose steps leave the device idle the longest; none where the device is the host."""
    config, device = checkpoint.config, checkpoint.device
    if device.platform == "cpu":
        return 0
    held, layers = min(HELD, config.max_position_embeddings), _layers(checkpoint)
    return roofline.best_defer(config, device, 1, held, rates, layers, _packed_bytes(checkpoint))


def _layers(checkpoint: Checkpoint) -> int:
    """Layers of the model, MTP's apart, whose experts lie on the host."""
    return sum(layer < checkpoint.config.num_hidden_layers for layer in checkpoint.host)


def _predicted(checkpoint: Checkpoint, rates: roofline.Host) -> Iterator[str]:
    """What the host reaches, and the rates of decoding and of reading a prompt that follow."""
    config, device, expert = checkpoint.config, checkpoint.device, _packed_bytes(checkpoint)
    layers = _layers(checkpoint)
    reached = f"{rates.bandwidth / 1e9:.1f} GB/s of experts, {rates.flops / 1e12:.2f} TFLOP/s"
    yield f"{rates.name}: {reached}, {rates.call * 1e6:.0f} us a call"
    if device.platform == "cpu":  # where what else a step takes is not known
        return
    held = min(HELD, config.max_position_embeddings)
    for rows in ROWS:
        step = roofline.decode_seconds(config, device, rows, held, rates, layers, expert, checkpoint.defer)
        theirs = layers * roofline.host_seconds(config, rates, rows, expert)
        parts = f"a step {step * 1e3:,.1f} ms, of which the CPU is busy {theirs * 1e3:,.1f} ms"
        yield f"predicted for {rows} row{'s' * (rows > 1)} over {held:,} tokens: {rows / step:,.1f} tok/s, {parts}"
    prompt, stream = min(CHUNK, config.max_position_embeddings), checkpoint.stream
    chunk = min(checkpoint.abstract.chunk(1, prompt, score_bytes(checkpoint.bytes(), device.platform)), prompt)
    streamed = f"with {stream:,} tokens or more over the link, {rates.link / 1e9:.1f} GB/s" if stream else "never over the link"
    rate = chunk / roofline.prefill_seconds(config, device, chunk, rates, layers, expert, stream)
    yield f"predicted for a prompt in chunks of {chunk:,} tokens: {rate:,.0f} tok/s; experts come to the device {streamed}"
