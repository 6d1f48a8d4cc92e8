"""cpu/linear.py and cpu/fused_ops.py against the plain formulas."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from sglang_dflow.cpu.fused_ops import rms_norm_forward, rotary_forward
from sglang_dflow.cpu.linear import PackedHeadMethod, PackedLinearMethod, pack_linears, padded_rows
from sglang_dflow.relay.modulation import RelayModulation

# oneDNN sums in another order than the reference; bf16 additionally rounds the result to 8 bits.
TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.0, "rtol": 2e-2}}


class Layer(torch.nn.Module):
    def __init__(self, method: Any, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(out_features)
        weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = method


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = Layer(UnquantizedEmbeddingMethod(), 96, 32, dtype)
        self.proj = Layer(UnquantizedLinearMethod(), 48, 32, dtype)
        self.norm = torch.nn.LayerNorm(32)

    def load_weights(self, scale: float) -> None:
        self.proj.weight.data.mul_(scale)  # as the host's weight loaders write: past the version counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 8, 33])
def test_packed_layers_compute_the_same(dtype: torch.dtype, rows: int) -> None:
    """Catches transposed or stale packing, at zero rows and at row counts other than the packed one."""
    model = Model(dtype)
    assert pack_linears(model) == 2
    x = torch.randn(rows, 32).to(dtype)
    for layer in (model.embedding, model.proj):
        found = layer.quant_method.apply(layer, x)
        expected = x.float() @ layer.weight.float().T
        torch.testing.assert_close(found.float(), expected, **TOLERANCE[dtype])


def test_padded_rows_are_cut_off_under_leading_dimensions() -> None:
    model = Model(torch.float32)
    pack_linears(model)
    x = torch.randn(3, 11, 32)
    found = model.proj.quant_method.apply(model.proj, x)
    torch.testing.assert_close(found, x @ model.proj.weight.T, **TOLERANCE[torch.float32])


def test_products_are_made_with_few_row_counts() -> None:
    """Catches a server that grows with every new batch size: oneDNN keeps the kernels of each (found by the soak)."""
    sizes = {count: padded_rows(count) for count in range(1, 2049)}
    assert len(set(sizes.values())) < 80
    assert all(count <= size <= 1.125 * count for count, size in sizes.items())
    verify_blocks = range(8, 136, 8)
    assert all(padded_rows(count) == count for count in (*range(1, 17), *verify_blocks))


def test_the_host_still_recognises_the_methods() -> None:
    """DFLASH slices the KV rows out of a fused weight only for an unquantised method; embeddings stay lookups."""
    model = Model(torch.float32)
    pack_linears(model)
    assert isinstance(model.proj.quant_method, PackedLinearMethod | UnquantizedLinearMethod)
    assert isinstance(model.embedding.quant_method, PackedHeadMethod)
    ids = torch.tensor([3, 95])
    assert torch.equal(model.embedding.quant_method.embedding(model.embedding, ids), model.embedding.weight[ids])


def test_loading_weights_drops_the_packed_copies() -> None:
    """Catches a served model that keeps answering with its old weights after an update."""
    model = Model(torch.float32)
    pack_linears(model)
    x = torch.randn(4, 32)
    before = model.proj.quant_method.apply(model.proj, x)
    model.load_weights(3.0)
    torch.testing.assert_close(model.proj.quant_method.apply(model.proj, x), before * 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_packed_relay_computes_the_same_and_follows_its_weights(dtype: torch.dtype) -> None:
    """Catches two slices of one weight that share a copy, and a relay that keeps its old weights after an update."""
    torch.manual_seed(0)
    model: Any = Model(dtype)
    model.relay = RelayModulation(32, 48, stale_token=True).to(dtype)
    torch.nn.init.normal_(model.relay.relay_mlp[2].weight)
    plain = copy.deepcopy(model.relay)
    pack_linears(model)
    inputs = [torch.randn(size).to(dtype) for size in ((2, 7, 32), (2, 32), (2, 32), (2, 7, 32))]
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(
                model.relay(*inputs), plain(*inputs), atol=5e-2 * (dtype != torch.float32) + 1e-4, rtol=2e-2
            )
            for relay in (model.relay, plain):
                relay.relay_mlp[0].weight.mul_(-1.0)
            model.load_weights(1.0)


def test_large_models_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing doubles the weights' memory: past the limit the layers stay as they are."""
    monkeypatch.setattr("sglang_dflow.cpu.linear.MAX_PACKED_BYTES", 16)
    model = Model(torch.float32)
    assert pack_linears(model) == 0
    assert type(model.proj.quant_method) is UnquantizedLinearMethod


def norm(**changes: Any) -> Any:
    """What the forward reads of the host's `RMSNorm`."""
    weight = torch.linspace(0.5, 1.5, 32)
    fields = {
        "variance_size_override": None,
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
        "override_orig_dtype": None,
        "hidden_size": 32,
        "weight": weight,
        "variance_epsilon": 1e-5,
        "forward_native": lambda *args: "native",
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rms_norm(dtype: torch.dtype) -> None:
    """Catches a residual that is normalised, or a sum that is rounded before it is normalised."""
    x, residual = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype)
    total = x.double() + residual.double()
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm().weight.double()
    normed, summed = rms_norm_forward(norm(), x, residual)
    torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5 if dtype.itemsize == 4 else 8e-3)
    assert torch.equal(summed, total.to(dtype))
    alone = rms_norm_forward(norm(), x)
    assert isinstance(alone, torch.Tensor)
    torch.testing.assert_close(alone, F.rms_norm(x.float(), (32,), norm().weight, 1e-5).to(dtype))


def test_unusual_norms_go_to_the_host() -> None:
    assert rms_norm_forward(norm(cast_x_before_out_mul=True), torch.zeros(1, 32)) == "native"
    assert rms_norm_forward(norm(variance_size_override=8), torch.zeros(1, 32)) == "native"


def rotary(**changes: Any) -> Any:
    """What the forward reads of the host's `RotaryEmbedding`: head 8, cache of cos beside sin."""
    angles = torch.arange(50.0).unsqueeze(1) / 10000 ** (torch.arange(4.0) / 4)
    fields = {
        "is_neox_style": True,
        "rotary_dim": 8,
        "head_size": 8,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "forward_native": lambda *args: ("native", "native"),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotary_turns_pairs_by_their_angle(dtype: torch.dtype) -> None:
    """Catches a sign, halves in the wrong order, and q and k mixed up; the reference multiplies complex numbers."""
    positions = torch.tensor([0, 3, 49])
    query, key = torch.randn(3, 4 * 8).to(dtype), torch.randn(3, 2 * 8).to(dtype)
    found = rotary_forward(rotary(), positions, query, key)
    angles = positions.double().unsqueeze(1) / 10000 ** (torch.arange(4.0, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)  # [3, 1, 4]
    for before, after in zip((query, key), found, strict=True):
        first, second = before.double().view(3, -1, 8).chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        expected = torch.cat([turned.real, turned.imag], dim=-1).view(before.shape)
        torch.testing.assert_close(after.double(), expected, atol=1e-5 if dtype.itemsize == 4 else 2e-2, rtol=0)
        assert after.shape == before.shape and after.dtype == dtype


def test_rotary_follows_a_replaced_cache() -> None:
    """The host grows its cache for long contexts by replacing it."""
    module = rotary()
    positions, query, key = torch.tensor([1]), torch.randn(1, 8), torch.randn(1, 8)
    before, _ = rotary_forward(module, positions, query, key)
    module.cos_sin_cache = torch.cat([torch.ones(50, 4), torch.zeros(50, 4)], dim=-1)
    after, _ = rotary_forward(module, positions, query, key)
    assert torch.equal(after, query) and not torch.equal(before, query)


def test_unusual_rotaries_go_to_the_host() -> None:
    args = (torch.tensor([0]), torch.zeros(1, 8), torch.zeros(1, 8))
    assert rotary_forward(rotary(is_neox_style=False), *args) == ("native", "native")
    assert rotary_forward(rotary(rotary_dim=4), *args) == ("native", "native")
