#!/usr/bin/env python3
"""Echelon against Python's PyTorch on the same work, in turn, on this machine.

Each round runs PyTorch with its defaults, PyTorch with its best settings
(fused optimizer, gradient_as_bucket_view; torchvision's own decoder) and
Echelon, one after the other. --compile adds PyTorch's best by torch.compile. A ratio is PyTorch's time over Echelon's within
one round: above 1 Echelon is faster. The cost of being distributed is a step's
time over that of the same step without communication in as many ranks, less 1.

Every rank computes with one thread, on both sides.
"""
import argparse
import json
import sys
import time
from pathlib import Path

from harness import ROOT, Sides, enter_environment, machine, spread

SIDES = ("default", "best")
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
KINDS = ("simple_cnn", "resnet18", "mlp", "start", "all_reduce", "images")


def median_of(values):
    return spread(values)["median"]


def compare_losses(name, theirs, ours):
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if abs(a - b) > 1e-4 * abs(a):
            sys.exit(
                f"{name}: not the same work: loss of step {step} is {a} in "
                f"PyTorch and {b} in Echelon"
            )


def measure_step(sides, name, rounds, compiled):
    """Times of each round, by side: {"default": [{...}], ...}."""
    from works import WORKS, write_start

    work = WORKS[name]
    weights, data = write_start(work, sides.folder)
    out = sides.folder / "out.json"
    common = ["--weights", weights, "--data", data, "--out", out]
    torch = sides.torchrun("torch_step.py", "--work", name, *common)
    echelon = sides.echelon_run("ddp_step", *echelon_arguments(work), *common)
    commands = {
        "default": torch,
        "best": [*torch, "--best"],
        "echelon": echelon,
    }
    if compiled:
        commands["compiled"] = [*torch, "--best", "--compile"]
    times = {side: [] for side in commands}
    for _ in range(rounds):
        for side, command in commands.items():
            times[side].append(sides.run(command, out))
        compare_losses(
            name, times["default"][-1]["losses"], times["echelon"][-1]["losses"]
        )
    return times


def echelon_arguments(work):
    arguments = ["--model", work.name, "--classes", work.classes]
    arguments += ["--batch", work.batch, "--optimizer", work.optimizer]
    arguments += ["--learning-rate", work.learning_rate]
    arguments += ["--block-steps", work.block_steps]
    for width in work.hidden:
        arguments += ["--hidden", width]
    return arguments


def report_step(name, times):
    row = {"what": f"DDP step, {name}", "unit": "ms", "losses": {}}
    for side, results in times.items():
        steps = [1e3 * median_of(r["step_seconds"]) for r in results]
        costs = [
            median_of(r["step_seconds"]) / median_of(r["alone_seconds"]) - 1
            for r in results
        ]
        row[side] = spread(steps)
        row[f"cost_{side}"] = spread(costs)
        row["losses"][side] = results[0]["losses"]
        row.setdefault("all", {})[side] = steps
    for side in times:
        if side == "echelon":
            continue
        pairs = zip(row["all"][side], row["all"]["echelon"])
        row[f"ratio_{side}"] = spread([a / b for a, b in pairs])
    return row


def first_step_seconds(sides, command, out, ranks):
    start = time.time()
    run_for_files(sides, command)
    ends = []
    for rank in range(ranks):
        file = Path(f"{out}.{rank}")
        ends.append(float(file.read_text()))
        file.unlink()
    return max(ends) - start


def run_for_files(sides, command):
    marker = sides.folder / "nothing.json"
    marker.write_text("{}")
    sides.run(command, marker)


def measure_start(sides, rounds):
    from works import WORKS, write_start

    ranks = 4
    work = WORKS["simple_cnn"]
    weights, data = write_start(work, sides.folder)
    out = sides.folder / "first"
    common = ["--weights", weights, "--data", data, "--out", out, "--first-step"]
    commands = {
        "default": sides.torchrun(
            "torch_step.py", "--work", work.name, *common, ranks=ranks
        ),
        "echelon": sides.echelon_run(
            "ddp_step", *echelon_arguments(work), *common, ranks=ranks
        ),
    }
    times = {side: [] for side in commands}
    for _ in range(rounds + 1):  # the first reads the files into memory
        for side, command in commands.items():
            times[side].append(first_step_seconds(sides, command, out, ranks))
    return {side: values[1:] for side, values in times.items()}


def simple_row(what, unit, times, more_is_better=False):
    row = {"what": what, "unit": unit, "all": times}
    for side, values in times.items():
        row[side] = spread(values)
    for side in SIDES:
        if side in times:
            pairs = zip(times[side], times["echelon"])
            row[f"ratio_{side}"] = spread(
                [b / a if more_is_better else a / b for a, b in pairs]
            )
    return row


def measure_all_reduce(sides, rounds):
    out = sides.folder / "out.json"
    torch = sides.torchrun(
        "torch_collectives.py", "--out", out, "--bytes", *SIZES.values()
    )
    echelon = [sides.program("bin/echelon"), "bench", "collectives"]
    echelon += ["--backend", "local,gloo", "-n", str(sides.ranks), "--json"]
    times = {}
    for _ in range(rounds):
        for row in sides.run(torch, out):
            times.setdefault(("torch", row["bytes"]), []).append(
                row["microseconds"]
            )
        for row in sides.run(echelon):
            if row["operation"] == "all_reduce":
                times.setdefault((row["backend"], row["bytes"]), []).append(
                    row["microseconds"]
                )
    rows = []
    for label, size in SIZES.items():
        for backend in ("local", "gloo"):
            rows.append(
                simple_row(
                    f"all_reduce of {label}, {backend}",
                    "us",
                    {
                        "default": times["torch", size],
                        "echelon": times[backend, size],
                    },
                )
            )
    return rows


def write_jpegs(folder, count=1200):
    """Pictures that compress like photographs, about 500x375 pixels."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    for i in range(count):
        place = folder / f"class{i % 4}"
        place.mkdir(parents=True, exist_ok=True)
        width, height = 500 - i % 7 * 10, 375 + i % 5 * 10
        coarse = random.integers(0, 256, (24, 32, 3), dtype=numpy.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.BICUBIC)
        noise = random.normal(0, 8, (height, width, 3))
        pixels = numpy.clip(numpy.asarray(image) + noise, 0, 255)
        Image.fromarray(pixels.astype(numpy.uint8)).save(
            place / f"{i}.jpg", quality=85
        )


def measure_images(sides, rounds, workers=2):
    folder, out = sides.folder / "images", sides.folder / "out.json"
    write_jpegs(folder)
    common = ["--folder", folder, "--workers", workers, "--out", out]
    torch = sides.python("torch_images.py", *common)
    echelon = [sides.program("benchmarks/load_images")]
    commands = {
        "default": torch,
        "best": [*torch, "--best"],
        "echelon": [*echelon, *map(str, common)],
    }
    times = {side: [] for side in commands}
    for _ in range(rounds):
        for side, command in commands.items():
            times[side].append(sides.run(command, out)["images_per_second"])
    return simple_row(
        f"JPEGs, {workers} workers", "images/s", times, more_is_better=True
    )


def show(row):
    def text(key, form):
        values = row.get(key)
        return "-" if values is None else form.format(**values)

    plain = "{median:.4g}"
    ratio = "{median:.2f} ({min:.2f} to {max:.2f})"
    print(
        f"{row['what']:<28} {row['unit']:<9}"
        f" {text('default', plain):>9} {text('best', plain):>9}"
        f" {text('echelon', plain):>9}"
        f"  {text('ratio_default', ratio):>22} {text('ratio_best', ratio):>22}"
    )
    if "ratio_compiled" in row:
        print(
            f"{'  by torch.compile':<28} {'':<9} {text('compiled', plain):>9}"
            f" {'':>20} {text('ratio_compiled', ratio):>22}"
        )
    if "cost_echelon" in row:
        cost = "{median:.1%}"
        print(
            f"{'  cost of being distributed':<28} {'':<9}"
            f" {text('cost_default', cost):>9} {text('cost_best', cost):>9}"
            f" {text('cost_echelon', cost):>9}"
        )


def main():
    enter_environment()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compile", action="store_true",
        help="time a step by torch.compile too",
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    options = parser.parse_args()

    described = machine()
    print(
        "{processor}, {cores} cores, {memory_gib} GiB; PyTorch {pytorch}".format(
            **described
        )
    )
    print(
        f"{'':<28} {'':<9} {'PyTorch':>9} {'best':>9} {'Echelon':>9}"
        f"  {'ratio to PyTorch':>22} {'ratio to best':>22}"
    )
    sides, rows = Sides(options.build.resolve(), ranks=2), []
    try:
        for kind in options.only:
            if kind == "start":
                times = measure_start(sides, options.rounds)
                new = [simple_row("start to first step, 4 ranks", "s", times)]
            elif kind == "all_reduce":
                new = measure_all_reduce(sides, options.rounds)
            elif kind == "images":
                new = [measure_images(sides, options.rounds)]
            else:
                times = measure_step(
                    sides, kind, options.rounds, options.compile
                )
                new = [report_step(kind, times)]
            for row in new:
                show(row)
                sys.stdout.flush()
            rows += new
    finally:
        sides.close()
    if options.json:
        result = {"machine": described, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
