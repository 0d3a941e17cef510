"""A GPT model that ends in one number a token instead of logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_dapo import device

device.install_cpu_support()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class ValueHead(nn.Module):
    """Hidden states -> values, where a GPT model has its output layer.

    Its weight starts at 0 in every layout, so the first values are exactly 0. It is whole on
    every tensor rank. Under sequence parallelism each rank sees its part of the tokens: Megatron
    sums such a weight's gradient over the tensor ranks, and all ranks get all values.
    """

    def __init__(self, transformer: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = transformer.sequence_parallel
        self.weight = nn.Parameter(
            torch.zeros(1, transformer.hidden_size, dtype=transformer.params_dtype)
        )
        self.weight.sequence_parallel = transformer.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[tokens, 1, hidden] (a tensor rank's part) -> [tokens, 1, 1] fp32, and no bias.

        The last two arguments are those of Megatron's output layer, and not used.
        """
        values = hidden.float() @ self.weight.float().T
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueModel(GPTModel):
    """The GPT model of the policy with a `ValueHead` for an output layer, tied to nothing."""

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        untied = {"share_embeddings_and_output_weights": False}
        super().__init__(config, *args, **options | untied)
        if self.post_process:
            self.output_layer = ValueHead(config)
