#!/usr/bin/env python3
"""Steps of 2-rank runs on this machine against what `echelon simulate` predicts.

Each round measures the machine (`echelon bench --save`), then runs every case for real
and simulates it from that file; rounds alternate, so that a machine that others use as
well is as slow for both. Prints both, the median of the ratios and its spread; and the
ratio to the quickest tenth of the steps, which others' work disturbs least.

A virtual machine's processors may be two threads of one core for some time: two at once
then take up to 1.8 times as long, one alone as long as ever. Whatever was measured before
or after two busy loops at once took longer than usual is measured again (--patience times
at most), by this rule alone; how often is printed and written."""
import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "configs"
# Part of the steps that are not counted: buckets are cut anew, memory is new, the
# timeline is recorded.
WARM_UP = 5  # one in so many

# The network of examples/01_data_parallel.cpp, and one of the size of
# examples/03_pipeline.cpp, as the trainer runs them.
DUMMY = {"name": "dummy", "samples": 4096, "holdout": 0.0}
FIRST = {
    "model": {"name": "mlp", "hidden": [64]},
    "data": DUMMY | {"shape": [1, 4, 4], "classes": 2},
    "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "train": {"batch": 128},
}
THIRD = {
    "model": {"name": "mlp", "hidden": [32] * 5},
    "data": DUMMY | {"shape": [2, 2, 2], "classes": 2},
    "optimizer": {"name": "adam", "learning_rate": 3e-3, "weight_decay": 0.0},
    "train": {"batch": 128},
    "layout": {"microbatches": 8},
}
# name, configuration, layout, what else is set, steps
CASES = [
    ("digits dp=2", "digits", "dp=2", {}, 1000),
    ("digits pp=2", "digits", "pp=2", {}, 500),
    ("digits fsdp=2", "digits", "fsdp=2", {}, 1000),
    ("simple_cnn_dummy dp=2", "simple_cnn_dummy", "dp=2", {}, 16),
    ("simple_cnn_dummy pp=2", "simple_cnn_dummy", "pp=2", {}, 16),
    ("text dp=2", "text", "dp=2", {}, 40),
    ("text fsdp=2", "text", "fsdp=2", {}, 40),
    ("text pp=2, 1f1b", "text", "pp=2", {"schedule": "1f1b"}, 40),
    ("text pp=2, gpipe", "text", "pp=2", {"schedule": "gpipe"}, 40),
    ("text pp=2, zb-h1", "text", "pp=2", {"schedule": "zb-h1"}, 40),
    ("01_data_parallel dp=2", FIRST, "dp=2", {}, 5000),
    ("03_pipeline pp=2", THIRD, "pp=2", {}, 1000),
]


def busy_loop(core):
    """Seconds of a loop on this core, the median of some."""
    os.sched_setaffinity(0, {core})
    seconds = []
    for _ in range(40):
        begin = time.perf_counter()
        total = 0
        for i in range(100000):
            total += i * i
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


class Quiet:
    """Measures again what was measured while the machine's cores were slow."""

    SLOWER = 1.2  # than the quickest two loops at once so far

    def __init__(self, patience):
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        self.patience = patience
        self.usual = min(self.loops() for _ in range(5))
        self.repeated = 0
        self.disturbed = 0  # and kept: patience ran out

    def loops(self):
        with multiprocessing.Pool(len(self.cores)) as pool:
            return max(pool.map(busy_loop, self.cores, chunksize=1))

    def slow(self):
        seconds = self.loops()
        self.usual = min(self.usual, seconds)
        return seconds > self.SLOWER * self.usual

    def wait(self):
        for _ in range(60):
            if not self.slow():
                return
            time.sleep(1)

    def measure(self, call):
        for left in range(self.patience, -1, -1):
            self.wait()
            result = call()
            if not self.slow():
                return result
            if left > 0:
                self.repeated += 1
        self.disturbed += 1
        return result


def toml(tables):
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def configuration(case, folder):
    name, source, layout, options, steps = case
    tables = tomllib.loads((EXAMPLES / f"{source}.toml").read_text()) if isinstance(source, str) else source
    tables = {key: dict(table) for key, table in tables.items()}
    tables["train"] |= {"steps": steps, "run": str(folder / "run")}
    tables["train"].pop("epochs", None)
    tables["optimizer"].pop("schedule", None)
    tables["optimizer"].pop("warmup_steps", None)
    tables["layout"] = tables.get("layout", {}) | options
    path = folder / "case.toml"
    path.write_text(toml(tables))
    return [str(path), "--layout", layout]


def out_of(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout


def measured_step(echelon, what, folder):
    out_of([echelon, "train", *what, "--overwrite"])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_seconds"] for line in lines if "step_seconds" in line]
    steps = steps[len(steps) // WARM_UP:]
    return statistics.median(steps), statistics.quantiles(steps, n=10)[0]


def predicted_step(echelon, what, cluster):
    return json.loads(out_of([echelon, "simulate", *what, "--cluster", cluster, "--count", "--json"]))["step_seconds"]


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def summary(rows):
    predicted = statistics.median(row["predicted"] for row in rows)
    measured = statistics.median(row["measured"] for row in rows)
    quick = statistics.median(row["quickest_tenth"] for row in rows)
    ratios = [row["predicted"] / row["measured"] for row in rows]
    return {
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "quickest_tenth_seconds": quick,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "rounds": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--echelon", default=ROOT / "build" / "bin" / "echelon", help="the program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--cluster", help="a file of bench --save, in place of measuring each round")
    parser.add_argument("--patience", type=int, default=4, help="repetitions of what was disturbed")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case[0]]
    load = os.getloadavg()[0]
    quiet = Quiet(arguments.patience)
    rows = {case[0]: [] for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for _ in range(arguments.rounds):
            cluster = arguments.cluster or str(scratch / "here.toml")
            if not arguments.cluster:
                quiet.measure(lambda: out_of([arguments.echelon, "bench", "--save", cluster, "-n", "2"]))
            for case in cases:
                what = configuration(case, scratch)
                step, quick = quiet.measure(lambda: measured_step(arguments.echelon, what, scratch))
                rows[case[0]].append({
                    "measured": step,
                    "quickest_tenth": quick,
                    "predicted": predicted_step(arguments.echelon, what, cluster),
                })
    found = {name: summary(one) for name, one in rows.items()}
    print(f"{'':24} {'measured':>10} {'predicted':>10}  predicted over measured (spread), over its quickest tenth of steps")
    for name, one in found.items():
        print(
            f"{name:24} {one['measured_seconds'] * 1e3:7.2f} ms {one['predicted_seconds'] * 1e3:7.2f} ms"
            f"  {one['ratio']:.2f} ({one['least']:.2f} to {one['most']:.2f})"
            f"  {one['predicted_seconds'] / one['quickest_tenth_seconds']:.2f}"
        )
    near = sum(abs(one["ratio"] - 1) <= 0.15 for one in found.values())
    print(f"{near} of {len(found)} within 15 %")
    print(
        f"the machine's cores were slow: {quiet.repeated} measurements repeated, "
        f"{quiet.disturbed} kept nevertheless"
    )
    if arguments.json:
        machine = {"processor": processor(), "cores": os.cpu_count(), "load_average_at_start": load}
        result = {
            "machine": machine,
            "rounds": arguments.rounds,
            "repeated": quiet.repeated,
            "kept_though_disturbed": quiet.disturbed,
            "cases": found,
        }
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
