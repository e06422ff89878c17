"""The page at `/`: one file, which the browser lets run its own script and ask this server alone."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi.responses import HTMLResponse

FILE = Path(__file__).with_name("page.html")


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    text = FILE.read_text("utf-8")
    script, style = (_hash_of(tag, text) for tag in ("script", "style"))
    policy = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "connect-src": "'self'",
        "img-src": "data:",  # of the icon, which is empty
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "Content-Security-Policy": "; ".join(f"{kind} {allowed}" for kind, allowed in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",  # a new version has its page at once
    }


def page_response() -> HTMLResponse:
    """The page as an answer."""
    text, headers = page()
    return HTMLResponse(text, headers=headers)


def _hash_of(tag: str, text: str) -> str:
    """The source expression of the only element of this kind."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
