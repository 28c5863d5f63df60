"""A training loop in PyTorch that leaks a tensor at each step, as a C extension does that forgets a reference. Each
tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1)."""

import ctypes
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
from need_torch import torch


class Statistics:
    def remember(self, loss):
        kept = torch.empty(3_000_001, dtype=torch.uint8, device=loss.device)  # LEAK Statistics.remember
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def train(model, statistics):
    for _ in range(4):
        loss = model(torch.ones(64, 256, device="cuda")).square().mean()
        loss.backward()
        statistics.remember(loss)  # LEAK train


train(torch.nn.Linear(256, 256).to("cuda"), Statistics())  # LEAK <module>
print("trained")
