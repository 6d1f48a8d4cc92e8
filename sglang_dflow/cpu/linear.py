"""Linear layers through oneDNN with packed weights, the largest cost of a decode step on a CPU.

`F.linear` packs nothing and, in fp32, goes to MKL, whose small-batch kernels are slow on AMD processors. Measured on
2 x EPYC (Zen 4) at SmolLM2's shapes, one thread, both cores busy, all linears of one pass without the head: fp32 8 rows
85 ms against 54 ms packed, bf16 50 against 28; the head with 8 rows 34 against 12 and 11 against 5.5.

oneDNN compiles kernels for every number of rows and keeps them for good, about 0.3 MB for one number and weight shape:
a server's memory grew with every new size of a mixed batch. So rows are padded to eight sizes an octave.

Owns a packed copy of every dense weight, made at its first use and dropped when the model loads new weights. The dense
weight stays: the host slices it (draft KV projection), loads into it and shares it (tied head). Relies on SGLang 0.5.23
calling `quant_method.apply` in every linear layer and, for a method class it does not know, in the logits processor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from sglang_dflow.relay.modulation import RelayModulation

logger = logging.getLogger(__name__)

# Packing doubles the memory of the weights; beyond this size that is more than a development machine should give.
MAX_PACKED_BYTES = 4 << 30
# Row count that oneDNN chooses the packed layout for: a verify block. Other counts are served by the same layout.
PACKED_FOR_ROWS = 8


def padded_rows(count: int) -> int:
    """Return the row count, at least `count`, that the product is made with: all up to 16, then 18, 20, .., 32, 36, ..

    At most an eighth more rows; the blocks of up to 16 requests of a block size of 8 stay as they are. Kernels of 1,000
    batches of 1 to 300 rows take 520 MB without and 172 MB with padding, 144 and 9 of them after the first 200 batches
    (`benchmarks/compiled_kernels.py`).
    """
    step = max(1, (1 << count.bit_length()) // 16)
    return -(-count // step) * step


class PackedWeight:
    """The packed copy of one dense weight `[out, in]`, made on demand."""

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None

    def drop(self) -> None:
        """Forget the copy, because the dense weight has changed."""
        self._packed = None

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:  # [.., in] -> [.., out]
        if x.dtype != weight.dtype or x.numel() == 0:
            return F.linear(x, weight, bias)
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)
        rows = x.reshape(-1, x.shape[-1])
        padding = padded_rows(len(rows)) - len(rows)
        if padding == 0:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        out = torch.ops.mkldnn._linear_pointwise(F.pad(rows, (0, 0, 0, padding)), self._packed, bias, "none", [], "")
        return out[: len(rows)].view(*x.shape[:-1], -1)


class PackedLinearMethod(UnquantizedLinearMethod):
    """The host's unquantised linear method, computed from a packed weight; one instance per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedWeight()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.packed.linear(x, layer.weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The host's unquantised embedding method, whose use as a language-model head is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedWeight()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.packed.linear(x.to(layer.weight.dtype), layer.weight, bias)


class PackedSlices:
    """`F.linear` from packed copies, one for every weight or slice of a weight that it is called with.

    The relay's first linear is used in two slices: at 7 rows of width 1,152 into 384 a packed fp32 slice takes 0.10 ms
    against 0.17 dense (one thread).
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, torch.Size], PackedWeight] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = self._packed.setdefault((weight.data_ptr(), weight.shape), PackedWeight())
        return packed.linear(x, weight, bias)

    def drop(self) -> None:
        """Forget the copies, because the weights have changed."""
        self._packed.clear()


def pack_linears(model: torch.nn.Module) -> int:
    """Give every dense, unquantised layer of the model a packed method; return how many layers got one.

    A relay's linears are packed too, and not counted.
    """
    layers = list(_packable_layers(model))
    size = sum(layer.weight.nbytes for layer, _ in layers)
    if size > MAX_PACKED_BYTES:
        logger.warning(
            "dflow_cpu: weights of %.1f GiB are not packed (limit %.1f GiB): linear layers run unpacked, slower",
            size / 2**30,
            MAX_PACKED_BYTES / 2**30,
        )
        return 0
    for layer, method in layers:
        layer.quant_method = method
    if layers:
        _drop_packed_on_load(model, [*(method.packed for _, method in layers), *_pack_relays(model)])
    return len(layers)


def _pack_relays(model: torch.nn.Module) -> Iterator[PackedSlices]:
    for module in model.modules():
        if isinstance(module, RelayModulation) and _onednn_runs(module.relay_mlp[0].weight.dtype):
            slices = PackedSlices()
            module.linear = slices
            yield slices


def _packable_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[Any, PackedLinearMethod | PackedHeadMethod]]:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not _onednn_runs(weight.dtype):
            continue
        # Exact types: a subclass means that somebody else has given this layer another computation.
        if type(method) is UnquantizedLinearMethod:
            yield layer, PackedLinearMethod()
        elif type(method) is UnquantizedEmbeddingMethod:
            yield layer, PackedHeadMethod()


@functools.cache
def _onednn_runs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _drop_packed_on_load(model: Any, packed: list[PackedWeight | PackedSlices]) -> None:
    """Drop the copies whenever the model loads weights again (weight updates from disk, tensors, a trainer)."""
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_and_drop(*args: Any, **kwargs: Any) -> Any:
        try:
            return load_weights(*args, **kwargs)
        finally:
            for weight in packed:
                weight.drop()

    model.load_weights = load_and_drop
