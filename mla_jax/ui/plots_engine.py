"""A figure of the engine at work, in the manner of `plots`: what its pages hold, and who runs and waits, over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_jax.engine.core.stats import EngineStats, Sample
from mla_jax.ui.plots import INK, _axes, _figure, _title

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Of the palette of `plots.STYLES`
HELD, CACHED, UNUSED, RUNNING, WAITING = "#0072B2", "#56B4E9", "#EEEEEE", "#D55E00", "#009E73"


def pool(
    stats: EngineStats,
    since: float = 0.0,
    *,
    ax: "Sequence[matplotlib.axes.Axes] | None" = None,
    size: tuple[float, float] = (9, 3.4),
) -> "matplotlib.figure.Figure":
    """The pool's pages over time, and the requests that run and wait, from `since` seconds of `stats.samples` on.

    Two axes: pages that requests hold, that are kept for later prompts only, and that hold nothing, stacked; and requests."""
    pages, requests = _axes(ax, size, 2)
    samples = [sample for sample in stats.samples if sample.seconds >= since] or [
        Sample(since, 0, 0, 0, 0, stats.pages, 0)
    ]
    seconds = [sample.seconds - samples[0].seconds for sample in samples]
    held, unused = ([getattr(sample, name) for sample in samples] for name in ("held", "unused"))
    kept = [stats.pages - a - b for a, b in zip(held, unused, strict=True)]
    names = ["held by requests", "kept for later prompts", "unused"]
    pages.stackplot(seconds, held, kept, unused, labels=names, colors=[HELD, CACHED, UNUSED], step="post")
    pages.set(ylim=(0, stats.pages * 1.3), ylabel="pages of the cache")
    requests.step(
        seconds, [sample.running for sample in samples], where="post", color=RUNNING, label="running"
    )
    requests.step(
        seconds, [sample.waiting for sample in samples], where="post", color=WAITING, ls="--", label="waiting"
    )
    requests.set(
        ylim=(0, 1.3 * max(1, *(max(sample.running, sample.waiting) for sample in samples))),
        ylabel="requests",
    )
    for one in (pages, requests):
        one.set(xlim=(0, max(seconds[-1], 1e-3)), xlabel="seconds")
        one.yaxis.get_major_locator().set_params(integer=True)
        one.legend(loc="upper right", ncols=2, frameon=False, fontsize=8, labelcolor=INK)
    _title(pages, f"At most {max(held):,} of {stats.pages:,} pages\nwere held at once")
    tokens = samples[-1].generated - samples[0].generated
    _title(
        requests,
        f"At most {max(sample.running for sample in samples):,} requests ran at once,\n{tokens:,} tokens generated",
    )
    return _figure(pages, requests)
