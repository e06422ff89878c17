"""The flags that fetch a model from the Hugging Face Hub before it is opened. No JAX here."""

import os
import sys
from dataclasses import dataclass

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import Checked, Options
from mla_jax.base.rules import flag, option, optional, text


@dataclass(frozen=True)
class DownloadOptions(Checked):
    """A model of the Hugging Face Hub: fetch it, choose its revision."""

    download: bool = option(False, flag)
    """Fetch --model from the Hub into the local cache, or files that are missing.

    `--model ORG/NAME:FILE.gguf` names a file of a repository that holds GGUF files."""
    revision: str | None = option(None, optional(text))
    """Branch, tag or commit of --model ORG/NAME (main)."""


def fetched(options: Options, asked: DownloadOptions, quiet: bool = False) -> Options:
    """The options with the revision in the model's name; the model is in the local cache if `--download` asks for that.

    Notes of commit and folder go to stderr. Raises BadRequest, BadFile, BadConfig, Unsupported or DoesNotFit."""
    if asked == DownloadOptions():
        return options
    if options.model.model is None:
        raise BadRequest("--download and --revision need --model", "name a model of the Hub, ORG/NAME")
    from mla_jax.weights.download import fetch, hub_name  # only now: most commands fetch nothing

    name = hub_name(str(options.model.model), asked.revision)
    if asked.download and quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported
        fetch(name)
    elif asked.download:
        fetch(name, _note)
    return options.replace(model=str(name))


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
