"""Names of settings: for an unknown one, the name of ours that was probably meant. No JAX here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from mla_jax.base.errors import BadRequest, printable, shown

P = ParamSpec("P")
R = TypeVar("R")
Homes = Mapping[str, Iterable[str]]  # the settings of each public name that takes some

# Our settings, and the same in vLLM, SGLang, transformers, llama.cpp, Ollama and OpenAI's interface
OTHERS = {
    "temperature": "temp do_sample",
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_length n_predict num_predict",
    "n": "num_return_sequences best_of",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "top_logprobs",
    "stop": "stop_strings stop_sequences",
    "stop_token_ids": "eos_token_id",
    "logit_bias": "bad_words",
    "params": "sampling_params",
    "model": "model_path model_name_or_path",
    "context": "max_model_len context_length max_seq_len n_ctx num_ctx",
    "dtype": "torch_dtype",
    "memory_fraction": "gpu_memory_utilization mem_fraction_static",
    "max_rows": "max_num_seqs max_batch_size max_running_requests",
    "max_waiting": "max_queued_requests",
    "cache_tokens": "max_total_tokens",
    "kv_cache": "kv_cache_dtype",
    "host_layers": "cpu_offload_gb n_gpu_layers n_cpu_moe",
    "host_cache": "swap_space",
    "attention": "attn_implementation attention_backend",
    "draft": "speculative_config",
    "draft_tokens": "num_speculative_tokens",
    'mesh="tensor=N"': "tensor_parallel_size tp_size",
    'mesh="data=N"': "data_parallel_size dp_size",
    'mesh="context=N"': "context_parallel_size decode_context_parallel_size",
    'mesh="auto"': "device_map",
}
MEANT = {word: ours for ours, words in OTHERS.items() for word in words.split()}
# Words for which there is no setting
ABSENT = {
    "trust_remote_code": "code of a model folder is never run",
    "tokenizer": "it is read from the model folder",
    "quantization": "quantised weights stay as the model folder has them",
    "load_format": "it is told by the files",
    "enable_prefix_caching": "it is always on",
    "enable_expert_parallel": "mesh shards experts over all devices",
}


class OwnNames(list[str]):
    """Values of a setting that a program adds to the library's own, which are `taken`."""

    def __init__(self, taken: Iterable[str]):
        super().__init__()
        self.taken = tuple(taken)

    def add(self, name: str) -> None:
        """Adds a name, which may be there already. Raises BadRequest for one that is taken or cannot be one."""
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("kernel_"):
            raise BadRequest(
                f"{shown(name)} cannot be a name", 'expected letters, digits and _, not "kernel_" in front'
            )
        if name in self.taken:
            raise BadRequest(f"the name {name} is taken by the library", "taken: " + ", ".join(self.taken))
        if name not in self:
            self.append(name)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` may have meant, as a hint."""
    names = list(known)
    meant = MEANT.get(word, "")
    if _name(meant) in names:
        return f"did you mean {meant}?"
    found = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {found[0]}?" if found else "known: " + ", ".join(names)


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str], homes: Homes) -> None:
    """Raises BadRequest for a name that is not `known` in `where`; it may belong to another of the `homes`."""
    known = list(known)
    for name in given:
        if name not in known:
            hint = ABSENT.get(name) or _elsewhere(name, known, homes) or nearest(name, known)
            raise BadRequest(f"{where} has no setting {printable(name)}", hint)


def only_known_names(function: Callable[P, R], homes: Homes) -> Callable[P, R]:
    """`function`, which raises BadRequest with a hint, not TypeError, for a keyword that it does not have."""
    known = list(inspect.signature(function).parameters)[1:]  # without self
    where = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(where, kwargs, known, homes)
        return function(*args, **kwargs)

    return called


def _elsewhere(name: str, known: list[str], homes: Homes) -> str | None:
    """The home of a setting, or of ours for it, that is not `known` here."""
    meant = MEANT.get(name, name)
    if _name(meant) in known:
        return None
    ours = meant if "=" in meant else f"{meant}=..."
    return next((f"did you mean {home}({ours})?" for home in homes if _name(meant) in homes[home]), None)


def _name(setting: str) -> str:
    """The name in a word such as `mesh="auto"`."""
    return setting.partition("=")[0]
