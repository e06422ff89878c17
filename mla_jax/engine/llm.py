"""LLM: a checkpoint as an object that answers prompts."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, shown
from mla_jax.base.limits import gib
from mla_jax.base.names import only_known_names
from mla_jax.base.options import HOMES, Options, SamplingParams
from mla_jax.base.settings import Settings
from mla_jax.cache.paged import PAGE
from mla_jax.decode import store
from mla_jax.decode.loop import Programs
from mla_jax.engine import looking, updating
from mla_jax.engine.bar import Bar
from mla_jax.engine.compressing import Compressing
from mla_jax.engine.core.compressed import CompressedContext, read_context
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.interface import EngineInterface
from mla_jax.engine.core.request import Chunk, Output, Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats, Stats, stats_of
from mla_jax.engine.core.worker import Worker
from mla_jax.engine.looking import capture_of
from mla_jax.engine.opening.explain import explain, explain_programs
from mla_jax.engine.opening.opened import Opened, opened_of
from mla_jax.engine.policy.choose import policy_of
from mla_jax.engine.policy.evicting import Eviction
from mla_jax.engine.processes import LedEngine, follow
from mla_jax.engine.reader import Reader, TokenReading
from mla_jax.engine.request_groups import Served
from mla_jax.engine.streams import Stream
from mla_jax.engine.text import files_of
from mla_jax.hosts import distributed
from mla_jax.model.parts import cost_of
from mla_jax.model.trainable import trainable
from mla_jax.model.transformer import Transformer
from mla_jax.text.stream import TextStream
from mla_jax.weights.held import HeldWeights
from mla_jax.weights.load import Progress
from mla_jax.weights.save import save

BAR_SECONDS = 0.5  # after which a bar is drawn again, if nothing has come

_named = functools.partial(only_known_names, homes=HOMES)


class LLM:
    """A model on the default device, or on a mesh. `notes` are remarks on the folder and the options."""

    def __init__(
        self,
        model: str | Path | Opened | None = None,
        options: Options | None = None,
        *,
        progress: Progress | None = None,
        **settings: Unpack[Settings],
    ):
        """Opens and loads `model`: a folder of safetensors or from mla-convert, a GGUF file, or a name in the local Hugging
        Face cache; None is the bundled demo model.

        `options` and single settings, as in `LLM(model, attention="absorbed", batch=8)`, say how; a setting overrides
        `options`. The fields of the groups of `Options` describe all settings; so does
        `python -m mla_jax.generate --help all`.

        `progress` is called with the bytes loaded and the bytes of the model. Raises BadRequest for an option that is unknown
        or of a wrong type; BadFile, BadConfig, Unsupported or DoesNotFit before any large allocation."""
        if progress is not None and not callable(progress):
            raise BadRequest(
                f"progress is {shown(progress)}, expected a function of the bytes loaded and of all bytes"
            )
        opened = opened_of(model, options, dict(settings))
        with distributed.together():
            opened.plan.refuse()
            self._load(opened, progress)

    def _load(self, opened: Opened, progress: Progress | None) -> None:
        self.name, self._about = opened.name, opened.about
        self.options = opened.options
        self.config = opened.config
        self.notes = opened.notes
        self.plan, self.placement, self.inputs = opened.plan, opened.placement, opened.inputs
        self.last_stats: Stats | None = None  # of the newest stream, once it has read its prompt
        self._formats, self._routing = opened.formats(), opened.routing()
        self._source = opened.checkpoint.source
        self._processes = opened.processes
        eviction = Eviction.of(self.options.eviction)
        evicts = None if eviction is None else eviction.evicts
        # Nothing is stored where there are several processes: a stored program is of one
        folder = store.default_folder() if opened.processes is None else None
        # Of its shapes at first: a GPU's programs take longer to compile than the weights to load, and both go on at once
        early = opened.compiles_early and self._routing is None
        self.model = opened.shapes() if early else self._loaded(opened, progress)
        self._programs = Programs(self.model, self._routing is not None, folder, opened.drafter, evicts)
        engine = self._new_engine()
        if early:
            engine.compile_early()
            self.model = self._loaded(opened, progress)
            self._programs.take(self.model)
        self.engine: EngineInterface = engine
        if opened.processes is not None:
            opened.processes.serves = True
            if opened.processes.leads:
                self.engine = LedEngine(engine, opened.processes)
        self._worker = Worker(self.engine, self._memory_explained, self.options.memory.max_waiting)

    def _loaded(self, opened: Opened, progress: Progress | None) -> Transformer:
        with self._memory_explained():
            return opened.load(progress)

    def _new_engine(self) -> Engine:
        programs, chunk = self._programs, self.model.dispatch.chunk(self.model)
        size = Size(self.plan.rows, self.plan.tokens // PAGE, self.context, chunk, self.plan.hosted // PAGE)
        policy = policy_of(programs, size, self.options.eviction)
        drafting = Drafting(cost_of(self.model), programs.drafter, self.options.drafts.draft_tokens)
        alone = self._processes is None  # several processes decide the same
        return Engine(
            programs,
            size,
            policy=policy,
            drafting=drafting,
            compiles_ahead=alone,
            grammars=self.inputs.grammars,
        )

    def __repr__(self) -> str:
        formats = ", ".join(f"{gib(size)} in {name}" for name, size in self._formats.items())
        layers, device = self.config.num_hidden_layers, self.model.dispatch.device.name
        devices = f"{device}, mesh {self.plan.mesh}" if self.plan.mesh else device
        return f"LLM({self.name!r}: {self.config.model_type}, {layers} layers, {formats}, context {self.context:,}, on {devices})"

    @property
    def tokenizer(self):
        """None for a folder without one."""
        return self.inputs.text.tokenizer

    @property
    def chat_template(self):
        """None for a folder without one."""
        return self.inputs.text.chat_template

    @property
    def context(self) -> int:
        """The most tokens of prompt and output together."""
        return self.inputs.context

    @_named
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        context: CompressedContext | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continues each prompt, a text or a list of token ids; always a list, in the order given, `n` outputs per prompt.

        Each goes on behind `context`, if one is given. `progress` shows a bar on stderr; None is where stderr is a terminal and
        there are many prompts."""
        requests = self.requests(prompts, params, context)
        bar = self.bar(len(requests), progress)
        with bar, contextlib.closing(self.serve(([request] for request in requests), bar)) as served:
            return [output for (output,) in served]

    def bar(self, total: int | None, shown: bool | None = None, done: int = 0) -> Bar:
        """A progress bar for `serve`, of `total` prompts, None if nobody knows, of which `done` are from an earlier run."""
        return Bar(total, self.engine.stats, self._programs.waits, shown, done)

    def serve(
        self, groups: Iterable[Sequence[Request]], bar: Bar | None = None
    ) -> Generator[list[Output], None, None]:
        """Answers groups of requests, such as the forks of one prompt, and yields the outputs of each group in the order given.

        There may be any number of groups: they are taken from `groups` only some way ahead of finished ones. An empty group
        comes back empty. `bar` shows how far the work is. `inputs.request` makes a Request."""
        self._refresh()
        waiting, shows = self.options.memory.max_waiting, bar is not None and bar.shown
        served = Served(self.submit, self.engine.rows, groups, waiting)
        try:
            while served.fill():
                if not served.ready:
                    served.wait(BAR_SECONDS if shows else None)
                if bar is not None and shows:
                    bar.update(served.done)
                for readers in served.take():
                    yield [self.output_of(reader) for reader in readers]
            self._count_experts()
        finally:
            self.cancel(served.unfinished)

    @_named
    def stream(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        context: CompressedContext | None = None,
    ) -> Stream:
        """Continues one prompt once and yields text as soon as it is final; the last chunk has a finish reason.

        Several streams may be read alternately, and `generate` called meanwhile: all go through one engine. `last_stats` has the
        figures of the newest stream so far."""
        self.last_stats = None
        if isinstance(params, SamplingParams) and params.n > 1:
            raise BadRequest(f"n is {params.n}, but a stream is one answer", "generate gives several")
        (request,) = self.requests([prompt], params, context)
        opened: list[Reader] = []
        return Stream(self._stream(request, opened), opened, functools.partial(looking.cache_of, self))

    def requests(self, prompts: Any, params: Any, context: CompressedContext | None = None) -> list[Request]:
        """As `inputs.requests`, which makes them; a context must be one of this LLM."""
        if context is not None:
            self._refresh()
            self._compressing.check(context)
        return self.inputs.requests(prompts, params, context)

    @_named
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Output:
        """Answers a conversation, `[{"role": "user", "content": ...}, ...]`, by the folder's chat template.

        Messages and tools have the shapes of OpenAI's chat interface; `encode_chat` says more."""
        prompt = self.encode_chat(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
        )
        return self.generate([prompt], params)[0]

    @_named
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation up to where the model answers; control tokens in what is given stay plain text.

        Answers may have `reasoning_content` and `tool_calls`, results of tools `tool_call_id`. `chat_template_kwargs` are
        variables of the template, such as {"thinking": True}. With `continue_final_message` the model goes on with the last
        answer. Raises BadRequest for other shapes, and for a folder without a template; BadTemplate where the template fails."""
        return self.inputs.encode_chat(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def logits(self, tokens: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """float32 logits `[B T W]` of token sequences of one length; no BOS is added.

        Raises DoesNotFit if they and the activations of one forward pass need more memory than the plan leaves."""
        return looking.logits_for(self, tokens)

    @_named
    def forward(
        self,
        tokens: Sequence[Sequence[int]] | np.ndarray,
        *,
        hidden: Sequence[int] = (),
        lens: Sequence[int] = (),
        attention: Sequence[int] = (),
        router: bool = False,
        cache: bool = False,
    ) -> dict[str, np.ndarray]:
        """The logits of token sequences `[B T]`, and further arrays of the L layers on the way, by name; float32.

        | name | asked by | shape |
        |---|---|---|
        | logits | | `[B T W]` |
        | hidden | `hidden`, n layers | `[n B T D]`, the layer's input; of L the last layer's output, before the last norm |
        | lens | `lens`, n layers | `[n B T W]`, the logits of these states (logit lens) |
        | attention | `attention`, n layers | `[n B N T S]`, N heads' weights of S = T tokens, each row's sum 1 |
        | experts, expert_weights | `router` | `[m B T K]`, int32 ids and weights of the m layers with experts |
        | c_kv, k_pe | `cache` | `[L B T R]`, `[L B T E]`, latents and rotary keys with RoPE |

        Attention is that of the form that the LLM was opened with. Raises BadRequest for layers that are not there, DoesNotFit
        before anything takes memory that the plan does not leave."""
        self._refuse_several("forward", "take one process")
        return looking.forward_for(
            self, tokens, capture_of(self.config, hidden, lens, attention, router, cache)
        )

    @_named
    def compress(
        self, context: str | Sequence[int], questions: str | Sequence[int] = ()
    ) -> CompressedContext:
        """Reads a text once, and keeps as much of it as `evict` says, for any number of prompts: `generate(.., context=..)`.

        Tokens are scored by the newest ones. `questions` are put behind the text for that, and do not stay: questions of the kind
        that will be asked. Raises BadRequest without `evict`."""
        self._refresh()
        return self._compressing.made(context, questions)

    def open_context(self, path: str | Path) -> CompressedContext:
        """Opens a file that `CompressedContext.save` has written. Raises BadFile for a damaged one; BadRequest for a context of
        another model, or of other settings of `evict`."""
        self._refresh()
        context = read_context(Path(path))
        self._compressing.check(context)
        return context

    def follow(self) -> None:
        """In each of several processes but the first: computes its part of what process 0 is asked for, until that ends."""
        if self._processes is None or self._processes.leads:
            raise BadRequest("this process follows no other", "it is for a process_id above 0")
        assert isinstance(self.engine, Engine)
        follow(self.engine, self._processes)

    def close(self) -> None:
        """Ends all requests; the LLM takes no more. `with LLM(...) as llm` does so at its end."""
        with contextlib.suppress(BadRequest):  # that it is closed
            self._count_experts()
        self._worker.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def trainable(self, *, remat: bool = False) -> Transformer:
        """A copy of the model that `jax.grad` can differentiate: floating-point weights, all experts computed for all tokens.

        With `remat` a layer's activations are computed again for its gradients, and only its input is kept in memory."""
        self._refuse_several("trainable", "take one process")
        return trainable(self.model, remat)

    def update(self, weights: Any) -> None:
        """Serves other weights from now on: a state of the tree of `nnx.state(llm.trainable(), nnx.Param)`, of floating-point
        arrays on any devices, or of numpy.

        They are cast or quantised to the formats of the weights that they replace, and laid out as these are; meanwhile requests
        wait. No program is compiled anew. Then requests that have begun are finished with the earlier weights, and so are those
        behind a compressed context; the others begin with the new ones. Pages of earlier prompts are forgotten.

        Raises BadRequest for another tree, another shape, and NaN or infinity; Unsupported for packed formats that are only read,
        experts on the CPU and several processes. Nothing is changed then. Until it returns, both weights are in memory."""
        self._refuse_several("update", "take one process")
        updating.update(self, weights)

    @contextlib.contextmanager
    def with_weights(self, weights: Any) -> Iterator["LLM"]:
        """Serves other weights within, as `update` does, and the earlier ones, bit for bit, afterwards.

        All who call this LLM meanwhile get the others. Both weights stay in memory."""
        self._refuse_several("with_weights", "take one process")
        before = updating.update(self, weights)
        try:
            yield self
        finally:
            updating.exchange(self, before)

    def save(self, folder: str | Path, *, dtype: str | None = None) -> None:
        """Writes the weights that are served now into a new folder, with the names of released checkpoints, config.json, and the
        tokenizer's files. transformers opens it, and so does `LLM`, with equal logits. A model that was opened without drafts has
        no MTP layer.

        `dtype` None keeps each weight as it is held; "bfloat16" and "float32" write numbers. The folder appears once it is
        complete. Raises BadFile for a folder that is not empty; Unsupported for packed formats that such a folder does not have,
        experts on the CPU and several processes; DoesNotFit for a full disk."""
        self._refuse_several("save", "take one process")
        self._refresh()
        save(
            self._worker.call(lambda: HeldWeights.of(self.model)),
            folder,
            dtype=dtype,
            others=files_of(self._source),
        )

    def explain(self) -> str:
        """Lines on the placement of the work and the reasons."""
        lines = explain(
            self.model,
            self._formats,
            self.plan,
            self.placement,
            self.engine.drafting,
            self.options.eviction,
            self._about,
        )
        lines.append(explain_programs(self._programs, self.plan))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def stats(self) -> EngineStats:
        """The engine's counters: requests, tokens, pages, times."""
        return self.engine.stats

    @_named
    def warm_up(self, *, grammars: bool = False) -> None:
        """Compiles every program that a request may need. Afterwards no request waits for the compiler.

        Requests with grammars need further programs, which are compiled if `grammars` asks for them."""
        self._refuse_followers()
        self._worker.call(lambda: self._warm_up(grammars))

    def _stream(self, request: Request, opened: list[Reader]) -> Generator[Chunk]:
        news = threading.Event()
        (reader,) = self.submit([request], lambda _: news.set(), streams=True)
        opened.append(reader)
        try:
            while not reader.done:
                chunk = reader.read()
                if chunk is None:
                    news.wait()
                    news.clear()
                    continue
                self.last_stats = self._stats_of(reader)
                yield chunk
            self._count_experts()
        finally:  # also of a stream that nobody reads to its end, which the collector may end: it must not wait
            self.cancel([reader])
            if self._routing is not None and not reader.done:
                self._worker.tell(self._take_load)

    def _warm_up(self, grammars: bool) -> None:
        with self._memory_explained():
            self.engine.warm_up(grammars)

    def submit(
        self,
        requests: Sequence[Request],
        wake: Callable[[Reader], None],
        streams: bool = False,
        reading: Callable[[Request], TokenReading] | None = None,
    ) -> list[Reader]:
        """Queues requests, made by `inputs.request`, and returns at once. `wake` gets a reader whenever it has something to read,
        on the engine's thread, and must not wait. `reading` makes what reads a request's tokens, if they are no plain text.

        Raises DoesNotFit for one that can never run, and Overloaded if too many wait; then none is queued."""
        self._refresh()
        jobs = [self.engine.job_of(request, streams=streams) for request in requests]
        reading = reading or self._plain_reading
        readers = [Reader(job, reading(job.request), self._worker.cancel) for job in jobs]
        for reader in readers:
            reader.job.wake = functools.partial(wake, reader)
        self._worker.submit(jobs)
        return readers

    def _plain_reading(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        params = request.params
        kept = params.include_stop_str_in_output
        return TextStream(self.tokenizer, params.stop, least=params.min_tokens, kept=kept)

    def cancel(self, readers: Iterable[Reader]) -> None:
        """Ends what nobody wants any more, soon."""
        self._worker.cancel([reader.job for reader in readers])

    def output_of(self, reader: Reader) -> Output:
        """The output of a reader that is done."""
        return reader.output(self._stats_of(reader))

    def _stats_of(self, reader: Reader) -> Stats:
        device, alone = self.model.dispatch.device, self._programs.spread.mesh is None
        bandwidth = device.bandwidth if alone and device.platform != "cpu" else None
        request = reader.job.request
        tokens, seed = (len(request.prompt), len(reader.ids)), request.params.seed or 0
        return stats_of(reader.job.times, *tokens, seed, self._programs.waits, bandwidth)

    def _refresh(self) -> None:
        """Takes the parameters as the model has them now; a change clears the cache."""
        self._refuse_followers()
        if not self._programs.weights.changed:
            return
        if self._processes is not None:
            raise Unsupported(
                "the model's parameters were changed in one of several processes", "take one process"
            )
        self._worker.call(lambda: self._take_weights(self.engine.reset))

    @functools.cached_property
    def _compressing(self) -> Compressing:
        return Compressing(self)

    def _take_weights(self, forget: Callable[[], None]) -> None:
        if self._programs.weights.refresh():
            self.__dict__.pop("_compressing", None)
            forget()

    def _refuse_several(self, what: str, advice: str) -> None:
        if self._processes is not None:
            raise Unsupported(f"{what} cannot be had with several processes", advice)

    def _refuse_followers(self) -> None:
        if self._processes is not None and not self._processes.leads:
            raise BadRequest(
                f"this is process {self._processes.process}", "process 0 is asked; this one calls follow()"
            )

    def _count_experts(self) -> None:
        """Adds the experts that were chosen to the statistics."""
        if self._routing is not None:
            self._worker.call(self._take_load)

    def _take_load(self) -> None:
        """As `_count_experts`, on the engine's thread. An answer is not lost because they cannot be written."""
        assert self._routing is not None
        self._routing.counts += self.engine.take_load()
        try:
            self._routing.save()
        except BadRequest as e:
            warnings.warn(f"routing statistics: {e}", RuntimeWarning, stacklevel=1)

    @contextlib.contextmanager
    def _memory_explained(self):
        """Turns out of memory on the device into DoesNotFit with the plan."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e) and "Out of memory" not in str(e):
                raise
            raise DoesNotFit(
                "the device ran out of memory",
                *self.plan.lines(),
                "is another process on the device? it can share: --memory-fraction; or lower --context and --max-tokens",
            ) from e
