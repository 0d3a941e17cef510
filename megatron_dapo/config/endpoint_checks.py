"""Where engines are, and what reaching them over a network asks for."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_dapo.config.redact import redact_text
from megatron_dapo.config.resharding_checks import MEETS_ON_LOOPBACK
from megatron_dapo.config.schema import RunConfig

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""That no other machine reaches."""
EVERYWHERE = ("0.0.0.0", "::")
RUN_SCRIPT = "examples/qwen32b/run.sh"


def endpoint_problems(config: RunConfig) -> Iterator[str]:
    """Addresses of `rollout.endpoints`, and machines of `rollout.engine_nodes`."""
    rollout = config.rollout
    for endpoint in rollout.endpoints:
        shown = redact_text(endpoint)
        if endpoint.startswith("unix:/"):
            continue
        host = _plain_host(endpoint)
        if host is None or host in EVERYWHERE:
            yield (
                f"rollout.endpoints: {shown!r} must be unix:/absolute/path, http://127.0.0.1:port, "
                "or with rollout.remote_engines=true http://host:port."
            )
        elif host not in LOOPBACK_HOSTS and not rollout.remote_engines:
            yield (
                f"rollout.endpoints: {shown!r} is another machine, and rollout.remote_engines="
                "false. Whoever reaches an engine can read prompts and change weights: read what "
                "that key says and set it, or use unix:/path or http://127.0.0.1:port."
            )
        elif host not in LOOPBACK_HOSTS and rollout.token_file is None:
            yield (
                f"rollout.endpoints: {shown!r} is another machine, and rollout.token_file is not "
                "set. Give the file with the token that the engine was started with."
            )
    if rollout.engine_nodes:
        yield from _engine_node_problems(config)


def missing_endpoints(config: RunConfig) -> Iterator[str]:
    """Engines that somebody else had to start, where they were not."""
    rollout = config.rollout
    if rollout.engine_nodes and not rollout.endpoints:
        yield (
            f"rollout.engine_nodes={rollout.engine_nodes}: their engines are started, and "
            f"rollout.endpoints filled in, by {RUN_SCRIPT}. Start with sbatch {RUN_SCRIPT}, or set "
            "rollout.engine_nodes=0."
        )


def _engine_node_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    seen = f"rollout.engine_nodes={rollout.engine_nodes}"
    if rollout.engines % rollout.engine_nodes:
        yield f"{seen}: must divide rollout.engines={rollout.engines}."
    if not rollout.remote_engines:
        yield (
            f"{seen}: these engines are reached over the network, and rollout.remote_engines="
            "false. Read what that key says, and set it to true."
        )
    if rollout.placement == "colocated":
        yield f"{seen}: needs rollout.placement=disaggregated, it is colocated."
    if config.resharding.transport in MEETS_ON_LOOPBACK:
        yield (
            f"{seen}: resharding.transport={config.resharding.transport} meets on 127.0.0.1. Use "
            "files (run_dir must lie on a shared file system) or nccl."
        )


def _plain_host(endpoint: str) -> str | None:
    """Host of http://host:port, None for anything else."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        return None
    plain = parts.scheme == "http" and parts.username is None and parts.path in ("", "/")
    return parts.hostname if plain and port is not None else None
