"""Methods that every engine worker gets besides vLLM's own (`--worker-extension-cls`).

They are called through /collective_rpc and answer with plain JSON, one answer for each worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_dapo.resharding.receive import PlannedWeights

if TYPE_CHECKING:
    from megatron_dapo.resharding.vllm_plugin import PolicyEngine


class WeightReports:
    """Mixed into vLLM's worker class, whose weight-transfer engine must be ours."""

    weight_transfer_engine: PolicyEngine
    _weight_update_active: bool

    def weight_digests(self) -> dict[str, str]:
        """Target of the plan -> 16 hexadecimal digits.

        A parameter that is written in place is digested now, as it is served. What the kernel
        keeps in a layout of its own, such as FP8 matrices, was digested when it had arrived whole
        and before it was handed over; only the probe covers what came after.

        Raises:
            RuntimeError: no update was finished, or the last one did not end well.
        """
        engine = self.weight_transfer_engine
        if engine.state.version is None:
            raise RuntimeError("no weight update was finished, so there is nothing to compare")
        return self._planned().digests()

    def weight_report(self) -> dict[str, str | int | float | None]:
        """How the last planned update went.

        plan (fingerprint), version (null: no finished update), live / rebuilt / loader (number of
        parameters), bytes_received, peak_extra_bytes, seconds.

        Raises:
            RuntimeError: the engine was given no plan.
        """
        version = self.weight_transfer_engine.state.version
        return {"version": version, **self._planned().report()}

    def end_open_update(self, asked: str) -> str:
        """End an update whose run is gone; the next one brings all weights. Returns `asked`.

        vLLM itself ends an update only when all its weights came, or when receiving them fails.
        """
        if self._weight_update_active:
            self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False
        return asked

    def _planned(self) -> PlannedWeights:
        planned = self.weight_transfer_engine.planned
        if planned is None:
            raise RuntimeError("init_weight_transfer_engine brought no plan to this worker")
        return planned
