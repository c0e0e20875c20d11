"""A tiny DistributedDataParallel job that goes on from its last checkpoint: run by
torchrun. Rank 0 saves each step into FOLDER, then adds a line to its metrics.jsonl."""
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main():
    folder = Path(sys.argv[1])
    saved = folder / "saved.pt"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    step = 0
    optimizer = torch.optim.AdamW(model.parameters())
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    while True:
        step += 1
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        loss = cross_entropy(ddp(torch.randn(16, 64)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
            with open(folder / "metrics.jsonl", "a") as metrics:
                line = {"step": step, "loss": loss.item()}
                print(json.dumps(line, separators=(",", ":")), file=metrics)


if __name__ == "__main__":
    main()
