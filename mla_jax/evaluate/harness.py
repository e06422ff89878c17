"""A model for lm-eval, in this process: `lm_eval.simple_evaluate(model=Harness(llm), tasks=["hellaswag"])`.

Importing this module registers it as `mla_jax`, whose `model_args` are those of `LLM`."""

# pyright: reportMissingImports=false
# lm-eval comes with an extra.

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import SamplingParams
from mla_jax.engine.llm import LLM
from mla_jax.evaluate.scores import score
from mla_jax.text.chat import ChatTemplate
from mla_jax.text.messages import checked_messages
from mla_jax.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 256  # tokens of an answer, where a task says nothing


@register_model("mla_jax")
class Harness(TemplateLM):
    """An `LLM` as lm-eval asks it; all requests of a task form one batch."""

    def __init__(self, llm: LLM | None = None, **settings: Any):
        """`settings` open a model: `pretrained` or `model`, and those of `LLM`; lm-eval's own are left out.

        Raises BadRequest for a model without a tokenizer."""
        super().__init__()
        for own in ("batch_size", "max_batch_size"):
            settings.pop(own, None)
        device = settings.pop("device", None)
        if device is not None:
            raise BadRequest(f"device is {device}", "JAX chooses it: set JAX_PLATFORMS")
        model = settings.pop("pretrained", settings.pop("model", None))
        self.llm = LLM(model, **settings) if llm is None else llm
        if self.llm.tokenizer is None:
            raise BadRequest("the model has no tokenizer", "lm-eval asks with texts")
        self._tokenizer: Tokenizer = self.llm.tokenizer
        self.batch_size = 1  # lm-eval asks for it; the engine makes batches of its own

    @property
    def eot_token_id(self) -> int:
        found = self._tokenizer.eos_id
        return self.prefix_token_id if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """The empty context: the model's BOS, whether texts begin with it or not, else its end token."""
        known = self._tokenizer.bos_id, self.llm.config.bos_token_id, self._tokenizer.eos_id
        found = next((token for token in known if token is not None), None)
        if found is None:
            raise BadRequest("the tokenizer names no token that a text begins or ends with")
        return found

    @property
    def max_length(self) -> int:
        return self.llm.context

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Control tokens count as such: a chat template writes them."""
        return self._tokenizer.encode(string, bos=add_special_tokens is not False, control=True)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text, by which lm-eval tells results apart."""
        template = self.llm.chat_template
        return getattr(template, "source", None) or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the folder's template writes it. Raises BadRequest for a model without one."""
        template = self.llm.chat_template
        if not isinstance(template, ChatTemplate):
            raise BadRequest("the model's folder has no chat template", "leave --apply_chat_template out")
        messages = checked_messages(chat_history, self._tokenizer)
        (text,) = template.render([messages], add_generation_prompt)
        assert text is not None, "of the first conversation a failure is an error"
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        found = score(self.llm, [(context, after) for _, context, after in requests])
        for (texts, _, _), one in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, (one.logprob, one.greedy))
        return [(one.logprob, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(score(self.llm, [pair for pairs in windows for pair in pairs]))
        sums = [sum(next(scores).logprob for _ in pairs) for pairs in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations of a text, as lm-eval cuts it."""
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
        return [make_disjoint_window(window) for window in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [self._asked(*request.args) for request in requests]
        prompts, params = [prompt for prompt, _ in asked], [one for _, one in asked]
        answers = self.llm.generate(prompts, params, progress=False) if asked else []
        texts = [answer.text or "" for answer in answers]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _asked(self, context: str, given: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        """A prompt, cut on the left as the context asks, and how lm-eval wants it continued."""
        wanted: dict[str, Any] = {**normalize_gen_kwargs(dict(given), OUTPUT_TOKENS)}
        until = wanted.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(filter(None, until))
        limit = min(wanted["max_gen_toks"], self.max_length - 1)
        known = {
            name: wanted[name] for name in ("top_p", "top_k", "min_p", "seed") if wanted.get(name) is not None
        }
        params = SamplingParams(temperature=wanted["temperature"], max_tokens=limit, stop=stop, **known)
        return self.tok_encode(context)[-(self.max_length - limit) :], params
