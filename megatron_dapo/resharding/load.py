"""Read a Hugging Face folder into this rank's Megatron parameters, only the slices it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig

from megatron_dapo.config.weight_files import INDEX_FILE, SINGLE_FILE, read_index
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.resharding.cuts import fuse, shard_bounds
from megatron_dapo.resharding.layout import local_parameters, shard_place
from megatron_dapo.resharding.name_map import Entry, Family, HfTensor, family_for
from megatron_dapo.resharding.train_map import blocks

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
"""Tensors of old folders that follow from the configuration."""


class HfFolder:
    """The safetensors of a Hugging Face folder, read slice by slice; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._handles: dict[str, safe_open] = {}
        self.file_of: dict[str, str] = {}
        if (folder / INDEX_FILE).is_file():
            self.file_of = read_index(folder / INDEX_FILE)
        elif (folder / SINGLE_FILE).is_file():
            self.file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ValueError(
                f"model.path={folder} has neither {INDEX_FILE} nor {SINGLE_FILE}; "
                "convert its weights to safetensors first"
            )

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def _open(self, file: str) -> safe_open:
        if file not in self._handles:
            path = self.folder / file
            if not path.is_file():
                raise ValueError(f"{INDEX_FILE} names {path}, which does not exist")
            try:
                self._handles[file] = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}. Fetch it again") from error
        return self._handles[file]

    def read(self, tensor: HfTensor, dim: int, part: slice) -> Tensor:
        """One slice of a tensor along `dim`, on CPU in the file's dtype.

        Raises:
            ValueError: the tensor is missing, cannot be read, or has another shape than the
                configuration says.
        """
        if tensor.name not in self.file_of:
            raise ValueError(
                f"{self.folder} has no tensor {tensor.name!r}, which config.json asks for"
            )
        try:
            stored = self._open(self.file_of[tensor.name]).get_slice(tensor.name)
        except SafetensorError as error:
            raise ValueError(
                f"tensor {tensor.name!r} of {self.folder} cannot be read: {error}"
            ) from error
        shape = tuple(stored.get_shape())
        if shape != tensor.shape:
            raise ValueError(
                f"tensor {tensor.name!r} of {self.folder} has shape {shape}, "
                f"config.json asks for {tensor.shape}"
            )
        return stored[part] if dim == 0 else stored[:, part]


def check_names(names: Iterable[str], family: Family) -> None:
    """Refuse a folder that holds weights which the model would silently leave out.

    Raises:
        ValueError: a tensor that no rule of the family names.
    """
    for name in names:
        spare_head = name == "lm_head.weight" and family.tied
        if name not in family.hf_tensors and not spare_head and not name.endswith(IGNORED_ENDINGS):
            raise ValueError(
                f"tensor {name!r} of the Hugging Face folder belongs to no parameter of the "
                "model that its config.json describes; the model would run without it"
            )


def load_hf_weights(
    chunks: Sequence[GPTModel],
    hf_config: PretrainedConfig,
    folder: Path,
    parallel: ParallelContext,
) -> None:
    """Copy a Hugging Face folder into this rank's parameters, each exactly once.

    Every rank calls it for itself; nothing is communicated. Afterwards each parameter holds its
    shard in its own dtype; padding rows of embedding and head are zero. Reads from the folder
    only the rows and columns that the rank holds.

    Args:
        chunks: this rank's model chunks, unwrapped.
        folder: safetensors, in one file or several with an index.

    Raises:
        ValueError: a parameter or tensor without a counterpart, or a shape that does not fit;
            the message names it.
    """
    family = family_for(hf_config)
    parameters = local_parameters(chunks, family, parallel)
    with HfFolder(folder) as source, torch.no_grad():
        check_names(source.file_of, family)
        for entry, parameter in parameters.items():
            _fill(parameter, entry, family, source, shard_place(entry, parallel))


def _fill(
    parameter: Parameter, entry: Entry, family: Family, source: HfFolder, place: tuple[int, int]
) -> None:
    cut = entry.rule.cut
    shards, index = place
    dim = 0 if cut.dim is None else cut.dim
    padded_size = parameter.shape[0] * shards if cut.padded else None
    if padded_size is not None and padded_size < family.vocab_size:
        raise ValueError(
            f"{entry.hf[0].name}: {family.vocab_size} rows do not fit into the {padded_size} rows "
            f"of the model on {shards} tensor ranks; build it with a padded vocabulary"
        )
    parts = [
        source.read(tensor, dim, shard_bounds(tensor.shape[dim], shards, index, padded_size))
        for tensor in entry.hf
    ]
    local = fuse(parts, blocks(entry.rule, family, shards))
    if cut.padded:
        real_rows = local.shape[0]
        parameter[real_rows:] = 0
        parameter = parameter[:real_rows]  # type: ignore[assignment]
    if local.shape != parameter.shape:
        raise ValueError(
            f"{', '.join(tensor.name for tensor in entry.hf)}: shard {index} of {shards} has "
            f"shape {tuple(local.shape)}, the model's parameter {entry.rule.megatron[0]} (layer "
            f"{entry.layer}) has {tuple(parameter.shape)}"
        )
    parameter.copy_(local)
