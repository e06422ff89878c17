"""Kernels, one folder per op: contract (`__init__`), specification (`reference`), portable fallback (`xla`), and kernels.

They know arrays only."""
