#!/usr/bin/env python3
"""Saving and loading a GPT's training on 2 ranks: Echelon against
torch.distributed.checkpoint (DCP).

29.5 million parameters (gpt.py's), AdamW, float32, one thread a rank: 354 MB,
each byte of them written once, by either rank half.

  dp    dp=2             against DistributedDataParallel
  fsdp  fsdp=2, stage 3  against FSDP2, DTensors

PyTorch comes twice: as it is, and at its best (each save's plan is kept for the
next, two threads a rank write, an asynchronous save copies beside forward and
backward). Both sides synchronise their files to the disk (FileSystemWriter's
sync_files); Echelon also its folders, and it takes checksums of all that it writes
and compares them with all that it reads.

  save     until all ranks know that the checkpoint is there
  stopped  how long a step waits for an asynchronous save to begin, the slowest
           rank's: dcp.async_save; with PyTorch at its best also the wait before
           the update
  cost     what steps beside a save take longer in all, with that wait
  load     until training can go on, of files that are not in memory
  memory   a process's peak beside saves over that of steps without, as a share
           of what the rank has of parameters and optimizer state

Each round runs all programs in turn, every other round in the opposite order; a
program's figure is its median. A ratio is PyTorch's time over Echelon's of the same
round: above 1 Echelon is faster. --folder is where the checkpoints are written.

--table FILE prints what --json wrote as a table for README.md.
"""
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from gpt import LENGTH, LEARNING_RATE, TOLERANCE, write_start
from harness import enter_environment, spread
from language_works import compare_losses, parser_of, ratios, run, text_of

WORKS = {"dp": "dp=2", "fsdp": "fsdp=2, stage 3"}
SIDES = ("pytorch", "pytorch best", "echelon")
TIMES = ("save", "stopped", "cost", "load")


def file_system(folder):
    """Its kind, "ext4", as the kernel names it."""
    found = ("", "unknown")
    folder = str(Path(folder).resolve()) + "/"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if folder.startswith(place.rstrip("/") + "/"):
            found = max(found, (place, kind), key=lambda f: len(f[0]))
    return found[1]


class Rounds:
    """Runs all programs in turn; results by work and side, one a round."""

    def __init__(self, sides, shape, options, start):
        self.sides = sides
        self.out = sides.folder / "out.json"
        self.options = options
        weights, data = start
        self.common = ["--layers", shape.layers, "--hidden", shape.hidden]
        self.common += ["--heads", shape.heads]
        self.common += ["--vocabulary", shape.vocabulary]
        self.common += ["--positions", shape.positions]
        self.common += ["--learning-rate", LEARNING_RATE]
        self.common += ["--weights", weights, "--data", data]
        self.common += ["--steps", options.steps, "--saves", options.saves]
        self.common += ["--loads", options.saves, "--out", self.out]
        self.results = {}

    def command(self, work, side, folder):
        arguments = ["--mode", work, "--folder", folder, *self.common]
        if side == "echelon":
            command = self.sides.echelon_run("checkpoint", *arguments)
            # As in gpt.py: a session of its own for each rank, as torchrun's have.
            at = command.index("--") + 1
            return [*command[:at], "setsid", "--wait", *command[at:]]
        if side == "pytorch best":
            arguments.append("--best")
        return self.sides.torchrun("torch_checkpoint.py", *arguments)

    def run_one(self, work, side):
        with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
            os.sync()
            result = self.sides.run(
                self.command(work, side, folder), self.out
            )
        self.results.setdefault((work, side), []).append(result)
        figures = ", ".join(
            f"{name} {seconds_of(name, result):.3f}" for name in TIMES
        )
        load = os.getloadavg()[0]
        print(f"  {work} {side}: {figures} s; load {load:.1f}", flush=True)

    def run(self, works):
        programs = [(work, side) for work in works for side in SIDES]
        for index in range(self.options.rounds):
            for program in programs[:: 1 if index % 2 == 0 else -1]:
                self.run_one(*program)


def seconds_of(name, result):
    """The median of one program's run."""
    if name == "cost":
        step = statistics.median(result["step_seconds"])
        return statistics.median(
            took - count * step
            for took, count in zip(
                result["beside_seconds"], result["beside_steps"], strict=True
            )
        )
    return statistics.median(result[name + "_seconds"])


def memory_of(result):
    """The largest over the ranks."""
    return max(
        (peak - plain) / own
        for peak, plain, own in zip(
            result["async_peak_bytes"],
            result["training_peak_bytes"],
            result["own_bytes"],
            strict=True,
        )
    )


def row_of(work, results):
    losses = {
        side: [x for r in results[work, side] for x in r["losses"]]
        for side in ("pytorch", "echelon")
    }
    row = {
        "work": work,
        "title": WORKS[work],
        "loss_difference": compare_losses(WORKS[work], losses, TOLERANCE),
    }
    every = {
        side: {
            name: [seconds_of(name, r) for r in results[work, side]]
            for name in TIMES
        }
        for side in SIDES
    }
    for side in SIDES:
        of_side = results[work, side]
        row[side] = {f"{n}_ms": spread([1e3 * s for s in every[side][n]])
                     for n in TIMES}
        row[side]["step_ms"] = spread(
            [1e3 * seconds_of("step", r) for r in of_side]
        )
        row[side]["megabytes"] = spread(
            [statistics.median(r["bytes"]) / 1e6 for r in of_side]
        )
        row[side]["memory"] = spread([memory_of(r) for r in of_side])
    for side in SIDES[:2]:
        row[f"ratio to {side}"] = {
            name: ratios(every[side][name], every["echelon"][name])
            for name in ("save", "stopped", "load")
        }
    return row


def show(row):
    print(f"{row['title']}, losses differ by {row['loss_difference']:.1e}:")
    for side in SIDES:
        times = ", ".join(
            f"{name} {row[side][name + '_ms']['median']:.0f} ms"
            for name in (*TIMES, "step")
        )
        memory = row[side]["memory"]["median"]
        print(f"  {side:12} {times}; memory {memory:.2f}")
    for side in SIDES[:2]:
        found = ", ".join(
            f"{name} {text_of(ratio, '.2f')}"
            for name, ratio in row[f"ratio to {side}"].items()
        )
        print(f"  ratio to {side}: {found}")


def print_table(path):
    rows = json.loads(Path(path).read_text())["rows"]
    print("| | PyTorch | PyTorch, best | Echelon | ratio | ratio to best |")
    print("| --- " * 6 + "|")
    for row in rows:
        for name in (*TIMES, "memory"):
            cells = [f"{row['title']}: {name}"]
            for side in SIDES:
                if name == "memory":
                    cells.append(f"{row[side]['memory']['median']:.2f}")
                else:
                    value = row[side][name + "_ms"]["median"]
                    cells.append(f"{value:.0f} ms")
            for side in SIDES[:2]:
                ratio = row[f"ratio to {side}"].get(name)
                cells.append(text_of(ratio, ".2f") if ratio else "")
            print("| " + " | ".join(cells) + " |")


def main():
    if sys.argv[1:2] == ["--table"]:
        print_table(sys.argv[2])
        return
    parser = parser_of(__doc__, WORKS, steps=4)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    from torch_gpt import Shape

    shape = Shape(8, 512, 8, 8192, LENGTH)

    def rows(sides):
        start = write_start(sides.folder, shape, 4)
        rounds = Rounds(sides, shape, options, start)
        rounds.run(options.only)
        for work in options.only:
            row = row_of(work, rounds.results)
            show(row)
            yield row

    run(
        options,
        2,
        rows,
        parameters=shape.parameters(),
        rounds=options.rounds,
        saves=options.saves,
        file_system=file_system(options.folder),
    )


if __name__ == "__main__":
    enter_environment()
    main()
