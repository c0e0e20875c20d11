"""Forward and backward passes of Python's models, for models_pytorch_test.

usage: reference.py JOB FOLDER
  run    MODEL.safetensors holds a state dict, input.safetensors an `input` and
         the `targets`: writes MODEL.out.safetensors with the logits in eval
         mode, the logits and loss in train mode, every gradient, and the
         buffers after it. For each model and dtype that is there.
  make   writes fresh.MODEL.safetensors, a state dict as Python initialises it.
"""

import pathlib
import sys

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn


class SimpleCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 9 * 8, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc(x.flatten(1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3 * 37 * 34, 20)
        self.fc2 = nn.Linear(20, 15)
        self.fc3 = nn.Linear(15, 10)

    def forward(self, x):
        x = self.fc2(self.fc1(x.flatten(1)).relu()).relu()
        return self.fc3(x)


def build(name):
    if name == "simple_cnn":
        return SimpleCnn()
    if name == "mlp":
        return Mlp()
    return getattr(torchvision.models, name)(num_classes=10)


def run(path):
    name, dtype = path.name.split(".")[:2]
    model = build(name).to(getattr(torch, dtype))
    model.load_state_dict(load_file(path), strict=True)
    given = load_file(path.parent / "input.safetensors")
    x, targets = given["input"].to(getattr(torch, dtype)), given["targets"]
    out = {"eval": model.eval()(x).detach()}
    logits = model.train()(x)
    loss = nn.functional.cross_entropy(logits, targets)
    loss.backward()
    out |= {"train": logits.detach(), "loss": loss.detach()}
    out |= {f"gradient.{n}": p.grad for n, p in model.named_parameters()}
    out |= {f"buffer.{n}": b for n, b in model.named_buffers()}
    save_file(out, path.parent / f"{name}.{dtype}.out.safetensors")


def main():
    job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if job == "run":
        torch.set_num_threads(1)  # sums in one order
        for path in sorted(folder.glob("*.weights.safetensors")):
            run(path)
    else:
        torch.manual_seed(0)
        for name in sys.argv[3:]:
            model = build(name)
            save_file(model.state_dict(), folder / f"fresh.{name}.safetensors")


main()
