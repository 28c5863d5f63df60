"""Tensors that another process opens (torch.multiprocessing, by CUDA IPC): what it reads, and what it writes is seen
here. Each tensor lies between others of the same size. (Natively PyTorch shares none without its caching allocator.)"""

from need_torch import torch
import torch.multiprocessing as multiprocessing


def other(tensors, sums):
    for tensor in iter(tensors.get, None):
        sums.put(int(tensor.sum().item()))
        tensor.add_(1)
        torch.cuda.synchronize()
        del tensor
        sums.put("written")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    process = context.Process(target=other, args=(tensors, sums))
    process.start()
    kept = [torch.full((1_000_003,), i, dtype=torch.int64, device="cuda") for i in range(9)]
    torch.cuda.synchronize()
    for i in (1, 4, 7, 4):
        tensors.put(kept[i])
        print(i, sums.get(timeout=50), sums.get(timeout=50))
    tensors.put(None)
    process.join(20)
    torch.cuda.synchronize()
    print([sorted(set(tensor.tolist())) for tensor in kept], process.exitcode)
