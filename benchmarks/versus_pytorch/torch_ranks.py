"""What the ranks of PyTorch's side share: how much memory they have, and how they
write what they measured and end."""
import json
import os
from pathlib import Path

import torch.distributed as dist


def memory_of(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    return 0


def finish(result, base_bytes, out, communicates=True):
    """Rank 0 writes `result` with the memory of every rank; base_bytes is what
    this one had before its model was built. Ranks that do not communicate are
    taken to have the same. Does not return."""
    size = dist.get_world_size()
    own = {"peak_bytes": memory_of("VmHWM"), "base_bytes": base_bytes}
    for key, value in own.items():
        every = [value] * size
        if communicates:
            dist.all_gather_object(every, value)
        result[key] = every
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads now and then abort the interpreter's own end.
    os._exit(0)
