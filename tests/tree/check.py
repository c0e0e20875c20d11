#!/usr/bin/env python3
"""What `make check` enforces in the whole tree.

  check.py format              every source is as clang-format writes it
  check.py folders [--write]   folders include each other without a cycle, as their
                               DEPENDS lines say; doc/architecture.* show it
  check.py headers BUILD       every header compiles by itself (clang)
  check.py pickles             nothing reads a pickle, which may run what its writer wants
  check.py spelling            codespell finds nothing
  check.py tidy BUILD          clang-tidy finds nothing (.clang-tidy)
  check.py entries BUILD       each test of each program belongs to one CTest entry

Exits with 1 and says what is wrong, or with 77 when a tool is missing."""
import collections
import concurrent.futures
import fnmatch
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLANG, TIDY = "clang++-16", "clang-tidy-16"
SOURCES = ("echelon", "tests", "benchmarks", "examples")


def files(folders, *endings):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings and path.is_file():
                yield path


def name_of(path):
    return str(path.relative_to(ROOT))


def need(*tools):
    for tool in tools:
        if shutil.which(tool) is None:
            print(f"skipped: {tool} is not installed: run `make extras`")
            sys.exit(77)


def run_each(command_of, paths):
    """Runs a command for each path, two at a time; returns the failures' output."""
    def one(path):
        done = subprocess.run(command_of(path), cwd=ROOT, capture_output=True, text=True)
        return None if done.returncode == 0 else (path, done.stdout + done.stderr)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [failure for failure in pool.map(one, paths) if failure]


def finish(problems, advice):
    for problem in problems[:50]:
        print(problem)
    if len(problems) > 50:
        print(f"and {len(problems) - 50} more")
    if problems:
        print(advice)
    sys.exit(1 if problems else 0)


# --- Format and spelling ------------------------------------------------------


def check_format():
    need("clang-format")
    paths = [str(p) for p in files(SOURCES, ".h", ".cpp")]
    done = subprocess.run(["clang-format", "--dry-run", "-Werror", *paths],
                          cwd=ROOT, capture_output=True, text=True)
    wrong = sorted({line.split(":")[0] for line in done.stderr.splitlines() if ": error:" in line})
    finish([os.path.relpath(path, ROOT) for path in wrong], "write them anew with: clang-format -i FILE")


def check_spelling():
    need("codespell")
    done = subprocess.run(
        ["codespell", "--ignore-words", "tests/tree/words.txt",
         "--skip", "*.csv,*.gz,*.png,*.json,*.svg,tests/fuzz/corpus,tests/data/*",
         *SOURCES, "doc", "setup", "cmake", "README.md", "CONTRIBUTING.md", "Makefile"],
        cwd=ROOT, capture_output=True, text=True)
    finish([line for line in done.stdout.splitlines() if line.strip()],
           "correct the words, or add a term of the field to tests/tree/words.txt")


def check_pickles():
    reads = re.compile(r"\b(torch::(jit::)?(load|import|unpickle|pickle_load)|InputArchive|Unpickler)\b"
                       r"|torch/csrc/jit/serialization/")
    finish([f"{name_of(path)}:{number}: {line.strip()}"
            for path in files(("echelon", "examples", "benchmarks"), ".h", ".cpp")
            for number, line in enumerate(path.read_text().splitlines(), 1) if reads.search(line)],
           "a pickle of a stranger runs code: read safetensors, or say how to convert it")


# --- Folders --------------------------------------------------------------------


class Room:
    """A folder of echelon/: what it includes, and what its CMakeLists.txt says."""

    def __init__(self, folder):
        self.folder = folder
        self.name = "error" if folder == Path("echelon") else "_".join(folder.parts[1:])
        text = (ROOT / folder / "CMakeLists.txt").read_text()
        call = re.search(r"echelon_room\((.*?)\n?\)", text, re.S)
        self.says = re.match(r"((?:# .*\n)*)", text).group(1).replace("# ", "").replace("\n", " ").strip()
        self.says = re.split(r"(?<=[.])\s", self.says)[0]
        self.program = call is None
        listed = re.findall(r"(\w+)\s+((?:echelon::\w+\s*)+)", call.group(1) if call else "")
        self.listed = {}
        for kind, names in listed:
            for name in re.findall(r"echelon::(\w+)", names):
                self.listed[name] = kind
        self.torch = bool(re.search(r"\bTORCH\b", text))
        self.includes = collections.defaultdict(list)

    def read(self):
        for path in sorted((ROOT / self.folder).glob("*")):
            if path.suffix in (".h", ".cpp", ".in"):
                for include in re.findall(r'^#include "(echelon/[^"]+)"', path.read_text(), re.M):
                    folder = Path(include).parent
                    if folder != self.folder:
                        self.includes[folder].append((path.name, include))


def rooms():
    found = {}
    for path in sorted((ROOT / "echelon").rglob("CMakeLists.txt")):
        folder = path.parent.relative_to(ROOT)
        if any((ROOT / folder).glob("*.cpp")) or any((ROOT / folder).glob("*.h")):
            found[folder] = Room(folder)
    for room in found.values():
        room.read()
    return found


def cycles(graph):
    """The knots of folders that include each other."""
    order, low, stack, on, knots = {}, {}, [], set(), []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        on.add(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            knot = []
            while not knot or knot[-1] != node:
                knot.append(stack.pop())
                on.discard(knot[-1])
            if len(knot) > 1:
                knots.append(knot)

    for node in graph:
        if node not in order:
            visit(node)
    return knots


# The folders that training programs include: their names are in echelon itself.
PUBLIC = ("architecture", "checkpoint", "comm", "data", "environment", "job", "layers", "layout", "memory", "models",
          "optim", "options", "parallel", "programs", "schedule", "text", "train")


def wrong_namespaces(folder):
    own = folder.parts[1] if len(folder.parts) > 1 else "echelon"
    if own in PUBLIC or own == "echelon":
        return []
    return [f"{folder}/{path.name}: {name}, but the folder's namespace is echelon::{own}"
            for path in sorted((ROOT / folder).glob("*"))
            if path.suffix in (".h", ".cpp")
            for name in re.findall(r"^namespace (echelon[\w:]*) {", path.read_text(), re.M)
            if f"{name}::".split("::")[1] != own]


def check_folders(write):
    found = rooms()
    problems = [problem for folder in found for problem in wrong_namespaces(folder)]
    graph = {folder: sorted(room.includes) for folder, room in found.items()}
    for folder, room in found.items():
        for other, places in room.includes.items():
            if other not in found:
                problems.append(f"{folder}/{places[0][0]}: includes {places[0][1]}, whose folder has no CMakeLists.txt")
            elif not room.program and found[other].name not in room.listed:
                problems.append(f"{folder}/{places[0][0]}: includes {places[0][1]}, but {folder}/CMakeLists.txt "
                                f"does not list echelon::{found[other].name}")
        names = {found[other].name for other in room.includes if other in found}
        for name in room.listed:
            if not room.program and name not in names:
                problems.append(f"{folder}/CMakeLists.txt: lists echelon::{name}, which no file there includes")
    for knot in cycles({f: [o for o in others if o in found] for f, others in graph.items()}):
        problems.append("a cycle: " + ", ".join(str(folder) for folder in knot))
        for folder in knot:
            for other, places in found[folder].includes.items():
                if other in knot:
                    problems.append(f"  {folder}/{places[0][0]} includes {places[0][1]}")
    if problems:
        finish(problems, "move a file, list the room in DEPENDS (used by a header) or PRIVATE, or use the folder's namespace")
    page, drawing = ROOT / "doc/architecture.md", ROOT / "doc/architecture.svg"
    begin, end = "<!-- rooms: made by tests/tree/check.py -->\n", "<!-- end of rooms -->"
    text = page.read_text()
    head, rest = text.split(begin)
    new = head + begin + room_table(found) + end + rest.split(end)[1]
    picture = draw(found)
    if write:
        page.write_text(new)
        drawing.write_text(picture)
    elif new != text or not drawing.exists() or drawing.read_text() != picture:
        finish(["doc/architecture.md or doc/architecture.svg is not what the includes say"],
               "write them anew with: make architecture")


def reduced(found):
    """The arrows that no longer path replaces."""
    below = {}

    def reach(folder):
        if folder not in below:
            below[folder] = set()
            for other in found[folder].includes:
                below[folder] |= {other} | reach(other)
        return below[folder]

    arrows = {}
    for folder, room in found.items():
        others = set(room.includes)
        arrows[folder] = sorted(o for o in others if not any(o in reach(p) for p in others if p != o))
    return arrows


def label(folder):
    return "error" if folder == Path("echelon") else "/".join(folder.parts[1:])


def room_table(found):
    arrows = reduced(found)
    lines = ["", "| folder | what it is | stands on |", "|---|---|---|"]
    for folder, room in found.items():
        if room.folder == Path("echelon"):
            continue
        below = ", ".join(label(o) for o in arrows[folder] if o != Path("echelon")) or "error"
        lines.append(f"| `{label(folder)}` | {room.says} | {below} |")
    return "\n".join(lines) + "\n\n"


WINGS = {"plain": "#2f6f9f", "training": "#b5541c", "operations": "#4c7a34"}
OPERATIONS = ("monitoring", "watch", "launch", "pool", "deploy", "cli", "programs")


def draw(found):
    """An SVG: each room above all that it includes, arrows as reduced()."""
    arrows = {f: [o for o in others if o != Path("echelon")]
              for f, others in reduced(found).items() if f != Path("echelon")}
    floor = {}

    def floor_of(folder):
        if folder not in floor:
            floor[folder] = 1 + max((floor_of(o) for o in arrows[folder]), default=-1)
        return floor[folder]

    for folder in arrows:
        floor_of(folder)
    floors = collections.defaultdict(list)
    for folder in sorted(arrows):
        floors[floor[folder]].append(folder)
    width, height, gap_x, gap_y = 146, 30, 14, 46
    columns = max(len(row) for row in floors.values())
    total = columns * (width + gap_x) + gap_x
    place = {}
    for level in sorted(floors):
        row = floors[level]
        wish = {f: (sum(place[o] for o in arrows[f] if o in place) / max(1, len(arrows[f])))
                if arrows[f] else row.index(f) * (width + gap_x) for f in row}
        row.sort(key=lambda f: (wish[f], str(f)))
        space = (total - len(row) * width) / (len(row) + 1)
        for i, folder in enumerate(row):
            place[folder] = space + i * (width + space) + width / 2
    top = max(floors)
    level_y = {level: 40 + (top - level) * (height + gap_y) for level in floors}
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {40 + (top + 1) * (height + gap_y):.0f}" '
           'font-family="system-ui, sans-serif" font-size="13">',
           '<rect width="100%" height="100%" fill="#fbfaf7"/>',
           '<g fill="none" stroke="#8a8478" stroke-width="1" opacity="0.55">']
    for folder, others in arrows.items():
        for other in others:
            x1, y1 = place[folder], level_y[floor[folder]] + height
            x2, y2 = place[other], level_y[floor[other]]
            bend = (y2 - y1) / 2
            out.append(f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>')
    out.append("</g>")
    for folder, room in found.items():
        if folder not in place:
            continue
        wing = "operations" if label(folder).split("/")[0] in OPERATIONS else "training" if room.torch else "plain"
        x, y = place[folder] - width / 2, level_y[floor[folder]]
        out.append(f'<g><title>{html.escape(label(folder) + ": " + room.says)}</title>'
                   f'<rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}" rx="5" fill="{WINGS[wing]}"/>'
                   f'<text x="{place[folder]:.0f}" y="{y + 20:.0f}" fill="#fff" text-anchor="middle">'
                   f'{html.escape(label(folder))}</text></g>')
    x = 20
    for wing, colour in WINGS.items():
        out.append(f'<rect x="{x}" y="12" width="14" height="14" rx="3" fill="{colour}"/>'
                   f'<text x="{x + 20}" y="24" fill="#333">{wing} wing</text>')
        x += 150
    return "\n".join(out + ["</svg>", ""])


# --- Compiled checks -------------------------------------------------------------


class Passed:
    """What a compiled check has accepted before, by its text and that of all files of the
    tree that it includes. It lives in the cache of set-up, as the compiler's cache does, so
    that a second run reads only what has changed."""

    def __init__(self, check, build, *tools):
        cache = os.environ.get("ECHELON_CACHE") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "echelon")
        self.folder = Path(cache) / "checks" / check
        self.build = str(build)
        self.includes = {}
        self.fixed = [subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
                      for tool in tools]
        self.fixed += [(ROOT / name).read_text() for name in ("tests/tree/check.py", ".clang-tidy")]
        old = time.time() - 90 * 24 * 3600
        for path in self.folder.glob("*"):
            if path.stat().st_mtime < old:
                path.unlink(missing_ok=True)

    def included(self, path):
        """The files of the tree that `path` includes itself."""
        if path not in self.includes:
            names = re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M)
            places = [place for name in names for place in (ROOT / name, path.parent / name)]
            self.includes[path] = [place for place in places if place.is_file()]
        return self.includes[path]

    def all_included(self, path):
        """`path` and the files of the tree that it and they include."""
        seen, left = {path}, [path]
        while left:
            for other in self.included(left.pop()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    def uses(self, path, library):
        """Whether one of them includes <library>."""
        return any(f"#include <{library}>" in one.read_text() for one in self.all_included(path))

    def key(self, path, command):
        seen = self.all_included(path)
        text = "\0".join([*self.fixed, *map(str, command),
                          *(f"{one}\0{one.read_text()}" for one in sorted(seen))])
        text = text.replace(self.build, "BUILD").replace(str(ROOT), "ROOT")
        return self.folder / hashlib.sha256(text.encode()).hexdigest()

    def run_each(self, command_of, paths):
        """As run_each, of those that have not passed."""
        keys = {path: self.key(path, command_of(path)) for path in paths}
        left = [path for path in paths if not keys[path].exists()]
        failures = run_each(command_of, left)
        failed = {path for path, _ in failures}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                if path not in failed:
                    keys[path].touch()
        except OSError as error:
            print(f"not kept for the next time: {error}")
        print(f"{len(left)} of {len(paths)} are new")
        return failures


class Clang:
    """clang's flags for a file, with a precompiled header for the training wing."""

    def __init__(self, build):
        need(CLANG)
        self.build = Path(build)
        cache = (self.build / "CMakeCache.txt").read_text()
        found = re.search(r"^ECHELON_LIBTORCH:\w+=(.+)$", cache, re.M)
        self.torch = found.group(1) if found else None
        self.plain = ["-std=c++20", "-DNDEBUG", f"-I{ROOT}", f"-I{build}", "-Wno-everything"]
        self.with_torch = self.plain + [
            "-fPIC", "-DFMT_HEADER_ONLY", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED",
            "-isystem", f"{self.torch}/include", "-isystem", f"{self.torch}/include/torch/csrc/api/include"]
        self.rooms = rooms()
        self.header = self.build / f"{CLANG}_pch.h"

    def make_header(self):
        text = "".join(f"#include <{name}>\n" for name in (
            "torch/types.h", "torch/autograd.h", "torch/nn/module.h", "torch/utils.h"))
        pch = self.header.with_suffix(".pch")
        if pch.exists() and self.header.exists() and self.header.read_text() == text:
            return
        self.header.write_text(text)
        done = subprocess.run(
            [CLANG, *self.with_torch, "-fpch-instantiate-templates", "-x", "c++-header",
             str(self.header), "-o", str(pch)], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:])
            sys.exit(1)

    def is_torch(self, path):
        room = self.rooms.get(path.relative_to(ROOT).parent)
        return room is not None and room.torch

    def flags(self, path):
        if not self.is_torch(path):
            return self.plain
        extra = ["-isystem", str(ROOT / "echelon/comm/gloo/declarations")] if "gloo" in path.parts else []
        return self.with_torch + extra + ["-include-pch", str(self.header.with_suffix(".pch"))]


def check_headers(build):
    clang = Clang(build)
    paths = [p for p in files(("echelon",), ".h")
             if "declarations" not in str(p) and "nccl_plugin" not in p.name]
    if clang.torch is None:
        paths = [p for p in paths if not clang.is_torch(p)]
    else:
        clang.make_header()
    failures = Passed("headers", build, CLANG).run_each(
        lambda p: [CLANG, *clang.flags(p), "-fsyntax-only", "-x", "c++", str(p)], paths)
    finish([f"{name_of(path)} does not compile by itself:\n{text[:600]}" for path, text in failures],
           "include what the header uses")


def check_tidy(build):
    need(TIDY)
    clang = Clang(build)
    commands = json.loads((Path(build) / "compile_commands.json").read_text())
    compiled = sorted({Path(c["file"]) for c in commands if "/comm/shared_memory/reduce" not in c["file"]})
    unity = [p for p in compiled if p.parent.name == "unity" and p.name.startswith("echelon_")]
    torch = {"echelon_" + room.name for room in clang.rooms.values() if room.torch}
    paths = [p for p in unity if p.stem.rsplit("_", 1)[0] not in torch]
    command = lambda p: [TIDY, "--quiet", "--warnings-as-errors=*", str(p), "--", *clang.plain]
    passed = Passed("tidy", build, TIDY)
    # Most of the time goes into headers of libraries, so several units are read as one:
    # those that need the largest library apart from the others. Each folder that is
    # not public has names of its own; the public ones share theirs, and collide less in
    # small groups. Units that collide are read by themselves.
    kinds = collections.defaultdict(list)
    for path in paths:
        kinds[path.stem.split("_")[1] in PUBLIC, passed.uses(path, "nlohmann/json.hpp")].append(path)
    together = {}
    for kind, count in (((False, True), 2), ((False, False), 1), ((True, True), 2), ((True, False), 4)):
        for i in range(count):
            group = Path(build) / f"tidy_{len(together)}.cpp"
            together[group] = kinds[kind][i::count]
            group.write_text("".join(f'#include "{path}"\n' for path in together[group]))
    failures = passed.run_each(command, list(together))
    collided = [group for group, text in failures if "[clang-diagnostic-error]" in text]
    failures = [one for one in failures if one[0] not in collided]
    failures += passed.run_each(command, [path for group in collided for path in together[group]])
    lines = sorted({line.replace(f"{ROOT}/", "") for _, text in failures for line in text.splitlines()
                    if re.search(r": (warning|error): ", line)})
    finish(lines or [text[:500] for _, text in failures], "mend them; .clang-tidy has the list of checks")


# Tests that others start in processes of their own.
STARTED_BY_TESTS = ("All/Rank.",)


def list_tests(program):
    listed = subprocess.run([program, "--gtest_list_tests"],
                            capture_output=True, text=True, check=True).stdout
    suite, names = "", []
    for line in listed.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith(" "):
            names.append(suite + name)
        else:
            suite = name
    return names


def check_entries(build):
    listed = json.loads(subprocess.run(
        ["ctest", "--test-dir", build, "--show-only=json-v1"],
        capture_output=True, text=True, check=True).stdout)
    entries = collections.defaultdict(list)
    for test in listed["tests"]:
        program, *words = test.get("command", [""])
        if len(words) == 1 and words[0].startswith("--gtest_filter="):
            # A program's tests may run again with other variables.
            variables = next((p["value"] for p in test["properties"] if p["name"] == "ENVIRONMENT"), [])
            if "ECHELON_TEST_FORKS=1" not in variables:
                entries[program].append(words[0].partition("=")[2].split(":"))
    problems = []
    for program in sorted(entries):
        for name in list_tests(program):
            count = sum(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
                        for patterns in entries[program])
            if count != 1 and not name.startswith(STARTED_BY_TESTS):
                problems.append(f"{Path(program).name}: {name} is in {count} entries")
    finish(problems, "give a suite one name in one file of a folder (cmake/EchelonTest.cmake)")


def main(words):
    checks = {
        "format": lambda: check_format(),
        "folders": lambda: check_folders("--write" in words),
        "headers": lambda: check_headers(Path(words[1]).resolve()),
        "pickles": lambda: check_pickles(),
        "spelling": lambda: check_spelling(),
        "tidy": lambda: check_tidy(Path(words[1]).resolve()),
        "entries": lambda: check_entries(Path(words[1]).resolve()),
    }
    if not words or words[0] not in checks:
        print(__doc__)
        sys.exit(2)
    checks[words[0]]()


main(sys.argv[1:])
