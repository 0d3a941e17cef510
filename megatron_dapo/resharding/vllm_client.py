"""What vLLM's trainer-side engines take for the inference side, which the rollouts talk to."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping

from vllm.distributed.weight_transfer.base import WeightTransferUpdatePayload

Deliver = Callable[[Mapping[str, object]], None]
"""Posts one `update_info` to every engine of the open update and returns when all have taken it."""


class ToldEngines:
    """vLLM's `VLLMWeightSyncClient` for engines that the rollouts have told already.

    Args:
        told: `init_info` of the first engine and `update_info`; None: this rank tells nothing.
        deliver: takes updates that were not announced.

    Raises:
        RuntimeError: (from its methods) vLLM's engine wants to say something else.
    """

    def __init__(
        self,
        told: tuple[Mapping[str, object], Mapping[str, object]] | None,
        deliver: Deliver | None,
    ) -> None:
        self._told, self._deliver = told, deliver

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """The engines join meanwhile."""
        _compare("init_weight_transfer_engine", init_info, self._of_leader()[0])

    def start_weight_update(self) -> None:
        """The rollouts pause the engines and start the update."""

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """The engines receive meanwhile, or now what only this call knows."""
        announced = self._of_leader()[1]
        assert isinstance(update_info, dict), "one update at a time"
        if announced:
            _compare("update_weights", update_info, announced)
        elif self._deliver is None:
            raise RuntimeError("nobody delivers updates to the engines: give `deliver` on rank 0")
        else:
            self._deliver(_for_http(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The rollouts let the engines finish once this rank has sent everything."""

    def _of_leader(self) -> tuple[Mapping[str, object], Mapping[str, object]]:
        assert self._told is not None, "rank 0 alone talks to the engines"
        return self._told


def _compare(call: str, wanted: Mapping[str, object], told: Mapping[str, object]) -> None:
    for name in sorted(wanted.keys() | told.keys()):
        if wanted.get(name) != told.get(name):
            raise RuntimeError(
                f"vLLM's trainer-side engine says {name}={str(wanted.get(name))[:80]} in {call}, "
                f"the engines were told {str(told.get(name))[:80]}: this vLLM has another protocol "
                "than the one that was written for; use another resharding.transport"
            )


def _for_http(update_info: Mapping[str, object]) -> dict[str, object]:
    """CUDA IPC handles are no JSON: in the form that vLLM's workers take over HTTP."""
    update = {name: value for name, value in update_info.items() if value is not None}
    if "ipc_handles" in update:
        handles = pickle.dumps(update.pop("ipc_handles"))
        update["ipc_handles_pickled"] = base64.b64encode(handles).decode()
    return update
