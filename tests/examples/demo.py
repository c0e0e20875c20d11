#!/usr/bin/env python3
"""setup/demo.sh, with few steps, in a temporary copy of what it reads: how little it
prints, and what its page has.

  demo.py BUILD"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(sys.argv[1]).resolve()
RUNS = ("one_device", "data_parallel", "sharded", "tensor_parallel", "pipeline_parallel", "model_parallel")
SECTIONS = ("Loss", "What a rank held and sent", "Equal to one device", "On other devices", *RUNS)
problems = []


def check(holds, problem):
    if not holds:
        problems.append(problem)


class Page(HTMLParser):
    """The headings, the first cells of the tables' rows, and the links of a page."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.rows, self.links = [], [], []
        self.inside, self.row_begins = "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "a":
            self.links.append(dict(attributes).get("href", ""))
        if tag == "tr":
            self.row_begins = True
        elif tag in ("h2", "h3") or (tag in ("th", "td") and self.row_begins):
            self.inside = tag
            (self.headings if tag in ("h2", "h3") else self.rows).append("")
            self.row_begins = False

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = ""

    def handle_data(self, data):
        if self.inside in ("h2", "h3"):
            self.headings[-1] += data
        elif self.inside:
            self.rows[-1] += data


def check_page(path, sections):
    page = Page(path.read_text())
    shown = [row for row in page.rows if row in RUNS]
    check(shown[:6] == list(RUNS), f"{path.name}: rows are {shown[:6]}, not one device first and the five ways")
    for link in page.links:
        if not link.startswith("#"):
            check((path.parent / link).exists(), f"{path.name}: links to {link}, which is not there")
    for section in sections:
        check(any(section in heading for heading in page.headings),
              f"{path.name}: no section \"{section}\" among {page.headings}")
    check(path.stat().st_size < 500_000, f"{path.name}: has {path.stat().st_size} bytes")


def main():
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        (folder / "setup").mkdir()
        shutil.copy(ROOT / "setup/demo.sh", folder / "setup")
        (folder / "build").mkdir()
        (folder / "build/bin").symlink_to(BUILD / "bin")
        for name in ("examples", "data"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "doc").mkdir()
        shutil.copy(ROOT / "doc/launch.md", folder / "doc")  # its text, less than all pages
        done = subprocess.run([folder / "setup/demo.sh", "12"], text=True, capture_output=True, timeout=600,
                              env=dict(os.environ, OMP_NUM_THREADS="1"))
        lines = done.stdout.splitlines()
        check(done.returncode == 0, f"ends with {done.returncode}: {done.stderr[-1500:]}")
        check(done.stderr == "", f"prints errors: {done.stderr[-500:]}")
        check(1 <= len(lines) <= 12, f"prints {len(lines)} lines")
        opens = re.fullmatch(r"demo: look at the page: xdg-open (\S+)", lines[-1] if lines else "")
        check(opens, f"does not end with how to open the page: {lines[-1:]}")
        if done.returncode == 0 and opens:
            check_page(folder / opens[1], SECTIONS)
            check_page(folder / "runs/demo/digits.html", ())
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


main()
