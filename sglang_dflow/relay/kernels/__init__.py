"""The relay on a GPU: three launches a round beyond the host's DFLASH, four where the embedding is not a plain table.

    verification ── relay_store                                  pool rows and boundary of the verified blocks
    draft graph  ── [relay_tokens ── the host's embedding] ── relay_gather ── relay_apply

What exists was looked at first (sglang 0.5.23, flashinfer-python as it pins it); one line per kernel:

- store: eleven torch launches, an `index_copy_` for each tensor; none of the fused norms returns the mean and the
  variance that `relay_apply` needs (`flashinfer.norm.layernorm` writes the normalised row instead).
- gather: neither cuBLAS nor the host's GEMMs take rows by index, so the states and embeddings would be copied
  together first; with the next kernel's part that is 42 torch launches.
- apply: the host's fused LayerNorm-and-modulate ops take one scale row per batch and write a new tensor; here scale and
  shift are the product itself, per row, and rows without relay must keep their bits.

The torch path (`RelayPool.store`, `RelayPool.read`, `RelayModulation`) is the reference of all four. Triton is imported
by these modules only, and these modules only where a pool asks for kernels.
"""
