#!/usr/bin/env python3
"""A GPT on 2 ranks: Echelon against torch.distributed.tensor.parallel and DDP.

29.5 million parameters, 34 million with the tied matrix of words counted twice
(8 layers, hidden 512, 8 heads, vocabulary 8192), a global batch of 4 samples of
256 tokens, AdamW, one thread a rank. Both sides read the same weights and
tokens; the losses of all steps must agree. PyTorch is at its best: fused
optimizer, gradient_as_bucket_view and static_graph (dp), a vocabulary that is
cut and loss_parallel (tp), Gloo.

Each round runs all programs in turn, so that other work of the machine slows all
of them. A ratio is PyTorch's time of a step over Echelon's of the same round:
above 1 Echelon is faster. The cost of being distributed is a step's time over
that of the same ranks with the collectives left out, less 1. Memory is a
process's peak, and the peak less what it had before the model was built, the
largest of the ranks; its ratio is Echelon's over PyTorch's.
"""
import argparse
import json
import sys
from pathlib import Path

from harness import ROOT, Sides, enter_environment, machine, spread

LEARNING_RATE = 1e-3
BATCH, LENGTH = 4, 256
MODES = ("tp", "dp")
# Of one loss, relative. Float32 sums in another order; AdamW's first steps
# divide gradients by their own size, small ones too.
TOLERANCE = 1e-5


def write_start(folder, shape, batches):
    import torch
    from safetensors.torch import save_file
    from torch_gpt import first_weights

    weights = folder / "weights.safetensors"
    save_file(first_weights(shape), weights)
    torch.manual_seed(1)
    data = folder / "data.safetensors"
    tokens = torch.randint(shape.vocabulary, (batches, BATCH, LENGTH + 1))
    save_file({"tokens": tokens}, data)
    return weights, data


def commands_of(sides, mode, shape, options, weights, data, out):
    common = ["--layers", shape.layers, "--hidden", shape.hidden]
    common += ["--heads", shape.heads, "--vocabulary", shape.vocabulary]
    common += ["--positions", shape.positions, "--steps", options.steps]
    common += ["--learning-rate", LEARNING_RATE, "--mode", mode]
    common += ["--weights", weights, "--data", data, "--out", out]

    def echelon(*more):
        command = sides.echelon_run("gpt_step", *common, *more)
        # torchrun starts each rank in a session of its own, which Linux gives a
        # share of a busy machine; these ranks get theirs too.
        at = command.index("--") + 1
        return [*command[:at], "setsid", "--wait", *command[at:]]

    return {
        "pytorch": sides.torchrun("torch_gpt_step.py", *common),
        "echelon": echelon(),
        "pytorch alone": sides.torchrun(
            "torch_gpt_step.py", *common, "--alone"
        ),
        "echelon alone": echelon("--alone"),
    }


def compare_losses(mode, theirs, ours):
    """The largest relative difference."""
    worst = 0.0
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        worst = max(worst, abs(a - b) / abs(a))
        if not worst <= TOLERANCE:
            sys.exit(
                f"{mode}: not the same work: loss of step {step} is {a} in "
                f"PyTorch and {b} in Echelon"
            )
    return worst


def ratios(above, below):
    return spread([a / b for a, b in zip(above, below, strict=True)])


def measure(sides, mode, shape, options, weights, data):
    out = sides.folder / "out.json"
    commands = commands_of(sides, mode, shape, options, weights, data, out)
    seconds = {side: [] for side in commands}
    peak = {side: [] for side in commands}
    own = {side: [] for side in commands}
    worst = 0.0
    for index in range(options.rounds):
        losses = {}
        # Every other round backwards: who goes first is not always the same.
        order = list(commands.items())[:: 1 if index % 2 == 0 else -1]
        for side, command in order:
            result = sides.run(command, out)
            seconds[side].append(spread(result["step_seconds"])["median"])
            peak[side].append(max(result["peak_bytes"]))
            pairs = zip(result["peak_bytes"], result["base_bytes"])
            own[side].append(max(p - b for p, b in pairs))
            losses[side] = result["losses"]
        worst = max(
            worst, compare_losses(mode, losses["pytorch"], losses["echelon"])
        )
    tokens = BATCH * LENGTH
    row = {"mode": mode, "loss_difference": worst, "losses": losses["echelon"]}
    for side in commands:
        row[side] = {
            "ms": spread([1e3 * s for s in seconds[side]]),
            "tokens_per_second": spread([tokens / s for s in seconds[side]]),
            "peak_mib": spread([b / 2**20 for b in peak[side]]),
            "own_mib": spread([b / 2**20 for b in own[side]]),
        }
    for side in ("pytorch", "echelon"):
        row[side]["cost"] = spread(
            [a / b - 1 for a, b in zip(seconds[side], seconds[side + " alone"])]
        )
    row["ratio"] = ratios(seconds["pytorch"], seconds["echelon"])
    row["ratio alone"] = ratios(
        seconds["pytorch alone"], seconds["echelon alone"]
    )
    row["peak ratio"] = ratios(peak["echelon"], peak["pytorch"])
    row["own ratio"] = ratios(own["echelon"], own["pytorch"])
    return row


def text_of(values, form):
    return (
        f"{values['median']:{form}} "
        f"({values['min']:{form}} to {values['max']:{form}})"
    )


def show(row):
    print(f"{row['mode']}=2, losses differ by {row['loss_difference']:.1e}:")
    for side in ("pytorch", "pytorch alone", "echelon", "echelon alone"):
        r = row[side]
        cost = text_of(r["cost"], ".1%") if "cost" in r else ""
        print(
            f"  {side:14} {r['ms']['median']:7.0f} ms"
            f" {r['tokens_per_second']['median']:6.0f} tokens/s"
            f" {r['peak_mib']['median']:6.0f} MiB"
            f" ({r['own_mib']['median']:.0f} own)  {cost}"
        )
    print(
        f"  ratio {text_of(row['ratio'], '.2f')}, without communication"
        f" {text_of(row['ratio alone'], '.2f')}, memory"
        f" {text_of(row['peak ratio'], '.2f')}, own"
        f" {text_of(row['own ratio'], '.2f')}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from torch_gpt import Shape

    shape = Shape(options.layers, 512, 8, 8192, LENGTH)
    sides = Sides(options.build.resolve(), 2)
    result = {
        "machine": machine(),
        "parameters": shape.parameters(),
        "rows": [],
    }
    try:
        weights, data = write_start(sides.folder, shape, 4)
        for mode in options.only:
            result["rows"].append(
                measure(sides, mode, shape, options, weights, data)
            )
            show(result["rows"][-1])
    finally:
        sides.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    enter_environment()
    main()
