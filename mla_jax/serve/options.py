"""The settings of the server. No JAX here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mla_jax.base.options import MAX_TIMEOUT, Checked
from mla_jax.base.rules import Wrong, flag, json_object, number, option, optional, path, text, texts, whole

MAX_NAMES = 64
MAX_WAITING = 4096  # requests that wait for a row, unless --max-waiting gives another number


def http_address(value: Any) -> str:
    """A URL of HTTP with a host."""
    try:
        if (
            isinstance(value, str)
            and (parts := urlsplit(value)).hostname
            and parts.scheme in ("http", "https")
        ):
            return value
    except ValueError:
        pass
    raise Wrong("an address such as http://127.0.0.1:4318/v1/traces")


@dataclass(frozen=True)
class ServeOptions(Checked):
    """The server: its address, who may use it, and its limits."""

    host: str = option("127.0.0.1", text)
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = option(8000, whole(0, 65535))
    """Port to listen on; 0 takes a free one."""
    model_name: tuple[str, ...] | str = option((), texts(MAX_NAMES))
    """Names that requests may give for the model (its folder's name)."""
    api_key_file: str | Path | None = option(None, optional(path))
    """File of keys, one per line; a request must have one of them."""
    cors_origins: tuple[str, ...] | str = option((), texts(MAX_NAMES))
    """Origins of web pages that may call the server; "*" is any (none)."""
    chat_template_kwargs: str | None = option(None, optional(json_object))
    """Variables of the chat template, below a request's own: '{"thinking": true}'."""
    max_body: float = option(16.0, number(0, 1024, above=True))
    """Largest request body, MiB."""
    request_timeout: float | None = option(None, optional(number(0, MAX_TIMEOUT, above=True)))
    """Seconds after which an answer ends with the tokens it has (never)."""
    drain_seconds: float = option(30.0, number(0, MAX_TIMEOUT))
    """Seconds that running requests get after SIGTERM."""
    warm_up: bool = option(False, flag)
    """Compile every program before the server is ready."""
    log_prompts: bool = option(False, flag)
    """Write prompts to the log, too."""
    otlp_traces_endpoint: str | None = option(None, optional(http_address))
    """Send spans of OpenTelemetry to this address, by OTLP over HTTP (none)."""
    config: str | Path | None = option(None, optional(path))
    """TOML file with these settings, one table per group."""
    debug: bool = option(False, flag)
    """Show the traceback of an error."""
