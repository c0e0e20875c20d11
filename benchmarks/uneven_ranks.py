#!/usr/bin/env python3
"""Two ranks, of which one has a share of a core: even batches and stages against measured ones.

  uneven_ranks.py [--build FOLDER] [--quota PERCENT] [--rounds N] [--steps N] [--json FILE]

The second rank starts in a cgroup of its own (version 1 or 2, as root) with a quota of its
core. The rows:

  batch      dp=2: equal batches, and [train] rebalance_every
  stages     pp=2: stages of equal work, and [model] balance = "measured"

Runs alternate, and each round gives one ratio: the mean of a step with equal parts over that
with measured ones, of the steps behind the last change. Beside it is what was predicted: by
`echelon explain` from the run with equal batches alone, by the trainer when it divided the
batch anew for the first time (of the slowest rank's work alone), and by `echelon simulate`,
for batches in proportion to the rates of a cluster file whose second device has the quota's
share of the first one's. On a machine with other work, `nice -n -15` keeps that out."""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BATCH = 256
PERIOD_US = 10_000  # short, so that a step has several
CONFIG = """[model]
name = "mlp"
hidden = [512, 512, 512, 512, 512, 512, 512]
{model}
[data]
name = "dummy"
samples = 4096
shape = [1, 16, 16]
holdout = 0
[train]
batch = {batch}
steps = {steps}
threads = 1
log_every = 1000
timeline_steps = 20
check_replicas_every = 0
run = "{run}"
{train}
[checkpoint]
at_end = false
[elastic]
memory = "off"
[layout]
{layout}
"""


class Quota:
    """A cgroup whose processes have so many percent of a core."""

    def __init__(self, percent):
        mixed = Path("/sys/fs/cgroup/cpu")
        root = mixed if mixed.is_dir() else Path("/sys/fs/cgroup")
        self.folder = root / f"echelon-uneven-{os.getpid()}"
        try:
            self.folder.mkdir()
            micros = PERIOD_US * percent // 100
            if mixed.is_dir():
                (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.folder / "cpu.cfs_quota_us").write_text(str(micros))
            else:
                (self.folder / "cpu.max").write_text(f"{micros} {PERIOD_US}")
        except OSError as error:
            sys.exit(f"uneven_ranks.py: no cgroup with a quota: {error}")

    def close(self):
        self.folder.rmdir()


def steps_of(folder):
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return ([line for line in lines if "step_seconds" in line],
            [line["rebalance"] | {"step": line["step"]} for line in lines if "rebalance" in line])


class Benchmark:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        self.bin = Path(arguments.build).resolve() / "bin"
        self.quota = Quota(arguments.quota)
        self.runs = 0

    # Both ranks have a core of their own; rank 1 is limited from its first instruction on.
    def train(self, layout, train="", model=""):
        self.runs += 1
        run = self.folder / f"run{self.runs}"
        config = self.folder / f"run{self.runs}.toml"
        config.write_text(CONFIG.format(batch=BATCH, steps=self.arguments.steps, run=run, train=train, model=model,
                                        layout=layout))
        limited = f'[ "$RANK" != 1 ] || echo $$ > {self.quota.folder}/cgroup.procs; '
        pinned = f'exec taskset -c "$RANK" {self.bin}/echelon-train train {config}'
        done = subprocess.run([self.bin / "echelon", "run", "-n", "2", "--max-restarts", "0", "--",
                               "sh", "-c", limited + pinned], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"uneven_ranks.py: a run failed:\n{done.stdout}{done.stderr}")
        steps, changes = steps_of(run)
        first = self.arguments.steps // 2
        if changes:
            first = max(first, changes[-1]["step"] + 2)
        seconds = [step["step_seconds"] for step in steps if step["step"] > first]
        return run, statistics.mean(seconds), changes

    def explained(self, run):
        out = subprocess.run([self.bin / "echelon", "explain", run, "--json"],
                             capture_output=True, text=True).stdout
        for finding in json.loads(out)["findings"]:
            settings = " ".join(finding.get("settings", []))
            if "train.rank_batch" in settings:
                return finding
        return None

    # The cluster as measured, with the quota's share of all rates of the second device.
    def cluster(self):
        here, mixed = self.folder / "here.toml", self.folder / "mixed.toml"
        subprocess.run([self.bin / "echelon", "bench", "--save", here, "-n", "2"], check=True,
                       capture_output=True)
        mixed.write_text(with_slow_device(here.read_text(), self.arguments.quota / 100))
        return mixed

    def simulated(self, run, cluster, division):
        config = self.folder / "simulated.toml"
        text = (run / "config.toml").read_text()
        config.write_text(re.sub(r"(?m)^rank_batch = .*", f"rank_batch = {division}", text))
        done = subprocess.run([self.bin / "echelon", "simulate", config, "--cluster", cluster, "--json"],
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"uneven_ranks.py: no simulation:\n{done.stderr}")
        return json.loads(done.stdout)["step_seconds"]

    def batch(self):
        rows = []
        for _ in range(self.arguments.rounds):
            even_run, even, _ = self.train("dp = 2")
            _, seconds, changes = self.train("dp = 2", train="rebalance_every = 20")
            row = {"even_seconds": even, "measured_seconds": seconds, "ratio": even / seconds,
                   "changes": changes}
            if finding := self.explained(even_run):
                row["explain"] = {"settings": finding["settings"], "ratio": 1 / (1 - finding["gain"])}
            if changes:
                first = changes[0]
                expected = max(work * now / before for work, now, before in
                               zip(first["seconds"], first["after"], first["before"]))
                row["trainer_ratio_of_work"] = max(first["seconds"]) / expected
            rows.append(row)
            show("batch", row)
        return {"rounds": rows, "run": even_run}

    def stages(self):
        rows = []
        for _ in range(self.arguments.rounds):
            _, even, _ = self.train("pp = 2\nmicrobatches = 8")
            _, seconds, _ = self.train("pp = 2\nmicrobatches = 8", model='balance = "measured"')
            rows.append({"even_seconds": even, "measured_seconds": seconds, "ratio": even / seconds})
            show("stages", rows[-1])
        return {"rounds": rows}


def with_slow_device(text, share):
    """One node of one device each: the measured one, and one with a share of its rates."""
    head, rest = text.split("[devices.", 1)
    device, node = rest.split("[[nodes]]", 1)
    name, device = device.split("]\n", 1)

    def scaled(line):
        faster = r'((?:rate|memory_rate|fp32|fp64|bf16) = ")([0-9.e+-]+)( [A-Z])'
        slower = r'((?:launch|backward|view|backward_view) = ")([0-9.e+-]+)( )'
        line = re.sub(faster, lambda m: f"{m[1]}{float(m[2]) * share:.6g}{m[3]}", line)
        return re.sub(slower, lambda m: f"{m[1]}{float(m[2]) / share:.6g}{m[3]}", line)

    slow = "\n".join(scaled(line) for line in device.split("\n"))
    link = re.search(r"inside = (.*)", node)[1]
    node = re.sub(r"devices = .*", "devices = 1", re.sub(r"network = .*", f"network = {link}", node))
    other = node.replace(f'device = "{name}"', 'device = "slow"')
    return f"{head}[devices.{name}]\n{device}[devices.slow]\n{slow}\n[[nodes]]{node}\n[[nodes]]{other}"


def show(what, row):
    print(f"{what}: {row['even_seconds'] * 1e3:.2f} ms even, {row['measured_seconds'] * 1e3:.2f} ms "
          f"measured, ratio {row['ratio']:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--quota", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(arguments, Path(folder))
        try:
            batch = benchmark.batch()
            stages = benchmark.stages()
            cluster = benchmark.cluster()
            run = batch.pop("run")
            share = arguments.quota / 100
            fast = round(BATCH / (1 + share))
            even = benchmark.simulated(run, cluster, [])
            planned = benchmark.simulated(run, cluster, [fast, BATCH - fast])
            batch["simulated"] = {"rank_batch": [fast, BATCH - fast], "even_seconds": even,
                                  "planned_seconds": planned, "ratio": even / planned}
        finally:
            benchmark.quota.close()
    result = {"quota": arguments.quota, "batch": batch, "stages": stages}
    for name in ("batch", "stages"):
        ratios = [row["ratio"] for row in result[name]["rounds"]]
        print(f"{name}: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
