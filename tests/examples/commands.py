#!/usr/bin/env python3
"""Every command of README.md and doc/*.md runs, its C++ is a part of examples/, its
links lead to files, and its pictures are small and made by setup/picture.py.

  commands.py BUILD [PAGE …]

Each page's commands run in their order in a temporary folder, with the build's
programs in PATH. A block that follows "Save this as `NAME.toml`:" becomes that file.
SKIPPED and CHANGED say what a test machine cannot do as it is written; an entry that
no command needs is an error."""
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(sys.argv[1]).resolve()

PROGRAMS = ("echelon", "echelon-train", "make", "ctest", "cmake", "torchrun", "srun",
            "mpirun", "python", "build/", "benchmarks/")

# A command that contains the text does not run, and why.
SKIPPED = {
    "make ": "builds and tests the tree",
    "ctest ": "runs the tests again",
    "build/tests/": "runs the tests again",
    "build/benchmarks/": "benchmarks are not built by the tests",
    "benchmarks/published/run.py": "takes minutes",
    "benchmarks/chaos.py": "takes minutes; tests/chaos does it in short",
    "benchmarks/chaos_hosts.py": "takes minutes, and needs root",
    "benchmarks/slurm_quota.py": "takes minutes; tests/cli/slurm_test does it once",
    "torchrun ": "needs Python's PyTorch; tests/launch starts programs under it",
    "srun ": "needs Slurm; tests/cli/slurm_test runs such commands",
    "--hosts host-0": "needs hosts; tests/cli/job_hosts_test has some",
    "--hostfile hosts.txt": "needs hosts; tests/cli/job_hosts_test has some",
    "--nnodes 1:2 --max-restarts 3": "needs Slurm; tests/cli/slurm_test runs it",
    "mpirun ": "needs Open MPI; tests/launch starts programs under it",
    "bench --save": "measures the machine for a minute; tests/bench does it in short",
    "echelon import": "needs a Hugging Face folder; tests/models makes one",
    "runs/llama/config.toml": "needs the model that `echelon import` brings",
    "--format huggingface": "needs a run of a GPT of some steps; tests/cli/export_test",
    "--format peft": "needs a run with adapters; tests/cli/export_test makes one",
    "sample runs/tuned": "needs a run with adapters; tests/train/fine_tuning_test",
    "torch.distributed.checkpoint.format_utils": "needs Python's PyTorch",
    "python -c": "needs Python's PyTorch",
    "convert_checkpoints.py": "needs Megatron",
    "contents 1": "is a part of a file, not a command",
    "echelon pool ": "needs a daemon that runs meanwhile; tests/pool does it",
    "benchmarks/pool.py": "takes minutes; tests/pool does it in short",
    "benchmarks/pool_first_step.py": "takes a minute; tests/pool does it in short",
    "echelon job ": "needs a job that runs meanwhile; tests/train/saving does it",
    "--nnodes 2 --check": "asks the Slurm of this machine; tests/deploy does it",
    "s3://models": "needs an S3 server; tests/train/saving/remote_command_test has one",
    "echelon submit ": "needs Slurm; tests/deploy has a stand-in",
    "echelon new ": "tests/package builds and trains such a project",
    "watch runs  ": "goes on until Ctrl-C; tests/watch does it",
    "watch runs/digits --web": "goes on until Ctrl-C; tests/watch does it",
    "echelon sample RUN": "names the options, not a command",
}
# The text of a command, and what stands for it here.
CHANGED = {
    "simulate … --cluster": "simulate --model gpt2 --layout dp=256 --batch 256 --cluster",
    "simulate …": "simulate --model gpt2 --cluster h100-sxm:1x8 --layout dp=8 --batch 64",
    "--its --arguments": "",
    "-n 8 --": "-n 1 --",
    "10.0.0.1": "127.0.0.1 --master-port {port}",
    "9464": "{port}",
    "/var/lib/prometheus/node-exporter/": "",
    "elsewhere/timeline.json": "runs/digits/timeline.json",
}
SMALL = """[model]
name = "mlp"
hidden = [32, 32, 32]
[data]
name = "digits"
[train]
batch = 32
steps = 60
run = "{run}"
[checkpoint]
every_steps = 20
"""
GPT = """[model]
name = "gpt"
layers = 4
hidden_size = 32
heads = 4
max_positions = 32
[data]
name = "text"
sources = ["README.md"]
tokenizer = "bytes"
sequence = 32
[train]
batch = 16
steps = 2
run = "runs/{name}-{set}"
"""
OWN = """[model]
name = "own"
library = "{library}"
dtype = "float64"
[data]
name = "own"
[train]
batch = 24
steps = 4
run = "runs/own"
"""


def png(path, red):
    rows = b"".join(b"\0" + bytes((red, 90, 255 - red)) * 16 for _ in range(16))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def points(path):
    labels = [i % 2 for i in range(128)]
    inputs = struct.pack("<1024f", *[label + 0.01 * j for label in labels for j in range(8)])
    targets = struct.pack("<128q", *labels)
    header = json.dumps({
        "inputs": {"dtype": "F32", "shape": [128, 8], "data_offsets": [0, len(inputs)]},
        "targets": {"dtype": "I64", "shape": [128],
                    "data_offsets": [len(inputs), len(inputs) + len(targets)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + inputs + targets)


def furnish(folder):
    """What the pages take for granted: configurations, data, a program, runs."""
    (folder / "build").mkdir()
    (folder / "build/bin").symlink_to(BUILD / "bin")
    (folder / "program").symlink_to(BUILD / "bin/01_data_parallel")
    # The project that README and own_model.md make of the example.
    (folder / "build/program").symlink_to(BUILD / "bin/06_own_model")
    (folder / "mine").symlink_to(folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("doc", "echelon", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    text = folder / "examples/configs/text.toml"
    text.write_text(text.read_text().replace("steps = 600", "steps = 2").replace("warmup_steps = 40\n", ""))
    for name in ("digits", "own_model"):
        config = folder / f"examples/configs/{name}.toml"
        config.write_text(re.sub(r"^epochs = .*", "epochs = 2", config.read_text(), flags=re.M))
    shutil.copy(folder / "examples/configs/own_model.toml", folder / "own.toml")
    (folder / "runs").mkdir()
    (folder / "runs/mixtral").mkdir()
    (folder / "runs/mixtral/metrics.jsonl").write_text(json.dumps({
        "step": 1, "epoch": 0.1, "loss": 9.1, "samples_per_second": 8, "step_seconds": 1,
        "data_seconds": 0, "learning_rate": 0.001,
        "expert_loads": {"model.layers.0.mlp": [300, 200, 250, 250, 190, 310, 240, 260]}}) + "\n")
    for name, run in (("first", "first"), ("second", "second"), ("long", "long"), ("model", "{name}-{set}")):
        (folder / f"{name}.toml").write_text(SMALL.format(run=f"runs/{run}"))
    (folder / "gpt.toml").write_text(GPT)
    # As that of the project which `echelon new` makes.
    (folder / "train.toml").write_text(OWN.format(library=BUILD / "tests/own_plugin.so"))
    for part in ("train", "test"):
        for i in range(8):
            png(folder / f"photos/{part}/cats/{i}.png", 200 + i)
            png(folder / f"photos/{part}/dogs/{i}.png", 20 + i)
    points(folder / "points.safetensors")
    for run in ("a", "b"):
        (folder / f"{run}.toml").write_text(SMALL.format(run=f"runs/{run}"))


def blocks(text):
    """The code blocks of a page: (language or "", the line above, lines)."""
    lines, above, i = text.splitlines(), "", 0
    while i < len(lines):
        if lines[i].startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            yield lines[i][3:], above, lines[i + 1:end]
            i, above = end, ""
        elif lines[i].startswith("    ") and not above:
            end = i
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
                end += 1
            yield "", "", [line[4:] for line in lines[i:end]]
            i = end - 1
        elif lines[i]:
            above = lines[i]
        elif not re.search(r"`[^`]+`:$", above):
            above = ""
        i += 1


def commands(lines):
    """The commands of a block as (host, command); output is left out."""
    shown = any(line.startswith("$ ") for line in lines)
    for line in lines:
        host, prompt, command = re.match(r"(host-\d)?(\$ )?(.*)", line).groups()
        if shown and not prompt:
            continue
        if re.sub(r"^(\w+=\S* )+", "", command).startswith(
                tuple(p if p.endswith("/") else p + " " for p in PROGRAMS)):
            yield host, command


def free_port():
    """A port that no outgoing connection takes: those have 32768 and above on Linux."""
    while True:
        with socket.socket() as one:
            try:
                one.bind(("", port := random.randrange(10000, 20000)))
                return port
            except OSError:
                pass


used = set()
# Commands that read and write no file, which end everywhere as they did on an earlier page.
ended_well = set()


def is_the_same_everywhere(command):
    return re.match(r"echelon (plan|simulate) --model [\w-]+ [^/|>;&.]*$", command.split(" #")[0].rstrip())


def runnable(command, port):
    """The command as it runs here; None when it is skipped."""
    for text in SKIPPED:
        if text in command:
            used.add(text)
            return None
    for text, other in CHANGED.items():
        if text in command:
            used.add(text)
            command = command.replace(text, other.format(port=port))
    return command


def run_page(page, problems):
    text = page.read_text()
    name = page.relative_to(ROOT)
    programs = [p.read_text() for p in sorted((ROOT / "examples").glob("*.cpp"))]
    prose = re.sub(r"```.*?```|^    .*?$|`[^`\n]*`", "", text, flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        if not (page.parent / link).exists():
            problems.append(f"{name}: links to {link}, which is not there")
    count = 0
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        furnish(folder)
        environment = dict(os.environ, OMP_NUM_THREADS="1", XDG_CONFIG_HOME=f"{temp}/.config",
                           PATH=f"{BUILD}/bin:{os.environ['PATH']}")

        def start(command):
            return subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment, text=True,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT)

        def finish(command, process):
            output = process.communicate(timeout=300)[0]
            if process.returncode != 0:
                problems.append(f"{name}: {command}\n  ends with {process.returncode}:\n" + output[-1500:])

        def needed(command):
            """The runs that a page reads without having trained them."""
            for run in re.findall(r"runs/(digits|text|first|a|b)\b", command):
                if (folder / "runs" / run).exists() or command.startswith("echelon train"):
                    continue
                config = f"examples/configs/{run}.toml" if run in ("digits", "text") else f"{run}.toml"
                finish(config, start(f"echelon train {config} -n 2"))

        for language, above, lines in blocks(text):
            saved = re.search(r"`([\w./-]+\.toml)`:$", above)
            if language == "cpp" and re.search(r"int main|my_model", "\n".join(lines)):
                if not any("\n".join(lines) in program for program in programs):
                    problems.append(f"{name}: the C++ that begins with \"{lines[0]}\" is not in examples/")
            elif saved:
                (folder / saved.group(1)).write_text("\n".join(lines).replace("= 224 ", "= 32 "))
            elif language == "":
                port, waiting = free_port(), []
                for host, command in commands(lines):
                    runs = runnable(command, port)
                    if runs is None:
                        continue
                    count += 1
                    if is_the_same_everywhere(runs):
                        if runs.split(" #")[0].rstrip() in ended_well:
                            continue
                        ended_well.add(runs.split(" #")[0].rstrip())
                    needed(runs)
                    process = start(runs)
                    if host is None:
                        finish(runs, process)
                    else:
                        waiting.append((runs, process))
                for runs, process in waiting:
                    finish(runs, process)
    print(f"{name}: {count} commands", flush=True)


def check_pictures(pages, problems):
    shown = "".join(page.read_text() for page in pages)
    script = (ROOT / "setup/picture.py").read_text()
    for picture in sorted((ROOT / "doc").glob("*.png")):
        name = picture.relative_to(ROOT)
        if not re.search(rf"!\[[^\]]{{40,}}\]\((doc/)?{picture.name}\)", shown):
            problems.append(f"{name}: no page shows it and says in words what is to be seen")
        if f'"{picture.stem}"' not in script:
            problems.append(f"{name}: setup/picture.py does not make it")
        if picture.stat().st_size > 120_000:
            problems.append(f"{name}: more than 120 kB")


def main():
    pages = [Path(p).resolve() for p in sys.argv[2:]]
    every = not pages
    pages = pages or [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]
    problems = []
    for page in pages:
        run_page(page, problems)
    for text in [*SKIPPED, *CHANGED] if every else []:
        if text not in used:
            problems.append(f"commands.py: no command contains \"{text}\"; remove the entry")
    if every:
        check_pictures(pages, problems)
    if len((ROOT / "README.md").read_text().splitlines()) > 80:
        problems.append("README.md: more than 80 lines")
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


main()
