"""Text and tokens; no JAX here."""
