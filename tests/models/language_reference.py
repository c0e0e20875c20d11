"""Language models of transformers, and a GPT-2 of torch.nn, for
language_pytorch_test.

usage: language_reference.py JOB[,JOB...] FOLDER
  make   writes tiny models as transformers saves them, FOLDER/NAME, and what they
         make of FOLDER/tokens.safetensors: NAME.logits.safetensors
  run    loads each folder FOLDER/NAME.exported and writes NAME.back.safetensors
  dcp    a tiny Llama as torch.distributed.checkpoint saves it from two ranks:
         FOLDER/sharded in safetensors files, FOLDER/pickled in its own format;
         its logits as dcp.logits.safetensors
  train  20 steps from each folder FOLDER/NAME.trained on the batches of
         FOLDER/batches.safetensors: writes NAME.losses.safetensors, with those
         of transformers and, of a gpt, of torch.nn
"""

import math
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

GPT = {
    "n_layer": 2, "n_embd": 20, "n_head": 5, "n_positions": 24, "vocab_size": 51,
    "n_inner": 27, "bos_token_id": None, "eos_token_id": None,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}
LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 37, "vocab_size": 51,
    "max_position_embeddings": 24, "bos_token_id": None, "eos_token_id": None,
}
DEEPSEEK = {
    **LLAMA, "num_key_value_heads": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "moe_intermediate_size": 13,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 9,
    "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 5,
}
MIXTURE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0,
    "beta_slow": 0.5, "original_max_position_embeddings": 6,
}
# Scores of a few units are well below the published caps of 50 and 30.
GEMMA2 = {
    **LLAMA, "head_dim": 10, "pad_token_id": None, "sliding_window": 5,
    "query_pre_attn_scalar": 7, "attn_implementation": "eager",
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    **LLAMA, "num_hidden_layers": 4, "head_dim": 10, "pad_token_id": None,
    "sliding_window": 5, "query_pre_attn_scalar": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                    "sliding_attention"],
}


def larger(model):
    """Weights that make every part of the model matter."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.mul_(10)
            else:
                value.add_(torch.randn_like(value), alpha=0.2)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(std=0.2)
    return model.eval()


def make(folder):
    torch.manual_seed(0)
    models = {
        "gpt": GPT2LMHeadModel(GPT2Config(**GPT)),
        "llama": LlamaForCausalLM(LlamaConfig(**LLAMA)),
        "llama_tied": LlamaForCausalLM(
            LlamaConfig(**LLAMA, tie_word_embeddings=True)
        ),
        "llama_stretched": LlamaForCausalLM(
            LlamaConfig(**LLAMA, rope_parameters=STRETCHED)
        ),
        "llama_bf16": LlamaForCausalLM(LlamaConfig(**LLAMA)),
        "mistral": MistralForCausalLM(
            MistralConfig(**LLAMA, sliding_window=5, head_dim=10)
        ),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=10)),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(**LLAMA, **MIXTURE, num_local_experts=5)
        ),
        "mixtral_window": MixtralForCausalLM(
            MixtralConfig(
                **LLAMA, **MIXTURE, num_local_experts=5, sliding_window=6
            )
        ),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **LLAMA, **MIXTURE, num_experts=5, moe_intermediate_size=13,
                head_dim=10, norm_topk_prob=True,
            )
        ),
        "qwen3_moe_shares": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **LLAMA, **MIXTURE, num_experts=5, moe_intermediate_size=13,
                head_dim=10, norm_topk_prob=False,
            )
        ),
        "deepseek_v3": DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **DEEPSEEK, q_lora_rank=11, n_group=3, topk_group=2,
            )
        ),
        "deepseek_v3_plain": DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1,
                norm_topk_prob=False, routed_scaling_factor=1.0,
            )
        ),
        "gemma": GemmaForCausalLM(
            GemmaConfig(**LLAMA, head_dim=10, pad_token_id=None)
        ),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**GEMMA2)),
        "gemma3": Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3)),
        "gemma3_stretched": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **GEMMA3,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "linear", "factor": 8.0, "rope_theta": 900.0,
                    },
                    "sliding_attention": {
                        "rope_type": "default", "rope_theta": 60.0,
                    },
                },
            )
        ),
        "llama_yarn": LlamaForCausalLM(
            LlamaConfig(**LLAMA, rope_parameters=YARN)
        ),
        "deepseek_v3_yarn": DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **DEEPSEEK, q_lora_rank=11, n_group=3, topk_group=2,
                rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
            )
        ),
    }
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    for name, model in models.items():
        larger(model)
        if name == "llama_bf16":
            model.to(torch.bfloat16)
        # Several files with an index, of all but one.
        size = "10GB" if name == "llama" else "10KB"
        model.save_pretrained(folder / name, max_shard_size=size)
        # Computed in float32, also where the weights were rounded.
        model = load(folder / name, dtype=torch.float32)
        save(model, tokens, folder / f"{name}.logits.safetensors")
    # As the first GPT-2 files were saved: names without the prefix.
    models["gpt"].transformer.save_pretrained(folder / "gpt_base")


def save(model, tokens, path):
    with torch.no_grad():
        save_file({"logits": model(tokens).logits.float()}, path)


def load(path, **options):
    # The other products of experts need rows of a multiple of 16 bytes.
    model, info = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, output_loading_info=True,
        experts_implementation="eager", **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (path, kind, info[kind])
    return model.eval()


def run(folder):
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    for path in sorted(folder.glob("*.exported")):
        model = load(path)
        save(model, tokens, folder / f"{path.stem}.back.safetensors")
        model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False)


def tiny_llama():
    torch.manual_seed(0)
    return larger(LlamaForCausalLM(LlamaConfig(**LLAMA)))


def save_rank(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for i, (name, value) in enumerate(tiny_llama().state_dict().items()):
        state[name] = distribute_tensor(value, mesh, [Shard(i % value.dim())])
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "sharded"), save_distributed=True
    )
    dcp.save(state, storage_writer=writer)
    dcp.save({"model": state}, checkpoint_id=str(folder / "pickled"))
    torch.distributed.destroy_process_group()


def save_dcp(folder):
    model = tiny_llama()
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    save(model, tokens, folder / "dcp.logits.safetensors")
    # Forked (before any backward pass): new interpreters would import everything
    # again.
    torch.multiprocessing.start_processes(
        save_rank, args=(folder,), nprocs=2, start_method="fork"
    )
    model.config.save_pretrained(folder / "sharded")


class Block(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        inner = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(inner)


class Gpt(nn.Module):
    """GPT-2 built from torch.nn."""

    def __init__(self, config):
        super().__init__()
        hidden = config.n_embd
        self.tokens = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.n_positions, hidden)
        inner = config.n_inner or 4 * hidden
        self.blocks = nn.ModuleList(
            Block(hidden, config.n_head, inner) for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T

    def take(self, given):
        names = {
            "tokens.weight": "transformer.wte.weight",
            "positions.weight": "transformer.wpe.weight",
            "norm": "transformer.ln_f",
        }
        parts = {
            "norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn",
            "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
        }
        with torch.no_grad():
            for name, value in self.named_parameters():
                path = name.split(".")
                if path[0] == "blocks":
                    theirs = f"transformer.h.{path[1]}.{parts[path[2]]}"
                    theirs += "." + path[3]
                else:
                    theirs = names.get(name) or f"{names[path[0]]}.{path[1]}"
                source = given[theirs]
                linear = path[0] == "blocks" and source.dim() == 2
                value.copy_(source.T if linear else source)
        return self


def train(folder):
    batches = load_file(folder / "batches.safetensors")["tokens"]
    for path in sorted(folder.glob("*.trained")):
        theirs = load(path)
        models = {"transformers": theirs}
        if path.stem == "gpt":
            models["torch"] = Gpt(theirs.config).take(theirs.state_dict())
        losses = {name: steps(name, m, batches) for name, m in models.items()}
        save_file(losses, folder / f"{path.stem}.losses.safetensors")


def steps(name, model, batches):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    found = []
    for tokens in batches:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        output = model(inputs)
        logits = output if name == "torch" else output.logits
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def main():
    jobs = {"make": make, "run": run, "dcp": save_dcp, "train": train}
    for job in sys.argv[1].split(","):
        jobs[job](pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    main()
