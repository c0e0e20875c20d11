#!/usr/bin/env python3
"""Kills the daemon of a pool at random moments while jobs are submitted.

  pool.py [--build FOLDER] [--kills N] [--submitters N] [--seed N] [--devices N]

Each job adds a line to a file of its own, and makes a folder for each of its slots, which
must not exist. It ignores SIGTERM, and ends within the grace. At the end no job may be lost, have run twice, or have failed, no slot may
have been given twice, and no project may have held more than its limit. Prints what was
done, and the time from a daemon's start to its first answer. Exits with 1 when a rule is
broken."""
import argparse
import collections
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"language": None, "vision": 2, "speech": 3}
POOL = """[pool]
grace = "2s"
[project.language]
guaranteed = 3
[project.vision]
guaranteed = 1
limit = 2
[project.speech]
guaranteed = 1
limit = 3
"""
JOB = """trap "" TERM; echo x >>"$1/ran/$2"; IFS=,
for s in $ECHELON_SLOTS; do mkdir "$1/slots/$s" || echo "$2 $s" >>"$1/clash"; done
sleep 0.$((RANDOM % 4))
for s in $ECHELON_SLOTS; do rmdir "$1/slots/$s"; done"""


class Campaign:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        self.echelon = str(Path(arguments.build) / "bin" / "echelon")
        self.random = random.Random(arguments.seed)
        self.submitted, self.failures, self.stop = 0, [], False
        self.lock = threading.Lock()
        for name in ("ran", "slots"):
            (folder / name).mkdir()
        (folder / "pool.toml").write_text(POOL)

    def ask(self, *words):
        done = subprocess.run([self.echelon, "pool", *words, "--folder", self.folder / "pool"],
                              capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def start_daemon(self):
        began = time.monotonic()
        daemon = subprocess.Popen(
            [self.echelon, "pool", "start", self.folder / "pool.toml", "--folder",
             self.folder / "pool", "--devices", str(self.arguments.devices)],
            stdout=subprocess.PIPE, stderr=open(self.folder / "errors", "ab"), text=True)
        daemon.stdout.readline()
        return daemon, time.monotonic() - began

    def submit_for_ever(self, number):
        choice = random.Random(self.arguments.seed * 1000 + number)
        count = 0
        while not self.stop:
            project = choice.choice(list(LIMITS))
            kind = choice.choice(["--preemptible", "--min-guaranteed=1"])
            name = f"{number}-{count}"
            code, error = self.submit(project, kind, choice, name)
            if code == 0:
                count += 1
                with self.lock:
                    self.submitted += 1
            elif "no pool runs there" not in error:
                self.failures.append(error)
            time.sleep(choice.random() * 0.5)

    def submit(self, project, kind, choice, name):
        done = subprocess.run(
            [self.echelon, "pool", "submit", "--project", project, "-n",
             choice.choice(["1", "1..2"]), kind, "--folder", self.folder / "pool", "--", "bash",
             "-c", JOB, "job", self.folder, name], capture_output=True, text=True)
        return done.returncode, done.stderr

    def run(self):
        daemon, seconds = self.start_daemon()
        starts = [seconds]
        threads = [threading.Thread(target=self.submit_for_ever, args=(i,))
                   for i in range(self.arguments.submitters)]
        for thread in threads:
            thread.start()
        for _ in range(self.arguments.kills):
            time.sleep(self.random.random() * 0.6)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            daemon, seconds = self.start_daemon()
            starts.append(seconds)
        self.stop = True
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + 600
        while json.loads(self.ask("list", "--json")[1])["jobs"]:
            if time.monotonic() > deadline:
                self.failures.append("jobs do not end")
                break
            time.sleep(1)
        self.check()
        daemon.terminate()
        daemon.wait()
        print(f"{self.arguments.kills} kills, {self.arguments.submitters} submitters, "
              f"{self.submitted} jobs; a daemon answers after {statistics.median(starts):.3f} s "
              f"(median), {max(starts):.3f} s (slowest)")

    def check(self):
        ran = list((self.folder / "ran").iterdir())
        # A job whose submission was cut off may have been taken as well.
        if len(ran) < self.submitted:
            self.failures.append(f"{self.submitted - len(ran)} jobs were lost")
        twice = [path.name for path in ran if path.read_text() != "x\n"]
        if twice:
            self.failures.append(f"ran twice: {twice}")
        if (self.folder / "clash").exists():
            self.failures.append("slots given twice: " + (self.folder / "clash").read_text())
        changes = collections.defaultdict(list)
        for one in json.loads(self.ask("history", "--json")[1])["allocations"]:
            changes[one["project"]] += [(one["began"], one["devices"]),
                                        (one["ended"], -one["devices"])]
        for project, limit in LIMITS.items():
            held = most = 0
            for _, devices in sorted(changes[project]):
                held += devices
                most = max(most, held)
            if limit is not None and most > limit:
                self.failures.append(f"{project} held {most} of at most {limit}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--submitters", type=int, default=8)
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="echelon-pool-") as folder:
        campaign = Campaign(arguments, Path(folder))
        campaign.run()
        for failure in campaign.failures[:20]:
            print("broken:", failure)
    sys.exit(1 if campaign.failures else 0)


main()
