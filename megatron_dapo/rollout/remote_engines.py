"""Engines that somebody else starts: `rollout.endpoints`, on this machine or another."""

from __future__ import annotations

import logging
import time

import httpx

from megatron_dapo.config.schema import RolloutConfig
from megatron_dapo.rollout.engine_http import CONNECT_SECONDS, bearer
from megatron_dapo.rollout.token_guard import read_token
from megatron_dapo.rollout.vllm_server import EngineStartError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


def token_of(rollout: RolloutConfig) -> str | None:
    """What engines with a port ask for; None where nobody asks."""
    return None if rollout.token_file is None else read_token(rollout.token_file)


def wait_for_endpoints(rollout: RolloutConfig) -> None:
    """Block until every one of `rollout.endpoints` answers: they may start beside the trainers.

    Raises:
        EngineStartError: one does not within `rollout.startup_timeout_seconds`, or refuses.
    """
    deadline = time.monotonic() + rollout.startup_timeout_seconds
    for endpoint in rollout.endpoints:
        with _client(endpoint, token_of(rollout)) as client:
            while (last := _health(client)) != "ok":
                if last == "401" or time.monotonic() > deadline:
                    raise EngineStartError(
                        f"rollout.endpoints: {endpoint} is not ready ({last}) after "
                        f"rollout.startup_timeout_seconds={rollout.startup_timeout_seconds}. Its "
                        "log says why; 401: it was started with another token."
                    )
                time.sleep(POLL_SECONDS)
        logger.info("rollout engine %s is ready", endpoint)


def _client(endpoint: str, token: str | None) -> httpx.Client:
    unix = endpoint.startswith("unix:")
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=endpoint.removeprefix("unix:") if unix else None),
        base_url="http://engine" if unix else endpoint,
        headers=bearer(token),
        timeout=CONNECT_SECONDS,
        trust_env=False,
    )


def _health(client: httpx.Client) -> str:
    try:
        status = client.get("/health").status_code
    except httpx.TransportError as error:
        return repr(error)
    return "ok" if status == httpx.codes.OK else str(status)
