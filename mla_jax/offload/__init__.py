"""Routed experts on the CPU: where each layer's experts are, and who computes them. The one door to `cpu_experts`."""
