"""A page to watch an endpoint or a directory: one document, with its styles and program in it.

It holds nothing of a state, so every client gets it; it asks for what it shows with a token. Its
policy lets nothing run or load that is not in the document itself. No torch.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from torchrelay.endpoint.server.http.connections import Response

PAGE = "/"
PATHS = ("/page/steps.json", "/page/tree.json", "/page/histogram.json", "/page/changes.json")
SCRIPTS = ("dom", "api", "overview", "graph", "list", "tree", "changes", "main")


@cache
def watch_page() -> Response:
    """The page, and the headers that it is sent with."""
    folder = files(__name__)
    style = (folder / "page.css").read_text("utf-8")
    parts = [(folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    text = (folder / "page.html").read_text("utf-8")
    text = text.replace("/*CSS*/", style).replace("/*JS*/", script)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {what}" for name, what in policy.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return Response(200, text.encode(), "text/html; charset=utf-8", headers)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
