#!/usr/bin/env python3
"""A real Prometheus scrapes a real run, whose rank is killed, and a real pool.

  prometheus.py BUILD

promtool checks the page, the alerts and their tests; Prometheus then answers what the manual
says that it does, and every query of the dashboard. Exits with 77 where the programs are
absent. Everything is in a temporary folder and on loopback."""
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "examples/monitoring"
BUILD = Path(sys.argv[1]).resolve()
CACHE = Path(os.environ.get("ECHELON_CACHE") or
             Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon")
LIMIT = 120  # seconds for one wait, on a machine that does much else


def find(program):
    """Installed, or as setup/extras.sh keeps it."""
    kept = CACHE / "prometheus/usr/bin" / program
    found = shutil.which(program) or (str(kept) if kept.exists() else None)
    if found is None:
        print(f"skipped: {program} is not there: run `make extras` once")
        sys.exit(77)
    return found


def expect(holds, what):
    if not holds:
        print(what)
        sys.exit(1)


def until(ask, what):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        value = ask()
        if value:
            return value
        time.sleep(0.2)
    expect(False, f"waited for {what} in vain")


def free_port():
    """One that no outgoing connection takes."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def check_files(promtool):
    for arguments in (["check", "rules", "alerts.yml", "pool_alerts.yml"],
                      ["check", "config", "prometheus.yml"],
                      ["test", "rules", "alerts_test.yml", "pool_alerts_test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=HERE, capture_output=True, text=True)
        expect(done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


def check_page(promtool, page):
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True)
    expect(done.returncode == 0 and not done.stderr, f"promtool check metrics:\n{done.stderr}")


class Prometheus:
    """Scrapes pages every second, by the lines of its configuration below scrape_configs."""

    def __init__(self, program, folder, alerts, scraped):
        self.port = free_port()
        head, _ = (HERE / "prometheus.yml").read_text().split("scrape_configs:\n")
        head = head.replace("15s", "1s").replace("alerts.yml", alerts)
        (folder / "prometheus.yml").write_text(head + "scrape_configs:\n" + scraped)
        shutil.copy(HERE / alerts, folder)
        self.log = open(folder / "prometheus.log", "w+")
        self.process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{self.port}"], stdout=self.log, stderr=self.log)

    def ask(self, query):
        text = get(f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": query}))
        answer = json.loads(text) if text else {}
        return answer.get("data", {}).get("result", []) if answer.get("status") == "success" else None

    def number(self, query):
        found = self.ask(query)
        return float(found[0]["value"][1]) if found else None

    def takes(self, board):
        """Answers every query of a dashboard; returns those that have no value, by panel."""
        empty = []
        for panel in json.loads((HERE / board).read_text())["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$run", ".*").replace("$__rate_interval", "10s")
                found = self.ask(query)
                expect(found is not None, f"Prometheus does not take {query}")
                empty += [] if found else [panel["title"]]
        return empty

    def alerts(self):
        return {rule["name"]: rule["health"]
                for group in json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/rules"))["data"]["groups"]
                for rule in group["rules"]}


def scraped_run(address):
    lines = (HERE / "prometheus.yml").read_text().split("scrape_configs:\n")[1]
    return lines.replace("127.0.0.1:9464", address)


def scraped_pool(address, folder):
    """As the manual has it."""
    page = (ROOT / "doc/pool.md").read_text()
    lines = page.split("    scrape_configs:\n")[1].split("\n\n")[0].split("\n")
    text = "\n".join(line[4:] for line in lines) + "\n"
    expect("/var/lib/echelon/pool" in text and "127.0.0.1:9465" in text, f"doc/pool.md has another example: {text}")
    return text.replace("/var/lib/echelon/pool", str(folder)).replace("127.0.0.1:9465", address)


def pid_of_rank(run, rank):
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"echelon-train") and f"{run}/config.toml".encode() in words and \
                f"RANK={rank}".encode() in variables:
            return int(process.name)
    return None


def check_run(program, promtool, folder, jobs):
    run = folder / "run"
    address = f"127.0.0.1:{free_port()}"
    job = subprocess.Popen(
        [str(BUILD / "bin/echelon"), "train", str(ROOT / "examples/configs/digits.toml"), "-n", "2",
         "--metrics-address", address, "--max-restarts", "3", "--set", f"train.run={run}",
         "--set", "train.epochs=0", "--set", "train.steps=100000000", "--set", "optimizer.warmup_steps=0",
         "--set", "checkpoint.every_steps=50"],
        stdout=subprocess.DEVNULL, stderr=open(folder / "job.log", "w"), env={**os.environ, "OMP_NUM_THREADS": "1"})
    jobs.append(job)
    server = Prometheus(program, folder, "alerts.yml", scraped_run(address))
    jobs.append(server.process)
    page = until(lambda: (lambda text: text if 'echelon_loss{run="run"}' in text else "")(get(f"http://{address}/metrics")),
                 "the page with a loss: " + (folder / "job.log").read_text())
    check_page(promtool, page)
    until(lambda: server.number("echelon_steps_total") or 0, "steps in Prometheus")
    first = server.number("echelon_steps_total")
    until(lambda: (server.number("echelon_steps_total") or 0) > first, "more steps")
    expect(server.number("sum(echelon_rank_up)") == 2, "both ranks are up")
    expect(server.number('echelon_restarts_total{reason="rank_killed"}') == 0, "no restart yet")
    until(lambda: server.number("echelon_checkpoint_age_seconds < 60"), "the age of a checkpoint")
    for phase in ("data", "forward", "backward", "communication", "update", "other"):
        until(lambda: (server.number(f'echelon_phase_seconds_total{{phase="{phase}"}}') or 0) > 0, f"phase {phase}")

    os.kill(until(lambda: pid_of_rank(run, 1), "the process of rank 1"), signal.SIGKILL)
    until(lambda: server.number('echelon_restarts_total{reason="rank_killed"}') == 1, "the restart in Prometheus")
    until(lambda: server.number("sum(echelon_rank_up)") == 2, "both ranks again")
    until(lambda: server.number("echelon_recovery_seconds_count") == 1, "the recovery")
    expect(server.number("echelon_recovery_seconds_sum") > 0, "a recovery takes time")
    after = server.number("echelon_steps_total")
    until(lambda: (server.number("echelon_steps_total") or 0) > after, "steps after the restart")
    # What was done again counts as steps, and as lost.
    step = until(lambda: server.number("echelon_steps_total - echelon_lost_steps_total - echelon_step") == 0,
                 "steps that add up")
    expect(step, "")
    expect(0 < server.number("echelon_effective_time_ratio") <= 1, "a share of the time")

    server.takes("dashboard.json")
    health = until(lambda: (lambda found: found if set(found.values()) == {"ok"} else None)(server.alerts()),
                   "alerts that are evaluated")
    expect(len(health) >= 6, f"alerts: {health}")

    job.send_signal(signal.SIGTERM)
    expect(job.wait(LIMIT) == 75, "the job saves and ends with 75")
    until(lambda: server.number('up{job="echelon"}') == 0, "a page that is gone")


def check_pool(program, promtool, folder, jobs):
    """vision holds its 1 of 3 slots and borrows none; language holds 2, and a job of it waits."""
    pool, address = folder / "pool", f"127.0.0.1:{free_port()}"
    (folder / "pool.toml").write_text("[pool]\ngrace = \"1s\"\n[project.language]\nguaranteed = 1\n"
                                      "[project.vision]\nguaranteed = 1\n")
    echelon = [str(BUILD / "bin/echelon"), "pool"]
    environment = {name: value for name, value in os.environ.items() if name != "ECHELON_TOKEN"}
    log = open(folder / "pool.log", "w")
    jobs.append(subprocess.Popen(
        [*echelon, "start", str(folder / "pool.toml"), "--folder", str(pool), "--devices", "3", "--page", address],
        stdout=log, stderr=log, env={**environment, "XDG_CONFIG_HOME": str(folder)}))

    def ask(*words):
        words = (words[0], "--folder", str(pool), "--json", *words[1:])
        done = subprocess.run([*echelon, *words], capture_output=True, text=True, env=environment)
        expect(done.returncode == 0, f"{words}: {done.stderr}" + (folder / "pool.log").read_text())
        return json.loads(done.stdout)

    until(lambda: (pool / "page-token").exists(), "the pool: " + (folder / "pool.log").read_text())
    until(lambda: "echelon pool:" in (folder / "pool.log").read_text(), "the pool's first line")
    submitted = []

    def submit(project, *words):
        # The command ends when the test does, whatever happens to it.
        command = f"while [ -e {folder}/pool.toml ] && [ ! -e {folder}/end ]; do sleep 0.1; done"
        submitted.append(ask("submit", "--project", project, *words, "--", "sh", "-c", command)["job"])

    submit("language", "-n", "2", "--preemptible")
    submit("vision", "-n", "1")
    submit("language", "-n", "2", "--preemptible")
    server = Prometheus(program, folder, "pool_alerts.yml", scraped_pool(address, pool))
    jobs.append(server.process)
    for query, value in (
            ('echelon_pool_capacity_devices{kind="all"}', 3), ('echelon_pool_capacity_devices{kind="idle"}', 0),
            ('echelon_pool_devices{project="language",kind="in_use"}', 2),
            ('echelon_pool_devices{project="language",kind="guaranteed"}', 1),
            ('echelon_pool_devices{project="language",kind="over_quota"}', 1),
            ('echelon_pool_devices{project="vision",kind="in_use"}', 1),
            ('echelon_pool_jobs{project="language",state="waiting"}', 1), ("echelon_pool_wait_seconds_count", 1)):
        until(lambda: server.number(query) == value, f"{query} = {value}, not {server.ask(query)}")
    until(lambda: (server.number('echelon_pool_device_seconds_total{project="language"}') or 0) >
          server.number('echelon_pool_device_seconds_total{project="vision"}') > 0, "device-seconds")
    token = (pool / "page-token").read_text().strip()
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"})
    check_page(promtool, urllib.request.urlopen(request, timeout=10).read().decode())
    # All panels have something to show; a quantile needs two scrapes around a start.
    until(lambda: set(server.takes("pool_dashboard.json")) <= {"Wait until the start"}, "every panel of the dashboard")
    until(lambda: set(server.alerts().values()) == {"ok"}, "alerts that are evaluated")
    (folder / "end").touch()
    until(lambda: server.number('echelon_pool_ended_jobs_total{project="language",state="done"}') == 2, "ended jobs")


def main():
    program, promtool = find("prometheus"), find("promtool")
    check_files(promtool)
    jobs = []
    with tempfile.TemporaryDirectory(prefix="echelon-test-") as folder:
        try:
            for name, check in (("pool", check_pool), ("run", check_run)):
                (Path(folder) / name).mkdir()
                check(program, promtool, Path(folder) / name, jobs)
        finally:
            for process in jobs:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


main()
