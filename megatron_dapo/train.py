"""Entry point of one trainer rank: `python -m megatron_dapo.train --config FILE`.

Started by `megatron-dapo train` on one machine, or by srun or torchrun, one task per device.
SIGTERM or SIGUSR1 on any rank: all stop generating, finish updates that have begun, save, and exit
with 75. SIGINT: exit at once, with 130, leaving no process, socket or shared memory.
The heavy imports come after the signal handlers: a rank that is asked to stop early says so.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from megatron_dapo.observability.logs import quiet_logs

logger = logging.getLogger("megatron_dapo.train")


def main(arguments: list[str] | None = None) -> int:
    """Train as the rank that the environment names; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dapo.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, _unwind)
    quiet_logs()

    from megatron_dapo.parallel.stop import StopRequest

    stop = StopRequest()
    stop.listen()
    from megatron_dapo.config import ConfigError, check_run, load_config
    from megatron_dapo.config.errors import (
        EXIT_CONFIG,
        EXIT_DONE,
        EXIT_FAILED,
        EXIT_PREEMPTED,
        RunFailed,
    )

    try:
        config = load_config(options.config, options.overrides)
        check_run(config)
        from megatron_dapo.session import train

        finished = train(config, stop)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    except RunFailed as error:
        logger.debug("where the run failed", exc_info=True)
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    finally:
        stop.close()
    return EXIT_DONE if finished else EXIT_PREEMPTED


def _unwind(number: int, _frame: FrameType | None) -> None:
    """Leave through every `finally`, so that engines, sockets and shared memory go too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
