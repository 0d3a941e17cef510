"""What a vLLM server with a port asks of every request: the run's token.

vLLM's own api key covers some prefixes of its routes and leaves open those that change weights,
/health, /metrics and /invocations. This middleware (vLLM's --middleware) stands before all of them.
Standard library only: the server loads it as one of its first modules.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN_FILE = "MEGATRON_DAPO_TOKEN_FILE"
"""Environment variable of the server: where the token is. The token itself is in no environment,
command line or log."""
LEAST_TOKEN_BYTES = 16
UNAUTHORIZED = b'{"error": "this engine answers nobody without the token of its run"}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def read_token(path: Path) -> str:
    """The token in `path`.

    Raises:
        ValueError: others may read or write the file, or it holds too little.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(
            f"rollout.token_file={path} has mode {mode:o}: others may read the token. chmod 600"
        )
    token = path.read_text().strip()
    if len(token) < LEAST_TOKEN_BYTES or not token.isalnum():
        raise ValueError(
            f"rollout.token_file={path}: need at least {LEAST_TOKEN_BYTES} letters and digits, for "
            f"example: (umask 077; openssl rand -hex 32 >{path})"
        )
    return token


class TokenGuard:
    """ASGI middleware: 401 for every request without `Authorization: Bearer TOKEN`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {read_token(Path(os.environ[TOKEN_FILE]))}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
