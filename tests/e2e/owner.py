"""A process that owns a server with two workers and waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_dapo.rollout.vllm_server import VllmServer
from tests.e2e.conftest import tiny_options


def main(folder: str, weights: str) -> None:
    options = tiny_options(Path(folder, "model"), Path(folder, "engine.log"), tensor=2)
    server = VllmServer(options)
    server.start()
    server.remove_when_orphaned(Path(weights))
    server.wait_ready()
    sys.stdout.write(f"{server.pid} {server.endpoint}\n")
    sys.stdout.flush()
    time.sleep(1200)


if __name__ == "__main__":
    main(*sys.argv[1:])
