"""Checks of figures: the parts that a reader sees, and their legibility."""

import itertools
from collections.abc import Callable


def never(one: str, other: str) -> bool:
    return False


def words(figure) -> list:
    """Every text that a reader sees, ticks left out."""
    texts = [figure._supxlabel] if figure._supxlabel else []
    for ax in figure.axes:
        texts += [*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]
        texts += ax.get_legend().get_texts() if ax.get_legend() else []
    return [text for text in texts if text.get_text()]


def assert_readable(figure, may_touch: Callable[[str, str], bool] = never) -> None:
    """Every word is on the page and touches no other, except two that `may_touch`."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in words(figure)]
    for said, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, said
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, said
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b) or may_touch(one, other), (one, other)
