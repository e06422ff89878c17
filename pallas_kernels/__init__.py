"""Kernels, one folder per op: a contract, a specification, a fallback that runs anywhere. They know arrays only."""
