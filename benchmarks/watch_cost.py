#!/usr/bin/env python3
"""What it costs a run to be watched: a step with a watcher and event files over one without.

  watch_cost.py [--build FOLDER] [--rounds N] [--seconds N] [--json FILE]

Runs of the digits on one rank alternate: one as it is by default, and one with
`[train] log = ["tensorboard"]` that `echelon watch` draws on a terminal all the time. Each
round gives one ratio of the median steps. Beside it is the processor time of the watcher, as
a share of the time that it watched: other programs disturb that less."""
import argparse
import json
import os
import pty
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def drain(terminal):
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the watcher has ended
        pass


def watch(echelon, run):
    controller, terminal = pty.openpty()
    process = subprocess.Popen([echelon, "watch", run], stdin=terminal, stdout=terminal,
                               env=dict(os.environ, TERM="xterm"))
    os.close(terminal)
    threading.Thread(target=drain, args=(controller,), daemon=True).start()
    return process


def measure(echelon, folder, seconds, watched):
    """The median step of a run, and the watcher's share of a processor."""
    run = Path(folder) / ("watched" if watched else "alone")
    words = [echelon, "train", ROOT / "examples/configs/digits.toml", "-n", "1", "--overwrite",
             "--set", f"train.run={run}", "--set", "train.epochs=1000000"]
    if watched:
        words += ["--set", 'train.log=["tensorboard"]']
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watcher = watch(echelon, run) if watched else None
    began = time.monotonic()
    time.sleep(seconds)
    share = 0.0
    if watcher:
        watcher.send_signal(signal.SIGINT)
        _, _, used = os.wait4(watcher.pid, 0)
        share = (used.ru_utime + used.ru_stime) / (time.monotonic() - began)
    job.send_signal(signal.SIGTERM)
    job.wait()
    steps = [json.loads(line) for line in open(run / "metrics.jsonl")]
    times = [step["step_seconds"] for step in steps if "loss" in step]
    return statistics.median(times[len(times) // 4:]), share


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    echelon = str(Path(arguments.build) / "bin/echelon")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.rounds):
            one = {}
            for watched in (False, True) if i % 2 == 0 else (True, False):
                step, share = measure(echelon, folder, arguments.seconds, watched)
                one["watched_s" if watched else "alone_s"] = step
                if watched:
                    one["watcher_share"] = share
            one["ratio"] = one["watched_s"] / one["alone_s"]
            rounds.append(one)
            print(f"alone {one['alone_s'] * 1e3:.3f} ms, watched {one['watched_s'] * 1e3:.3f} ms, "
                  f"ratio {one['ratio']:.4f}, watcher {one['watcher_share']:.2%} of a core", flush=True)
    ratio = statistics.median(one["ratio"] for one in rounds)
    print(f"median ratio {ratio:.4f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rounds": rounds, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
