#!/usr/bin/env python3
"""The first hour on a machine with GPUs, unattended: what runs, what it computes,
and how fast.

  gpu_node.py --build FOLDER [--out FOLDER] [--gpus N] [--ranks N] [--minutes M]
              [--only REGEX]

FOLDER has bin/echelon and bin/echelon-train. The output folder gets a log for each
check, the runs with their reports, results.json and a page, index.html. Exits with 1
when a check failed.

Checks: the machine; collectives of 2, 4 and 8 ranks; `bench --save`; `verify` of every
kind of layout that the GPUs allow; gpt2 trained in each, with the time of a step and its
tokens per second; the losses of 50 steps with blocking launches and without the caching
allocator, which must be equal; SIGTERM; kill -9 of a rank.

--ranks: more ranks than GPUs share them, each as a host of its own, and NCCL connects
them by sockets. So one GPU shows what several compute, though not how fast."""
import argparse
import html
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

GPT2 = """[model]
name = "gpt"
vocab_size = {vocabulary}
layers = {layers}
hidden_size = {hidden}
heads = {heads}
max_positions = {sequence}
[data]
name = "text"
tokenizer = "bytes"
sources = ["{text}"]
sequence = {sequence}
[train]
run = "{run}"
steps = 30
batch = 8
log_every = 1
timeline_steps = 10
[optimizer]
learning_rate = 1e-3
clip_norm = 1.0
"""
REAL = dict(vocabulary=50304, layers=12, hidden=768, heads=12, sequence=1024)
SMALL = dict(vocabulary=320, layers=4, hidden=32, heads=4, sequence=16)


# What makes the model one of four experts, two for a token.
EXPERTS = ["model.name=mixtral", "model.intermediate_size=1536", "model.experts=4",
           "model.experts_per_token=2"]


def layouts(ranks):
    """Every kind of parallelism that so many ranks allow: (layout, settings)."""
    found = [("dp=1", [])]
    if ranks >= 2:
        found += [(f"dp={ranks}", []), (f"fsdp={ranks}", []), ("tp=2", []), ("pp=2", []),
                  ("pp=2", ["layout.schedule=interleaved"]),
                  ("cp=2", ["layout.context=ring"]), ("cp=2", ["layout.context=all_gather"]),
                  ("cp=2", ["layout.context=ulysses"]), ("ep=2", EXPERTS)]
    if ranks >= 4:
        found += [("fsdp=2,tp=2", []), ("pp=4", []), ("fsdp=2,pp=2", []), ("cp=2,tp=2", []),
                  ("cp=4", ["layout.context=ulysses_ring", "layout.context_ulysses=2"]),
                  ("fsdp=2,ep=2", EXPERTS)]
    if ranks >= 8:
        found += [("fsdp=2,tp=2,pp=2", []), ("dp=2,fsdp=2,tp=2", [])]
    return found


def ranks_of(layout):
    return math.prod(int(part.split("=")[1]) for part in layout.split(","))


def free_port():
    """A port that no outgoing connection takes: those have 32768 and above on Linux."""
    while True:
        with socket.socket() as one:
            try:
                one.bind(("", port := random.randrange(10000, 20000)))
                return port
            except OSError:
                pass


class Launch:
    """The processes of one job: a launcher or, with ranks that share GPUs, one for each rank."""

    def __init__(self, jobs):
        self.jobs = jobs

    def poll(self):
        return None if any(job.poll() is None for job in self.jobs) else self.code()

    def code(self):
        """That of the first launcher that failed."""
        return next((job.returncode for job in self.jobs if job.returncode != 0), 0)

    def wait(self, seconds):
        end = time.time() + seconds
        for job in self.jobs:
            job.wait(max(0.1, end - time.time()))
        return self.code()

    def terminate(self):
        for job in self.jobs:
            if job.poll() is None:
                job.terminate()

    def kill(self):
        for job in self.jobs:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            job.wait()


class Node:
    def __init__(self, arguments):
        self.arguments = arguments
        self.out = Path(arguments.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.bin = Path(arguments.build).resolve() / "bin"
        self.end = time.time() + 60 * arguments.minutes
        self.rows = []
        self.echelon = str(self.bin / "echelon")
        (self.out / "text.txt").write_text(
            " ".join(str(i * i) for i in range(200_000 if not arguments.small else 2_000)))
        self.config = self.out / "gpt2.toml"
        self.config.write_text(GPT2.format(
            text=self.out / "text.txt", run=self.out / "run", **(SMALL if arguments.small else REAL)))

    # --- Running ----------------------------------------------------------------

    def check(self, name, body, *more):
        """Runs `body`, which returns (ok, text), and keeps the row."""
        if not re.search(self.arguments.only, name):
            return
        if time.time() > self.end:
            self.keep(name, "skipped", "the time is up", 0)
            return
        begin = time.time()
        try:
            ok, text = body(name, *more)
            status = "passed" if ok else "FAILED"
        except Exception as error:  # the other checks go on
            status, text = "FAILED", f"{type(error).__name__}: {error}"
        self.keep(name, status, text, time.time() - begin)

    def keep(self, name, status, text, seconds):
        self.rows.append(dict(check=name, status=status, text=text, seconds=round(seconds, 1)))
        print(f"{status:8} {name:44} {seconds:6.1f} s  {text}", flush=True)
        self.write()

    def log_of(self, name):
        return self.out / "logs" / (re.sub(r"[^\w=.-]+", "_", name) + ".txt")

    def start(self, name, words, ranks=1, environment={}):
        """Starts `echelon` with `words` on so many ranks."""
        log = self.log_of(name)
        log.parent.mkdir(exist_ok=True)
        file = log.open("w")

        def launch(words, more):
            file.write("$ " + " ".join(words) + "\n")
            file.flush()
            return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=self.out,
                                    env={**os.environ, **environment, **more}, start_new_session=True)

        words = [self.echelon, *words]
        if ranks <= self.arguments.gpus:
            return Launch([launch(words, {})])
        port = str(free_port())
        hosts = ["--nnodes", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port]
        return Launch([
            launch([*words, "-n", "1", *hosts, "--node-rank", str(i)],
                   {"CUDA_VISIBLE_DEVICES": str(i % self.arguments.gpus), "NCCL_HOSTID": f"host-{i}",
                    "NCCL_SOCKET_IFNAME": "lo"})
            for i in range(ranks)])

    def run(self, name, words, ranks=1, environment={}, seconds=300):
        job = self.start(name, words, ranks, environment)
        try:
            return job.wait(min(seconds, max(10, self.end - time.time())))
        except subprocess.TimeoutExpired:
            job.kill()
            return -1

    def last_line(self, name):
        lines = [line for line in self.log_of(name).read_text().splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def train(self, layout, settings, run):
        words = ["train", str(self.config), "--layout", layout]
        for one in [f"train.run={run}", "train.overwrite=true", *self.device(), *settings]:
            words += ["--set", one]
        return words

    def device(self):
        return [] if self.arguments.device == "cuda" else [f"comm.device={self.arguments.device}"]

    def steps(self, run):
        file = Path(run) / "metrics.jsonl"
        if not file.exists():
            return []
        found = []
        for line in file.read_text().splitlines():
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "step_seconds" in value:
                found.append(value)
        return found

    # --- Checks -----------------------------------------------------------------

    def machine(self, name):
        log = self.log_of(name)
        log.parent.mkdir(exist_ok=True)
        text = ""
        for words in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], [self.echelon, "doctor"]):
            try:
                text += "$ " + " ".join(words) + "\n" + subprocess.run(
                    words, capture_output=True, text=True, timeout=120).stdout
            except (OSError, subprocess.TimeoutExpired) as error:
                text += f"{error}\n"
        log.write_text(text)
        return True, f"{self.arguments.gpus} devices"

    def collectives(self, name, ranks):
        backend = "nccl" if self.arguments.device == "cuda" else "gloo"
        words = ["bench", "collectives", "--backend", backend, "--bytes", "4KiB,1MiB,64MiB"]
        if ranks <= self.arguments.gpus:
            words += ["-n", str(ranks)]
        ok = self.run(name, words, ranks) == 0
        return ok, "see the log for the rates" if ok else self.last_line(name)

    def bench(self, name):
        words = ["bench", "--save", str(self.out / "here.toml"), "-n", str(self.arguments.gpus)]
        ok = self.run(name, words) == 0
        return ok, "here.toml" if ok else self.last_line(name)

    def verify(self, name, layout, settings):
        words = ["verify", str(self.config), "--layout", layout, "--steps", "2"]
        sizes = dict(layers=4, hidden_size=48, heads=4, vocab_size=320, max_positions=32)
        for one in [f"model.{key}={value}" for key, value in sizes.items()] + [
                "data.sequence=32", *self.device(), *settings]:
            words += ["--set", one]
        ok = self.run(name, words, ranks_of(layout)) == 0
        return ok, self.last_line(name)

    def trained(self, name, layout, settings):
        run = self.out / "runs" / re.sub(r"[^\w=.-]+", "_", layout + "".join(settings))
        ranks = ranks_of(layout)
        batch = 8 * ranks if not self.arguments.small else 8
        ok = self.run(name, self.train(layout, [f"train.batch={batch}", *settings], run), ranks) == 0
        steps = self.steps(run)
        if not ok or len(steps) < 10:
            return False, self.last_line(name)
        if not (run / "report.html").exists() or not (run / "timeline.json").exists():
            return False, "the report or the timeline is missing"
        late = steps[len(steps) // 2:]
        seconds = statistics.median(one["step_seconds"] for one in late)
        tokens = statistics.median(one["tokens_per_second"] for one in late)
        return True, f"{1000 * seconds:.1f} ms a step, {tokens:,.0f} tokens/s, loss {steps[-1]['loss']:.4f}"

    def same_losses(self, name, layout):
        """Graphs, launches in another order, or memory at other places, change no loss."""
        losses = {}
        usual = ["train.steps=50", f"train.batch={8 * ranks_of(layout)}"]
        kernel_by_kernel = ["train.cuda_graphs=off"]
        for label, environment, more in (
                ("usual", {}, []), ("kernel by kernel", {}, kernel_by_kernel),
                ("blocking", {"CUDA_LAUNCH_BLOCKING": "1"}, kernel_by_kernel),
                ("uncached", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, kernel_by_kernel)):
            run = self.out / "runs" / f"losses-{label.replace(' ', '-')}"
            settings = [*usual, *more]
            if self.run(f"{name}, {label}", self.train(layout, settings, run), ranks_of(layout), environment) != 0:
                return False, f"{label}: " + self.last_line(f"{name}, {label}")
            losses[label] = [one["loss"] for one in self.steps(run)]
        apart = max(abs(a - b) / abs(a) for label in losses
                    for a, b in zip(losses["usual"], losses[label], strict=True))
        return apart < 1e-3, f"50 losses, at most {apart:.1e} apart"

    def stopped(self, name, layout, how):
        run = self.out / "runs" / f"stopped-{how}"
        job = self.start(name, self.train(
            layout, ["train.steps=1000000", "checkpoint.every_steps=10"], run), ranks_of(layout))
        begin = time.time()
        saved = lambda: list(run.glob("checkpoints/step-*"))
        while not saved() and job.poll() is None and time.time() < begin + 120:
            time.sleep(0.2)
        if job.poll() is not None or not saved():
            job.kill()
            return False, "it did not train: " + self.last_line(name)
        begin = time.time()
        if how == "SIGKILL":
            # The launcher gives each rank a process group of its own.
            ranks = subprocess.run(["pgrep", "-f", f"echelon-train.*{run.name}"],
                                   capture_output=True, text=True).stdout.split()
            before = max(saved())
            os.kill(int(ranks[-1]), signal.SIGKILL)
            while max(saved()) <= before and job.poll() is None and time.time() < begin + 120:
                time.sleep(0.1)
            again = time.time() - begin
        job.terminate()
        try:
            code = job.wait(120)
        except subprocess.TimeoutExpired:
            job.kill()
            return False, "it did not end within two minutes"
        took = time.time() - begin
        text = f"exit code {code} after {took:.1f} s, checkpoints kept: {len(saved())}"
        if how == "SIGTERM":
            return code == 75 and bool(saved()), text
        started = "restart 1 " in self.log_of(name).read_text()
        return code == 75 and started and max(saved()) > before, f"next checkpoint after {again:.1f} s; {text}"

    def compared(self, name):
        runs = [str(path.parent) for path in sorted(self.out.glob("runs/*/report.html"))
                if not path.parent.name.startswith(("losses", "stopped"))]
        if not runs:
            return False, "no run has ended"
        ok = self.run(name, ["compare", *runs, "-o", str(self.out / "compare.html")]) == 0
        return ok, "compare.html" if ok else self.last_line(name)

    def all(self):
        ranks = self.arguments.ranks
        self.check("machine", self.machine)
        for some in (2, 4, 8):
            if some <= ranks:
                self.check(f"collectives, {some} ranks", self.collectives, some)
        most = max(layouts(ranks), key=lambda one: len(one[0]))[0] if ranks > 1 else "dp=1"
        for layout, settings in layouts(ranks):
            self.check(" ".join(["verify", layout, *settings]), self.verify, layout, settings)
        for layout, settings in layouts(ranks):
            self.check(" ".join(["train", layout, *settings]), self.trained, layout, settings)
        self.check("compare", self.compared)
        self.check("equal losses", self.same_losses, f"fsdp={ranks}" if ranks > 1 else "dp=1")
        self.check(f"stop {most} by SIGTERM", self.stopped, most, "SIGTERM")
        self.check(f"kill a rank of {most}", self.stopped, most, "SIGKILL")
        self.check("bench --save", self.bench)

    # --- The page -----------------------------------------------------------------

    def write(self):
        (self.out / "results.json").write_text(json.dumps(self.rows, indent=1))
        rows = ""
        for row in self.rows:
            name = html.escape(row["check"])
            if self.log_of(row["check"]).exists():
                name = f'<a href="logs/{html.escape(self.log_of(row["check"]).name)}">{name}</a>'
            rows += (f'<tr class="{row["status"]}"><td>{name}<td>{row["status"]}<td>{html.escape(row["text"])}'
                     f'<td class=number>{row["seconds"]}')
        reports = "".join(
            f'<li><a href="runs/{html.escape(path.parent.name)}/report.html">{html.escape(path.parent.name)}</a>'
            for path in sorted(self.out.glob("runs/*/report.html")))
        compare = '<p><a href="compare.html">All runs side by side</a>' if (self.out / "compare.html").exists() else ""
        failed = sum(row["status"] == "FAILED" for row in self.rows)
        (self.out / "index.html").write_text(f"""<!doctype html><meta charset=utf-8>
<meta name=viewport content="width=device-width"><title>First hour on this machine</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884;
vertical-align:top}}.number{{text-align:right}}.FAILED td:nth-child(2){{color:#b3261e;font-weight:600}}
@media(prefers-color-scheme:dark){{body{{background:#16181c;color:#e6e6e6}}a{{color:#8ab4f8}}}}</style>
<h1>First hour on this machine</h1>
<p>{len(self.rows)} checks, {failed} failed.{compare}
<table><tr><th>check<th>result<th>what it found<th class=number>seconds{rows}</table>
<h2>Reports</h2><ul>{reports}</ul>
""")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="the folder of bin/echelon")
    parser.add_argument("--out", default="gpu-node", help="the folder to write")
    parser.add_argument("--gpus", type=int, help="how many to use (default: all)")
    parser.add_argument("--ranks", type=int, help="how many at most (default: one for each GPU)")
    parser.add_argument("--minutes", type=float, default=30, help="checks that would begin later are skipped")
    parser.add_argument("--only", default=".", metavar="REGEX", help="checks whose name matches")
    parser.add_argument("--device", choices=["cuda", "test", "cpu"], default="cuda",
                        help="test: the device of Echelon's tests")
    parser.add_argument("--small", action="store_true", help="a model that CPUs train in a second")
    arguments = parser.parse_args()
    if arguments.gpus is None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        arguments.gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    if arguments.gpus < 1:
        sys.exit("gpu_node: nvidia-smi lists no GPU")
    arguments.ranks = arguments.ranks or arguments.gpus
    node = Node(arguments)
    node.all()
    failed = [row for row in node.rows if row["status"] == "FAILED"]
    print(f"{node.out}/index.html: {len(node.rows)} checks, {len(failed)} failed")
    sys.exit(1 if failed or not node.rows else 0)


main()
