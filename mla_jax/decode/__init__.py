"""Decoding inside jit: prefill, decode steps, sampling, drafts."""
