"""Entry point of one trainer rank: `python -m megatron_dapo.train --config FILE`.

Started by `megatron-dapo train` on one machine, or by srun or torchrun, one task per device.
SIGUSR1 on any rank: all finish the running step, save, and exit with 75. SIGTERM: exit at once,
with 143, leaving no process, socket or shared memory.
This module stays light and guarded: saving a checkpoint starts helper processes that import
it again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from megatron_dapo.observability.logs import quiet_logs


def main(arguments: list[str] | None = None) -> int:
    """Train as the rank that the environment names; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    save_and_stop = threading.Event()
    signal.signal(signal.SIGTERM, _unwind)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: save_and_stop.set())
    quiet_logs()

    # Imported here: a checkpoint's helper process imports this module and needs none of it.
    from megatron_dapo.config import ConfigError, check_run, load_config
    from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED

    try:
        config = load_config(options.config, options.overrides)
        check_run(config)
        from megatron_dapo.session import train

        finished = train(config, save_and_stop)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a second one must not change the exit code
    return EXIT_DONE if finished else EXIT_PREEMPTED


def _unwind(number: int, _frame: FrameType | None) -> None:
    """Leave through every `finally`, so that engines, sockets and shared memory go too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
