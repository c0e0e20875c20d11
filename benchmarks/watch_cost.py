#!/usr/bin/env python3
"""What it costs a run to be watched: a step with watchers and all files over one without.

  watch_cost.py [--build FOLDER] [--pairs N] [--seconds N] [--batch N] [--json FILE]

Two runs of the digits, on one rank each, take turns: one process is stopped (SIGSTOP) while
the other trains for a second. The first run is alone: `[train] watch_seconds = 0`. The second
records a step every 5 s and writes `[train] log = ["tensorboard", "otlp"]`, and while it has its
turn, `echelon watch` draws it on a terminal and `echelon watch --web` gives its page each second.
Each turn of the second run is compared with the mean of the first run's turns before and after
it, so that what else the machine does disturbs both alike. Two ratios are taken: of the time of
a step (the median of the turn), and of the processor time of the rank's process for a step,
in which waits for other programs do not count. The result is the median of each over all turns,
with an interval of 95 % by resampling. Beside it is the processor time of the two watchers, as a
share of a core."""
import argparse
import json
import os
import pty
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def drain(terminal):
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the watcher has ended
        pass


def processor_seconds(pid):
    """Of all threads of a process, so far: the scheduler's count in nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            pass
    return total * 1e-9


class Run:
    """A run whose rank waits until it has its turn."""

    def __init__(self, echelon, folder, name, batch, settings):
        self.folder = Path(folder) / name
        words = [echelon, "train", ROOT / "examples/configs/digits.toml", "-n", "1",
                 "--max-restarts", "0", "--set", f"train.run={self.folder}",
                 # The watchers have a core of their own, as on a host with some to spare.
                 "--set", f"train.threads={max(1, os.cpu_count() - 1)}",
                 "--set", "train.epochs=1000000", "--set", f"train.batch={batch}",
                 # A pause shows where it falls into a step.
                 "--set", "train.eval_every=1000000000"]
        for one in settings:
            words += ["--set", one]
        self.job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.stops = []  # how many lines the metrics had
        self.rank = 0
        while self.rank <= 0 or self.steps() < 50:
            time.sleep(0.2)
            self.rank = self.process()
        self.stop()

    def process(self):
        """Of the rank; 0: it has not started."""
        try:
            return json.loads((self.folder / "status/rank-0.json").read_text())["ranks"][0]["pid"]
        except (OSError, LookupError):
            return 0

    def steps(self):
        try:
            return sum(1 for _ in open(self.folder / "metrics.jsonl"))
        except OSError:
            return 0

    def stop(self):
        os.kill(self.rank, signal.SIGSTOP)
        time.sleep(0.02)  # a system call that it is in may end
        self.stops.append(self.steps())

    def turn(self, seconds):
        before = processor_seconds(self.rank)
        os.kill(self.rank, signal.SIGCONT)
        time.sleep(seconds)
        self.stop()
        return processor_seconds(self.rank) - before

    def turns(self):
        """The step times of each turn. Lines are written up to 50 ms late, so a turn may have
        the last steps of the turn before, and the step with the pause in it: the median of some
        hundred steps is the same without it."""
        lines = [json.loads(line) for line in open(self.folder / "metrics.jsonl")]
        return [[line["step_seconds"] for line in lines[before:after] if "loss" in line]
                for before, after in zip(self.stops, self.stops[1:])]

    def end(self):
        os.kill(self.rank, signal.SIGCONT)
        self.job.send_signal(signal.SIGTERM)
        self.job.wait()


class Watchers:
    """A terminal and a browser, which look while the run has its turn."""

    def __init__(self, echelon, run):
        controller, terminal = pty.openpty()
        self.screen = subprocess.Popen([echelon, "watch", run.folder], stdin=terminal,
                                       stdout=terminal, env=dict(os.environ, TERM="xterm"))
        os.close(terminal)
        threading.Thread(target=drain, args=(controller,), daemon=True).start()
        port = random.randrange(20000, 60000)
        self.server = subprocess.Popen([echelon, "watch", run.folder, "--web", str(port)],
                                       stdout=subprocess.PIPE, text=True)
        self.address = re.search(r"http://\S+", self.server.stdout.readline()).group()
        self.looks = threading.Event()
        threading.Thread(target=self.browse, daemon=True).start()

    def browse(self):
        while self.looks.wait():
            try:
                urllib.request.urlopen(self.address, timeout=5).read()
            except OSError:
                return
            time.sleep(1)

    def let(self, look):
        self.looks.set() if look else self.looks.clear()
        for one in (self.screen, self.server):
            one.send_signal(signal.SIGCONT if look else signal.SIGSTOP)

    def end(self):
        self.let(True)
        used = 0
        for one in (self.screen, self.server):
            one.send_signal(signal.SIGINT)
            _, _, usage = os.wait4(one.pid, 0)
            used += usage.ru_utime + usage.ru_stime
        return used


def ratios(alone, watched):
    """Each turn over the mean of its neighbours."""
    near = [(one, *alone[i:i + 2]) for i, one in enumerate(watched) if len(alone) > i + 1]
    return [2 * one / (before + after) for one, before, after in near if one and before and after]


def interval(ratios):
    """The median, and where 95 % of the medians of resampled pairs lie."""
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "low": draws[50], "high": draws[1950]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--json")
    given = parser.parse_args()
    echelon = str(Path(given.build) / "bin/echelon")
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run(echelon, folder, "alone", given.batch, ["train.watch_seconds=0"]),
                Run(echelon, folder, "watched", given.batch, ['train.log=["tensorboard", "otlp"]'])]
        watchers = Watchers(echelon, runs[1])
        watchers.let(False)
        used = [[], []]
        for turn in range(2 * given.pairs + 1):
            which = turn % 2
            watchers.let(which == 1)
            used[which].append(runs[which].turn(given.seconds))
            watchers.let(False)
            loads.append(os.getloadavg()[0])
        watching = watchers.end() / (given.pairs * given.seconds)
        for run in runs:
            run.end()
        turns = [run.turns() for run in runs]
    # A turn of few steps says little.
    wall = [[statistics.median(turn) if len(turn) > 4 else None for turn in one] for one in turns]
    each = [[spent / len(turn) if len(turn) > 4 else None for spent, turn in zip(*one)]
            for one in zip(used, turns)]
    result = {"pairs": len(ratios(*wall)), "step_seconds": statistics.median(filter(None, wall[0])),
              "time": interval(ratios(*wall)), "processor": interval(ratios(*each)),
              "watchers_share_of_a_core": watching,
              "load": {"least": min(loads), "median": statistics.median(loads), "most": max(loads)},
              "cores": os.cpu_count()}
    print(f"{result['pairs']} pairs, a step {result['step_seconds'] * 1e3:.2f} ms, load "
          f"{result['load']['median']:.1f} on {result['cores']} cores")
    for name, what in (("time", "time of a step"), ("processor", "processor time of a step")):
        one = result[name]
        print(f"{what}: ratio {one['median']:.4f} ({one['low']:.4f} to {one['high']:.4f})")
    print(f"the watchers: {watching:.2%} of a core")
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
