"""Several processes of one run: the channel between them, and how jax.distributed starts."""
