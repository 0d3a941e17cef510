"""A GPT model that ends in hidden states: the loss multiplies them by the head, block by block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_dapo import device

device.install_cpu_support()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class HeadWeight(ColumnParallelLinear):
    """Megatron's output layer without its product: it holds the weight, and saves and loads it."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """The hidden states as they came; under sequence parallelism each tensor rank's part."""
        return input_, None


class PolicyModel(GPTModel):
    """The GPT model of the policy. Parameters, names and checkpoints are those of a GPTModel.

    Its last chunk returns final hidden states, [1, tokens, hidden] ([1, tokens / tp, hidden] under
    sequence parallelism), and never forms logits.
    """

    output_layer: HeadWeight

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        if self.post_process:
            layer = HeadWeight(
                config.hidden_size,
                self.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=True,
                tp_group=self.pg_collection.tp,
            )
            layer.weight = self.output_layer.weight  # None where it is this chunk's embedding
            self.output_layer = layer

    @property
    def head_weight(self) -> nn.Parameter:
        """[vocab / tp, hidden] of the last chunk: the output layer's, or the tied embedding's."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def show_head_gradient(weight: nn.Parameter) -> None:
    """Let Megatron's overlapped reduction of gradients see that the head's weight has its own.

    The loss adds it to main_grad and leaves nothing to autograd, but the reduction starts only on a
    `weight.grad`: it gets a zero that takes no memory, unless an embedding that shares the weight
    has brought one. Call after `wrap_chunks`, on the last stage. Local.
    """
    view = weight.expand_as(weight)
    assert view.grad_fn is not None, "the head's weight trains"
    accumulate = view.grad_fn.next_functions[0][0]
    assert accumulate is not None, "a leaf has a node that accumulates its gradient"

    def fill(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is None and weight.grad is None:
            weight.grad = weight.detach().new_zeros(()).expand_as(weight)

    accumulate.register_prehook(fill)
