"""Measurements that run from a checkout: the laboratory and the kernels. Served speculation: `sglang-dflow bench`."""
