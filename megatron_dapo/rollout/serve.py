"""One rollout engine of a run on a machine of its own: `python -m megatron_dapo.rollout.serve`.

A launch script (examples/qwen32b/run.sh) starts one for each of `rollout.engines`, as tasks of a
job step; trainer rank 0 reaches it at its node's address. It serves as long as the token file is
there, restarts its server `rollout.max_restarts` times when it ends or hangs, and ignores the
signals that ask trainers to save: they need their engines until they have.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, RunFailed
from megatron_dapo.config.machine_checks import decide_device
from megatron_dapo.observability.logs import quiet_logs
from megatron_dapo.rollout.engine_http import EngineHttp
from megatron_dapo.rollout.event_loop import EventLoopThread
from megatron_dapo.rollout.health import SERVER, Heartbeat
from megatron_dapo.rollout.restarts import RestartBudget
from megatron_dapo.rollout.server_options import Address, ServerOptions, server_options
from megatron_dapo.rollout.token_guard import read_token
from megatron_dapo.rollout.vllm_server import EngineStartError, VllmServer

logger = logging.getLogger("megatron_dapo.rollout.serve")

POLL_SECONDS = 0.5
REFILL_SECONDS = 3600.0
"""A server that was up for so long has all its restarts again, as one of a run after good steps."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until the token file goes; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.rollout.serve")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--hosts", required=True, help="addresses of the step's nodes: a,b,c")
    parser.add_argument("--first-port", type=int, required=True, help="of engine 0")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    quiet_logs()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # not ignored: what it starts would inherit that
    try:
        config = decide_device(load_config(options.config, options.overrides))
        engine = engine_options(config, options.hosts, options.first_port, os.environ)
        return serve(engine, config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    except RunFailed as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED


def engine_options(
    config: RunConfig, hosts: str, first_port: int, environ: Mapping[str, str]
) -> ServerOptions:
    """How this task of the job step starts its engine: task n is engine n, on its node's address.

    Raises:
        ConfigError: there is no token file.
    """
    host = hosts.split(",")[int(environ["SLURM_NODEID"])]
    index, place = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    token_file = config.rollout.token_file
    if token_file is None:
        raise ConfigError(
            "rollout.token_file is not set: an engine with a port asks for a token. Give the file "
            "that examples/qwen32b/run.sh writes"
        )
    tensor = config.rollout.engine_tensor
    devices = range(place * tensor, (place + 1) * tensor) if config.device == "cuda" else ()
    return server_options(
        config,
        index,
        device="cuda" if config.device == "cuda" else "cpu",
        visible_devices=tuple(devices),
        address=Address(socket.gethostbyname(host), first_port + index, token_file),
    )


def serve(options: ServerOptions, config: RunConfig) -> int:
    """Keep a server of `options` up; returns 0 once the token file is gone.

    Raises:
        EngineStartError: it ended or hung more often than `rollout.max_restarts`.
        ConfigError: the token file cannot be used.
    """
    assert options.address is not None, "an engine of its own has an address"
    try:
        token = read_token(options.address.token_file)
    except FileNotFoundError:
        return EXIT_DONE
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most = config.rollout.max_restarts
    server, budget = VllmServer(options), RestartBudget(most)
    health = EventLoopThread("health of the engine")
    try:
        while True:
            server.start()
            started = time.monotonic()
            hangs = health.submit(_until_silent(server, token, config))
            while server.alive and not hangs.done():
                if not options.address.token_file.exists():
                    return EXIT_DONE
                time.sleep(POLL_SECONDS)
            reason = server.exit_reason() or hangs.result()
            hangs.cancel()
            tail = server.log_tail()
            server.kill()
            if time.monotonic() - started >= REFILL_SECONDS:
                budget = RestartBudget(most)
            wait = budget.spend()
            if wait is None:
                break
            logger.error("%s is lost (%s):\n%s", server.name, reason, tail)
            time.sleep(wait)
    finally:
        health.close()
        server.stop()
    raise EngineStartError(
        f"{server.name} was lost {most + 1} times, at last: {reason}. Last lines of "
        f"{options.log_file}:\n{tail}"
    )


async def _until_silent(server: VllmServer, token: str, config: RunConfig) -> str:
    """Returns once a server hangs, before it is ready or after: how it was noticed.

    Trainers bring weights in without a word to this process, so what computes may always be silent
    for as long as an update may take.
    """
    rollout = config.rollout
    http = EngineHttp(
        server.endpoint,
        label=server.label,
        timeout_seconds=rollout.heartbeat_timeout_seconds,
        token=token,
    )
    heartbeat = Heartbeat(
        http.status,
        every_seconds=rollout.heartbeat_seconds,
        timeout_seconds=rollout.heartbeat_timeout_seconds,
        updating=lambda: True,
        update_seconds=config.resharding.timeout_seconds,
    )
    now = asyncio.get_running_loop().time
    ready_by = now() + rollout.startup_timeout_seconds
    try:
        while await http.status(SERVER) != 200:  # it loads its model
            if now() > ready_by:
                seconds = f"{rollout.startup_timeout_seconds:g} s"
                return f"not ready within {seconds} (rollout.startup_timeout_seconds)"
            await asyncio.sleep(rollout.heartbeat_seconds)
        return await heartbeat.until_lost()
    finally:
        await http.close()


if __name__ == "__main__":
    sys.exit(main())
