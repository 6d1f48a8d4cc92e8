"""Checks and timings of the relay's GPU kernels. Imports torch, triton and sglang_dflow.relay; never sglang."""
