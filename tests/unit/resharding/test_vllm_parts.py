"""Ways to write a vLLM module, on small ones: what is live, what is loaded, what is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megatron_dapo.resharding import vllm_layers
from megatron_dapo.resharding.block_grid import SCALE_SUFFIX
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.messages import dtype_of
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import ReshardPlan, build_plan
from megatron_dapo.resharding.receive import Part, PlannedWeights
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.resharding.transport import new_payload
from megatron_dapo.resharding.vllm_layers import find_parts
from megatron_dapo.resharding.vllm_parts import find_reload
from tests.unit.resharding.fp8_layouts import bits, expected, telling
from tests.unit.resharding.in_process import InProcess, outboxes_of
from tests.unit.resharding.layouts import Case

SIZES = dict(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
RELOAD = "vllm.model_executor.model_loader.reload"


class Packed(QuantizeMethodBase):
    """A layout that nobody here knows."""

    def create_weights(self, layer: nn.Module, *arguments: object, **options: object) -> None:
        raise AssertionError("not called")

    def apply(self, layer: nn.Module, *arguments: object, **options: object) -> Tensor:
        raise AssertionError("not called")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


class Blocks(fp8.Fp8LinearMethod):
    """vLLM's layout of FP8 matrices, without a kernel."""

    def __init__(self) -> None:
        """Nothing to choose a kernel for."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """A kernel that takes them as they are."""


class Model(nn.Module):
    """The modules of a plan, with a loader that remembers what it was given."""

    def __init__(self, plan: ReshardPlan) -> None:
        super().__init__()
        self.given: dict[str, Tensor] = {}
        self.ignored = ""
        for name, shape in plan.parameters(0).items():
            content = plan.content(name)
            self._add(name, torch.zeros(shape).to(dtype_of(content, torch.bfloat16)))
            if content == "values":
                self.get_submodule(name.rpartition(".")[0]).quant_method = Blocks()

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
        filled = set()
        for name in given:
            for part, whole in (("qkv", "[qkv]_proj"), ("gate_up", "(gate|up)_proj")):
                name = re.sub(rf"\.{whole}\.", f".{part}_proj.", name)
            filled.add(name)
        return filled - {self.ignored}


def plan_of(quantization: str | None) -> ReshardPlan:
    config = transformers.Qwen2Config(**SIZES)
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


def updated(model: Model, plan: ReshardPlan) -> PlannedWeights:
    """After an update with `telling` tensors."""
    outboxes = outboxes_of(plan, telling(plan.family))
    weights = PlannedWeights(plan, 0, parts_of(model, plan), InProcess(outboxes, 0))
    weights.receive(new_payload(1, 1))
    return weights


def wanted_of(plan: ReshardPlan) -> dict[str, Tensor]:
    config = transformers.Qwen2Config(**SIZES)
    case = Case(config, plan.train, plan.engine, plan.bucket_bytes)
    return expected(case, telling(plan.family), 0)


@pytest.mark.parametrize("way", ["rebuilt", "loader"])
def test_an_fp8_engine_gets_values_and_scales_in_its_own_layout(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("fp8")
    model = Model(plan)
    if way == "loader":
        monkeypatch.setattr(vllm_layers, "find_reload", lambda: None)
    report = updated(model, plan).report()
    matrices = [name for name in plan.parameters(0) if plan.content(name) == "values"]
    assert len(matrices) == 8
    assert report[way] == 16 and report["live"] == len(plan.parameters(0)) - 16
    wanted = wanted_of(plan)
    if way == "loader":
        scaled = [name for name in model.given if name.endswith(SCALE_SUFFIX)]
        assert len(model.given) == 28 and len(scaled) == 14
        assert not [name for name in model.given if name.endswith("bias")]
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(bits(model.given[name]), bits(wanted[name]))
        assert torch.equal(model.given[name + SCALE_SUFFIX], wanted[name + SCALE_SUFFIX])
        return
    for name, parameter in model.named_parameters():
        assert torch.equal(bits(parameter.data), bits(wanted[name])), name


def test_what_the_loader_of_an_fp8_engine_does_not_fill_ends_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_layers, "find_reload", lambda: None)
    plan = plan_of("fp8")
    model = Model(plan)
    model.ignored = "model.layers.1.self_attn.qkv_proj.weight" + SCALE_SUFFIX
    with pytest.raises(RuntimeError, match=r"did not fill 'model\.layers\.1\.self_attn\.qkv_proj"):
        updated(model, plan)


def test_an_engine_with_other_blocks_or_none_is_refused() -> None:
    plan = plan_of("fp8")
    path = "model.layers.1.mlp.down_proj"
    model = Model(plan)
    module = model.get_submodule(path)
    module.weight_scale_inv = nn.Parameter(torch.zeros(8, 2), requires_grad=False)
    with pytest.raises(ValueError, match=rf"{path}.weight_scale_inv' is \(\(8, 2\), torch.float32"):
        parts_of(model, plan)
    model = Model(plan)
    module = model.get_submodule(path)
    module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
    with pytest.raises(ValueError, match=rf"{path}.weight' is .*bfloat16.*float8_e4m3fn"):
        parts_of(model, plan)
    model = Model(plan)
    model.get_submodule(path).register_parameter("input_scale", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=rf"{path}.input_scale, which the plan does not write"):
        parts_of(model, plan)
    model = Model(plan)
    model.get_submodule(path).quant_method = Packed()
    with pytest.raises(ValueError, match=rf"{path}' keeps its weights as Packed does.*Fp8Linear"):
        parts_of(model, plan)


def test_what_an_fp8_kernel_adds_is_no_parameter_of_the_policy() -> None:
    plan = plan_of("fp8")
    model = Model(plan)
    record_metadata_for_reloading(model)
    module = model.get_submodule("model.layers.1.mlp.down_proj")
    module.register_parameter("workspace", nn.Parameter(torch.zeros(3), requires_grad=False))
    parts = find_parts(
        model,
        SimpleNamespace(dtype=torch.bfloat16),  # type: ignore[arg-type]
        plan,
        0,
        torch.device("cpu"),
    )
    assert {name for part in parts for name in part.targets} == plan.parameters(0).keys()


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
