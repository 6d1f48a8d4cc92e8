"""The files of a checkpoint: where they are, its config.json, its safetensors, their headers.

Owns nothing but reading: a directory or a hub id in, paths and shapes out, of one file or of all shards. Only
`read_tensors` reads weights; the others keep to the headers of the safetensors.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md"]
"""Files of a hub repository that are downloaded: what loading a model and its tokenizer needs."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ITEM_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "F4": 4, "F16": 16, "BF16": 16, "I16": 16,
              "U16": 16, "F32": 32, "I32": 32, "U32": 32, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip
"""Bits of an element by safetensors' name of the type."""


class TensorHeader(NamedTuple):
    """One tensor as the header of its file tells it."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"
    file: Path

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * _ITEM_BITS[self.dtype] // 8


def locate(source: str | Path) -> Path:
    """Return the directory of a checkpoint: ``source`` itself, or the local snapshot of a hub id (``owner/name``).

    Raises:
        ValueError: neither a directory nor a hub id, or the hub did not give it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{source} is not a directory; expected a checkpoint directory or a hub id (owner/name).")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=PATTERNS))
    except OSError as error:  # no network, no such repository, no access: all are OSErrors of the hub's client
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{source} is not a directory here, and the hub did not give a checkpoint of that name ({reason}). Check "
            "the name and the network, or download the checkpoint elsewhere and name its directory."
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return the checkpoint's ``config.json``.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json; expected a drafter checkpoint directory.")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error.msg}, line {error.lineno}); expected a model's config."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; expected a JSON object with the model's fields.")
    return config


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold the weights, sorted: the index's shards, or the single file.

    Raises:
        ValueError: there are none, or a shard that the index names is missing.
    """
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        files = sorted({directory / name for name in index["weight_map"].values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{directory} lacks {missing}, which its {INDEX} names. Download the checkpoint again.")
        return files
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    raise ValueError(
        f"{directory} holds neither {WEIGHTS} nor {INDEX}; expected the drafter's weights as safetensors. "
        "Remedy: save the drafter with `save_pretrained(.., safe_serialization=True)`."
    )


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint by name, from one file or from all shards."""
    from safetensors.torch import load_file

    return {name: tensor for file in weight_files(directory) for name, tensor in load_file(file).items()}


def tensor_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return name -> header of every tensor of the checkpoint. Reads no weights."""
    from safetensors import safe_open

    headers: dict[str, TensorHeader] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                view = handle.get_slice(name)
                headers[name] = TensorHeader(tuple(view.get_shape()), view.get_dtype(), file)
    return headers
