"""PyTorch's all_reduce on Gloo: run by torchrun, rank 0 writes JSON to --out."""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for size in options.bytes:
        tensor = torch.ones(size // 4)
        times = []
        warm_up = 5
        repeats = warm_up + 5
        while len(times) < repeats:
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
            tensor.fill_(1)
            if len(times) == warm_up:
                # Every rank repeats as often as rank 0 says.
                count = int(options.seconds / statistics.median(times))
                repeats = torch.tensor([warm_up + min(max(count, 5), 2000)])
                dist.broadcast(repeats, 0)
                repeats = repeats.item()
        rows.append(
            {
                "backend": "torch gloo",
                "operation": "all_reduce",
                "bytes": size,
                "microseconds": 1e6 * statistics.median(times[warm_up:]),
            }
        )
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
