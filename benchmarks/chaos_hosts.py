#!/usr/bin/env python3
"""Faults of hosts, and how soon training goes on.

Three hosts are network namespaces with a switch between them, so this needs
root and the program ip. Each has a launcher and one rank, which share a run's
folder and a processor. A time is from the fault to the next step that was not
done before. With --memory nothing is saved on disk, every step is copied to
memory, and the steps that are done again are counted.

usage: benchmarks/chaos_hosts.py [--build build/bin] [--tries 10] [--seed 1]
           [--only killed|first|cut|drain] [--memory] [--json FILE]
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
NUM_HOSTS = 3


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


class Network:
    """Namespaces with a switch between them."""

    def __init__(self):
        self.name = f"chaos{os.getpid()}"
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.name, "link", "set", "switch", "up")
        for host in range(NUM_HOSTS):
            space, cable = f"{self.name}-{host}", self.cable(host)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", cable, "type", "veth", "peer", "name",
                cable + "e")
            run("ip", "link", "set", cable, "netns", self.name)
            run("ip", "-n", self.name, "link", "set", cable, "master", "switch",
                "up")
            run("ip", "link", "set", cable + "e", "netns", space)
            run("ip", "-n", space, "addr", "add", f"10.84.0.{host + 1}/24",
                "dev", cable + "e")
            run("ip", "-n", space, "link", "set", cable + "e", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def cable(self, host):
        return f"ch{os.getpid() % 10**7}{host}"

    def connect(self, host, connected):
        run("ip", "-n", self.name, "link", "set", self.cable(host),
            "up" if connected else "down")

    def close(self):
        for host in range(NUM_HOSTS):
            subprocess.run(["ip", "netns", "del", f"{self.name}-{host}"])
        subprocess.run(["ip", "netns", "del", self.name])


class Job:
    """A job on all hosts that trains until it is stopped."""

    def __init__(self, arguments, network, layout="fsdp=3"):
        self.arguments, self.network, self.layout = arguments, network, layout
        self.folder = tempfile.mkdtemp(prefix="chaos-hosts-")
        self.run = os.path.join(self.folder, "run")
        self.launchers = [None] * NUM_HOSTS
        self.again = []  # steps that were done again, by lost host
        for host in range(NUM_HOSTS):
            self.start(host)
        self.wait(lambda: self.last_step() > 20, "the first steps")

    def start(self, host):
        settings = [
            "train.steps=100000000", "model.name=mlp", "model.dtype=float64",
            "train.epochs=0", "train.eval_every=1000000000",
            "comm.backend=gloo", f"train.run={self.run}"]
        if self.arguments.memory:
            settings += ["train.batch=1200",
                         "checkpoint.every_steps=0", "checkpoint.at_end=false",
                         "elastic.memory_steps=1"]
        else:
            settings += ["train.batch=24", "checkpoint.every_steps=20"]
        words = ["ip", "netns", "exec", f"{self.network.name}-{host}",
                 os.path.join(self.arguments.build, "echelon"), "train",
                 os.path.join(HERE, "../examples/configs/digits.toml"), "-n",
                 "1", "--layout", self.layout, "--nnodes", f"1:{NUM_HOSTS}",
                 "--node-rank", str(host), "--master-addr", "10.84.0.1"]
        for setting in settings:
            words += ["--set", setting]
        log = open(os.path.join(self.folder, f"host-{host}.log"), "a")
        self.launchers[host] = subprocess.Popen(words, stdout=log, stderr=log)

    def last_step(self):
        try:
            with open(os.path.join(self.run, "metrics.jsonl"), "rb") as file:
                file.seek(max(0, os.path.getsize(file.name) - 4000))
                lines = file.read().split(b"\n")
        except OSError:
            return 0
        for line in reversed(lines):
            found = re.search(rb'"step": ?(\d+)', line)
            if found and line.endswith(b"}"):
                return int(found.group(1))
        return 0

    def ranks(self):
        try:
            with open(os.path.join(self.run, "config.toml")) as file:
                return int(re.search(r"^fsdp = (\d+)", file.read(), re.M)[1])
        except (OSError, TypeError):
            return 0

    def wait(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                for host in range(NUM_HOSTS):
                    path = os.path.join(self.folder, f"host-{host}.log")
                    print(open(path).read()[-2000:], file=sys.stderr)
                raise SystemExit(f"{what}: not within {seconds} s")
            time.sleep(0.004)

    def seconds_to_step(self, act, ranks):
        """From act() to a new step of a job with so many ranks."""
        resumed = len(self.resumed())
        before = self.last_step()
        begin = time.monotonic()
        act()
        self.wait(lambda: self.ranks() == ranks, f"{ranks} ranks")
        self.wait(lambda: self.last_step() > before, "a new step")
        seconds = time.monotonic() - begin
        self.wait(lambda: len(self.resumed()) > resumed, "where it went on")
        self.lost = max(0, before - self.resumed()[-1])
        return seconds

    def resumed(self):
        """The steps from which ranks said that they go on, in their order."""
        steps = []
        for host in range(NUM_HOSTS):
            with open(os.path.join(self.folder, f"host-{host}.log")) as log:
                steps += [int(step) for step in re.findall(
                    r"resumes from step (\d+)", log.read())]
        return sorted(steps)

    def coordinator(self):
        """The host whose launcher serves the store of rank 0."""
        for host, launcher in enumerate(self.launchers):
            for pid in children(launcher.pid):
                try:
                    with open(f"/proc/{pid}/environ", "rb") as file:
                        if b"\0RANK=0\0" in file.read():
                            return host
                except OSError:
                    pass
        return 0

    def end(self):
        for launcher in self.launchers:
            if launcher and launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)
                launcher.wait()
        time.sleep(0.5)
        shutil.rmtree(self.folder, ignore_errors=True)


def children(pid):
    found, level = [], [pid]
    while level:
        next_level = []
        for one in level:
            try:
                with open(f"/proc/{one}/task/{one}/children") as file:
                    next_level += [int(word) for word in file.read().split()]
            except OSError:
                pass
        found += next_level
        level = next_level
    return found


def kill(job, host):
    job.launchers[host].send_signal(signal.SIGKILL)
    job.launchers[host].wait()


def lose_and_come(job, random_numbers, pick, lose):
    """Times of going on without a host and of taking it in again."""
    time.sleep(random_numbers.uniform(2.2, 3.5))
    host = pick()
    lost = job.seconds_to_step(lambda: lose(host), NUM_HOSTS - 1)
    job.again.append(job.lost)
    time.sleep(random_numbers.uniform(2.2, 3.0))
    come = job.seconds_to_step(lambda: job.start(host), NUM_HOSTS)
    return lost, come


def row_killed(job, random_numbers):
    def pick():
        first = job.coordinator()
        return random_numbers.choice(
            [host for host in range(NUM_HOSTS) if host != first])
    lost, come = lose_and_come(job, random_numbers, pick,
                               lambda host: kill(job, host))
    return {"killed": lost, "come": come}


def row_first(job, random_numbers):
    lost, come = lose_and_come(job, random_numbers, job.coordinator,
                               lambda host: kill(job, host))
    return {"first_killed": lost, "come": come}


def row_cut(job, random_numbers):
    time.sleep(random_numbers.uniform(2.2, 3.5))
    host = random_numbers.randrange(NUM_HOSTS)
    lost = job.seconds_to_step(lambda: job.network.connect(host, False),
                               NUM_HOSTS - 1)
    job.again.append(job.lost)
    time.sleep(random_numbers.uniform(4.0, 6.0))
    come = job.seconds_to_step(lambda: job.network.connect(host, True),
                               NUM_HOSTS)
    return {"cut": lost, "mended": come}


def row_drain(job, random_numbers):
    time.sleep(random_numbers.uniform(2.2, 3.5))
    host = random_numbers.randrange(NUM_HOSTS)

    def drain():
        run("ip", "netns", "exec", f"{job.network.name}-{host}",
            os.path.join(job.arguments.build, "echelon"), "job", "drain",
            job.run)
    left = job.seconds_to_step(drain, NUM_HOSTS - 1)
    if job.launchers[host].wait() != 75:
        raise SystemExit("a drained host did not end with 75")
    time.sleep(2.2)
    return {"drained": left,
            "come": job.seconds_to_step(lambda: job.start(host), NUM_HOSTS)}


ROWS = {"killed": row_killed, "first": row_first, "cut": row_cut,
        "drain": row_drain}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default=os.path.join(HERE, "../build/bin"))
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(ROWS))
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ.setdefault("ECHELON_TOKEN", "5" * 64)
    random_numbers = random.Random(arguments.seed)
    network = Network()
    seconds, again = {}, {}
    try:
        for name in [arguments.only] if arguments.only else ROWS:
            job = Job(arguments, network)
            try:
                for _ in range(arguments.tries):
                    for kind, value in ROWS[name](job, random_numbers).items():
                        seconds.setdefault(kind, []).append(round(value, 3))
            finally:
                job.end()
            if job.again:
                again[name] = job.again
                print(f"{name:14} steps done again: {sorted(job.again)}",
                      flush=True)
            for kind, values in seconds.items():
                ordered = sorted(values)
                p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
                print(f"{kind:14} {len(values):3} times: median "
                      f"{statistics.median(values):.2f} s, p95 {p95:.2f} s, "
                      f"largest {ordered[-1]:.2f} s", flush=True)
    finally:
        network.close()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"hosts": NUM_HOSTS, "memory": arguments.memory,
                       "seconds": seconds, "done_again": again}, file,
                      indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
