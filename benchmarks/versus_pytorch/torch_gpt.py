"""A GPT-2 in plain PyTorch, and its cuts: by torch.distributed.tensor.parallel,
and by torch.distributed.fsdp.

Weights are Hugging Face's, under their names. Queries, keys and values of one
head stand together in c_attn, so that ColwiseParallel gives each rank whole
heads of one fused matrix.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int

    def parameters(self):
        block = 12 * self.hidden**2 + 13 * self.hidden
        words = (self.vocabulary + self.positions) * self.hidden
        return self.layers * block + words + 2 * self.hidden


class Attention(nn.Module):
    def __init__(self, shape, ranks):
        super().__init__()
        self.heads = shape.heads // ranks
        self.c_attn = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.c_proj = nn.Linear(shape.hidden, shape.hidden)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.c_attn(x).view(batch, length, self.heads, 3, -1)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
        y = self.attend(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.c_fc = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.c_proj = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape, ranks):
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.hidden)
        self.attn = Attention(shape, ranks)
        self.ln_2 = nn.LayerNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """`ranks`: how many share the heads of each layer."""

    def __init__(self, shape, ranks=1):
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.positions, shape.hidden)
        self.h = nn.ModuleList(Block(shape, ranks) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def first_weights(shape):
    """Under Hugging Face's names, matrices [in, out]."""
    torch.manual_seed(0)

    def normal(*size, deviation=0.02):
        return torch.randn(*size) * deviation

    h = shape.hidden
    small = 0.02 / (2 * shape.layers) ** 0.5
    weights = {
        "transformer.wte.weight": normal(shape.vocabulary, h),
        "transformer.wpe.weight": normal(shape.positions, h),
        "transformer.ln_f.weight": torch.ones(h),
        "transformer.ln_f.bias": torch.zeros(h),
    }
    for i in range(shape.layers):
        layer = {
            "ln_1.weight": torch.ones(h),
            "ln_1.bias": torch.zeros(h),
            "attn.c_attn.weight": normal(h, 3 * h),
            "attn.c_attn.bias": normal(3 * h),
            "attn.c_proj.weight": normal(h, h, deviation=small),
            "attn.c_proj.bias": normal(h),
            "ln_2.weight": torch.ones(h),
            "ln_2.bias": torch.zeros(h),
            "mlp.c_fc.weight": normal(h, 4 * h),
            "mlp.c_fc.bias": normal(4 * h),
            "mlp.c_proj.weight": normal(4 * h, h, deviation=small),
            "mlp.c_proj.bias": normal(h),
        }
        for name, tensor in layer.items():
            weights[f"transformer.h.{i}.{name}"] = tensor
    return weights


def load(model, path, shape):
    """Copies the weights of a file, one tensor after the other."""
    from safetensors import safe_open

    own = dict(model.named_parameters())
    with torch.no_grad(), safe_open(path, "pt") as weights:
        for name in weights.keys():
            tensor = weights.get_tensor(name)
            if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
                tensor = tensor.t()
            if ".c_attn." in name:
                rest = tensor.shape[1:]
                size = shape.hidden // shape.heads
                by_kind = tensor.reshape(3, shape.heads, size, *rest)
                tensor = by_kind.transpose(0, 1).reshape(-1, *rest)
            own.pop(name.removeprefix("transformer.")).copy_(tensor)
    if own:
        raise ValueError(f"{path} has no {', '.join(own)}")


def cut(model, mesh):
    """Cuts the model over the mesh's ranks; its words stay tied."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(
            output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(len(model.h)):
        plan[f"h.{i}.attn.c_attn"] = ColwiseParallel()
        plan[f"h.{i}.attn.c_proj"] = RowwiseParallel()
        plan[f"h.{i}.mlp.c_fc"] = ColwiseParallel()
        plan[f"h.{i}.mlp.c_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = model.wte.weight
    return model


def shard(model, mesh, keep):
    """FSDP2: the words, which the head uses too, each block, and the rest are a
    unit; forward gathers a block ahead of it, as backward does. `keep`: parameters
    stay together from forward to backward."""
    from torch.distributed.fsdp import fully_shard

    settings = {"mesh": mesh, "reshard_after_forward": not keep}
    blocks = list(model.h)
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard([model.wte, model.lm_head], **settings)
    fully_shard(model, **settings)
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    return model


def make_optimizer(model, learning_rate, zero=False):
    """Fused; tensors that are cut and plain ones are groups of their own.
    `zero`: each rank updates some of the parameters (ZeRO, stage 1)."""
    settings = {"lr": learning_rate, "weight_decay": 0.0, "fused": True}
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **settings,
        )
    from torch.distributed.tensor import DTensor

    groups = {True: [], False: []}
    for parameter in model.parameters():
        groups[isinstance(parameter.data, DTensor)].append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values() if group], **settings
    )
