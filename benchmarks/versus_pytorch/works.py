"""The work that both sides do: models, data shapes, batches, optimizers."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Work:
    name: str
    shape: tuple  # of one sample: channels, height, width
    classes: int
    batch: int  # of all ranks together
    optimizer: str  # sgd | adamw, without weight decay
    learning_rate: float
    block_steps: int  # timed together
    hidden: tuple = ()  # mlp


WORKS = {
    "simple_cnn": Work("simple_cnn", (3, 64, 64), 10, 64, "adamw", 1e-3, 30),
    "resnet18": Work("resnet18", (3, 64, 64), 10, 16, "sgd", 1e-2, 4),
    # 8 linear layers, 40.3 million parameters.
    "mlp": Work("mlp", (3, 20, 40), 10, 16, "sgd", 1e-2, 4, (2400,) * 7),
}


class SimpleCnn(nn.Module):
    def __init__(self, work):
        super().__init__()
        channels, height, width = work.shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * (height // 4) * (width // 4), work.classes)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class Mlp(nn.Module):
    def __init__(self, work):
        super().__init__()
        widths = [work.shape[0] * work.shape[1] * work.shape[2]]
        widths += [*work.hidden, work.classes]
        self.depth = len(widths) - 1
        for i in range(self.depth):
            setattr(self, f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, x):
        x = x.flatten(1)
        for i in range(self.depth):
            x = getattr(self, f"fc{i + 1}")(x)
            if i + 1 < self.depth:
                x = nn.functional.relu(x)
        return x


def make_model(work):
    """Parameters have the names that Echelon's models have."""
    if work.name == "simple_cnn":
        return SimpleCnn(work)
    if work.name == "mlp":
        return Mlp(work)
    import torchvision

    return getattr(torchvision.models, work.name)(num_classes=work.classes)


def make_optimizer(work, parameters, fused):
    options = {"lr": work.learning_rate, "weight_decay": 0.0}
    if fused:
        options["fused"] = True
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    return kinds[work.optimizer](parameters, **options)


def write_start(work, folder, num_batches=4):
    """First weights and a few global batches, for both sides to read."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = folder / f"{work.name}.weights.safetensors"
    save_file(make_model(work).state_dict(), weights)
    samples = num_batches * work.batch
    data = folder / f"{work.name}.data.safetensors"
    save_file(
        {
            "inputs": torch.randn(samples, *work.shape),
            "targets": torch.randint(work.classes, (samples,)),
        },
        data,
    )
    return weights, data
