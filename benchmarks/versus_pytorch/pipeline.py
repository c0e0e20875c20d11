#!/usr/bin/env python3
"""Pipelines: Echelon against torch.distributed.pipelining (Gloo), in turn.

The same blocks, weights and batches, 2 ranks with one thread each; the losses
of all steps must agree. A ratio is PyTorch's time of a step over Echelon's of
the same round: above 1 Echelon is faster. Memory is the peak of a process less
what it had before the model was built, the largest of the ranks; its ratio is
Echelon's over PyTorch's: below 1 Echelon needs less. Where PyTorch has no
schedule of the same name, it is compared with the nearest.
"""
import argparse
import json
import sys
from pathlib import Path

from harness import ROOT, Sides, enter_environment, machine, spread

# PyTorch's, Echelon's
PAIRS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved-zb": "zb-v",
    "zb-v": "zb-v",
}
# blocks, width, rows of a microbatch
WORKS = {
    "small": (8, 128, 32),
    "wide": (8, 256, 256),
    "long": (8, 128, 2048),
}


def own_bytes(result):
    pairs = zip(result["peak_bytes"], result["base_bytes"])
    return max(peak - base for peak, base in pairs)


def compare_losses(name, theirs, ours):
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if abs(a - b) > 1e-4 * abs(a):
            sys.exit(
                f"{name}: not the same work: loss of step {step} is {a} in "
                f"PyTorch and {b} in Echelon"
            )


def measure(sides, kind, work, options):
    from torch_pipeline import write_start

    blocks, width, rows = WORKS[work]
    weights, data = write_start(
        sides.folder, blocks, width, rows * options.microbatches
    )
    out = sides.folder / "out.json"
    common = ["--microbatches", options.microbatches, "--blocks", blocks]
    common += ["--width", width, "--rows", rows, "--steps", options.steps]
    common += ["--weights", weights, "--data", data, "--out", out]
    commands = {
        "pytorch": sides.torchrun(
            "torch_pipeline.py", "--kind", kind, *common
        ),
        "echelon": sides.echelon_run(
            "pipeline_step", "--kind", PAIRS[kind], *common
        ),
        "echelon over gloo": sides.echelon_run(
            "pipeline_step", "--kind", PAIRS[kind], "--backend", "gloo", *common
        ),
    }
    row = {"schedule": kind, "work": work, "echelon_schedule": PAIRS[kind]}
    seconds = {side: [] for side in commands}
    memory = {side: [] for side in commands}
    for _ in range(options.rounds):
        losses = {}
        for side, command in commands.items():
            result = sides.run(command, out)
            seconds[side].append(spread(result["step_seconds"])["median"])
            memory[side].append(own_bytes(result))
            losses[side] = result["losses"]
            compare_losses(f"{kind}, {side}", losses["pytorch"], losses[side])
    for side in commands:
        row[side] = {
            "ms": spread([1e3 * s for s in seconds[side]]),
            "mib": spread([b / 2**20 for b in memory[side]]),
        }
        pairs = list(zip(seconds["pytorch"], seconds[side]))
        row[side]["ratio"] = spread([a / b for a, b in pairs])
        pairs = list(zip(memory["pytorch"], memory[side]))
        row[side]["memory_ratio"] = spread([b / a for a, b in pairs])
    return row


def text_of(values, digits):
    return (
        f"{values['median']:.{digits}f} "
        f"({values['min']:.{digits}f} to {values['max']:.{digits}f})"
    )


def show(row):
    print(f"{row['schedule']}, {row['work']}:")
    for side in ("pytorch", "echelon", "echelon over gloo"):
        r = row[side]
        print(
            f"  {side:18} {r['ms']['median']:8.1f} ms"
            f" {r['mib']['median']:7.1f} MiB"
            f"   ratio {text_of(r['ratio'], 2)}"
            f"   memory {text_of(r['memory_ratio'], 2)}",
            flush=True,
        )


def measure_memory(sides, options):
    """A model of which each of 4 stages holds a quarter."""
    out = sides.folder / "memory.json"
    blocks, width, rows = 24, 896, 128
    rows_of = []
    for kind in ("gpipe", "1f1b", "zb-h1"):
        result = sides.run(
            sides.echelon_run(
                "pipeline_step", "--kind", kind, "--microbatches", 8,
                "--blocks", blocks, "--width", width, "--rows", rows,
                "--steps", 2, "--memory", "--out", out, ranks=4,
            ),
            out,
        )
        ratios = [
            (peak - base) / share
            for peak, base, share in zip(
                result["peak_bytes"],
                result["base_bytes"],
                result["share_bytes"],
            )
        ]
        rows_of.append({"schedule": kind, "ratios": ratios, **result})
        print(
            f"memory, {kind}, 4 stages: peak over share by rank "
            + ", ".join(f"{ratio:.3f}" for ratio in ratios)
            + f" (shares {result['share_bytes'][0] / 2**20:.0f} MiB, before"
            f" the model {result['base_bytes'][0] / 2**20:.0f} MiB)",
            flush=True,
        )
    return rows_of


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--work", nargs="*", choices=WORKS, default=["small"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--memory", action="store_true", help="that alone")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sides = Sides(options.build, 2)
    result = {"machine": machine(), "rows": []}
    try:
        if not options.memory:
            for work in options.work:
                for kind in options.only:
                    result["rows"].append(measure(sides, kind, work, options))
                    show(result["rows"][-1])
        result["memory"] = measure_memory(sides, options)
    finally:
        sides.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    enter_environment()
    main()
