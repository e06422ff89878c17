"""Settings that options leave open, chosen from the headers of a model: devices, drafter, placement of experts, memory plan."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from mla_jax.base import device_rates, roofline
from mla_jax.base.axes import parse_mesh
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MAX_ROWS, OWN_ATTENTION, Options
from mla_jax.decode.speculative import Drafter
from mla_jax.engine.core.drafting import Drafting, drafter_of
from mla_jax.engine.core.size import ROW_COUNTS
from mla_jax.engine.opening.combinations import HOST_EXPERTS, INDEXER, refuse
from mla_jax.engine.policy.evicting import Eviction
from mla_jax.engine.policy.retrieving import retrieval_of
from mla_jax.hosts import distributed
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.expert_copies import placed
from mla_jax.mesh.partition import Layout
from mla_jax.mesh.planned import planned
from mla_jax.model import fp8_latent, own_forms
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.parts import cost_of
from mla_jax.offload import calibrate
from mla_jax.offload.place import Placement, is_asked, place
from mla_jax.offload.routing import Routing
from mla_jax.weights import auto_mesh
from mla_jax.weights.hub import resolve
from mla_jax.weights.load import ON_DEVICE, Checkpoint
from mla_jax.weights.placement_inputs import DEFAULT_CONTEXT, figures
from mla_jax.weights.plan import MemoryPlan, memory_plan

OWN_PER_COPY = 8  # of a device's own experts of a layer, one is copied, where nothing else is asked for


def checkpoint_of(options: Options) -> Checkpoint:
    """The headers of the model's files."""
    attention, kv_cache = options.attention.attention, options.attention.kv_cache
    experts = "auto" if options.experts.experts == "host" else options.experts.experts
    device = options.mesh.device
    reached = _reached() if device is None else PLANNED[device].figures
    dispatch = Dispatch(attention, experts, kv_cache, reached, retrieval=retrieval_of(options.retrieval))
    devices = _devices(options, reached)
    checkpoint = Checkpoint(
        resolve(options.model.model), dispatch=dispatch, dtype=options.model.dtype, devices=devices
    )
    if kv_cache == "fp8" and (reason := fp8_latent.why_not(checkpoint.config, attention)):
        raise Unsupported('kv_cache "fp8" is not available for this model', reason)
    if attention in OWN_ATTENTION:
        asked = {"evict": options.eviction.evict, "retrieve": options.retrieval.retrieve}
        policies = [name for name, policy in asked.items() if policy != "off"]
        own_forms.check_form(attention, checkpoint.config, policies)
    return checkpoint


def _reached() -> roofline.Device:
    """A device's rates, as process 0 has measured them: by these figures all processes decide the same."""
    own, processes = device_rates.measured_device(), distributed.running()
    return own if processes is None else roofline.Device(*processes.same(list(own)))


def _devices(options: Options, reached: roofline.Device) -> Devices:
    """Those of the mesh that is asked for; one device until the config is known where that is "auto"."""
    mesh, device = options.mesh.mesh, options.mesh.device
    if device is None and mesh in (None, "auto"):
        return Devices.default(reached)
    sizes = parse_mesh(mesh or "") if isinstance(mesh, str | None) else cast(Any, mesh)
    devices = (
        Devices.of(sizes, reached)
        if device is None
        else planned(device, sizes, options.memory.memory_fraction)
    )
    refuse(options, Layout(**devices.sizes))
    return devices


def on_devices(options: Options, checkpoint: Checkpoint, drafter: Drafter) -> tuple[Checkpoint, str]:
    """The checkpoint for the devices that are asked for, and why these where that is left open: there the context that is asked
    for must fit, or one of some length."""
    if options.mesh.mesh != "auto":
        return checkpoint, ""

    def on(sizes: Mapping[str, int]) -> Checkpoint:
        return checkpoint.on(Devices.of(sizes, checkpoint.device))

    def fits(sizes: Mapping[str, int]) -> bool:
        found = planned_memory(options, on(sizes), drafter)
        return found.fits and found.longest >= (
            options.model.context or min(DEFAULT_CONTEXT, checkpoint.config.max_position_embeddings)
        )

    sizes, why = auto_mesh.choose_mesh(checkpoint.config, len(jax.devices()), fits)
    refuse(options, Layout(**sizes))
    return on(sizes), why


def check_context(options: Options, longest: int) -> None:
    """Raises BadRequest for a context, or where that has no limit, a window, that is longer than the model allows."""
    context, window = options.model.context, options.retrieval.retrieve_window
    name, value = ("context", context) if window is None else ("retrieve_window", window)
    if value is not None and value > longest:
        raise BadRequest(
            f"{name} is {value:,}, expected 1 to {longest:,}",
            "the model's max_position_embeddings is the limit",
        )


def drafter_for(options: Options, checkpoint: Checkpoint) -> Drafter:
    """The drafter; none by default where tokens are dropped, whose cache MTP's layer cannot follow, and with InfLLM, which would
    count the queries of rejected drafts."""
    evicts, drafts = options.eviction.evict != "off", options.drafts
    if (evicts or options.retrieval.retrieve == "infllm") and drafts.draft == "auto":
        drafts = dataclasses.replace(drafts, draft="off", draft_tokens=None)
    return drafter_of(drafts, checkpoint.has_mtp, checkpoint.device.platform)


def placement_of(checkpoint: Checkpoint, options: Options) -> Placement:
    """Decides which layers' experts the CPU computes."""
    if (device := options.mesh.device) is not None:  # the host of the devices is not known
        if is_asked(options.experts):
            raise BadRequest(
                f"experts on the CPU and device {device} exclude each other",
                "the memory of its host is not known",
            )
        return Placement(why="all on the devices, of whose host nothing is known")
    if options.processes.several:
        return Placement(why="all on the devices of several processes")
    known = figures(checkpoint, options.experts, options.model.context, options.memory.batch)
    return place(options.experts, known, calibrate.host)


def features_of_model(config: Config, placement: Placement) -> list[str]:
    """Features that are in use without being asked for."""
    found = {HOST_EXPERTS: bool(placement.host), INDEXER: config.index_topk is not None}
    return [name for name, is_used in found.items() if is_used]


def planned_memory(
    options: Options, checkpoint: Checkpoint, drafter: Drafter, placement: Placement = ON_DEVICE
) -> MemoryPlan:
    memory = options.memory
    room = options.model.context, memory.batch, placement, memory.cache_tokens
    inexact = options.eviction.evict != "off" or options.retrieval.retrieve != "off"
    cost = cost_of(checkpoint.model(placement))
    drafting = Drafting(cost, drafter, options.drafts.draft_tokens).most_rows((*ROW_COUNTS, MAX_ROWS))
    drafts, keeps_text = drafter.most, drafter.needs_text or inexact
    eviction = Eviction.of(options.eviction)
    resident = None if eviction is None or eviction.chunk is None else eviction.resident
    return memory_plan(
        checkpoint, *room, drafts, keeps_text, memory.host_cache, memory.max_rows, drafting, resident
    )


def routing_counts(options: Options, config: Config) -> Routing | None:
    """The counts of chosen experts so far; with several processes those in the file of process 0."""
    path, processes = options.experts.routing_stats, distributed.running()
    if path is None:
        return None
    if processes is None:
        return Routing.open(Path(path), config)
    counts = Routing.open(Path(path), config).counts.tolist() if processes.leads else None
    return Routing(Path(path), config, np.array(processes.same(counts), np.int64))


def with_copies(checkpoint: Checkpoint, options: Options, placement: Placement) -> Checkpoint:
    """On a mesh, with copies of the experts that were counted most in each layer that is on the devices."""
    asked, devices = options.experts.device_experts, checkpoint.layout.devices
    counts = routing_counts(options, checkpoint.config) if devices > 1 else None
    if counts is None:
        return checkpoint
    own = (checkpoint.config.n_routed_experts or 0) // devices
    copies = max(own // OWN_PER_COPY, 1) if asked is None else asked
    if not copies or not counts.tokens:
        return checkpoint
    layers = counts.of_layers()
    return checkpoint.with_copies(
        {n: placed(layers[n], devices, copies) for n in layers if n not in placement.host}
    )
