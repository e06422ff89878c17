"""Many requests of all kinds: their pages and rows are given back, and nothing compiles once their shapes are known."""

import gc

import jax
import numpy as np
import pytest
from models import FAMILIES, tensors, write

from mla_jax import LLM, SamplingParams

ROUNDS, REQUESTS = 4, 25


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


def random_requests(seed: int) -> list[tuple[list[list[int]], SamplingParams, bool]]:
    """Prompts of up to 30 tokens, alone or in threes, greedy or sampled; some are streams that are dropped half way."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(REQUESTS):
        rows = int(rng.choice([1, 3]))
        prompts = [rng.integers(5, 90, rng.integers(1, 30)).tolist() for _ in range(rows)]
        sampled = {"temperature": float(rng.choice([0.0, 0.7])), "top_k": int(rng.integers(0, 5)), "seed": int(rng.integers(99))}
        params = SamplingParams(max_tokens=int(rng.integers(1, 17)), ignore_eos=True, **sampled)
        found.append((prompts, params, bool(rng.random() < 0.3)))
    return found


def serve(llm: LLM, requests: list) -> None:
    for prompts, params, dropped in requests:
        if dropped:
            next(iter(llm.stream(prompts[0], params)))
        else:
            assert len(llm.generate(prompts, params)) == len(prompts)


def settle(llm: LLM) -> None:
    """Waits until the engine has no work left: a stream that was dropped may still be in flight."""
    llm._worker.join()
    gc.collect()


@pytest.mark.slow
@pytest.mark.deep
def test_churn_leaks_nothing_and_compiles_nothing(tmp_path):
    llm = LLM(write(tmp_path / "v3", FAMILIES["v3"], tensors(FAMILIES["v3"])), context=64)
    requests = random_requests(0)
    serve(llm, requests)  # now every shape is known
    settle(llm)
    arrays, resident, compiled = len(jax.live_arrays()), resident_bytes(), []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: compiled.append(event))
    for _ in range(ROUNDS):
        serve(llm, requests)
    settle(llm)
    assert [event for event in compiled if event.endswith("backend_compile_duration")] == []
    assert len(jax.live_arrays()) <= arrays
    assert resident_bytes() - resident < 32 << 20
