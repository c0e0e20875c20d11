"""PyTorch's side of gpu_models.py: a model of the package transformers in
bfloat16 on one GPU, eager or compiled. Writes JSON to --out."""
import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


def matrix_rate():
    """Floating-point operations per second of a large bfloat16 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        options.weights, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).cuda()
    model.config.use_cache = False
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.0, fused=True
    )
    tokens = load_file(options.data)["tokens"].cuda()

    def loss_of(inputs, targets):
        logits = model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if options.compile:
        loss_of = torch.compile(loss_of)

    losses, seconds = [], []
    for step in range(-3, options.steps):  # the first ones warm up
        both = tokens[(step + 3) % len(tokens)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = loss_of(both[:, :-1].contiguous(), both[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        losses.append(loss.detach())
        if step >= 0:
            seconds.append(time.perf_counter() - begin)
    result = {
        "losses": [loss.item() for loss in losses],
        "step_seconds": seconds,
        "matrix_rate": matrix_rate(),
        "device": torch.cuda.get_device_name(),
    }
    Path(options.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
