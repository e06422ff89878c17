"""Runs kernels in the interpreter as interpret.py does, some of whose waits and arrivals come late; prints the same lines.

Other stretches of a kernel's program are slow in each round, so that its threads run ahead of each other as they would only
seldom do."""

import random
import time

import interpret
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

ROUNDS = 3
LAG = 0.1  # seconds at most, many times what a step takes
CASES = {"mla_prefill": ["many short rows", "packed, tiles that not all of a cluster need"], "mla_decode": ["64 heads"]} | {
    "heads_decode": ["each head has its own"],
    "mla_sparse": ["64 heads, drafts"],
}
chance, slow = random.Random(0), False


def late(operation):
    def traced(*arguments, **options):
        global slow
        if chance.random() < 0.15:
            slow = not slow
        if slow:
            jax.debug.callback(lambda: time.sleep(chance.random() * LAG))
        return operation(*arguments, **options)

    return traced


plgpu.barrier_wait, plgpu.barrier_arrive = late(plgpu.barrier_wait), late(plgpu.barrier_arrive)
for _ in range(ROUNDS):
    for op, names in CASES.items():
        run, cases = interpret.OPS[op]
        for case in cases:
            if case.name in names:
                run(case)
    jax.clear_caches()  # so that kernels are traced once more
