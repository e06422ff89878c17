"""mla-jax: DeepSeek-style models with multi-head latent attention, in JAX."""

__version__ = "0.1.0"
