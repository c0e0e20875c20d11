#!/usr/bin/env python3
"""Kernels that a transformer block launches for a microbatch, forward and backward.

  launches.py [--build FOLDER]

PyTorch's are those of eager modules in bf16: plain ones with fused functions
(torch_gpt.py), and Hugging Face's. Operators are seen below autograd, views are left
out, and an operator counts for as many kernels as it has on a GPU (KERNELS). Echelon's
are what `echelon simulate --count` says, by the same rules, of one of its blocks."""
import argparse
import collections
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gpt

VIEWS = set("""view _unsafe_view transpose t permute split split_with_sizes unsqueeze squeeze slice
expand detach alias select as_strided reshape _reshape_alias chunk unbind empty empty_like narrow
lift_fresh""".split())
KERNELS = {"_scaled_dot_product_flash_attention_for_cpu_backward": 3,
           "native_layer_norm_backward": 2, "_fused_rms_norm_backward": 2}


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.count[name] += KERNELS.get(name, 1)
        return function(*args, **(kwargs or {}))


def counted(call):
    with Kernels() as forward:
        y = call()
    y = y[0] if isinstance(y, tuple) else y
    gradient = torch.ones_like(y)
    with Kernels() as backward:
        y.backward(gradient)
    return sum(forward.count.values()), sum(backward.count.values())


def pytorch():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = torch_gpt.Block(torch_gpt.Shape(1, 64, 4, 64, 16), 1).to(torch.bfloat16)
    yield "gpt", "PyTorch, plain modules", *counted(lambda: plain(x))
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
    config = GPT2Config(n_embd=64, n_head=4, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, attn_implementation="sdpa")
    block = GPT2Block(config, layer_idx=0).to(torch.bfloat16)
    yield "gpt", "PyTorch, Hugging Face", *counted(lambda: block(x))
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
                         attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    places = torch.arange(16)[None]
    turns = LlamaRotaryEmbedding(config)(x, places)
    yield "llama", "PyTorch, Hugging Face", *counted(
        lambda: layer(x, position_ids=places, position_embeddings=turns))


def echelon(build, model, tp):
    """The difference of two depths is one block."""
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(" ".join(map(str, range(20_000))))
        for layers in (2, 3):
            config = Path(folder) / "job.toml"
            config.write_text(
                f'[model]\nname = "{model}"\nlayers = {layers}\nhidden_size = 256\nheads = 4\n'
                + ("kv_heads = 2\nintermediate_size = 512\n" if model == "llama" else "")
                + f'max_positions = 64\n[data]\nname = "text"\ntokenizer = "bytes"\nsequence = 64\n'
                f'sources = ["{text}"]\n[train]\nsteps = 1\nbatch = 8\n[precision]\ncompute = "bf16"\n'
                f'[layout]\ntp = {tp}\n')
            told = json.loads(subprocess.run(
                [f"{build}/bin/echelon", "train", config, "--dry-run", "--on", "h100-sxm:8", "--json"],
                check=True, capture_output=True, text=True).stdout)
            found = told["step"]["counted"]
            kernels.append([sum(one["calls"] * KERNELS.get(one["name"], 1) for one in found["operators"]
                                if one["backward"] == backward) for backward in (False, True)])
    return tuple(round(deep - flat) for flat, deep in zip(*kernels))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=Path(__file__).parents[2] / "build", help="the folder of bin/echelon")
    build = parser.parse_args().build
    rows = list(pytorch())
    for model in ("gpt", "llama"):
        for tp in (1, 2):
            name = "Echelon" if tp == 1 else "Echelon, tp = 2, with its all-reduces"
            rows.append((model, name, *echelon(build, model, tp)))
    print("| block | program | forward | backward |\n| --- | --- | ---: | ---: |")
    for model, program, forward, backward in sorted(rows, key=lambda row: row[0]):
        print(f"| {model} | {program} | {forward} | {backward} |")


if __name__ == "__main__":
    main()
