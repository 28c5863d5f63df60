"""PyTorch, for the programs here: they end as skipped where there is none, or no GPU for it."""

import sys

try:
    import torch
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)
if not torch.cuda.is_available():
    print("SKIP: this PyTorch sees no GPU")
    sys.exit(77)
