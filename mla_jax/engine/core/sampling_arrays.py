"""Parameters of requests as arrays, for their rows on the device."""

from collections.abc import Iterable

import numpy as np

from mla_jax.base.options import MAX_BIASES, MAX_ENDS, SamplingParams
from mla_jax.decode.rows import Entry
from mla_jax.decode.sampling import Sampling
from mla_jax.engine.core.job import Job


def entries(jobs: list[Job], count: int) -> Entry:
    """An entry for each job; entries beyond, up to `count`, are nobody's."""
    return Entry(
        held=_column((job.read for job in jobs), count, np.int32),
        prompt=_column((len(job.request.prompt) for job in jobs), count, np.int32),
        limit=_column((job.left for job in jobs), count, np.int32),
        again=_column((job.again for job in jobs), count, np.int32),
        logprobs=_column((job.logprobs is not None for job in jobs), count, np.bool_),
        sampling=_sampling(jobs, count),
    )


def _sampling(jobs: list[Job], count: int) -> Sampling:
    params = [job.request.params for job in jobs]

    def numbers(name: str, rest: float = 0.0) -> np.ndarray:
        return _column((getattr(one, name) for one in params), count, np.float32, rest)

    seed, bias_ids, bias = _seeds(params, count), *_biases(params, count)
    return Sampling(
        temperature=numbers("temperature"),
        top_k=_column((one.top_k or 0 for one in params), count, np.int32),
        top_p=numbers("top_p", 1.0),
        min_p=numbers("min_p"),
        presence_penalty=numbers("presence_penalty"),
        frequency_penalty=numbers("frequency_penalty"),
        repetition_penalty=numbers("repetition_penalty", 1.0),
        seed=seed,
        bias_ids=bias_ids,
        bias=bias,
        ends=_ends(jobs, count),
        may_end=_column(map(_may_end, jobs), count, np.int32),
    )


def _seeds(params: list[SamplingParams], count: int) -> np.ndarray:
    """The high and the low half of each seed."""
    seeds = _filled((count, 2), 0, np.uint32)
    for row, one in zip(seeds, params, strict=False):
        row[:] = divmod(one.seed or 0, 1 << 32)
    return seeds


def _ends(jobs: list[Job], count: int) -> np.ndarray:
    """The token ids that end each answer."""
    ends = _filled((count, MAX_ENDS), -1, np.int32)
    for row, job in zip(ends, jobs, strict=False):
        row[: len(job.request.all_ends)] = job.request.all_ends
    return ends


def _may_end(job: Job) -> int:
    """The first position where an end token may stand."""
    least = job.request.params.min_tokens
    return len(job.request.prompt) + least if least else 0


def _biases(params: list[SamplingParams], count: int) -> tuple[np.ndarray, np.ndarray]:
    ids = _filled((count, MAX_BIASES), -1, np.int32)
    biases = _filled((count, MAX_BIASES), 0, np.float32)
    for i, one in enumerate(params):
        given = one.logit_bias or {}
        ids[i, : len(given)], biases[i, : len(given)] = list(given.keys()), list(given.values())
    return ids, biases


def _column(values: Iterable[float], count: int, dtype: type, rest: float = 0.0) -> np.ndarray:
    """Values as an array; whole numbers that are too large become the largest."""
    most = np.iinfo(np.int32).max if dtype is np.int32 else np.inf
    array = _filled((count,), rest, dtype)
    for i, value in enumerate(values):
        array[i] = min(value, most)
    return array


def _filled(shape: tuple[int, ...], value: float, dtype: type) -> np.ndarray:
    return np.full(shape, value, dtype)
