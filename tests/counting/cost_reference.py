"""What PyTorch's own counters say of a forward and a backward pass, for
layer_cost_pytorch_test. Prints a line per model: name, FLOPs forwards, FLOPs
backwards, bytes of storages saved for backward, bytes of parameters.
"""

import torch
import torchvision
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

WIDTH, HEADS, WORDS = 64, 4, 1000


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.fused = fused

    def attend(self, q, k, v):
        if self.fused:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
        scores = q.matmul(k.transpose(2, 3)) * 0.25
        return scores.softmax(-1).matmul(v)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(
            batch, length, 3, HEADS, WIDTH // HEADS
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attend(q, k, v).transpose(1, 2)
        x = x + self.out(y.reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer(fused):
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        Block(fused),
        Block(fused),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS),
    )


def count(name, model, x):
    state = [*model.parameters(), *model.buffers()]
    kept_anyway = {tensor.untyped_storage()._cdata for tensor in state}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in kept_anyway:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as forward:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.backward(torch.empty_like(y))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        name,
        forward.get_total_flops(),
        backward.get_total_flops(),
        sum(saved.values()),
        weights,
    )


def main():
    torch.set_default_device("meta")
    for name in ("resnet18", "resnet50"):
        model = getattr(torchvision.models, name)(num_classes=10)
        count(name, model, torch.empty(8, 3, 224, 224))
    tokens = torch.empty(4, 128, dtype=torch.int64)
    count("plain", transformer(fused=False), tokens)
    count("fused", transformer(fused=True), tokens)


main()
