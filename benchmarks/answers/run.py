#!/usr/bin/env python3
"""How long `echelon plan` and `echelon simulate` take to answer, and how much memory.

Each case is a command as a user types it, run several times in turn with all others;
prints the median of the wall times with its spread, and the most memory of all runs."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = ["plan", "--model", "gpt3-175b", "--batch", "1536", "--cluster"]
SIMULATE = ["simulate", "--model", "llama3.1-405b", "--seq-len", "8192", "--sequence-parallel", "--zero", "1"]
UNEVEN = ["--jitter", "0.02", "--stragglers", "3", "--seed", "1"]

# name, arguments, seconds and MiB that it is to stay below (None: no target)
CASES = [
    ("plan, 1,024 devices", [*PLAN, "a100-80gb:128x8"], 2, None),
    ("plan, 512 + 512 devices of two kinds", [*PLAN, "h100-sxm:64x8+a100-80gb:64x8"], 2, None),
    ("plan, 384 + 384 + 256 of three kinds", [*PLAN, "h100-sxm:48x8+a100-80gb:48x8+a100-40gb:32x8"], 2, None),
    ("simulate, 16,384 devices",
     [*SIMULATE, "--cluster", "h100-sxm:2048x8", "--layout", "fsdp=128,tp=8,pp=16", "--batch", "2048"], 10, 1024),
    ("simulate, 100,352 devices",
     [*SIMULATE, "--cluster", "h100-sxm:12544x8", "--layout", "fsdp=784,tp=8,pp=16", "--batch", "12544"], 10, 1024),
    ("simulate, 16,384 devices, none like another",
     [*SIMULATE, "--cluster", "h100-sxm:2048x8", "--layout", "fsdp=128,tp=8,pp=16", "--batch", "2048", *UNEVEN], 10, 1024),
]


def run(command):
    """Wall seconds and the process' peak of memory in MiB."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{errors}")
    return seconds, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--echelon", default=ROOT / "build" / "bin" / "echelon", help="the program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    runs = {case[0]: [] for case in CASES}
    for _ in range(arguments.rounds):
        for name, command, _, _ in CASES:
            runs[name].append(run([arguments.echelon, *command]))
    results = {}
    print(f"{'':46} {'seconds':>8}  {'least to most':>14}  {'MiB':>6}  asked")
    for name, _, limit, memory in CASES:
        seconds = [one[0] for one in runs[name]]
        most = max(one[1] for one in runs[name])
        results[name] = {
            "seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds),
            "mebibytes": most, "asked_seconds": limit, "asked_mebibytes": memory}
        asked = "" if limit is None else f"{limit} s" + ("" if memory is None else f", {memory} MiB")
        print(f"{name:46} {statistics.median(seconds):8.2f}  {min(seconds):5.2f} to {max(seconds):5.2f}  {most:6.0f}  {asked}")
    if arguments.json:
        machine = {"cores": os.cpu_count(), "load_average_at_start": load}
        Path(arguments.json).write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
