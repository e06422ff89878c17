"""Runs the kernel over all named cases in the interpreter, looking for races; prints one JSON line each."""

import json

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import testing
from pallas_kernels.mla_decode import gpu, reference, schedule, xla

for case in testing.MLA_DECODE:
    inputs = testing.mla_decode_inputs(case)
    wanted, lse = reference.mla_decode(**inputs, scale=case.scale)
    own, _ = xla.mla_decode(**inputs, scale=case.scale)
    plan = schedule(inputs["seq_lens"], heads=case.heads, tokens=case.tokens, units=4)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out, got = gpu.mla_decode(**inputs, scale=case.scale, schedule=plan, interpret=interpret)
    row = {"name": case.name, "error": testing.error(out, wanted), "fallback": testing.error(own, wanted)}
    row["lse"] = testing.lse_error(got, lse)
    print(json.dumps(row), flush=True)
