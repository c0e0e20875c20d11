"""PyTorch's side of gpt.py: run by torchrun, rank 0 writes JSON to --out.

--mode tp      tensor parallel: ColwiseParallel, RowwiseParallel, loss_parallel
--mode dp      DistributedDataParallel, gradient_as_bucket_view
--mode zero    the same with ZeroRedundancyOptimizer
--mode fsdp    FSDP2: fully_shard of words, each block and the rest;
               reshard_after_forward unless --keep
--mode cp      the ring of context_parallel, and DistributedDataParallel
--alone        the same on each rank, with the collectives left out: the process
               group is PyTorch's fake one (tp), or the model is not wrapped
--compile      dp: by torch.compile, around DistributedDataParallel
"""
import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn import functional as F

import torch_ring
from torch_gpt import Gpt, Shape, cut, load, make_optimizer, shard
from torch_ranks import finish, memory_of


def start(options):
    """Rank and size; without communication no process group is needed, but
    that of the cut tensors."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.alone and options.mode == "tp":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=size
        )
    else:
        dist.init_process_group("gloo")
    return rank, size


def build(options, shape, size):
    model = Gpt(shape, ranks=size if options.mode == "tp" else 1)
    load(model, options.weights, shape)
    if options.mode == "tp" or (options.mode == "fsdp" and not options.alone):
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        if options.mode == "tp":
            return cut(model, mesh)
        return shard(model, mesh, options.keep)
    if options.mode == "cp":
        rank = int(os.environ["RANK"])
        for block in model.h:
            block.attn.attend = (
                torch_ring.alone(rank, size)
                if options.alone
                else torch_ring.attention(dist.group.WORLD)
            )
    if options.alone:
        return torch.compile(model) if options.compile else model
    if options.compile:  # which asks for a graph that may change
        return torch.compile(
            torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True
            )
        )
    return torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("tp", "dp", "zero", "fsdp", "cp"),
                        required=True)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--compile", action="store_true")
    for name in ("layers", "hidden", "heads", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    shape = Shape(
        options.layers, options.hidden, options.heads, options.vocabulary,
        options.positions,
    )

    torch.set_num_threads(1)
    rank, size = start(options)
    base_bytes = memory_of("VmRSS")
    model = build(options, shape, size)
    optimizer = make_optimizer(
        model,
        options.learning_rate,
        zero=options.mode == "zero" and not options.alone,
    )
    tokens = load_file(options.data)["tokens"]  # [steps, batch, length + 1]
    here = slice(None)  # of the positions
    if options.mode == "cp":
        here = torch_ring.positions_of(tokens.shape[2] - 1, rank, size)
    elif options.mode != "tp":
        tokens = tokens.chunk(size, dim=1)[rank]
    positions = here if options.mode == "cp" else None
    context = contextlib.nullcontext
    if options.mode == "tp":
        from torch.distributed.tensor.parallel import loss_parallel as context

    def step(batch):
        optimizer.zero_grad()
        with context():
            logits = model(batch[:, :-1][:, here], positions)
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:][:, here].flatten()
            )
            loss.backward()
        optimizer.step()
        loss = loss.detach()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    result = {"losses": [], "step_seconds": []}
    for index in range(options.steps + 1):
        batch = tokens[index % len(tokens)].contiguous()
        dist.barrier()
        begin = time.perf_counter()
        loss = step(batch)
        dist.barrier()
        if index > 0:  # the first one warms up
            result["step_seconds"].append(time.perf_counter() - begin)
        if options.mode != "tp" and (options.compile or not options.alone):
            dist.all_reduce(loss)
            loss /= size
        result["losses"].append(loss.item())

    finish(result, base_bytes, options.out, not options.alone)


if __name__ == "__main__":
    main()
