"""A model that is opened but not loaded: headers checked, experts placed, memory planned. LLM and `--dry-run` share it."""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from mla_jax.base import device_rates, roofline
from mla_jax.base.axes import parse_mesh
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported, shown
from mla_jax.base.files import cache_folder
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import Options
from mla_jax.base.platforms import default_device
from mla_jax.decode.speculative import NOBODY, Drafter
from mla_jax.engine import export
from mla_jax.engine.core.drafting import Drafting, drafter_of
from mla_jax.engine.inputs import InputProcessor
from mla_jax.engine.opening.explain import explain
from mla_jax.engine.opening.prediction import Prediction, predict
from mla_jax.engine.opening.refused import EXPERTS_ON_HOST, refuse_on_mesh
from mla_jax.engine.policy.retrieving import refuse_contradictions, retrieval_of
from mla_jax.engine.processes import facts_of_model, refuse_left_out, started
from mla_jax.engine.text import Text, open_text
from mla_jax.hosts import distributed
from mla_jax.hosts.distributed import Processes
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.expert_copies import placed
from mla_jax.mesh.partition import Layout
from mla_jax.mesh.planned import planned
from mla_jax.model import fp8_latent, ops
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.transformer import Transformer
from mla_jax.offload import calibrate, library
from mla_jax.offload.place import Placement, is_asked, place
from mla_jax.offload.routing import Routing
from mla_jax.weights import auto_mesh
from mla_jax.weights.hub import resolve
from mla_jax.weights.load import ON_DEVICE, Checkpoint, Progress
from mla_jax.weights.placement_inputs import ROOM, figures
from mla_jax.weights.plan import Plan, plan

COPIES = 8  # of a device's own experts of a layer, one is copied, where nothing else is asked for


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are still in their files, with all that follows from its headers."""

    options: Options
    checkpoint: Checkpoint
    placement: Placement
    plan: Plan
    text: Text
    drafter: Drafter
    processes: Processes | None = None  # those that have parts of the model, if there are several

    @property
    def name(self) -> str:
        """What the user calls the model: the name of a folder or file, or of a model in the Hub's cache."""
        model = self.options.model.model
        if model is None:
            return "demo"
        return Path(model).resolve().name if Path(model).exists() else str(model)

    @property
    def config(self) -> Config:
        return self.checkpoint.config

    @property
    def inputs(self) -> InputProcessor:
        """Checks prompts, before there are weights."""
        return InputProcessor(self.config, self.text, self.plan.context)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user of the folder should know."""
        host = library.notes() if self.placement.host else ()
        return (*self.config.notes, *self.text.notes, *host, *self._shortened(), *self._chosen_mesh())

    def _shortened(self) -> tuple[str, ...]:
        """That the context is shorter than the model's, if nobody has asked for that."""
        longest = self.config.max_position_embeddings
        if self.options.model.context is not None or self.plan.context == longest or not self.plan.longest:
            return ()
        return (f"context: {self.plan.context:,} of the model's {longest:,} tokens; --context asks for more",)

    def _chosen_mesh(self) -> tuple[str, ...]:
        return (self.plan.why_mesh,) if self.plan.why_mesh else ()

    def routing(self) -> Routing | None:
        """The counts of chosen experts to add to; their file is written at once, for that must not fail after the work."""
        counts = _counted(self.options, self.config)
        if counts is None:
            return None
        if self.processes is None or self.processes.leads:
            counts.save()
        return counts

    def load(self, progress: Progress | None = None) -> Transformer:
        """The model with its weights, on the devices. Raises BadRequest where these are not here."""
        if (device := self.options.mesh.device) is not None:
            raise BadRequest(
                f"there is no device {device} to run on", "it is for --dry-run alone; leave it out"
            )
        folder = self.options.experts.host_folder
        return self.checkpoint.load(self.placement, progress, None if folder is None else Path(folder))

    def export(self, path: str | Path, **asked: Any) -> None:
        """As `LLM.export`, of the programs alone: no weights are loaded, so the model need not fit this machine."""
        defaults = {
            "prompt": 256,
            "rows": 8,
            "context": None,
            "platforms": None,
            "mesh": None,
            "kernels": False,
        }
        if unknown := asked.keys() - defaults.keys():
            raise BadRequest(f"export has no argument {shown(min(unknown))}", f"it has {', '.join(defaults)}")
        asked = defaults | asked
        asked["mesh"] = asked["mesh"] or self.checkpoint.layout.sizes
        whole = self.checkpoint.on(Devices.default(self.checkpoint.device)).model(self.placement)
        # The longest request, whatever length fits the devices of the plan
        longest = self.options.model.context or self.config.max_position_embeddings
        export.export(path, whole, self.options, self.name, self.text.end_ids, longest, asked, weights=False)

    def explain(self) -> list[str]:
        """What runs where, and why, in words; from shapes alone."""
        model, fixed = self.checkpoint.model(self.placement), self.options.drafts.draft_tokens
        drafting = Drafting(self.config, model.dispatch.device, self.drafter, fixed)
        with _kernels(self.options):
            return explain(model, self.formats(), self.plan, self.placement, drafting, self.options.eviction)

    def formats(self) -> dict[str, int]:
        """The bytes of the weights by number format, on the device and on the host."""
        return self.checkpoint.formats(self.placement)

    def predicted(self) -> Prediction | None:
        """What a mesh would reach, or a device that is not here; None for one that is, and where the CPU computes experts."""
        devices, options = self.checkpoint.devices, self.options
        if self.placement.host or (devices.count == 1 and options.mesh.device is None):
            return None
        return predict(
            self.checkpoint, devices, self.plan.available, options.memory.batch, options.model.context
        )


def open_model(options: Options) -> Opened:
    """Opens the model that `options` name; reads headers, config and tokenizer, and takes no memory of the devices.

    Raises BadFile, BadConfig, Unsupported or BadRequest. A model that does not fit is opened; `plan.refuse()` says so."""
    with _kernels(options), distributed.together():
        return _opened(options)


def _kernels(options: Options) -> AbstractContextManager[None]:
    """Inside, kernels answer for the device that is planned for."""
    if options.mesh.device is None:
        return nullcontext()
    kind = PLANNED[options.mesh.device]
    return ops.as_if_on(kind.kind, kind.figures.platform, kind.capability)


def _opened(options: Options) -> Opened:
    refuse_contradictions(options)
    # JAX reads the variable when it first uses the device
    if options.memory.memory_fraction is not None and options.mesh.device is None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(options.memory.memory_fraction)
    processes = started(options)
    if processes is not None and options.mesh.mesh is None:
        options = options.replace(mesh="auto")
    cache_compiled_programs(default_device().platform, several=processes is not None)
    checkpoint = _checkpoint(options)
    check_context(options.model.context, checkpoint.config.max_position_embeddings)
    drafter = _drafter(options, checkpoint)
    if options.drafts.draft in ("off", "lookup"):
        checkpoint = checkpoint.without_mtp()
    checkpoint, why = _on_devices(options, checkpoint, drafter)
    text = open_text(checkpoint.source)
    placement = _place(checkpoint, options)
    if placement.host and checkpoint.layout.tensor * checkpoint.layout.context > 1:
        raise Unsupported(*EXPERTS_ON_HOST)
    checkpoint = _with_copies(checkpoint, options, placement)
    found = dataclasses.replace(_plan(options, checkpoint, drafter, placement), why_mesh=why)
    opened = Opened(options, checkpoint, placement, found, text, drafter, processes)
    if processes is not None:
        refuse_left_out(checkpoint.devices, processes)
        processes.agree(facts_of_model(checkpoint, found))
    return opened


def _plan(
    options: Options, checkpoint: Checkpoint, drafter: Drafter, placement: Placement = ON_DEVICE
) -> Plan:
    memory = options.memory
    room = options.model.context, memory.batch, placement, memory.cache_tokens
    inexact = options.eviction.evict != "off" or options.retrieval.retrieve != "off"
    return plan(checkpoint, *room, drafter.most, drafter.needs_text or inexact, memory.host_cache)


def _on_devices(options: Options, checkpoint: Checkpoint, drafter: Drafter) -> tuple[Checkpoint, str]:
    """The checkpoint for the devices that are asked for, and why these where that is left open: there the context that is asked
    for must fit, or one of some length."""
    if options.mesh.mesh != "auto":
        return checkpoint, ""

    def on(sizes: Mapping[str, int]) -> Checkpoint:
        return checkpoint.on(Devices.of(sizes, checkpoint.device))

    def fits(sizes: Mapping[str, int]) -> bool:
        found = _plan(options, on(sizes), drafter)
        return found.fits and found.longest >= (
            options.model.context or min(ROOM, checkpoint.config.max_position_embeddings)
        )

    sizes, why = auto_mesh.choose(checkpoint.config, len(jax.devices()), fits)
    refuse_on_mesh(options, Layout(**sizes))
    return on(sizes), why


def _drafter(options: Options, checkpoint: Checkpoint) -> Drafter:
    """Who guesses; where tokens are dropped, not the model's layer, whose cache cannot follow. Where pages are chosen, nobody: a
    pass over several tokens chooses none."""
    evicts, drafts = options.eviction.evict != "off", options.drafts
    if options.retrieval.retrieve != "off":
        return NOBODY
    if evicts and drafts.draft == "mtp":
        raise BadRequest('draft is "mtp", but evict is on', 'draft may be "lookup" or "off"')
    if evicts and drafts.draft == "auto":
        drafts = dataclasses.replace(drafts, draft="off", draft_tokens=None)
    return drafter_of(drafts, checkpoint.has_mtp, checkpoint.device.platform)


def _checkpoint(options: Options) -> Checkpoint:
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
    return checkpoint


def _reached() -> roofline.Device:
    """What a device reaches, as process 0 has measured it: by these figures all decide the same."""
    own, processes = device_rates.device(), distributed.running()
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
    refuse_on_mesh(options, Layout(**devices.sizes))
    return devices


def _place(checkpoint: Checkpoint, options: Options) -> Placement:
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


def _counted(options: Options, config: Config) -> Routing | None:
    """The counts of chosen experts so far; with several processes those in the file of process 0."""
    path, processes = options.experts.routing_stats, distributed.running()
    if path is None:
        return None
    if processes is None:
        return Routing.open(Path(path), config)
    counts = Routing.open(Path(path), config).counts.tolist() if processes.leads else None
    return Routing(Path(path), config, np.array(processes.same(counts), np.int64))


def _with_copies(checkpoint: Checkpoint, options: Options, placement: Placement) -> Checkpoint:
    """On a mesh, with copies of the experts that were counted most in each layer that is on the devices."""
    asked, devices = options.experts.device_experts, checkpoint.layout.devices
    counts = _counted(options, checkpoint.config) if devices > 1 else None
    if counts is None:
        return checkpoint
    own = (checkpoint.config.n_routed_experts or 0) // devices
    copies = max(own // COPIES, 1) if asked is None else asked
    if not copies or not counts.tokens:
        return checkpoint
    layers = counts.of_layers()
    return checkpoint.with_copies(
        {n: placed(layers[n], devices, copies) for n in layers if n not in placement.host}
    )


def check_context(context: int | None, longest: int) -> None:
    """Raises BadRequest for a context that is longer than the model allows."""
    if context is not None and context > longest:
        raise BadRequest(
            f"context is {context:,}, expected 1 to {longest:,}",
            "the model's max_position_embeddings is the limit",
        )


def cache_compiled_programs(platform: str, several: bool) -> None:
    """Turns on JAX's persistent compilation cache, unless the user has set one.

    Several processes on GPUs have none, not even the user's. Each tunes a part of a program's kernels and waits for what the
    others found: forever, if one of them has the program in its cache."""
    if several and platform == "gpu":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.values["jax_compilation_cache_dir"] is None and (folder := cache_folder()) is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
