"""Every route that vLLM's server has, by its own list, asks for the token."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_dapo.rollout.server_options import Address, server_command, server_options
from megatron_dapo.rollout.token_guard import TOKEN_FILE
from tests.unit.config.runs import make_config

pytestmark = pytest.mark.e2e
TOKEN = "0123456789abcdef" * 2
KNOWN = {"/health", "/update_weights", "/inference/v1/generate", "/sleep", "/invocations"}
"""Some of them, so that an empty list proves nothing."""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's application as `server_command` starts it, without an engine behind it."""
    pytest.importorskip("vllm")
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    monkeypatch.setenv(TOKEN_FILE, str(token_file))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    address = Address("127.0.0.1", 12000, token_file)
    options = server_options(make_config(), 0, device="cpu", address=address)
    command = server_command(options, tmp_path / "http")
    arguments = command[command.index("--host") :]
    return build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments), ("generate",))


def test_no_route_answers_without_the_token(app: Any) -> None:
    routes = [(m, r.path) for r in app.routes for m in getattr(r, "methods", None) or ["GET"]]
    assert {path for _, path in routes} >= KNOWN

    async def statuses(headers: dict[str, str]) -> dict[tuple[str, str], int]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine", headers=headers
        ) as client:
            return {
                (method, path): (
                    await client.request(method, re.sub(r"{[^}]*}", "1", path))
                ).status_code
                for method, path in [*routes, ("OPTIONS", "/v1/models"), ("GET", "/nowhere")]
            }

    open_without = {k: v for k, v in asyncio.run(statuses({})).items() if v != 401}
    assert open_without == {}
    known = asyncio.run(statuses({"Authorization": f"Bearer {TOKEN}"}))
    assert known["GET", "/nowhere"] == 404
    assert known["GET", "/version"] == 200
