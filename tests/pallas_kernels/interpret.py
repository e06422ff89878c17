"""Runs an op's GPU kernel over all named cases in the interpreter, looking for races; prints one JSON line each."""

import json
import sys

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import (
    heads_decode,
    mla_decode,
    mla_prefill,
    mla_sparse,
    rope_append,
    router,
    testing,
    tuning,
)
from pallas_kernels.heads_decode import gpu as heads_gpu
from pallas_kernels.heads_decode import reference as heads_reference
from pallas_kernels.mla_decode import gpu as decode_gpu
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_prefill import gpu as prefill_gpu
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.mla_sparse import gpu as sparse_gpu
from pallas_kernels.mla_sparse import reference as sparse_reference
from pallas_kernels.rope_append import gpu as append_gpu
from pallas_kernels.rope_append import reference as append_reference
from pallas_kernels.router import gpu as router_gpu
from pallas_kernels.router import reference as router_reference

interpret = plgpu.InterpretGPUParams(detect_races=True)


def show(case, got, wanted, fallback):
    row = {"name": case.name, "error": testing.error(got[0], wanted[0]), "fallback": testing.error(fallback[0], wanted[0])}
    print(json.dumps(row | {"lse": testing.lse_error(got[1], wanted[1])}), flush=True)


def decode(case):
    inputs = testing.mla_decode_inputs(case) | {"scale": case.scale}
    plan = mla_decode.schedule(inputs["seq_lens"], heads=case.heads, tokens=case.tokens, units=4)
    got = decode_gpu.mla_decode(**inputs, schedule=plan, interpret=interpret)
    show(case, got, decode_reference.mla_decode(**inputs), mla_decode.mla_decode(**inputs, impl="xla"))


def heads(case):
    inputs = testing.heads_decode_inputs(case) | {"scale": 0.1}
    got = heads_gpu.heads_decode(**inputs, units=4, interpret=interpret)
    show(case, got, heads_reference.heads_decode(**inputs), heads_decode.heads_decode(**inputs, impl="xla"))


def sparse(case):
    inputs = testing.mla_sparse_inputs(case) | {"scale": case.scale}
    got = sparse_gpu.mla_sparse(**inputs, units=4, interpret=interpret)
    show(case, got, sparse_reference.mla_sparse(**inputs), mla_sparse.mla_sparse(**inputs, impl="xla"))


def prefill(case):
    if (sizes := tuning.MLA_PREFILL.get((case.width, case.value))) is not None:
        inputs = testing.mla_prefill_inputs(case) | {"scale": case.scale}
        got = prefill_gpu.mla_prefill(**inputs, sizes=sizes, units=4, interpret=interpret)
        show(case, got, prefill_reference.mla_prefill(**inputs), mla_prefill.mla_prefill(**inputs, impl="xla"))


def append(case):
    inputs = testing.rope_append_inputs(case)
    wanted = append_reference.rope_append(**inputs)
    fallback = testing.rope_append_errors(rope_append.rope_append(**inputs, impl="xla"), wanted, inputs)
    errors = testing.rope_append_errors(append_gpu.rope_append(**inputs, interpret=interpret), wanted, inputs)
    print(json.dumps({"name": case.name, "errors": errors, "fallback": fallback}), flush=True)


def route(case):
    inputs = testing.router_inputs(case)
    wanted = router_reference.router(**inputs, rule=case.rule)
    fallback = testing.router_error(router.router(**inputs, rule=case.rule, impl="xla"), wanted, inputs)
    error = testing.router_error(router_gpu.router(**inputs, rule=case.rule, interpret=interpret), wanted, inputs)
    print(json.dumps({"name": case.name, "error": error, "fallback": fallback}), flush=True)


OPS = {
    "heads_decode": (heads, testing.HEADS_DECODE),
    "mla_decode": (decode, testing.MLA_DECODE),
    "mla_prefill": (prefill, testing.MLA_PREFILL),
    "mla_sparse": (sparse, testing.MLA_SPARSE),
    "rope_append": (append, testing.ROPE_APPEND),
    "router": (route, testing.ROUTER),
}

if __name__ == "__main__":
    run, cases = OPS[sys.argv[1]]
    for case in cases:
        run(case)
