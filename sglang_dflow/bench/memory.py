"""Peak memory of a running server: a thread that looks twice a second."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil
import torch

from sglang_dflow.server import has_cuda

_SECONDS = 0.5


class PeakMemory:
    """Largest resident memory of a process tree (pages that its processes share count once each), and of all GPUs.

    GPU memory is that of the visible devices as a whole, whoever uses it: measure on devices of your own. A context
    manager; read `ram_mb` and `gpu_mb` (None without CUDA) after it.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._gpus = torch.cuda.device_count() if has_cuda() else 0
        self.ram_mb = 0.0
        self.gpu_mb: float | None = None

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            self._look()

    def _look(self) -> None:
        resident = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                resident += process.memory_info().rss
            except psutil.NoSuchProcess:  # ended since it was listed
                continue
        self.ram_mb = max(self.ram_mb, resident / 1e6)
        if self._gpus:
            used = sum(torch.cuda.device_memory_used(gpu) for gpu in range(self._gpus))  # as nvidia-smi tells
            self.gpu_mb = max(self.gpu_mb or 0.0, used / 1e6)
