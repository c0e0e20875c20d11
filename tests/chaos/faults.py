#!/usr/bin/env python3
"""Faults of a training job on one host, against the programs that users run.

  faults.py BUILD ROW [SEED]

Each row is one of doc/reliability.md that no other test shows. Four ranks train the digits;
what follows a fault must be what the page says, and losses and weights those of a job that
nothing disturbed. Exits with 77 when the row needs what this system does not have."""
import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from chaos import RANKS, Campaign, contents, kill_rank, losses  # noqa: E402

LIMIT = 300  # seconds for one wait, on a machine that does much else


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def expect(holds, what, job=None):
    if not holds:
        print(what)
        if job:
            print(job.output()[-3000:])
        sys.exit(1)


def expect_equal(campaign, job, plain, code=0):
    """The job has ended as one that nothing disturbed."""
    expect(job.process.wait(LIMIT) == code, f"ends with {job.process.returncode}", job)
    expect(losses(job) == losses(plain), "its losses are not those of an undisturbed job", job)
    expect(contents(campaign, job) == contents(campaign, plain), "its weights are not those of an undisturbed job", job)


def wait_for(job, condition, what):
    expect(job.wait_until(condition, LIMIT), f"waited for {what} in vain", job)


def steps_more(job, count):
    last = job.last_step()
    wait_for(job, lambda: job.last_step() >= last + count, f"{count} more steps")


def inject(pid, calls, what):
    """strace of all threads of a process; returns when it has attached."""
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), "-e", f"trace={calls}", "-e", f"inject={calls}:{what}"],
                              stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in tracer.stderr:
        if "attached" in line:
            threading.Thread(target=lambda: [None for _ in tracer.stderr], daemon=True).start()
            return tracer
    skip("strace may not trace here")


def need_strace():
    if subprocess.run(["sh", "-c", "strace -o /dev/null true"], capture_output=True).returncode != 0:
        skip("strace is not there, or may not trace here (setup/packages.sh installs it)")


class ControlGroup:
    """A group of processes with limits, in version 1 or 2 of control groups."""

    def __init__(self, controller, limits, limits_of_version_2):
        for mount, given in ((f"/sys/fs/cgroup/{controller}", limits), ("/sys/fs/cgroup", limits_of_version_2)):
            self.path = Path(mount) / f"echelon-chaos-{os.getpid()}"
            try:
                self.path.mkdir()
                for name, value in given.items():
                    (self.path / name).write_text(str(value))
                return
            except OSError:
                self.remove()
        skip(f"this system lets us make no control group for {controller}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in (self.path / "cgroup.procs").read_text().split():
            kill_rank(int(pid))
        end = time.monotonic() + 5
        while not self.remove() and time.monotonic() < end:
            time.sleep(0.05)

    def remove(self):
        try:
            self.path.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        return True

    def take(self, pid):
        (self.path / "cgroup.procs").write_text(str(pid))

    def wrapper(self):
        """Words before a command that is to run in the group."""
        return ["sh", "-c", f"echo $$ > {self.path}/cgroup.procs; exec \"$@\"", "sh"]


# --- F5: a rank that computes for ever ---------------------------------------------------


class Tracer:
    """Holds the main thread of a process, for changes; lets it go when the block ends."""

    ATTACH, DETACH, GET, SET, PEEK, POKE, TO_SYSTEM_CALL = 16, 17, 12, 13, 1, 4, 24
    FIRST_ARGUMENT, NUMBER, PLACE = 14, 15, 16  # of the registers: rdi, orig_rax, rip

    def __init__(self, pid):
        self.pid = pid
        self.ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self.ptrace.argtypes, self.ptrace.restype = [ctypes.c_long] * 2 + [ctypes.c_void_p] * 2, ctypes.c_long
        self.registers = (ctypes.c_ulong * 27)()

    def __enter__(self):
        if self.ptrace(self.ATTACH, self.pid, None, None) != 0:
            skip(f"may not trace a process: {os.strerror(ctypes.get_errno())}")
        os.waitpid(self.pid, 0)
        self.ptrace(self.GET, self.pid, None, ctypes.addressof(self.registers))
        return self

    def go_to_system_call(self):
        self.ptrace(self.TO_SYSTEM_CALL, self.pid, None, None)
        os.waitpid(self.pid, 0)
        self.ptrace(self.GET, self.pid, None, ctypes.addressof(self.registers))

    def __exit__(self, *_):
        self.ptrace(self.SET, self.pid, None, ctypes.addressof(self.registers))
        self.ptrace(self.DETACH, self.pid, None, None)


def spin(pid):
    """The next instruction of the main thread becomes a jump to itself."""
    with Tracer(pid) as tracer:
        place = tracer.registers[Tracer.PLACE]
        word = tracer.ptrace(Tracer.PEEK, pid, place, None) & ~0xffff | 0xfeeb
        tracer.ptrace(Tracer.POKE, pid, place, word & (1 << 64) - 1)


def row_livelock(campaign):
    settings = ["elastic.memory_steps=1", "comm.timeout=20s"]
    plain = campaign.undisturbed(100, settings)
    job = campaign.train(100, settings)
    steps_more(job, 30)
    rank, pid = campaign.random.choice(sorted(job.ranks().items()))
    began = time.monotonic()
    spin(pid)
    wait_for(job, lambda: "restart 1 of" in job.output(), "a restart")
    print(f"found after {time.monotonic() - began:.1f} s", job.output()[-1500:])
    expect(f"rank {rank}: hangs: no rank has made progress" in job.output() or f"not arrived: rank {rank};" in job.output(),
           f"does not say that rank {rank} hangs", job)
    expect_equal(campaign, job, plain)


# --- F6: a rank that ends -----------------------------------------------------------


def leave(pid, code):
    """Makes a process end with that exit code at its next system call."""
    with Tracer(pid) as tracer:
        tracer.go_to_system_call()
        exit_group = 231
        tracer.registers[Tracer.NUMBER], tracer.registers[Tracer.FIRST_ARGUMENT] = exit_group, code


def row_ends(campaign):
    settings = ["elastic.memory_steps=1", "checkpoint.every_steps=100"]
    plain = campaign.undisturbed(150, settings)
    job = campaign.train(150, settings)
    faults = [(lambda pid, number=number: os.kill(pid, number), f"ended with SIG{name}")
              for name, number in (("SEGV", signal.SIGSEGV), ("ABRT", signal.SIGABRT), ("FPE", signal.SIGFPE))]
    faults += [(lambda pid: leave(pid, 7), "ended with exit code 7"), (lambda pid: leave(pid, 0), "was lost")]
    campaign.random.shuffle(faults)
    for count, (act, words) in enumerate(faults, 1):
        wait_for(job, lambda: len(job.ranks()) == RANKS, "all ranks")
        steps_more(job, 5)
        rank, pid = campaign.random.choice(sorted(job.ranks().items()))
        seen = len(job.output())
        act(pid)
        wait_for(job, lambda: f"restart {count} of" in job.output(), "a restart")
        said = job.output()[seen:]
        expect(re.search(rf"rank {rank}\b.*{words}", said), f"does not say that rank {rank} {words}", job)
    expect_equal(campaign, job, plain)


# --- F7: a straggler ----------------------------------------------------------------


def row_straggler(campaign):
    with ControlGroup("cpu", {"cpu.cfs_period_us": 50000, "cpu.cfs_quota_us": 1000},
                      {"cpu.max": "1000 50000"}) as group:
        for _ in range(2):
            job = campaign.train(1000000, ["train.batch=512"])
            wait_for(job, lambda: job.last_step() > 10, "the first steps")
            rank, pid = campaign.random.choice(sorted(job.ranks().items()))
            group.take(pid)
            first = job.last_step()
            steps_more(job, 20)
            expect(job.kill() == 75, "does not end as a job that was told to stop", job)
            steps = map(json.loads, (job.folder / "run/metrics.jsonl").read_text().splitlines())
            named = [step["slowest_rank"] for step in steps if step["step"] > first + 1 and "slowest_rank" in step]
            print(f"rank {rank} was slow; named: {({one: named.count(one) for one in set(named)})}")
            # Ranks share cores with all that runs here, so others are slow at times.
            expect(max(range(RANKS), key=named.count) == rank, f"does not name rank {rank}", job)


# --- F10, F11: a disk that is full or fails --------------------------------------------


def row_disk(campaign):
    need_strace()
    settings = ["checkpoint.every_steps=10", "checkpoint.attempts=100000"]
    plain = campaign.undisturbed(400, settings)
    job = campaign.train(400, settings)
    checkpoints = job.folder / "run/checkpoints"
    for call, error, text in (("fsync", "EIO", "Input/output error"), ("write", "ENOSPC", "No space left on device"),
                              ("write", "EDQUOT", "Disk quota exceeded")):
        steps_more(job, 10)
        seen = len(job.output())
        # Rank 0 writes to the terminal too.
        rank = campaign.random.randrange(0 if call == "fsync" else 1, RANKS)
        tracer = inject(job.ranks()[rank], call, f"error={error}")
        wait_for(job, lambda: text in job.output()[seen:], f"\"{text}\"")
        tracer.terminate()
        tracer.wait()
        after = job.last_step()
        wait_for(job, lambda: any(int(path.name[5:]) > after for path in checkpoints.glob("step-*")),
                 f"a checkpoint after {error}")
        expect(re.search(rf"the checkpoint of step \d+ failed: rank {rank}: .*{text}", job.output()[seen:]),
               f"does not say that rank {rank} could not write", job)
    expect_equal(campaign, job, plain)
    expect("restart " not in job.output(), "was started again", job)


# --- F12: a kill within a save ----------------------------------------------------------


def row_save(campaign):
    need_strace()
    settings = ["elastic.memory=off", "checkpoint.every_steps=10"]
    plain = campaign.undisturbed(400, settings)
    job = campaign.train(400, settings)
    hit, tries = {}, 0
    while tries < 6 and not job.done():
        tries += 1
        wait_for(job, lambda: len(job.ranks()) == RANKS, "all ranks")
        steps_more(job, 15)
        call, most = campaign.random.choice([("write", 12), ("fsync", 4), ("rename", 3), ("openat", 9), ("unlink", 3)])
        rank = campaign.random.choice([0, 0, campaign.random.randrange(RANKS)])
        seen, step = job.output().count("restart "), job.last_step()
        tracer = inject(job.ranks()[rank], call, f"signal=KILL:when={campaign.random.randint(1, most)}")
        job.wait_until(lambda: job.output().count("restart ") > seen or job.last_step() > step + 40)
        tracer.terminate()
        tracer.wait()
        hit[call] = hit.get(call, 0) + (job.output().count("restart ") > seen)
    print(f"killed within a save: {hit}")
    expect(sum(hit.values()) > 0, "nothing was killed", job)
    expect_equal(campaign, job, plain)
    whole = subprocess.run([campaign.echelon, "checkpoint", "verify", job.folder / "run"], capture_output=True, text=True)
    expect(whole.returncode == 0, whole.stdout + whole.stderr)


# --- F15: broken images ---------------------------------------------------------------------


def png(random):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + random.randbytes(3 * 16) for _ in range(16))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def row_images(campaign):
    folder = campaign.folder()
    for kind in ("cat", "dog"):
        (folder / kind).mkdir()
        for number in range(40):
            image = png(campaign.random)
            if number % 4 == 0:
                image = image[:campaign.random.randrange(len(image) - 12)]
            (folder / kind / f"{number}.png").write_bytes(image)
    settings = ["data.name=images", f"data.path={folder}", "data.image_size=16", "train.batch=16", "optimizer.warmup_steps=0"]
    job = campaign.train(10, [*settings, "data.bad_image=skip"])
    expect(job.process.wait(LIMIT) == 0, "does not train on the others", job)
    steps = {}
    for line in (job.folder / "run/metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        steps[values["step"]] = values
    expect(sorted(steps) == list(range(1, 11)), "does not make each step once", job)
    broken = set(re.findall(r"skipped a sample: (.*): broken image", job.output()))
    expect(len(broken) >= 10 and all(int(Path(name).stem) % 4 == 0 for name in broken),
           "does not list the broken images, and no others", job)
    job = campaign.train(10, settings)
    expect(job.process.wait(LIMIT) == 3 and ".png" in job.output(), "does not name a broken image", job)
    expect("restart " not in job.output(), "was started again", job)


# --- F21: strangers --------------------------------------------------------------------------


def ports_of(pids):
    """TCP ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
            except OSError:
                pass
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in sockets})


def memory(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def row_strangers(campaign):
    settings = ["comm.backend=gloo", "checkpoint.every_steps=100"]
    plain = campaign.undisturbed(300, settings)
    job = campaign.train(300, settings)
    wait_for(job, lambda: job.last_step() > 20, "the first steps")
    ranks = job.ranks()
    ports = ports_of([*ranks.values(), job.process.pid])
    before = {rank: memory(pid) for rank, pid in ranks.items()}
    first = [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"ECHstor1" + bytes(64), b"\xff" * 9 + bytes(1 << 20),
             campaign.random.randbytes(1000)]
    held, count = [], 0
    end = time.monotonic() + 3
    while time.monotonic() < end and not job.done():
        for port in ports:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 0.1)
                stranger.setblocking(False)
                held = held[-300:] + [stranger]
                stranger.send(first[count % len(first)])
                count += 1
            except OSError:
                pass
    after = {rank: memory(pid) for rank, pid in ranks.items() if not job.done()}
    grown = max([after[rank] - before[rank] for rank in after], default=0)
    print(f"{count} strangers at {len(ports)} ports; a rank grew by {grown >> 10} KiB at most")
    expect(count > 100 and len(ports) > 0, "no stranger came through", job)
    expect(grown < 32 << 20, "a rank's memory grew", job)
    expect_equal(campaign, job, plain)
    expect("restart " not in job.output(), "was started again", job)


# --- F26: memory that runs out ------------------------------------------------------------------


def row_memory(campaign):
    with ControlGroup("memory", {"memory.limit_in_bytes": 400 << 20}, {"memory.max": 400 << 20}) as group:
        job = campaign.train(100, ["model.name=mlp", "model.hidden=[4096,4096]"], restarts=100, wrapper=group.wrapper())
        expect(job.process.wait(LIMIT) == 137, "does not end as its rank", job)
    expect("restart 1 of 1 after memory ran out" in job.output() and
           "no restart: memory ran out before" in job.output(), "does not start again once", job)
    expect(job.output().count("killed by SIGKILL (Killed); the kernel did this because memory ran out; this job's "
                              "control group may have 400 MiB") >= 4, "does not say that memory ran out", job)


# --- F31: a flood of output -----------------------------------------------------------------------


def row_flood(campaign):
    folder = campaign.folder()
    flood = f"yes {'x' * 199} | head -c 40000000"
    for reader in ("cat >/dev/null", "{ sleep 1; cat >/dev/null; }"):
        process = subprocess.Popen([campaign.echelon, "run", "-n", "2", "--log-dir", folder, "--", "sh", "-c", flood],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        slow = subprocess.Popen(["sh", "-c", reader], stdin=process.stdout)
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        slow.wait()
        print(f"the launcher had {usage.ru_maxrss >> 10} MiB at most")
        expect(status == 0, f"ends with {status}")
        expect(usage.ru_maxrss < 32 << 10, "a flood fills the launcher's memory")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends jobs, too
    build, row = Path(sys.argv[1]).resolve(), sys.argv[2]
    campaign = Campaign(build, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    try:
        globals()[f"row_{row}"](campaign)
    finally:
        campaign.close()


if __name__ == "__main__":
    main()
