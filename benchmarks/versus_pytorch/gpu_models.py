#!/usr/bin/env python3
"""gpt2 and llama-1b in bfloat16 on one GPU: Echelon, PyTorch eager, compiled.

PyTorch runs the models of the package transformers, from the same weights and
tokens; the first losses must agree as far as bfloat16 goes, and how far apart
the later ones are is printed. A ratio is PyTorch's time of a step over Echelon's
of the same round. Model FLOPs utilisation is the model's floating-point
operations (no recompute) over what the device's matrix units can do; of a device
that is not in the table, over a large bfloat16 product that is timed in the same
run. Without a GPU it says so and ends with 77.
"""
import sys
from pathlib import Path

from harness import enter_environment, spread
from language_works import (
    compare_losses, parser_of, ratios, run, text_of, timings,
)

SIDES = ("eager", "compiled", "echelon")
# model, samples of a batch, tokens of a sample
WORKS = {"gpt2": (16, 1024), "llama-1b": (4, 2048)}
# Parameters that are bfloat16 lose most of a small update to rounding, so later
# losses differ from one order of sums to another.
SAME_STEPS = 8
# bfloat16 without sparsity, from the makers' data sheets
PEAK_FLOPS = {
    "A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12,
    "L40S": 362e12, "B200": 2250e12,
}


def write_start(name, folder, batch, length, batches=4):
    """The model's first weights, as Hugging Face keeps them, and tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import (
        GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
    )

    torch.manual_seed(0)
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config())
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256, hidden_size=2048, intermediate_size=8192,
                num_hidden_layers=16, num_attention_heads=32,
                num_key_value_heads=8, max_position_embeddings=8192,
                rope_theta=500000.0, tie_word_embeddings=True,
            )
        )
    weights = folder / name
    model.to(torch.bfloat16).save_pretrained(weights)
    words = model.config.vocab_size
    data = folder / f"{name}.data.safetensors"
    tokens = torch.randint(words, (batches, batch, length + 1))
    save_file({"tokens": tokens}, data)
    return weights, data


def peak_flops(result):
    for name, flops in PEAK_FLOPS.items():
        if name in result["device"]:
            return flops, f"peak of the {name}"
    return result["matrix_rate"], "a timed product of matrices"


def measure(sides, name, options):
    batch, length = WORKS[name]
    weights, data = write_start(name, sides.folder, batch, length)
    out = sides.folder / "out.json"
    common = ["--steps", options.steps, "--weights", weights]
    common += ["--data", data, "--out", out]
    torch = sides.python("torch_gpu_model.py", *common)
    echelon = [sides.program("benchmarks/gpu_model_step"), "--model", name]
    echelon += ["--batch", batch, "--length", length, *common]
    if options.profile:
        options.profile.mkdir(exist_ok=True)
        trace = options.profile.resolve() / f"{name}.json"
        echelon += ["--profile", trace]
    commands = {
        "eager": torch,
        "compiled": [*torch, "--compile"],
        "echelon": list(map(str, echelon)),
    }
    seconds = {side: [] for side in SIDES}
    last = {}
    for _ in range(options.rounds):
        for side, command in commands.items():
            last[side] = sides.run(command, out)
            seconds[side].append(spread(last[side]["step_seconds"])["median"])
        compare_losses(
            name,
            {side: r["losses"][:SAME_STEPS] for side, r in last.items()},
            0.02,
        )
    flops = last["echelon"]["flops"]
    peak, of_what = peak_flops(last["eager"])
    row = {"model": name, "device": last["eager"]["device"], "of": of_what}
    row["losses"] = {side: r["losses"] for side, r in last.items()}
    row["losses_apart"] = {
        side: max(
            abs(a - b) / abs(a)
            for a, b in zip(row["losses"]["eager"], losses, strict=True)
        )
        for side, losses in row["losses"].items()
    }
    for side in SIDES:
        row[side] = {
            **timings(seconds[side], batch * length),
            "utilisation": spread([flops / s / peak for s in seconds[side]]),
            "ratio": ratios(seconds[side], seconds["echelon"]),
        }
    return row


def show(row):
    print(f"{row['model']} on {row['device']}:")
    for side in SIDES:
        r = row[side]
        print(
            f"  {side:9} {r['ms']['median']:8.1f} ms"
            f" {r['tokens_per_second']['median']:9.0f} tokens/s"
            f" {r['utilisation']['median']:6.1%} of {row['of']}"
            f"  ratio {text_of(r['ratio'], '.2f')}"
            f"  losses at most {row['losses_apart'][side]:.1%} from eager's",
            flush=True,
        )


def main():
    parser = parser_of(__doc__, WORKS, steps=20)
    parser.add_argument(
        "--profile", type=Path, help="a folder for Chrome traces of Echelon"
    )
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("skipped: no GPU; PyTorch finds no CUDA device")
        sys.exit(77)

    def rows(sides):
        for name in options.only:
            row = measure(sides, name, options)
            show(row)
            yield row

    run(options, 1, rows)


if __name__ == "__main__":
    enter_environment()
    main()
