#!/usr/bin/env python3
"""A GPT on 2 ranks: Echelon against torch.distributed.

29.5 million parameters, 34 million with the tied matrix of words counted twice
(8 layers, hidden 512, 8 heads, vocabulary 8192), a global batch of 4 samples of
256 tokens, AdamW, one thread a rank. Both sides read the same weights and
tokens; the losses of all steps must agree, and with torch.compile the first five
of a round. With cp it is a sample of 4096 tokens.

  tp      tp=2             against ColwiseParallel, RowwiseParallel
  dp      dp=2             against DistributedDataParallel
  stage1  fsdp=2, stage 1  against ZeroRedundancyOptimizer
  stage2  fsdp=2, stage 2  against FSDP2, parameters kept until backward
  stage3  fsdp=2, stage 3  against FSDP2
  cp      cp=2, ring       against the ring of context_parallel
  compiled   dp=2          against DistributedDataParallel by torch.compile
  compiled1  dp=1          against one rank by torch.compile; two at once

PyTorch is at its best: fused optimizer, gradient_as_bucket_view and
static_graph (DDP), parameters_as_bucket_view (ZeroRedundancyOptimizer), a
vocabulary that is cut and loss_parallel (tp), each block a unit that is gathered
ahead (FSDP2), Gloo.

Each round runs all programs in turn, so that other work of the machine slows all
of them; every other round runs them in the opposite order. A ratio is PyTorch's
time of a step over Echelon's of the same round: above 1 Echelon is faster. The
cost of being distributed is a step's time over that of the same ranks with the
collectives left out (tp: a silent group; else: each rank trains the whole model
on its samples), less 1. Memory is a process's peak, and the peak less what it
had before the model was built, the largest of the ranks; its ratio is Echelon's
over PyTorch's. With both in one run, stage 3's time over stage 0's, which is dp.

--table FILE prints what --json wrote as a table for README.md.
"""
import json
import sys
from dataclasses import dataclass

from harness import enter_environment, spread
from language_works import compare_losses, parse, ratios, run, text_of, timings

LEARNING_RATE = 1e-3
BATCH, LENGTH = 4, 256
# Of one loss, relative. Float32 sums in another order; AdamW's first steps
# divide gradients by their own size, small ones too.
TOLERANCE = 1e-5
# How many losses of a round are compared with torch.compile's. It rounds
# differently from eager PyTorch, and the difference grows: its seventh loss is
# 2.3e-5 from eager PyTorch's, and Echelon's is 2.1e-6 from it.
COMPARED_WITH_COMPILED = 5


@dataclass(frozen=True)
class Work:
    title: str
    pytorch: tuple  # arguments of torch_gpt_step.py
    echelon: tuple  # of gpt_step
    alone: tuple  # of both
    batch: int = BATCH
    length: int = LENGTH
    compared: int | None = None  # how many losses of a round; None: all

    @property
    def tokens(self):
        return self.batch * self.length


WHOLE = ("--mode", "dp", "--alone")
WORKS = {
    "tp": Work(
        "tp=2",
        ("--mode", "tp"), ("--mode", "tp"), ("--mode", "tp", "--alone"),
    ),
    "dp": Work("dp=2", ("--mode", "dp"), ("--mode", "dp"), WHOLE),
    "stage1": Work(
        "fsdp=2, stage 1",
        ("--mode", "zero"), ("--mode", "fsdp", "--stage", "1"), WHOLE,
    ),
    "stage2": Work(
        "fsdp=2, stage 2",
        ("--mode", "fsdp", "--keep"), ("--mode", "fsdp", "--stage", "2"), WHOLE,
    ),
    "stage3": Work(
        "fsdp=2, stage 3",
        ("--mode", "fsdp"), ("--mode", "fsdp", "--stage", "3"), WHOLE,
    ),
    "compiled": Work(
        "dp=2, torch.compile",
        ("--mode", "dp", "--compile"), ("--mode", "dp"), WHOLE,
        compared=COMPARED_WITH_COMPILED,
    ),
    "compiled1": Work(
        "dp=1, torch.compile", (*WHOLE, "--compile"), WHOLE, WHOLE,
        compared=COMPARED_WITH_COMPILED,
    ),
    "cp": Work(
        "cp=2, ring",
        ("--mode", "cp"), ("--mode", "cp"), ("--mode", "cp", "--alone"),
        batch=1, length=4096,
    ),
}


def write_start(folder, shape, batches, batch=BATCH):
    import torch
    from safetensors.torch import save_file
    from torch_gpt import first_weights

    weights = folder / "weights.safetensors"
    save_file(first_weights(shape), weights)
    torch.manual_seed(1)
    data = folder / "data.safetensors"
    tokens = torch.randint(
        shape.vocabulary, (batches, batch, shape.positions + 1)
    )
    save_file({"tokens": tokens}, data)
    return weights, data


def programs_of(works):
    """(side, arguments) of all that the works compare, each once."""
    every = {}
    for work in works:
        for side in ("pytorch", "echelon"):
            every[side, getattr(work, side)] = None
            every[side, work.alone] = None
    return list(every)


class Rounds:
    """Runs all programs in turn; figures by program, one a round."""

    def __init__(self, sides, programs, shape, options, weights, data):
        self.sides = sides
        self.script, self.program = programs
        self.out = sides.folder / "out.json"
        self.common = [*shape, "--steps", options.steps]
        self.common += ["--learning-rate", LEARNING_RATE]
        self.common += ["--weights", weights, "--data", data]
        self.common += ["--out", self.out]
        self.results = {}

    def command(self, side, arguments):
        if side == "pytorch":
            return self.sides.torchrun(self.script, *self.common, *arguments)
        command = self.sides.echelon_run(
            self.program, *self.common, *arguments
        )
        # torchrun starts each rank in a session of its own, which Linux gives a
        # share of a busy machine; these ranks get theirs too.
        at = command.index("--") + 1
        return [*command[:at], "setsid", "--wait", *command[at:]]

    def run(self, programs, rounds):
        for index in range(rounds):
            for program in programs[:: 1 if index % 2 == 0 else -1]:
                self.results.setdefault(program, []).append(
                    self.sides.run(self.command(*program), self.out)
                )

    def seconds(self, program):
        return [
            spread(r["step_seconds"])["median"] for r in self.results[program]
        ]

    def peak(self, program):
        return [max(r["peak_bytes"]) for r in self.results[program]]

    def own(self, program):
        """The peak, less what there was before the model."""
        return [
            max(p - b for p, b in zip(r["peak_bytes"], r["base_bytes"]))
            for r in self.results[program]
        ]

    def losses(self, program, count):
        """The first `count` of each round."""
        return [
            loss for r in self.results[program] for loss in r["losses"][:count]
        ]


def figures(name, work, rounds, tolerance):
    programs = {
        "pytorch": ("pytorch", work.pytorch),
        "echelon": ("echelon", work.echelon),
        "pytorch alone": ("pytorch", work.alone),
        "echelon alone": ("echelon", work.alone),
    }
    seconds = {side: rounds.seconds(p) for side, p in programs.items()}
    peak = {side: rounds.peak(p) for side, p in programs.items()}
    own = {side: rounds.own(p) for side, p in programs.items()}
    losses = {
        s: rounds.losses(programs[s], work.compared)
        for s in ("pytorch", "echelon")
    }
    row = {
        "mode": name,
        "title": work.title,
        "loss_difference": compare_losses(work.title, losses, tolerance),
        "losses": losses["echelon"],
    }
    for side in programs:
        row[side] = {
            **timings(seconds[side], work.tokens),
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


def row_of(name, rounds):
    row = figures(name, WORKS[name], rounds, TOLERANCE)
    stage0 = ("echelon", WORKS["dp"].echelon)
    if name == "stage3" and stage0 in rounds.results:
        own = rounds.seconds(("echelon", WORKS[name].echelon))
        row["over stage 0"] = ratios(own, rounds.seconds(stage0))
    return row


def show(row):
    print(f"{row['title']}, losses differ by {row['loss_difference']:.1e}:")
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
        f" {text_of(row['own ratio'], '.2f')}"
    )
    if "over stage 0" in row:
        print(f"  time over stage 0's {text_of(row['over stage 0'], '.2f')}")


def print_table(path):
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    print(
        "| work | PyTorch | Echelon | ratio | without communication "
        "| cost of being distributed | peak memory | own memory |"
    )
    print("| --- " * 8 + "|")
    for row in rows:
        tokens = [
            f"{row[side]['tokens_per_second']['median']:.0f} tokens/s"
            for side in ("pytorch", "echelon")
        ]
        costs = []
        for side in ("pytorch", "echelon"):
            cost = {k: 100 * v for k, v in row[side]["cost"].items()}
            costs.append(
                f"{cost['median']:.3g} % "
                f"({cost['min']:.3g} to {cost['max']:.3g})"
            )
        cells = [row["title"], *tokens, text_of(row["ratio"], ".2f")]
        cells.append(text_of(row["ratio alone"], ".2f"))
        cells.append(", ours ".join(costs))
        cells += [f"{row[r]['median']:.2f}" for r in ("peak ratio", "own ratio")]
        print("| " + " | ".join(cells) + " |")
    for row in rows:
        if "over stage 0" in row:
            over = text_of(row["over stage 0"], ".2f")
            print(f"\nTime of a step, stage 3 over stage 0: {over}.")


def main():
    if sys.argv[1:2] == ["--table"]:
        print_table(sys.argv[2])
        return
    options = parse(__doc__, WORKS, steps=6)
    from torch_gpt import Shape

    def shape_of(length):
        return Shape(8, 512, 8, 8192, length)

    def rows(sides):
        # Works of one size run in turn.
        sizes = {}
        for name in options.only:
            work = WORKS[name]
            sizes.setdefault((work.batch, work.length), []).append(name)
        for (batch, length), names in sizes.items():
            shape = shape_of(length)
            weights, data = write_start(sides.folder, shape, 4, batch)
            numbers = {
                "layers": shape.layers, "hidden": shape.hidden,
                "heads": shape.heads, "vocabulary": shape.vocabulary,
                "positions": shape.positions,
            }
            rounds = Rounds(
                sides, ("torch_gpt_step.py", "gpt_step"),
                [x for k, v in numbers.items() for x in (f"--{k}", v)],
                options, weights, data,
            )
            rounds.run(
                programs_of(WORKS[name] for name in names), options.rounds
            )
            for name in names:
                row = row_of(name, rounds)
                show(row)
                yield row

    run(
        options, 2, rows, parameters=shape_of(LENGTH).parameters(),
        rounds=options.rounds,
    )


if __name__ == "__main__":
    enter_environment()
    main()
