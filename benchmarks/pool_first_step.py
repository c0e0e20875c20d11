#!/usr/bin/env python3
"""The time from `echelon pool submit` of a guaranteed job to its first training step.

  pool_first_step.py [--build FOLDER] [--rounds N] [--model NAME] [--json FILE]

A job that trains on 4 slots, 2 of them borrowed, goes on with 2 when a guaranteed job of
another project asks for the others. Prints, for each round, the seconds from the start of
`echelon pool submit`
  - to the first step that the guaranteed job has written,
  - to the first step that the borrower does on 2 slots, and how long it did none.
Each step of the borrower must be there once, with the loss of one device (float64). Exits
with 1 when one is not."""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POOL = """[project.language]
guaranteed = 2
[project.vision]
guaranteed = 2
"""
LIMIT = 120  # seconds for one wait
STEPS = 20   # on each number of slots


def settings(run, model):
    pairs = [f"train.run={run}", "train.epochs=0", "train.steps=1000000", "train.batch=24",
             "train.eval_every=1000000", f"model.name={model}", "model.dtype=float64",
             "optimizer.warmup_steps=0", "checkpoint.every_steps=0"]
    return [word for pair in pairs for word in ("--set", pair)]


class Steps:
    """The steps that a run has written, and when they were seen."""

    def __init__(self, run):
        self.path, self.read, self.seen = run / "metrics.jsonl", 0, []

    def look(self):
        try:
            with open(self.path, "rb") as file:
                file.seek(self.read)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[:new.rfind(b"\n") + 1]
        self.read += len(whole)
        self.seen += [time.monotonic()] * whole.count(b'"loss"')

    def losses(self):
        lines = [json.loads(line) for line in open(self.path)]
        steps = [line for line in lines if "loss" in line]
        if [line["step"] for line in steps] != list(range(1, len(steps) + 1)):
            sys.exit(f"{self.path}: a step is missing, or is there twice")
        return [line["loss"] for line in steps]


def wait(looks, done, what):
    end = time.monotonic() + LIMIT
    while not done():
        if time.monotonic() > end:
            sys.exit(f"waited for {what} in vain")
        time.sleep(0.002)
        for one in looks:
            one.look()


class Round:
    def __init__(self, echelon, folder, model):
        self.echelon, self.folder, self.model = echelon, folder, model
        (folder / "pool.toml").write_text(POOL)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.log = open(folder / "daemon.log", "w")
        self.daemon = subprocess.Popen(
            [echelon, "pool", "start", folder / "pool.toml", "--folder", folder / "pool",
             "--devices", "4"], stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.daemon.stdout.readline()

    def pool(self, *words):
        words = list(words)
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = ["--folder", self.folder / "pool"]
        done = subprocess.run([self.echelon, "pool", *words], env=self.environment,
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return done.stdout

    def train(self, name):
        return [self.echelon, "train", ROOT / "examples/configs/digits.toml", *settings(self.folder / name, self.model)]

    def slots(self, job):
        return json.loads(self.pool("status", str(job), "--json"))["devices"]

    def measure(self):
        borrower, owner = Steps(self.folder / "borrower"), Steps(self.folder / "owner")
        self.pool("submit", "--project", "language", "-n", "2..4", "--preemptible", "--",
                  *self.train("borrower"))
        wait([borrower], lambda: len(borrower.seen) >= STEPS, "steps of the borrower")
        if self.slots(1) != 4:
            sys.exit("the borrower has not borrowed")
        began = time.monotonic()
        submit = subprocess.Popen(
            [self.echelon, "pool", "submit", "--project", "vision", "-n", "2", "--folder",
             self.folder / "pool", "--", *self.train("owner")],
            env=self.environment, stdout=subprocess.DEVNULL)
        wait([borrower, owner], lambda: owner.seen, "a step of the owner")
        submit.wait()
        before = len(borrower.seen)
        wait([borrower, owner], lambda: len(borrower.seen) >= before + STEPS, "steps on 2 slots")
        if self.slots(1) != 2:
            sys.exit("the borrower has not shrunk")
        after = [t for t in borrower.seen if t > began]
        pauses = [(b - a, b) for a, b in zip([began] + after, after)]
        pause, end = max(pauses)
        return {"first_step": owner.seen[0] - began, "shrunk": end - began, "pause": pause,
                "losses": borrower.losses()}

    def end(self):
        for job in (1, 2):
            self.pool("cancel", str(job))
        while json.loads(self.pool("list", "--json"))["jobs"]:
            time.sleep(0.1)
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait()


def check(got, one):
    """Against a run on one device."""
    alone = Steps(one.folder / "alone")
    job = subprocess.Popen(
        one.train("alone"), env=one.environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    wait([alone], lambda: len(alone.seen) >= len(got), "steps of one device")
    job.send_signal(signal.SIGTERM)
    job.wait()
    wanted = alone.losses()
    worst = max(abs(a / b - 1) for a, b in zip(got, wanted))
    if worst > 1e-10:
        sys.exit(f"the losses differ from those of one device by {worst}")
    return len(got), worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="simple_cnn")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    echelon = Path(arguments.build).resolve() / "bin" / "echelon"
    rounds = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="echelon-pool-") as name:
            one = Round(echelon, Path(name), arguments.model)
            found = one.measure()
            one.end()
            steps, worst = check(found.pop("losses"), one)
            found.update(steps=steps, largest_difference=worst, load=os.getloadavg()[0])
            rounds.append(found)
            print(f"round {number + 1}: first step of the guaranteed job {found['first_step']:.2f} s, "
                  f"first step on 2 slots {found['shrunk']:.2f} s, no step for {found['pause']:.2f} s; "
                  f"{steps} steps equal to one device within {worst:.0e}; load {found['load']:.1f}", flush=True)
    for key, what in (("first_step", "guaranteed job's first step"), ("shrunk", "first step on 2 slots"),
                      ("pause", "pause of the borrower")):
        values = sorted(one[key] for one in rounds)
        print(f"{what}: median {statistics.median(values):.2f} s, {values[0]:.2f} to {values[-1]:.2f} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"cores": os.cpu_count(), "model": arguments.model, "rounds": rounds}, indent=1) + "\n")


main()
