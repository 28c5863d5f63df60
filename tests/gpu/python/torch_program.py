"""A small training loop in PyTorch: convolution, linear layers, Adam; every step deterministic. Prints losses as
bits and a checksum of the trained weights. PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes each tensor an allocation."""

import os
import zlib

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
from need_torch import torch

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
torch.manual_seed(7)
device = torch.device("cuda")
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(32 * 16 * 16, 128), torch.nn.ReLU(),
    torch.nn.Linear(128, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = torch.nn.CrossEntropyLoss()
side = torch.cuda.Stream()
for step in range(20):
    images = torch.randn(32 + step % 5, 3, 32, 32).to(device, non_blocking=True)
    labels = torch.randint(0, 10, (images.shape[0],)).to(device)
    optimizer.zero_grad(set_to_none=True)
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    with torch.cuda.stream(side):  # work that nothing orders with the training's
        other = torch.full((1 << 20,), float(step), device=device)
        total = (other * 2).sum()
    side.synchronize()
    print(f"step {step}: loss {loss.item().hex()}, side {total.item()}")
weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
print(f"weights {zlib.crc32(weights):08x}")
