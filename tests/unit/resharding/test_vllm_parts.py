"""Ways to write a vLLM module, on small ones: what is live, what is loaded, what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megatron_dapo.resharding.engine_map import EngineLayout
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.quantize import quantize_blocks
from megatron_dapo.resharding.receive import Part, PlannedWeights
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.resharding.transport import new_payload
from megatron_dapo.resharding.vllm_layers import find_parts, loader_modules
from megatron_dapo.resharding.vllm_parts import find_reload
from tests.unit.resharding.in_process import InProcess, outboxes_of

RELOAD = "vllm.model_executor.model_loader.reload"


class Packed(QuantizeMethodBase):
    """A layout that nobody here knows."""

    def create_weights(self, layer: nn.Module, *arguments: object, **options: object) -> None:
        raise AssertionError("not called")

    def apply(self, layer: nn.Module, *arguments: object, **options: object) -> Tensor:
        raise AssertionError("not called")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


class Model(nn.Module):
    """The modules of a plan, with a loader that remembers what it was given."""

    def __init__(self, plan: ReshardPlan) -> None:
        super().__init__()
        self.given: dict[str, Tensor] = {}
        self.ignored = ""
        self.loaded_modules = loader_modules(plan)
        for name, shape in plan.parameters(0).items():
            self._add(name, torch.zeros(shape, dtype=torch.bfloat16))
        for path in set(loader_modules(plan).values()):
            self._add(f"{path}.weight", torch.zeros(3, dtype=torch.uint8))
            self.get_submodule(path).quant_method = Packed()

    def _add(self, name: str, value: Tensor) -> None:
        module: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = {name: value.clone() for name, value in weights}
        self.given |= given
        paths = {self.loaded_modules[name.removesuffix("_scale_inv")] for name in given}
        return {f"{path}.weight" for path in paths} - {self.ignored}


def plan_of(quantization: str | None) -> ReshardPlan:
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return build_plan(
        TrainLayout(tensor=2, padded_vocab_size=64),
        EngineLayout(dtype="bfloat16", quantization=quantization),  # type: ignore[arg-type]
        family_for(config),
        bucket_bytes=30_000,
    )


def parts_of(model: Model, plan: ReshardPlan) -> list[Part]:
    record_metadata_for_reloading(model)
    return find_parts(
        model,
        SimpleNamespace(dtype=torch.bfloat16),  # type: ignore[arg-type]
        plan,
        0,
        torch.device("cpu"),
    )


def test_the_installed_vllm_has_the_steps_of_a_rebuild() -> None:
    assert find_reload() is not None


@pytest.mark.parametrize("change", ["gone", "other arguments"])
def test_steps_that_changed_are_not_used(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layerwise = importlib.import_module(f"{RELOAD}.layerwise")
    if change == "gone":
        monkeypatch.delattr(layerwise, "_layerwise_process")
    else:
        monkeypatch.setattr(layerwise, "_layerwise_process", lambda layer: None)
    assert find_reload() is None


def test_a_quantised_engine_gets_blocks_and_scales_through_its_loader() -> None:
    plan = plan_of("fp8")
    model = Model(plan)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in plan.family.hf_tensors.items()
    }
    weights = PlannedWeights(
        plan, 0, parts_of(model, plan), InProcess(outboxes_of(plan, tensors), 0)
    )
    weights.receive(new_payload(1, 1))
    matrices = [name for name in plan.loader_tensors if name.endswith("weight")]
    vectors = [name for name in plan.loader_tensors if name.endswith("bias")]
    assert len(matrices) == 14 and len(vectors) == 6
    assert model.given.keys() == {
        *vectors,
        *(name + suffix for name in matrices for suffix in ("", "_scale_inv")),
    }
    for name in vectors:
        assert torch.equal(model.given[name], tensors[name].bfloat16())
    for name in matrices:
        values, scales = quantize_blocks(tensors[name].bfloat16())
        assert torch.equal(model.given[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(model.given[name + "_scale_inv"], scales)
    norm = model.get_parameter("model.norm.weight")
    assert torch.equal(norm, tensors["model.norm.weight"].bfloat16())
    report = weights.report()
    assert (report["loader"], report["rebuilt"]) == (20, 0)
    assert report["live"] == len(plan.parameters(0))
    assert weights.digests().keys() == set(plan.targets(0))


def test_what_the_loader_of_a_quantised_engine_does_not_fill_ends_the_update() -> None:
    plan = plan_of("fp8")
    model = Model(plan)
    model.ignored = "model.layers.1.self_attn.qkv_proj.weight"
    tensors = {name: torch.zeros(shape) for name, shape in plan.family.hf_tensors.items()}
    outboxes = outboxes_of(plan, tensors)
    weights = PlannedWeights(plan, 0, parts_of(model, plan), InProcess(outboxes, 0))
    with pytest.raises(RuntimeError, match=r"did not fill 'model\.layers\.1\.self_attn\.qkv_proj"):
        weights.receive(new_payload(1, 1))


def test_parameters_without_a_method_of_their_own_are_live() -> None:
    plan = plan_of(None)
    model = Model(plan)
    assert {part.way for part in parts_of(model, plan)} == {"live"}


def test_an_unknown_layout_that_the_plan_writes_directly_is_refused() -> None:
    plan = plan_of(None)
    model = Model(plan)
    model.get_submodule("model.layers.1.mlp.down_proj").quant_method = Packed()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj.*as Packed does"):
        parts_of(model, plan)


def test_a_narrower_live_parameter_is_refused_and_a_wider_one_is_not() -> None:
    plan = plan_of(None)
    model = Model(plan)
    norm = model.get_submodule("model.norm")
    norm.weight = nn.Parameter(norm.weight.float(), requires_grad=False)
    assert parts_of(model, plan)
    norm.weight = nn.Parameter(norm.weight.half(), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*float16.*planned is"):
        parts_of(model, plan)


def test_a_module_that_the_engine_lacks_is_refused() -> None:
    plan = plan_of(None)
    model = Model(plan)
    del model.lm_head
    with pytest.raises(ValueError, match=r"has no 'lm_head\.weight'"):
        parts_of(model, plan)
