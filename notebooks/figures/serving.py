"""A figure of the engine at work over time: its pages by use, and its requests that run and wait."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import INK, finished, new_axes, title
from mla_jax.engine.core.stats import EngineStats, Sample

HELD, CACHED, UNUSED, RUNNING, WAITING = "#0072B2", "#56B4E9", "#EEEEEE", "#D55E00", "#009E73"


def pool(stats: EngineStats, since: float = 0.0) -> Figure:
    """The pool's pages over time, and the requests that run and wait, from `since` seconds of `stats.samples` on.

    Two axes: pages that requests hold, that are kept for later prompts only, and that hold nothing, stacked; and requests."""
    pages, requests = new_axes((9, 3.4), 2)
    samples = [sample for sample in stats.samples if sample.seconds >= since]
    samples = samples or [Sample(since, 0, 0, 0, 0, stats.pages, 0)]
    seconds = [sample.seconds - samples[0].seconds for sample in samples]
    _draw_pages(pages, seconds, samples, stats.pages)
    _draw_requests(requests, seconds, samples)
    for one in (pages, requests):
        one.set(xlim=(0, max(seconds[-1], 1e-3)), xlabel="seconds")
        one.yaxis.get_major_locator().set_params(integer=True)
        one.legend(loc="upper right", ncols=2, frameon=False, fontsize=8, labelcolor=INK)
    return finished(pages, requests)


def _draw_pages(ax: Axes, seconds: Sequence[float], samples: Sequence[Sample], count: int) -> None:
    held = [sample.held for sample in samples]
    unused = [sample.unused for sample in samples]
    kept = [count - a - b for a, b in zip(held, unused, strict=True)]
    names = ["held by requests", "kept for later prompts", "unused"]
    ax.stackplot(seconds, held, kept, unused, labels=names, colors=[HELD, CACHED, UNUSED], step="post")
    ax.set(ylim=(0, count * 1.3), ylabel="pages of the cache")
    title(ax, f"At most {max(held):,} of {count:,} pages\nwere held at once")


def _draw_requests(ax: Axes, seconds: Sequence[float], samples: Sequence[Sample]) -> None:
    running = [sample.running for sample in samples]
    waiting = [sample.waiting for sample in samples]
    ax.step(seconds, running, where="post", color=RUNNING, label="running")
    ax.step(seconds, waiting, where="post", color=WAITING, ls="--", label="waiting")
    ax.set(ylim=(0, 1.3 * max(1, *running, *waiting)), ylabel="requests")
    tokens = samples[-1].generated - samples[0].generated
    title(ax, f"At most {max(running):,} requests ran at once,\n{tokens:,} tokens generated")
