"""A trainer as far as ownership goes: starts a server, then waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_dapo.rollout import vllm_server
from megatron_dapo.rollout.vllm_server import VllmServer
from tests.unit.rollout.test_vllm_server import options


def main(folder: str, behaviour: str, stand_in: str, weights: str) -> None:
    vllm_server.server_command = lambda options, socket: [  # type: ignore[assignment]
        *(sys.executable, stand_in, str(socket), behaviour)
    ]
    vllm_server.GRACE_SECONDS = 1.0
    server = VllmServer(options(Path(folder)))
    server.start()
    server.wait_ready()
    server.remove_when_orphaned(Path(weights))
    scratch = Path(server.endpoint.removeprefix("unix:")).parent
    sys.stdout.write(f"{server.pid} {scratch}\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
