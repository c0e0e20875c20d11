"""PyTorch's side of a pipeline: run by torchrun, rank 0 writes JSON to --out."""
import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed import pipelining

from torch_ranks import finish, memory_of

KINDS = {
    "gpipe": (pipelining.ScheduleGPipe, "straight"),
    "1f1b": (pipelining.Schedule1F1B, "straight"),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "loop"),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, "loop"),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, "v"),
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, names, width):
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, Block(width))

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x


def write_start(folder, blocks, width, samples):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Blocks([f"block{i}" for i in range(blocks)], width)
    weights = folder / "pipeline.weights.safetensors"
    save_file(model.state_dict(), weights)
    data = folder / "pipeline.data.safetensors"
    save_file(
        {
            "inputs": torch.randn(samples, width),
            "targets": torch.randn(samples, width),
        },
        data,
    )
    return weights, data


def stages_of(style, rank, ranks):
    if style == "straight":
        return [rank]
    second = rank + ranks if style == "loop" else 2 * ranks - 1 - rank
    return [rank, second]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    for name in ("microbatches", "blocks", "width", "rows", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    warm = torch.randn(64, 64).requires_grad_()
    nn.functional.gelu(warm.mm(warm)).sum().backward()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    base_bytes = memory_of("VmRSS")

    make, style = KINDS[options.kind]
    indices = stages_of(style, rank, size)
    num_stages = size * len(indices)
    weights = load_file(options.weights)
    modules, stages = [], []
    for index in indices:
        begin = options.blocks * index // num_stages
        end = options.blocks * (index + 1) // num_stages
        names = [f"block{i}" for i in range(begin, end)]
        module = Blocks(names, options.width)
        module.load_state_dict(
            {k: v for k, v in weights.items() if k.split(".")[0] in names}
        )
        modules.append(module)
        stages.append(
            pipelining.PipelineStage(
                module, index, num_stages, torch.device("cpu")
            )
        )
    del weights
    if style == "v":
        # Its first step sends to every neighbour, itself too, which Gloo
        # refuses; Gloo needs no such start.
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = lambda: []
    schedule = make(
        stages[0] if style == "straight" else stages,
        options.microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, fused=True)
    data = load_file(options.data)
    last = num_stages - 1 in indices

    result = {"losses": [], "step_seconds": []}
    for step in range(options.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        losses = []
        arguments = (data["inputs"],) if rank == 0 else ()
        given = {"target": data["targets"], "losses": losses} if last else {}
        schedule.step(*arguments, **given, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if step > 0:  # the first one warms up
            result["step_seconds"].append(time.perf_counter() - start)
        total = torch.tensor(
            [sum(loss.item() for loss in losses) / options.microbatches]
        )
        dist.all_reduce(total)
        result["losses"].append(total.item())

    finish(result, base_bytes, options.out)


if __name__ == "__main__":
    main()
