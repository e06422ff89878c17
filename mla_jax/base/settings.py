"""The keywords of `LLM(...)`, for editors and type checkers; options.py says what they mean. No JAX here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict


class Settings(TypedDict, total=False):
    """The settings of all groups of `Options`, by name, except the model."""

    dtype: Any  # "float32", "bfloat16", or such a dtype
    context: int | None
    attention: str
    kv_cache: str
    experts: str
    host_layers: int | None
    host_precision: str | None
    host_folder: str | Path | None
    defer: int
    stream_tokens: int | None
    routing_stats: str | Path | None
    device_experts: int | None
    draft: str
    draft_tokens: int | None
    evict: Any  # a name, a policy, or an Evict
    evict_budget: Any
    evict_keep: float
    evict_chunk: int | None
    evict_sinks: int
    evict_recent: int
    retrieve: str
    retrieve_tokens: int
    retrieve_window: int | None
    memory_fraction: float | None
    batch: int
    max_rows: int | None
    max_waiting: int | None
    cache_tokens: int | None
    host_cache: float
    mesh: str | Mapping[str, int] | Any  # or a jax.sharding.Mesh
    device: str | None
    coordinator: str | None
    processes: int | None
    process_id: int | None


class SettingsOfModel(Settings, total=False):
    """The same with the model."""

    model: str | Path | None
