"""DFlow speculative decoding for SGLang. Importing this package imports neither torch nor sglang."""

__version__ = "0.1.0"
