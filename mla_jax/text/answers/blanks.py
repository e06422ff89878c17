"""Blanks at the borders of an answer's parts: they belong to the markup, where a tag follows or comes before."""

BLANKS = " \t\r\n"


class Trimmed:
    """A text that arrives in pieces, without the blanks at its end that a tag turns out to follow.

    Behind a tag, newlines are dropped as well (or all of `leading`), and blanks that nothing follows."""

    def __init__(self, leading: str = "\n", after_tag: bool = False):
        self._leading, self._after_tag, self._held = leading, after_tag, ""

    @property
    def empty(self) -> bool:
        """Whether no text has come since the last tag."""
        return self._after_tag

    def push(self, text: str) -> str:
        """The text that is now final."""
        text = self._held + text
        if self._after_tag:
            text = text.lstrip(self._leading)
        final = text.rstrip(BLANKS)
        self._held = text[len(final) :]
        self._after_tag = self._after_tag and not final
        return final

    def cut(self) -> None:
        """Notes a tag: blanks before it are no text."""
        self._held, self._after_tag = "", True

    def finish(self) -> str:
        """The blanks at the end of the text, which no tag follows."""
        rest, self._held = self._held, ""
        return "" if self._after_tag else rest
