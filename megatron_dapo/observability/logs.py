"""What a process of ours writes about itself."""

from __future__ import annotations

import logging
import warnings


def quiet_logs() -> None:
    """Our own messages from INFO on, others' from WARNING on, and none about missing GPU parts.

    `megatron-dapo doctor` says what is missing; without a GPU Megatron says it at every import.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("megatron_dapo").setLevel(logging.INFO)
    for module in (r"megatron\.core", r"torch\.distributed"):
        warnings.filterwarnings("ignore", module=module)
