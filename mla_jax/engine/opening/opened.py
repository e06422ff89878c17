"""A model that is opened but not loaded: headers checked, experts placed, memory planned. LLM and `--dry-run` share it."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.options import Options
from mla_jax.decode.speculative import Drafter
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.inputs import InputProcessor
from mla_jax.engine.opening import choose, environment
from mla_jax.engine.opening.combinations import refuse
from mla_jax.engine.opening.explain import explain
from mla_jax.engine.opening.prediction import Prediction, predict
from mla_jax.engine.processes import facts_of_model, refuse_left_out
from mla_jax.engine.text import Text, open_text
from mla_jax.hosts import distributed
from mla_jax.hosts.distributed import Processes
from mla_jax.mesh.partition import ONE
from mla_jax.model.parts import cost_of
from mla_jax.model.transformer import Transformer
from mla_jax.offload import library
from mla_jax.offload.place import Placement
from mla_jax.offload.routing import Routing
from mla_jax.weights import gguf_about
from mla_jax.weights.load import Checkpoint, Progress
from mla_jax.weights.plan import MemoryPlan


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are still in their files, with all that follows from its headers."""

    options: Options
    checkpoint: Checkpoint
    placement: Placement
    plan: MemoryPlan
    text: Text
    drafter: Drafter
    processes: Processes | None = None  # those that have parts of the model, if there are several

    @property
    def name(self) -> str:
        """The model's name for the user: the name of a folder or file, or of a model in the Hub's cache."""
        model = self.options.model.model
        if model is None:
            return "demo"
        return Path(model).resolve().name if Path(model).exists() else str(model)

    @property
    def config(self) -> Config:
        return self.checkpoint.config

    @property
    def about(self) -> str | None:
        """The name, size and maker that a GGUF file names."""
        metadata = self.checkpoint.source.metadata
        return None if metadata is None else gguf_about.self_description(metadata)

    @property
    def inputs(self) -> InputProcessor:
        """Checks prompts, before there are weights."""
        return InputProcessor(self.config, self.text, self.plan.context)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a user of the folder."""
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
        counts = choose.routing_counts(self.options, self.config)
        if counts is None:
            return None
        if self.processes is None or self.processes.leads:
            counts.save()
        return counts

    @property
    def compiles_early(self) -> bool:
        """Whether programs are compiled while the weights are loaded: for one GPU that computes all."""
        devices, is_here = self.checkpoint.devices, self.options.mesh.device is None
        is_alone = devices.count == 1 and self.processes is None and not self.placement.host
        return is_here and is_alone and devices.platform != "cpu"

    def shapes(self) -> Transformer:
        """The model without its weights."""
        return self.checkpoint.model(self.placement)

    def load(self, progress: Progress | None = None) -> Transformer:
        """The model with its weights, on the devices. Raises BadRequest where these are not here."""
        if (device := self.options.mesh.device) is not None:
            raise BadRequest(
                f"there is no device {device} to run on", "it is for --dry-run alone; leave it out"
            )
        folder = self.options.experts.host_folder
        return self.checkpoint.load(self.placement, progress, None if folder is None else Path(folder))

    def explain(self) -> list[str]:
        """Lines on the placement of the work and the reasons, from shapes alone."""
        model, fixed = self.checkpoint.model(self.placement), self.options.drafts.draft_tokens
        with environment.kernels_of(self.options):
            drafting = Drafting(cost_of(model), self.drafter, fixed)
            return explain(
                model,
                self.formats(),
                self.plan,
                self.placement,
                drafting,
                self.options.eviction,
                self.about,
            )

    def formats(self) -> dict[str, int]:
        """The bytes of the weights by number format, on the device and on the host."""
        return self.checkpoint.formats(self.placement)

    def predicted(self) -> Prediction | None:
        """The prediction for a mesh or an absent device; None for one device that is here, and where the CPU computes experts."""
        devices, options = self.checkpoint.devices, self.options
        if self.placement.host or (devices.count == 1 and options.mesh.device is None):
            return None
        with environment.kernels_of(options):
            model = self.checkpoint.model()
            return predict(model, self.plan, options.memory.batch, options.model.context)


def open_model(options: Options) -> Opened:
    """Opens the model that `options` name; reads headers, config and tokenizer, and takes no memory of the devices.

    Raises BadFile, BadConfig, Unsupported or BadRequest. A model that does not fit is opened; `plan.refuse()` says so."""
    with environment.kernels_of(options), distributed.together():
        return _opened(options)


def opened_of(model: Any, options: Any, fields: dict[str, Any]) -> Opened:
    """The model that the arguments of LLM name, opened; raises BadRequest for arguments that contradict each other."""
    if isinstance(model, Opened):
        if options is not None or fields:
            raise BadRequest("an opened model takes no further options", "give them to open_model")
        return model
    if options is not None and not isinstance(options, Options):
        raise BadRequest(
            f"options is {shown(options)}, expected Options",
            "give single settings by name: LLM(model, batch=8)",
        )
    options = (options or Options()).replace(**fields)
    if model is None:
        return open_model(options)
    if options.model.model is not None:
        raise BadRequest(f"the model is given twice: {shown(model)} and {shown(options.model.model)}")
    return open_model(options.replace(model=model))


def _opened(options: Options) -> Opened:
    refuse(options, ONE)
    options, processes = environment.prepare_environment(options)
    checkpoint = choose.checkpoint_of(options)
    choose.check_context(options, checkpoint.config.max_position_embeddings)
    drafter = choose.drafter_for(options, checkpoint)
    if options.drafts.draft in ("off", "lookup"):
        checkpoint = checkpoint.without_mtp()
    checkpoint, why = choose.on_devices(options, checkpoint, drafter)
    text = open_text(checkpoint.source)
    placement = choose.placement_of(checkpoint, options)
    refuse(options, checkpoint.layout, choose.features_of_model(checkpoint.config, placement))
    checkpoint = choose.with_copies(checkpoint, options, placement)
    found = choose.planned_memory(options, checkpoint, drafter, placement)
    found = dataclasses.replace(found, why_mesh=why)
    if processes is not None:
        refuse_left_out(checkpoint.devices, processes)
        processes.agree(facts_of_model(checkpoint, found))
    return Opened(options, checkpoint, placement, found, text, drafter, processes)
