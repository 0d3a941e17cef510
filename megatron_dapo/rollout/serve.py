"""One rollout engine of a run on a machine of its own: `python -m megatron_dapo.rollout.serve`.

A launch script (examples/qwen32b/run.sh) starts one for each of `rollout.engines`, as tasks of a
job step; trainer rank 0 reaches it at its node's address. It serves as long as the token file is
there, restarts its server `rollout.max_restarts` times, and ignores the signals that ask trainers
to save: they need their engines until they have.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_DONE
from megatron_dapo.config.machine_checks import decide_device
from megatron_dapo.observability.logs import quiet_logs
from megatron_dapo.rollout.restarts import RestartBudget
from megatron_dapo.rollout.server_options import Address, ServerOptions, server_options
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
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    return serve(engine, config.rollout.max_restarts)


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


def serve(options: ServerOptions, max_restarts: int) -> int:
    """Keep a server of `options` up; returns 0 once the token file is gone."""
    assert options.address is not None, "an engine of its own has an address"
    server, budget = VllmServer(options), RestartBudget(max_restarts)
    try:
        while True:
            server.start()
            started = time.monotonic()
            while server.alive:
                if not options.address.token_file.exists():
                    return EXIT_DONE
                time.sleep(POLL_SECONDS)
            if time.monotonic() - started >= REFILL_SECONDS:
                budget = RestartBudget(max_restarts)
            wait = budget.spend()
            if wait is None:
                break
            logger.error("%s ended:\n%s", server.name, server.log_tail())
            time.sleep(wait)
            server.stop()
    finally:
        server.stop()
    message = f"{server.name} ended {max_restarts + 1} times"
    raise EngineStartError(f"{message}. Last lines of {options.log_file}:\n{server.log_tail()}")


if __name__ == "__main__":
    sys.exit(main())
