"""Times FlashInfer and torch's cuDNN on our kernels' shapes, by the method of ops/timing.py, with torch and without JAX.

    python benchmarks/peer_flashinfer.py --out peers.jsonl
    python benchmarks/kernels.py --ops mla_decode mla_prefill --peer peers.jsonl

Launches run back to back for a quarter of a second without pauses, which would raise the clock of a GPU at its power limit.
Each line is JSON: a peer and a shape with `us` and `err`, or with the reason in `failed`."""

import argparse
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

BATCHES, HEADS, HELD = (1, 64, 128), (16, 128), (4096, 16384)  # of mla_decode
PROMPTS, PROMPT_HEADS = (4096, 8192), 128  # of mla_prefill
RANK, ROPE, PAGE = 512, 64, 64
WIDTH, VALUE = 192, 128
SCALE = WIDTH**-0.5
BEYOND_L2, CALLS, SECONDS = 256 << 20, 64, 0.25
LIMIT = 0.01  # of the relative error; rounding to bfloat16 gives 0.002 to 0.003
WORKSPACE = 512 << 20
DEVICE = "cuda"


def sets_of(nbytes: int, most: int = 16) -> int:
    """The number of inputs of `nbytes` to rotate over, so that none is still in the L2."""
    return min(max(1, -(-BEYOND_L2 // nbytes)), most)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def int32(values: torch.Tensor) -> torch.Tensor:
    return values.to(DEVICE, torch.int32)


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error over all values; NaN if any value is NaN."""
    return float((out.float() - wanted).norm() / wanted.norm())


def elapsed(launch: Callable[[], object], times: int) -> float:
    """Seconds of `times` launches, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds(launch: Callable[[], object], elapsed: Callable[[Callable, int], float] = elapsed) -> float:
    """Seconds per launch, over at least SECONDS, after two warm-up launches."""
    elapsed(launch, 1)
    times, took = 1, elapsed(launch, 1)
    while took < SECONDS:
        times = math.ceil(1.1 * times * SECONDS / took)
        took = elapsed(launch, times)
    return took / times


class Cache:
    """Paged rows of equal length, in rotating sets that exceed the L2, spread in memory if small; and their queries."""

    def __init__(self, batch: int, heads: int, held: int):
        self.batch, self.heads, self.held, self.per_row = batch, heads, held, -(-held // PAGE)
        pages = batch * self.per_row
        nbytes = pages * PAGE * (RANK + ROPE) * 2
        sets = sets_of(nbytes)
        apart = sets_of(nbytes, 1 << 20) // sets
        pool = normal(pages * (1 + (sets - 1) * apart), PAGE, RANK + ROPE)
        self.sets = [pool[i * apart * pages :][:pages] for i in range(sets)]
        self.q = normal(batch, heads, RANK + ROPE)
        self.table = int32(torch.randperm(pages)).view(batch, self.per_row)

    def wanted(self, rows: int = 2) -> torch.Tensor:
        """The expected output for some rows of the first set, in float32."""
        held = self.sets[0][self.table[:rows].long()].flatten(1, 2)[:, : self.held].float()
        scores = torch.einsum("bnr,bsr->bns", self.q[:rows].float(), held) * SCALE
        return torch.einsum("bns,bsr->bnr", scores.softmax(-1), held[..., :RANK])


def decoder(backend: str, cache: Cache) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step over one of the sets of `cache`, planned in advance."""
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE), backend=backend
    )
    starts = int32(torch.arange(cache.batch + 1))
    wrapper.plan(
        qo_indptr=starts, kv_indptr=starts * cache.per_row, kv_indices=cache.table.flatten(),
        kv_len_arr=int32(torch.full((cache.batch,), cache.held)), num_heads=cache.heads, head_dim_ckv=RANK, head_dim_kpe=ROPE,
        page_size=PAGE, causal=False, sm_scale=SCALE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q_c, q_pe = (q.contiguous() for q in cache.q.split([RANK, ROPE], -1))
    out = torch.empty_like(q_c)
    return lambda kv: wrapper.run(q_c, q_pe, kv[..., :RANK], kv[..., RANK:], out=out)


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def decode(backend: str, batch: int, heads: int, held: int) -> tuple[float, float]:
    """Microseconds per call, without the plan, and the error of two rows."""
    cache = Cache(batch, heads, held)
    call = decoder(backend, cache)
    off = error(call(cache.sets[0])[:2], cache.wanted())
    calls = [functools.partial(call, kv) for kv in cache.sets] * max(1, CALLS // len(cache.sets))
    return seconds(captured(calls).replay) / len(calls) * 1e6, off


def prompt_flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    import flashinfer

    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    starts = int32(torch.tensor([0, len(q)]))
    options = {"causal": True, "sm_scale": SCALE, "q_data_type": torch.bfloat16}
    wrapper.plan(starts, starts, PROMPT_HEADS, PROMPT_HEADS, WIDTH, VALUE, **options)
    return lambda: wrapper.run(q, k, v)


def prompt_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padded: bool
) -> Callable[[], torch.Tensor]:
    """`padded`: values are padded to the width of keys, for which some versions have a faster kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if padded:
        v = torch.nn.functional.pad(v, (0, WIDTH - VALUE))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
        return out[0].transpose(0, 1)[..., :VALUE]

    return call


def prompt_wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int = 128, heads: int = 2
) -> torch.Tensor:
    """The expected output for the last queries of some heads, in float32."""
    q, k, v = (x[:, :heads].float() for x in (q[-rows:], k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * SCALE
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).triu(len(k) - len(q) + 1)
    return torch.einsum("nts,snv->tnv", scores.masked_fill(unseen, -math.inf).softmax(-1), v)


def prefill(make: Callable[..., Callable[[], torch.Tensor]], tokens: int) -> tuple[float, float]:
    """Microseconds per call, and the error of the last queries of two heads."""
    qkv = [normal(tokens, PROMPT_HEADS, width) for width in (WIDTH, WIDTH, VALUE)]
    call, wanted = make(*qkv), prompt_wanted(*qkv)
    off = error(call()[-len(wanted) :, : wanted.shape[1]], wanted)
    return seconds(call) * 1e6, off


def measured(about: dict, run: Callable[[], tuple[float, float]]) -> dict:
    """`about` with the result of `run`, or with the reason if it fails or its error is too large."""
    try:
        torch.cuda.empty_cache()
        us, off = run()
    except Exception as fault:  # the other peers continue
        return about | {"failed": " ".join(f"{type(fault).__name__}: {fault}".split())[:300]}
    if not off < LIMIT:
        return about | {"failed": f"its error is {off:.3g}"}
    return about | {"us": round(us, 2), "err": round(off, 5)}


def decode_lines(backends: tuple[str, ...]) -> Iterator[dict]:
    for shape in itertools.product(BATCHES, HEADS, HELD):
        for backend in backends:
            about = {
                "peer": f"flashinfer-{backend}",
                **dict(zip(("batch", "heads_q", "seqlen_k"), shape, strict=True)),
            }
            yield measured(about, functools.partial(decode, backend, *shape))


def prefill_lines() -> Iterator[dict]:
    """FlashInfer, and cuDNN with the faster of padded and plain values."""
    for tokens in PROMPTS:
        about = {"kind": "prefill", "batch": 1, "heads_q": PROMPT_HEADS, "seqlen_k": tokens}
        yield measured(
            {"peer": "flashinfer-fa3"} | about, functools.partial(prefill, prompt_flashinfer, tokens)
        )
        both = [
            measured(
                {"peer": "cudnn"} | about | {"padded": padded},
                functools.partial(prefill, functools.partial(prompt_cudnn, padded=padded), tokens),
            )
            for padded in (False, True)
        ]
        yield min(both, key=lambda line: line.get("us", math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--fa2", action="store_true", help="also time FlashInfer's FA2 backend of mla_decode")
    options = parser.parse_args()
    lines = []
    for line in itertools.chain(decode_lines(("fa3", "fa2") if options.fa2 else ("fa3",)), prefill_lines()):
        lines.append(json.dumps(line) + "\n")
        print(lines[-1], end="", flush=True)
        if options.out:
            options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
