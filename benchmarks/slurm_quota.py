#!/usr/bin/env python3
"""Pre-emption by quota on a real Slurm, many times over.

Two nodes of two GPUs (files that stand for them) are network namespaces of this
machine, with slurmdbd and MariaDB. A job of the project language trains on all
four over its quota. The project vision, which has two guaranteed, submits one:
Slurm stops the first, whose ranks save and end with 75. A time is from the
submission to the first training step of vision's job. The first job goes on
when vision's has ended, and the next try begins. It is the test
SlurmQuota.AGuaranteedJobPreemptsOneThatSavesAndGoesOn, which checks each try;
it needs root and `make extras`.

usage: benchmarks/slurm_quota.py [--build build] [--tries 20] [--json FILE]
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default=os.path.join(HERE, "../build"))
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    test = subprocess.run(
        [os.path.join(arguments.build, "tests/cli_tests"),
         "--gtest_filter=SlurmQuota.*"], capture_output=True, text=True,
        env=dict(os.environ, ECHELON_QUOTA_TRIES=str(arguments.tries)))
    tries = [
        {"seconds": float(seconds), "saved": int(saved), "done": int(done)}
        for seconds, saved, done in re.findall(
            r"first step after ([\d.]+) s; saved step (\d+) of (\d+)",
            test.stdout)]
    if not tries or test.returncode != 0:
        print(test.stdout + test.stderr, file=sys.stderr)
    if not tries:
        raise SystemExit("there was no try")
    seconds = sorted(one["seconds"] for one in tries)
    saved = sum(one["saved"] == one["done"] for one in tries)
    print(f"first step: median {statistics.median(seconds):.2f} s, largest "
          f"{seconds[-1]:.2f} s; saved: {saved} of {len(tries)}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"tries": tries}, file, indent=1)
            file.write("\n")
    raise SystemExit(test.returncode)


if __name__ == "__main__":
    main()
