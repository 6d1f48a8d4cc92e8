"""Torch versions of the host's small index kernels over the request-to-token table.

Symbols: `bs` requests, `L` table width (context length). All work is a fixed number of tensor operations.
"""

from __future__ import annotations

import torch


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,  # [bs] int64
    req_to_token: torch.Tensor,  # [pool rows, L] int32
    start_offset: torch.Tensor,  # [bs]
    end_offset: torch.Tensor,  # [bs], start_offset + draft_token_num
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:  # [bs * draft_token_num] int64
    """Return the KV slots of positions `start .. start + draft_token_num - 1` of every request, row-major.

    The host's kernel of the same contract is `assign_extend_cache_locs`; `end_offset` is redundant there too
    whenever the caller extends all requests by the same number of tokens, the only way the DFLASH family calls it.
    Columns past the table's width give slot 0, the padding slot, as the host's fused block kernel does.
    """
    width = req_to_token.shape[1]
    columns = start_offset.to(torch.int64).unsqueeze(1) + torch.arange(draft_token_num, device=device)
    rows = req_pool_indices.to(torch.int64).unsqueeze(1)  # [bs, 1]
    slots = req_to_token[rows, columns.clamp(max=width - 1)]  # [bs, draft_token_num]
    return torch.where(columns < width, slots, 0).to(torch.int64).reshape(-1)


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,  # [bs] int64
    req_to_token: torch.Tensor,  # [pool rows, L] int32, written in place
    start_offset: torch.Tensor,  # [bs]
    end_offset: torch.Tensor,  # [bs]
    out_cache_loc: torch.Tensor,  # [sum(end - start)]
    batch_size: int,
) -> None:
    """Write packed slots into columns `start .. end - 1` of every request's row."""
    lengths = (end_offset - start_offset).to(torch.int64)  # [bs]
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), lengths)  # [sum]
    first = torch.cumsum(lengths, 0) - lengths  # [bs] offset of each request in the packed slots
    shift = torch.repeat_interleave(start_offset.to(torch.int64) - first, lengths)  # [sum]
    columns = torch.arange(rows.numel(), device=rows.device) + shift  # [sum]
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
