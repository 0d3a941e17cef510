"""A run with a checkpoint, made without Megatron: the files that an export reads, quickly."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor

from megatron_dapo.checkpoint.commit import TENSORS, commit
from megatron_dapo.checkpoint.commit import unfinished_folder as unfinished
from megatron_dapo.checkpoint.header import HEADER_FILE, Header
from megatron_dapo.config import load_config
from megatron_dapo.config.load import save_resolved
from megatron_dapo.resharding.cuts import fuse
from megatron_dapo.resharding.name_map import family_for
from tests.unit.checkpoint.records import recorded
from tests.unit.config.runs import write_run

STEP = 5


def write_exported_run(folder: Path, *, layers: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """`folder/run` with one step; returns the Hugging Face tensors that it holds.

    About 13 MB a layer in float32, half of it in bfloat16; 4 MB beside the layers.
    """
    hf_config = transformers.Qwen2Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    run = load_config(
        write_run(folder, hf=hf_config.to_dict()),
        [f"model.dtype={str(dtype).removeprefix('torch.')}"],
    )
    save_resolved(run, run.run_dir)
    family = family_for(hf_config)
    torch.manual_seed(layers)
    tensors: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(9)}
    for entry in family.entries:
        parts = [torch.randn(tensor.shape, dtype=dtype) for tensor in entry.hf]
        tensors |= {tensor.name: part for tensor, part in zip(entry.hf, parts, strict=True)}
        blocks = family.kv_groups if entry.rule.cut.per_kv_group else 1
        state[entry.rule.megatron[0].format(layer=entry.layer)] = fuse(parts, blocks)
    checkpoints = run.run_dir / "checkpoints"
    building = unfinished(checkpoints, STEP)
    building.mkdir(parents=True)
    dcp.save(state, checkpoint_id=building / TENSORS, no_dist=True)
    (building / HEADER_FILE).write_text(Header(STEP, {}, 1).text())
    commit(checkpoints, STEP, recorded(building))
    return tensors
