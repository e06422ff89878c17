"""An OpenAI-compatible server over the engine. Nothing else of the library knows it."""

import logging

log = logging.getLogger("mla_jax.serve")
