#!/usr/bin/env python3
"""What faults cost a job: a campaign against the release programs.

  chaos.py [--build FOLDER] [--seed N] [--only ROW …] [--tries N] [--minutes M]
           [--json FILE] [--check]

Four ranks train the digits. The rows; the last three only when --only names them:

  kill       kill -9 of a random rank at a random moment (also while ranks start, save or
             end), until the job is done: time to the next step, steps that are repeated;
             losses and weights must equal those of a run that nothing disturbed
  stop       SIGSTOP of a random rank: time to the next step
  term       SIGTERM to launcher and ranks at once: saved, exit code 75, how long
  flip       a kill, and a flipped bit in the newest copy in memory: found, and which step
             is used instead
  resize     `echelon job resize` to a random number of ranks at a random moment: time to the
             next step; losses must equal those of a job that kept its ranks
  cost       steps of a job that copies its state to memory, over those of one that does not
  fault15    a kill each 15 s for M minutes: steps done over those of an undisturbed job that
             runs beside it, so that both have what other programs leave of the machine
  fault300   the same with a kill each 5 minutes
  alarms     M minutes without a fault, beside four busy loops for each core: restarts
  torchrun   kill -9 of a random rank of a DistributedDataParallel job under torchrun, in turn
             with `echelon train`: time to the first step, and from the kill to the next step,
             for which each job has 60 s (needs `make extras`)

A time is from the signal to the line of the next step in the run's metrics. --check: exits
with 1 when a fault cost more than it may (steps, not time). tests/chaos uses this file."""
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4


class Job:
    """A job in a folder of its own, and its processes."""

    def __init__(self, command, folder, kind, environment=None):
        self.folder, self.kind = folder, kind
        self.log = open(folder / "output", "ab")
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=folder, stdout=self.log, stderr=self.log,
                                        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})

    def done(self):
        return self.process.poll() is not None

    def output(self):
        return (self.folder / "output").read_text(errors="replace")

    def ranks(self):
        """The ranks' processes, by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_text()
                if self.kind not in command or f"{self.folder}" not in command:
                    continue
                variables = (entry / "environ").read_text().split("\0")
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == 0:
                    continue
            except (OSError, ValueError):
                continue  # It ended between two reads.
            for variable in variables:
                if variable.startswith("RANK="):
                    found[int(variable[5:])] = int(entry.name)
        return found

    def last_step(self):
        """The step of the last whole line of the metrics; 0 without one."""
        for path in (self.folder / "run/metrics.jsonl", self.folder / "metrics.jsonl"):
            try:
                with open(path, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                    lines = file.read().split(b"\n")[:-1]
            except OSError:
                continue
            for line in reversed(lines):
                step = re.match(rb'\{"step":(\d+)', line)
                if step:
                    return int(step.group(1))
        return 0

    def wait_until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.done():
                return condition()
            time.sleep(0.004)
        return False

    def kill(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Campaign:
    def __init__(self, build, seed):
        self.echelon = build / "bin/echelon"
        self.random = random.Random(seed)
        self.top = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.count = 0
        self.jobs = []

    def close(self):
        """Ends jobs that are still there, and removes all folders."""
        for job in self.jobs:
            if not job.done():
                job.process.kill()
                job.process.wait()
        shutil.rmtree(self.top, ignore_errors=True)

    def folder(self):
        self.count += 1
        folder = self.top / str(self.count)
        folder.mkdir()
        return folder

    def train(self, steps, settings, restarts=100000, wrapper=()):
        folder = self.folder()
        words = [*wrapper, self.echelon, "train", ROOT / "examples/configs/digits.toml", "-n", str(RANKS),
                 "--max-restarts", str(restarts)]
        for one in ["train.epochs=0", f"train.steps={steps}", f"train.run={folder}/run", *settings]:
            words += ["--set", one]
        return self.start([str(word) for word in words], folder, "echelon-train")

    def start(self, *arguments):
        self.jobs.append(Job(*arguments))
        return self.jobs[-1]

    def undisturbed(self, steps, settings=()):
        job = self.train(steps, settings)
        job.process.wait()
        return job

    def fault(self, job, act, settle=(0.1, 1.0)):
        """Waits a random while, acts on a random rank, and returns (seconds until a step that
        was not done before, steps done again), or nothing when the job was over."""
        time.sleep(self.random.uniform(*settle))
        ranks = job.ranks()
        if len(ranks) < RANKS or job.done():
            job.wait_until(lambda: len(job.ranks()) == RANKS, 5)
            ranks = job.ranks()
        if not ranks or job.done():
            return None
        before = job.last_step()
        began = time.monotonic()
        seen = job.output().count("restart ")
        act(self.random.choice(sorted(ranks.values())))
        if not job.wait_until(lambda: job.output().count("restart ") > seen and job.last_step() > before):
            return None if job.done() else (float("inf"), 0)
        seconds = time.monotonic() - began
        starts = re.findall(r"restart \d+ of \d+, from (?:step (\d+)|the start)", job.output())
        return seconds, max(0, before - int(starts[-1] or 0)) if starts else 0


def is_running(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def kill_rank(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def spread(seconds):
    ordered = sorted(seconds)
    return {"tries": len(ordered), "median": statistics.median(ordered),
            "p95": ordered[max(0, int(len(ordered) * 0.95 + 0.5) - 1)], "largest": ordered[-1]}


def contents(campaign, job):
    shown = subprocess.run([campaign.echelon, "checkpoint", "show", job.folder / "run", "--json"],
                           capture_output=True, text=True)
    return json.loads(shown.stdout)["content_hash"] if shown.returncode == 0 else shown.stderr


def losses(job):
    found = {}
    for line in (job.folder / "run/metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "loss" in values and "step_seconds" in values:
            found.setdefault(values["step"], []).append(values["loss"])
    return found


def row_kill(campaign, tries=100):
    settings = ["elastic.memory_steps=1", "checkpoint.every_steps=200"]
    seconds, repeated, equal, jobs = [], [], 0, 0
    steps = max(400, 30 * tries)
    plain = campaign.undisturbed(steps, settings)
    while len(seconds) < tries:
        job = campaign.train(steps, settings)
        job.wait_until(lambda: job.last_step() > 0)
        here = 0
        while len(seconds) < tries:
            # One in four comes while the ranks start.
            settle = (0.0, 0.5) if campaign.random.random() < 0.25 else (0.1, 1.5)
            found = campaign.fault(job, kill_rank, settle)
            if found is None:
                break
            seconds.append(found[0])
            repeated.append(found[1])
            here += 1
        code = job.process.wait()
        jobs += 1
        equal += code == 0 and losses(job) == losses(plain) and contents(campaign, job) == contents(campaign, plain)
        if code != 0:
            print(job.output()[-2000:], file=sys.stderr)
    return {**spread(seconds), "steps repeated": max(repeated), "jobs": jobs, "jobs equal": equal,
            "right": max(repeated) <= 1 and jobs == equal}


def row_stop(campaign, tries=10):
    job = campaign.train(1000000, ["elastic.memory_steps=1"])
    job.wait_until(lambda: job.last_step() > 100)
    seconds = [campaign.fault(job, lambda pid: os.kill(pid, signal.SIGSTOP))[0] for _ in range(tries)]
    job.kill()
    return {**spread(seconds), "right": max(seconds) < 60}


def row_term(campaign, tries=100):
    seconds, saved, codes = [], 0, []
    for _ in range(tries):
        job = campaign.train(1000000, [])
        job.wait_until(lambda: job.last_step() > 0)
        time.sleep(campaign.random.uniform(0, 0.5))
        began = time.monotonic()
        for pid in [job.process.pid, *job.ranks().values()]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        codes.append(job.process.wait())
        seconds.append(time.monotonic() - began)
        shown = subprocess.run([campaign.echelon, "checkpoint", "show", job.folder / "run", "--json"],
                               capture_output=True, text=True)
        saved += shown.returncode == 0 and json.loads(shown.stdout)["step"] == job.last_step()
    return {**spread(seconds), "exit code 75": codes.count(75), "last step saved": saved,
            "right": codes.count(75) == saved == tries}


def newest_copy(launcher, rank):
    """The step and the file of a rank's newest copy in the memory of the launcher."""
    found = []
    for link in Path(f"/proc/{launcher}/fd").iterdir():
        if not os.readlink(link).startswith(f"/memfd:echelon-record-{rank} "):
            continue
        text = link.read_text()
        step = re.search(r'"step":\s*(\d+)', text)
        names = re.findall(r'"name":\s*"(\d+)"', text)
        if step and names:
            found.append((int(step.group(1)), f"/proc/{launcher}/fd/{names[-1]}"))
    return max(found)


def row_flip(campaign, tries=100):
    found, lost = 0, []
    job = campaign.train(1000000, ["elastic.memory_steps=1"])
    for _ in range(tries):
        start = job.last_step()
        job.wait_until(lambda: job.last_step() > start + 30)
        # The launcher waits, so that nothing reads the copies before the bit is flipped.
        os.kill(job.process.pid, signal.SIGSTOP)
        for pid in job.ranks().values():
            kill_rank(pid)
        job.wait_until(lambda: not job.ranks())
        step, name = newest_copy(job.process.pid, campaign.random.randrange(RANKS))
        with open(name, "r+b") as file:
            at = campaign.random.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << campaign.random.randrange(8)]))
        before = len(job.output())
        os.kill(job.process.pid, signal.SIGCONT)
        job.wait_until(lambda: re.search(r"\nresumes from step|goes on without", job.output()[before:]))
        output = job.output()[before:]
        used = re.search(r"resumes from step (\d+) in memory", output)
        # A step that other ranks have not written whole is no candidate: nobody reads the bit.
        found += f"the copy of step {step} in memory is damaged" in output or (used and int(used.group(1)) < step)
        lost.append(step - int(used.group(1)) if used else step)
    job.kill()
    return {"tries": tries, "found": found, "steps lost": max(lost), "right": found == tries}


def rate(job, seconds):
    """Steps a second, from the first line on."""
    job.wait_until(lambda: job.last_step() > 50)
    first, began = job.last_step(), time.monotonic()
    time.sleep(seconds)
    steps = job.last_step() - first
    passed = time.monotonic() - began
    return steps / passed


def row_cost(campaign, tries=5):
    ratios = {"auto": [], "every step": []}
    for _ in range(tries):
        rates = {}
        for name, settings in (("off", ["elastic.memory=off"]), ("auto", []), ("every step", ["elastic.memory_steps=1"])):
            job = campaign.train(1000000, settings)
            rates[name] = rate(job, 6)
            job.kill()
        for name in ratios:
            ratios[name].append(rates[name] / rates["off"])
    return {f"speed with copies, {name}": f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            for name, values in ratios.items()}


def row_resize(campaign, tries=20):
    """Losses of all steps must be those of an undisturbed job, and each step be done once."""
    steps = max(400, 60 * tries)
    settings = ["train.batch=24", "model.dtype=float64"]
    plain = losses(campaign.undisturbed(steps, settings))
    seconds, furthest, once, size = [], 0, True, RANKS
    while len(seconds) < tries:
        job = campaign.train(steps, settings)
        job.wait_until(lambda: job.last_step() > 0)
        size = RANKS
        while len(seconds) < tries:
            time.sleep(campaign.random.uniform(0.1, 0.5))
            size = campaign.random.choice([n for n in (1, 2, 3, 4) if n != size])
            began = time.monotonic()
            asked = subprocess.run([campaign.echelon, "job", "resize", job.folder / "run", str(size)],
                                   capture_output=True, text=True)
            if asked.returncode != 0:
                break
            if not job.wait_until(lambda: f"\nechelon: {size} rank" in job.output().rsplit("\nresumes from", 1)[0]
                                  and len(job.ranks()) == size):
                break
            before = job.last_step()
            if not job.wait_until(lambda: job.last_step() > before):
                break
            seconds.append(time.monotonic() - began)
        once &= job.process.wait() == 0
        found = losses(job)
        once &= sorted(found) == sorted(plain) and all(len(values) == 1 for values in found.values())
        furthest = max(furthest, max(abs(found[step][0] / plain[step][0] - 1) for step in found))
    return {**spread(seconds), "largest relative difference of a loss": furthest, "each step once": once,
            "right": once and furthest < 1e-9}


def effective(campaign, minutes, every):
    settings = ["elastic.memory_steps=1"]
    plain, job = (campaign.train(100000000, settings) for _ in range(2))
    for one in (plain, job):
        one.wait_until(lambda: one.last_step() > 50)
    before, began = (plain.last_step(), job.last_step()), time.monotonic()
    seconds, repeated = [], []
    while time.monotonic() - began < 60 * minutes:
        # In the middle, so that what follows a fault counts.
        last = time.monotonic()
        found = campaign.fault(job, kill_rank, (every / 2, every / 2))
        if found:
            seconds.append(found[0])
            repeated.append(found[1])
        time.sleep(max(0, last + every - time.monotonic()))
    after, passed = (plain.last_step(), job.last_step()), time.monotonic() - began
    restarts = [one.output().count("restart ") for one in (plain, job)]
    for one in (plain, job):
        one.kill()
    steps = [last - first for first, last in zip(before, after)]
    return {"minutes": passed / 60, **spread(seconds), "steps repeated": max(repeated), "steps": steps[1],
            "steps undisturbed": steps[0], "effective": steps[1] / steps[0],
            "time without a new step": sum(seconds) / passed, "restarts": restarts[1],
            "restarts undisturbed": restarts[0], "load": os.getloadavg()[2]}


def row_fault15(campaign, minutes=2):
    return effective(campaign, minutes, 15)


def row_fault300(campaign, minutes=20):
    return effective(campaign, minutes, 300)


def row_alarms(campaign, minutes=20):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
             for _ in range(4 * len(os.sched_getaffinity(0)))]
    try:
        job = campaign.train(100000000, [])
        began, last, longest = time.monotonic(), 0, 0.0
        since = began
        while time.monotonic() - began < 60 * minutes and not job.done():
            time.sleep(0.01)
            now, step = time.monotonic(), job.last_step()
            if step != last:
                longest = max(longest, now - since if last else 0)
                last, since = step, now
        code = job.kill()
    finally:
        for loop in loops:
            loop.kill()
    restarts = job.output().count("restart ")
    return {"minutes": minutes, "cores": len(os.sched_getaffinity(0)), "busy loops": len(loops), "steps": last,
            "longest pause": longest, "restarts": restarts, "load": os.getloadavg()[2],
            "right": restarts == 0 and code == 75}


# What torchrun's users set where a rank's end must not end the job.
TORCHRUN = {
    "torchrun": ([], {}),
    "torchrun, tuned": (["--standalone", "--monitor-interval", "0.05"],
                        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
}


def row_torchrun(campaign, tries=10):
    cache = Path(os.environ.get("ECHELON_CACHE") or
                 Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon")
    torchrun = cache / "pytorch-2.11.0/bin/torchrun"
    if not torchrun.exists():
        sys.exit(f"{torchrun} is missing: run `make extras` first")
    seconds = {name: [] for name in ["echelon", *TORCHRUN]}
    first = {name: [] for name in seconds}
    for _ in range(tries):
        for name in seconds:
            if name == "echelon":
                job = campaign.train(1000000, ["elastic.memory_steps=1"])
            else:
                words, variables = TORCHRUN[name]
                folder = campaign.folder()
                job = campaign.start([torchrun, *words, f"--nproc-per-node={RANKS}", "--max-restarts=3",
                                      ROOT / "benchmarks/versus_pytorch/torch_restarts.py", folder],
                                     folder, "torch_restarts", variables)
            if not job.wait_until(lambda: job.last_step() > 0, 300):
                raise RuntimeError(f"{name}: no first step: {job.output()[-2000:]}")
            first[name].append(time.monotonic() - job.began)
            time.sleep(campaign.random.uniform(0.5, 1.5))
            old, before = sorted(job.ranks().values()), 0
            began = time.monotonic()
            kill_rank(campaign.random.choice(old))

            def goes_on():
                # A step that the other ranks still end is none of the next ranks.
                nonlocal before, old
                step = job.last_step()
                old = [pid for pid in old if is_running(pid)]
                before = step if old else before
                return step > before and not old

            went_on = job.wait_until(goes_on)
            seconds[name].append(time.monotonic() - began if went_on else float("inf"))
            print(f"{name}: first step {first[name][-1]:.2f} s, next step {seconds[name][-1]:.2f} s", file=sys.stderr)
            if not went_on:
                job.process.kill()
                for pid in job.ranks().values():
                    kill_rank(pid)
            job.kill()
    found = {}
    for name, values in seconds.items():
        went_on = [value for value in values if value != float("inf")]
        found[name] = {"tries": tries, "went on": len(went_on), "first step": statistics.median(first[name])}
        if went_on:
            found[name].update(median=statistics.median(went_on), largest=max(went_on))
    return {**found, "load": os.getloadavg()[2]}


def main():
    rows = {name[4:]: run for name, run in globals().items() if name.startswith("row_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--seed", type=int, default=1)
    short = [name for name in rows if name not in ("fault300", "alarms", "torchrun")]
    parser.add_argument("--only", nargs="+", choices=sorted(rows), default=short)
    parser.add_argument("--tries", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results = {}
    campaign = Campaign(arguments.build.resolve(), arguments.seed)
    try:
        for name in arguments.only:
            takes = rows[name].__code__.co_varnames[1]
            given = getattr(arguments, takes)
            results[name] = rows[name](campaign, **({takes: given} if given else {}))
            values = ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                               for key, value in results[name].items())
            print(f"{name:9} {values}", flush=True)
    finally:
        campaign.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.check and not all(result.get("right", True) for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
