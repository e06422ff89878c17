"""Evaluation of a loaded model: perplexity, rates as llama-bench prints them, and a model for lm-eval.

`python -m mla_jax.evaluate perplexity` and `bench` are the commands; `mla_jax.evaluate.harness` registers the model."""
