"""PyTorch's side of a step: run by torchrun, rank 0 writes JSON to --out."""
import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from works import WORKS, make_model, make_optimizer


def run_steps(model, optimizer, batches, count, losses=None):
    for step in range(count):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if losses is not None:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())


def timed(model, optimizer, batches, count):
    dist.barrier()
    start = time.perf_counter()
    run_steps(model, optimizer, batches, count)
    return (time.perf_counter() - start) / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--first-step", action="store_true")
    parser.add_argument("--check-steps", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    work = WORKS[options.work]

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    def build():
        model = make_model(work)
        model.load_state_dict(load_file(options.weights))
        if options.compile:
            model.compile()  # in place, its parameters stay
        return model, make_optimizer(work, model.parameters(), options.best)

    data = load_file(options.data)
    share = work.batch // size
    batches = []
    for begin in range(0, len(data["inputs"]), work.batch):
        mine = slice(begin + rank * share, begin + (rank + 1) * share)
        batches.append((data["inputs"][mine], data["targets"][mine]))

    model, optimizer = build()
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=options.best
    )
    if options.first_step:
        run_steps(ddp, optimizer, batches, 1)
        Path(f"{options.out}.{rank}").write_text(repr(time.time()))
        dist.destroy_process_group()
        return

    losses = []
    run_steps(ddp, optimizer, batches, options.check_steps, losses)
    alone, alone_optimizer = build()
    result = {"losses": losses, "step_seconds": [], "alone_seconds": []}
    for block in range(options.blocks + 1):
        step = timed(ddp, optimizer, batches, work.block_steps)
        without = timed(alone, alone_optimizer, batches, work.block_steps)
        if block > 0:  # the first one warms up
            result["step_seconds"].append(step)
            result["alone_seconds"].append(without)
    if rank == 0:
        Path(options.out).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
