"""PyTorch's side of experts.py: a mixture of experts whose ranks share out the
experts, in the way of torchtitan. Tokens are sorted by expert, sent by
all_to_all_single with the counts that the host has read, put in order again for
the experts, computed one expert after the other, and sent back.

--alone trains all experts on each rank by itself.
"""
import argparse
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd as exchange,
)
from torch.nn import functional as F

from torch_ranks import finish, memory_of


class Mixture(nn.Module):
    def __init__(self, weights, experts, chosen, group):
        super().__init__()
        size = dist.get_world_size(group) if group else 1
        rank = dist.get_rank(group) if group else 0
        self.experts, self.chosen = experts, chosen
        self.group, self.size = group, size
        own = range(experts * rank // size, experts * (rank + 1) // size)

        def stacked(name):
            return nn.Parameter(torch.stack(
                [weights[f"experts.{e}.{name}.weight"] for e in own]
            ))

        self.gate = nn.Parameter(weights["gate.weight"].clone())
        self.w1 = stacked("gate_proj")
        self.w3 = stacked("up_proj")
        self.w2 = stacked("down_proj")

    def compute(self, rows, counts):
        parts = []
        for e, x in enumerate(rows.split(counts)):
            h = F.silu(x @ self.w1[e].t()) * (x @ self.w3[e].t())
            parts.append(h @ self.w2[e].t())
        return torch.cat(parts)

    def route(self, x):
        shares = F.softmax(x @ self.gate.t(), dim=-1)
        weights, experts = shares.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts

    def forward(self, x):
        weights, experts = self.route(x)
        flat = experts.flatten()
        counts = torch.bincount(flat, minlength=self.experts)
        order = flat.argsort(stable=True)
        rows = x[order // self.chosen]
        if self.group:
            rows = self.spread(rows, counts)
        else:
            rows = self.compute(rows, counts.tolist())
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.chosen, rows)

    def spread(self, rows, counts):
        here = torch.empty_like(counts)
        dist.all_to_all_single(here, counts, group=self.group)
        sent = counts.view(self.size, -1).sum(1).tolist()
        received = here.view(self.size, -1).sum(1).tolist()
        rows = exchange(rows, received, sent, self.group)
        # By rank and expert -> by expert and rank.
        table = here.view(self.size, -1)
        begins = (here.cumsum(0) - here).view(self.size, -1)
        order = torch.cat([
            torch.arange(begin, begin + count)
            for begin, count in zip(
                begins.t().flatten().tolist(), table.t().flatten().tolist()
            )
        ])
        done = self.compute(rows[order], table.sum(0).tolist())
        back = torch.empty_like(done).index_copy(0, order, done)
        return exchange(back, sent, received, self.group)


def main():
    parser = argparse.ArgumentParser()
    for name in ("hidden", "inner", "experts", "chosen", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    for name in ("weights", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    base_bytes = memory_of("VmRSS")
    model = Mixture(
        load_file(options.weights), options.experts, options.chosen,
        None if options.alone else dist.group.WORLD,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=0,
        fused=True,
    )
    data = load_file(options.data)
    x, y = (data[name].chunk(size, 1)[rank].contiguous() for name in "xy")
    del data

    def step(i):
        optimizer.zero_grad()
        loss = (model(x[i]) - y[i]).square().mean()
        loss.backward()
        if not options.alone:
            # Those of experts are sums over the ranks; others are averaged.
            for weight in (model.w1, model.w2, model.w3):
                weight.grad /= size
            dist.all_reduce(model.gate.grad)
            model.gate.grad /= size
        optimizer.step()
        return loss.detach()

    result = {"losses": [], "step_seconds": []}
    for index in range(options.steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        loss = step(index % len(x))
        dist.barrier()
        if index > 0:  # the first one warms up
            result["step_seconds"].append(time.perf_counter() - begin)
        dist.all_reduce(loss)
        result["losses"].append(loss.item() / size)

    finish(result, base_bytes, options.out)


if __name__ == "__main__":
    main()
