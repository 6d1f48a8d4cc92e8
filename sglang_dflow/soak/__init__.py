"""A seeded workload of everything that requests do to a server, against one live DFLOW server: `sglang-dflow soak`."""
