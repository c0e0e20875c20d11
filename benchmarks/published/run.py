#!/usr/bin/env python3
"""Published training steps against what `echelon simulate --table` predicts.

Prints, for each file of the table: rows, rows predicted, mean and median absolute
error of the step time, bias, memory, and for each sweep (layouts of one model on one
cluster) the rank correlation and how far the layout predicted best is from the
best one measured. Every row left out is listed with its reason."""
import argparse
import collections
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Targets of the mean error, and those of the rank correlation.
TARGETS = {
    "vtrain_a100_single": 0.08,
    "vtrain_a100_multi": 0.12,
    "dgxc_benchmarking": 0.15,
    "nemo_h100": 0.15,
    "nemo_other_gpus": 0.15,
}
SWEPT = ("vtrain_a100_single", "vtrain_a100_multi", "bigscience_a100", "llm_foundry", "zero_bubble")
FEWEST = 4  # rows that make a sweep

MODEL = ("file", "gpu", "gpus", "layers", "hidden", "heads", "precision")


def ranks(values):
    order = sorted(range(len(values)), key=lambda i: values[i])
    result = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for i in order[at:end]:
            result[i] = (at + end - 1) / 2
        at = end
    return result


def spearman(left, right):
    a, b = ranks(left), ranks(right)
    middle = (len(a) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b))
    squares = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return both / squares**0.5 if squares > 0 else None


def summary(rows):
    errors = [r["step_error"] for r in rows if "step_error" in r]
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(errors),
        "mean": statistics.fmean(map(abs, errors)),
        "median": statistics.median(map(abs, errors)),
        "bias": statistics.fmean(errors),
    }


def sweeps(rows, same_batch):
    """Rank correlation of seconds a token within each sweep: layouts of one batch and
    sequence length, or of any."""
    groups = collections.defaultdict(list)
    for row in rows:
        if "step_error" in row:
            key = [row["cells"][k] for k in MODEL]
            groups[tuple(key + [row["cells"][k] for k in ("global_batch", "seq")] * same_batch)].append(row)
    found = []
    for key, group in groups.items():
        tokens = [float(r["cells"]["global_batch"]) * float(r["cells"]["seq"]) for r in group]
        measured = [r["measured_step_seconds"] / t for r, t in zip(group, tokens)]
        predicted = [r["step_seconds"] / t for r, t in zip(group, tokens)]
        if len(group) < FEWEST:
            continue
        correlation = spearman(measured, predicted)
        if correlation is None:
            continue
        first = min(range(len(group)), key=lambda i: predicted[i])
        found.append({
            "sweep": " ".join(key[1:]),
            "rows": len(group),
            "rank_correlation": correlation,
            "behind_best": measured[first] / min(measured) - 1,
        })
    return found


def sweep_summary(found):
    if not found:
        return {"sweeps": 0}
    values = [s["rank_correlation"] for s in found]
    behind = [s["behind_best"] for s in found]
    weights = sum(s["rows"] for s in found)
    return {
        "sweeps": len(found),
        "rows": weights,
        "rank_correlation": sum(s["rank_correlation"] * s["rows"] for s in found) / weights,
        "least_rank_correlation": min(values),
        "behind_best_mean": statistics.fmean(behind),
        "behind_best_most": max(behind),
        "within_5_percent": sum(b <= 0.05 for b in behind),
    }


def out_of_memory(row):
    text = (row["cells"]["notes"] + row["cells"]["table"]).lower()
    return "out of memory" in text or "oom" in text.split()


def report(table, rows):
    files = {}
    for name in dict.fromkeys(r["cells"]["file"] for r in rows):
        mine = [r for r in rows if r["cells"]["file"] == name]
        memory = [r["memory_error"] for r in mine if "memory_error" in r]
        oom = [r for r in mine if out_of_memory(r)]
        files[name] = {
            "rows": len(mine),
            "predicted": sum("excluded" not in r for r in mine),
            "target": TARGETS.get(name, 0.10),
            "step": summary(mine),
            "memory": {
                "rows": len(memory),
                "mean": statistics.fmean(map(abs, memory)) if memory else None,
                "bias": statistics.fmean(memory) if memory else None,
            },
            "said_to_fit": sum(r.get("fits", False) for r in mine if not out_of_memory(r)),
            "out_of_memory": {
                "rows": len(oom),
                "predicted_not_to_fit": sum(not r.get("fits", True) for r in oom),
            },
            "stacks": dict(collections.Counter(r["stack"] for r in mine if "stack" in r)),
        }
        if name in SWEPT:
            files[name]["sweeps_same_batch"] = sweeps(mine, True)
            files[name]["sweeps_any_batch"] = sweeps(mine, False)
    return {
        "table": table,
        "files": files,
        "excluded": [
            {"row": r["row"], "file": r["cells"]["file"], "model": r["cells"]["model"], "reason": r["excluded"]}
            for r in rows if "excluded" in r
        ],
        "worst": [
            {
                "row": r["row"], "file": r["cells"]["file"], "model": r["cells"]["model"],
                "strategy": r["strategy"], "step_error": round(r["step_error"], 4),
            }
            for r in sorted((r for r in rows if "step_error" in r), key=lambda r: -abs(r["step_error"]))[:40]
        ],
    }


def percent(value, sign=""):
    return "" if value is None else f"{100 * value:{sign}.1f} %"


def print_table(result):
    print("| file | rows | predicted | asked | mean | median | bias | memory, mean (bias) |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, f in result["files"].items():
        step, memory = f["step"], f["memory"]
        cells = [
            name, str(f["rows"]), str(f["predicted"]), percent(f["target"]).replace(".0", ""),
            percent(step.get("mean")), percent(step.get("median")), percent(step.get("bias"), "+"),
            f"{percent(memory['mean'])} ({percent(memory['bias'], '+')})" if memory["rows"] else "",
        ]
        print("| " + " | ".join(cells) + " |")
    print("\n| sweeps of | batch and sequence | sweeps | rows | rank correlation | least | predicted best behind the best: mean, most | within 5 % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, f in result["files"].items():
        for key, batch in (("sweeps_same_batch", "same"), ("sweeps_any_batch", "any")):
            s = sweep_summary(f.get(key, []))
            if not s["sweeps"]:
                continue
            print(
                f"| {name} | {batch} | {s['sweeps']} | {s['rows']} | {s['rank_correlation']:.3f} | "
                f"{s['least_rank_correlation']:.3f} | {percent(s['behind_best_mean'])}, "
                f"{percent(s['behind_best_most'])} | {s['within_5_percent']} of {s['sweeps']} |")
    for row in result["excluded"]:
        print(f"left out: row {row['row']} ({row['file']}, {row['model']}): {row['reason']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default=str(HERE / "step_times.csv"))
    parser.add_argument("--echelon", default=str(ROOT / "build" / "bin" / "echelon"))
    parser.add_argument("--predictions", help="a file with the output of simulate --json, in place of running it")
    parser.add_argument("--json", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.predictions:
        text = Path(arguments.predictions).read_text()
    else:
        command = [arguments.echelon, "simulate", "--table", arguments.table, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr or f"{command[0]} ended with {done.returncode}")
        text = done.stdout
    rows = json.loads(text)["rows"]
    with open(arguments.table, newline="") as file:
        cells = list(csv.DictReader(file))
    if len(cells) != len(rows):
        sys.exit(f"{arguments.table} has {len(cells)} rows, but {len(rows)} were predicted")
    for row, cell in zip(rows, cells):
        row["cells"] = cell
    result = report(Path(arguments.table).name, rows)
    print_table(result)
    if arguments.json:
        for f in result["files"].values():
            for key in ("sweeps_same_batch", "sweeps_any_batch"):
                if key in f:
                    f[key.replace("sweeps", "sweep_summary")] = sweep_summary(f[key])
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
