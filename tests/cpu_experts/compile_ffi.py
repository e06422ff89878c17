"""Compiles two layers with experts on the CPU for an H200 on a machine without one; prints the order of what its stream runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cpu_experts import Experts, ffi

# The driver's version decides what XLA captures into graphs.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
  l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 runtime_version: "13.0.0" driver_version: "13.0.0"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
MODEL = 1024


def moe_layer(experts: Experts, x: jax.Array, shared: jax.Array, router: jax.Array) -> jax.Array:
    rows = (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    weights, ids = jax.lax.top_k((rows @ router).astype(jnp.float32), 2)
    ticket = ffi.submit(experts, rows, ids[:, :1], weights[:, :1])
    later = ffi.submit(experts, ticket.x, ids[:, 1:], weights[:, 1:])
    with jax.named_scope("meanwhile"):
        meanwhile = jax.nn.silu(later.x @ shared) @ shared.T
    now = ffi.collect(ticket, after=meanwhile)
    return x + (meanwhile + now + ffi.collect(later, after=now)).astype(jnp.float32)


def main() -> None:
    shapes = ((4, 16, MODEL), (4, 16, MODEL), (4, MODEL, 16))
    layers = [Experts(*(np.ones(shape, np.float32) for shape in shapes)) for _ in range(2)]

    def model(x, shared, router):
        for experts in layers:
            x = moe_layer(experts, x, shared, router)
        return x

    chip = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
    one = NamedSharding(Mesh(np.array(chip.devices), ("x",)), PartitionSpec())
    bf16 = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((MODEL, 2 * MODEL), (MODEL, 4)))
    compiled = jax.jit(model, in_shardings=one, out_shardings=one).lower(jax.ShapeDtypeStruct((1, MODEL), jnp.float32), *bf16)
    beside = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    for line in compiled.compile(compiler_options=beside).as_text().split("ENTRY")[1].splitlines():
        if found := re.search(r"custom_call_target=\"(cpu_experts_\w+)|op_name=\"[^\"]*(meanwhile)/| (copy)\(", line):
            print(*(word for word in found.groups() if word))


if __name__ == "__main__":
    main()
