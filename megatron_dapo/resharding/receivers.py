"""The receiving side that an engine's `init_info` asks for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from megatron_dapo.resharding.cuda_ipc import CudaIpcReceiver, NoteBoard
from megatron_dapo.resharding.files import FileReceiver
from megatron_dapo.resharding.meeting import Meeting
from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.point_to_point import PointToPointReceiver
from megatron_dapo.resharding.transport import InitInfo, Receiver


def open_receiver(
    init: InitInfo, plan: ReshardPlan, tensor_rank: int, device: torch.device
) -> Receiver:
    """One worker's end of the transport; joins nobody yet.

    Args:
        plan: computed here from `init`; its fingerprint must be the trainer's.
        tensor_rank: of this worker in its engine.
        device: where messages are to arrive.

    Raises:
        ValueError: another plan than the trainer's, no such directory or transport.
        RuntimeError: the transport needs a CUDA device and there is none.
    """
    if plan.fingerprint != init["fingerprint"]:
        raise ValueError(
            f"the engine's plan is {plan.fingerprint}, the trainer's is {init['fingerprint']}: "
            "model or layouts differ, or one side runs another version of megatron_dapo"
        )
    directory = Path(init["directory"]).resolve()
    if not directory.is_dir():
        raise ValueError(
            f"weights directory {init['directory']!r} does not exist here; trainers and engines "
            "must share it"
        )
    transport = init["transport"]
    if transport == "files":
        return FileReceiver(plan, tensor_rank, directory, device)
    timeout = timedelta(seconds=init["timeout_seconds"])
    trainers, workers, replica = plan.train.world_size, plan.engine.tensor, init["replica"]
    if transport == "gloo" or transport == "nccl":
        meeting = Meeting(directory, replica, 0, trainers, workers, transport, timeout)
        return PointToPointReceiver(plan, meeting, tensor_rank, device)
    if transport == "cuda_ipc":
        board = NoteBoard(directory, replica, 0, trainers, workers, timeout)
        return CudaIpcReceiver(plan, board, tensor_rank, device)
    raise ValueError(
        f"transport {transport!r} of init_weight_transfer_engine is not one of files, gloo, nccl, "
        "cuda_ipc"
    )
