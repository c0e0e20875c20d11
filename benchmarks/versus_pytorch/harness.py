"""Runs programs of both sides in turn, and compares what they measured."""
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def cache_folder():
    if "ECHELON_CACHE" in os.environ:
        return Path(os.environ["ECHELON_CACHE"])
    xdg = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(xdg) / "echelon"


def enter_environment():
    """Starts this program again in the environment of setup/extras.sh, unless this
    Python has the same PyTorch."""
    try:
        if importlib.metadata.version("torch").split("+")[0] == "2.11.0":
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    python = cache_folder() / "pytorch-2.11.0" / "bin" / "python"
    if Path(sys.prefix) == python.parent.parent:
        return
    if not python.exists():
        sys.exit(f"{python} is missing: run \"make extras\" first")
    os.execv(python, [str(python), *sys.argv])


class Sides:
    """Command lines of both sides; each call returns what the program wrote."""

    def __init__(self, build, ranks):
        self.build = build
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="versus_pytorch."))

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def torchrun(self, script, *arguments, ranks=None):
        return [
            str(Path(sys.prefix) / "bin" / "torchrun"),
            "--standalone",
            f"--nproc-per-node={ranks or self.ranks}",
            str(HERE / script),
            *map(str, arguments),
        ]

    def program(self, name):
        path = self.build / name
        if not path.exists():
            sys.exit(f"{path} is missing: run \"make build\" first")
        return str(path)

    def python(self, script, *arguments):
        return [sys.executable, str(HERE / script), *map(str, arguments)]

    def echelon_run(self, program, *arguments, ranks=None):
        return [
            self.program("bin/echelon"),
            "run",
            "-n",
            str(ranks or self.ranks),
            "--",
            self.program(f"benchmarks/{program}"),
            *map(str, arguments),
        ]

    def run(self, command, out=None):
        """Runs `command`, which writes JSON to `out` (else to its output)."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != 0:
            sys.exit(
                f"{' '.join(command)}\nended with {done.returncode}:\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        if out is None:
            return json.loads(done.stdout)
        return json.loads(Path(out).read_text())


def spread(values):
    return {
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
    }


def machine():
    model, memory = platform.processor(), 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal"):
            memory = int(line.split()[1]) / 2**20
    import torch
    import torchvision

    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "kernel": platform.release().split("-")[0],
        "pytorch": torch.__version__,
        "torchvision": torchvision.__version__,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }
