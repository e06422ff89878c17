"""Figures of a model's inside: the logit lens, maps of attention, experts by layer, and the latents' share of RoPE."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import COLORS, INK, finished, new_axes, title

DARK = 0.55  # of a cell's range, from which its word is white


def lens(words: Sequence[Sequence[str]], chances: np.ndarray, tokens: Sequence[str]) -> Figure:
    """The likeliest next word by layer (up) and token (across), in the shade of its probability `[layers tokens]`."""
    layers, count = chances.shape
    (ax,) = new_axes((max(6.0, 1.5 + 0.8 * count), 1.2 + 0.34 * layers))
    ax.imshow(chances, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
    for layer in range(layers):
        for place in range(count):
            color = "white" if chances[layer, place] > DARK else INK
            ax.text(place, layer, words[layer][place], ha="center", va="center", fontsize=7, color=color)
    ax.set_xticks(range(count), tokens, fontsize=8)
    ax.set_yticks(range(layers), [*map(str, range(layers - 1)), "last"], fontsize=8)
    ax.set(xlabel="token that was read", ylabel="hidden state before layer")
    answers = [layer[-1] for layer in words]
    settled = next(layer for layer in range(layers) if set(answers[layer:]) == {answers[-1]})
    title(ax, f"The last token's answer stands before layer {settled} and after", "the likeliest next token, by layer")
    return finished(ax)


def attention(weights: np.ndarray, tokens: Sequence[str], layer: int) -> Figure:
    """Maps of all heads `[N T S]` of a layer, in which rows look at columns."""
    axes = new_axes((2.2 * len(weights), 2.9), len(weights))
    for head, (ax, one) in enumerate(zip(axes, weights, strict=True)):
        ax.imshow(one, cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(len(tokens)), tokens, fontsize=6, rotation=90)
        ax.set_yticks(range(len(tokens)), tokens if head == 0 else [], fontsize=6)
        ax.set_title(f"head {head}", fontsize=9, color=INK)
    first = weights[:, 1:, 0].mean()
    axes[0].figure.suptitle(
        f"Layer {layer}: {first:.0%} of the attention goes to the first token", x=0.01, ha="left", fontweight="bold"
    )
    return finished(*axes)


def experts(chosen: np.ndarray, number: int) -> Figure:
    """How often each of `number` experts is chosen, by layer, of the ids `[layers tokens K]`."""
    counts = np.stack([np.bincount(layer.ravel(), minlength=number) for layer in chosen])
    (ax,) = new_axes((max(5.2, 1.5 + 0.45 * number), 1.2 + 0.34 * len(counts)))
    ax.imshow(counts, cmap="Blues", aspect="auto", origin="lower")
    _numbers(ax, counts)
    ax.set(xlabel="expert", ylabel="layer with experts")
    ax.set_xticks(range(number))
    ax.set_yticks(range(len(counts)))
    even, most = chosen[0].size / number, counts.max()
    title(ax, f"The busiest expert gets {most / even:.1f} times its even share", "times chosen")
    return finished(ax)


def rotary_share(plain: np.ndarray, rotary: np.ndarray) -> Figure:
    """Mean sizes of a score's two parts by layer: of the latent, and of the rotary key."""
    (ax,) = new_axes((6.4, 2.8))
    layers = np.arange(len(plain))
    ax.bar(layers - 0.2, plain, 0.4, color=COLORS[0], label="through the latent, $q_c \\cdot c_{kv}$")
    ax.bar(layers + 0.2, rotary, 0.4, color=COLORS[1], label="through RoPE, $q_{pe} \\cdot k_{pe}$")
    ax.set(xlabel="layer", ylabel="standard deviation of scores")
    ax.set_xticks(layers)
    ax.legend(frameon=False, fontsize=9)
    wins = int((rotary > plain).sum())
    title(ax, f"The rotary part varies more in {wins} of {len(layers)} layers", "parts of the scores before the softmax")
    return finished(ax)


def _numbers(ax: Axes, counts: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if count > DARK * counts.max() else INK
        ax.text(column, row, str(count), ha="center", va="center", fontsize=7, color=color)
