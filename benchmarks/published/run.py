#!/usr/bin/env python3
"""Published training steps against what `build/benchmarks/published_steps` predicts.

Prints, for each file of the table: rows, rows predicted, mean and median absolute
error of the step time, bias, memory, and for each sweep (layouts of one model on one
cluster) the rank correlation, how far the layout predicted best is from the
best one measured, how far the one that the planner puts first is, and what a predictor
without any error would get, given how well measurements repeat. Every row left out is
listed with its reason; rows that ran out of memory are in out_of_memory.csv. --unseen
takes a further table, of models that nothing was chosen by."""
import argparse
import collections
import csv
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
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
DRAWS = 300

MODEL = ("file", "gpu", "gpus", "layers", "hidden", "heads", "precision")
LAYOUT = MODEL + ("global_batch", "seq", "microbatch_size", "tp", "pp", "virtual_stages", "cp", "ep", "dp",
                  "zero_or_fsdp", "recompute", "schedule")
# The machine was changed between these tables and those that follow them in the source
# (PCI Express and NUMA, 25 February 2022), which says not to compare the two.
BEFORE_THE_CHANGE = ("Best TFLOPs", "tile and wave quantization", "48 node contenders",
                     "Final round comparison", "NHEADs comparison")


def setting(row):
    changed = row["cells"]["file"] == "bigscience_a100"
    return "before" if changed and row["cells"]["table"] in BEFORE_THE_CHANGE else "after"


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


def sweeps(rows, same_batch, repeat=None):
    """Rank correlation of seconds a token within each sweep: layouts of one batch and
    sequence length, or of any."""
    groups = collections.defaultdict(list)
    for row in rows:
        if "step_error" in row:
            key = [row["cells"][k] for k in MODEL] + [setting(row)]
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
        planned = [i for i in range(len(group)) if group[i].get("planned_step_seconds")]
        if planned and same_batch:
            first = min(planned, key=lambda i: group[i]["planned_step_seconds"])
            found[-1]["planned_rows"] = len(planned)
            found[-1]["planner_behind_best"] = measured[first] / min(measured) - 1
        if repeat:
            found[-1]["ceiling"] = ceiling(group, measured, repeat)
    return found


def repeated(rows):
    """Standard deviation of the logarithm of a step time, of rows that differ in the
    table of the source alone: measured again. The same figure again is no measurement."""
    groups = collections.defaultdict(set)
    for row in rows:
        if "step_error" in row:
            key = tuple(row["cells"][k] for k in LAYOUT) + (setting(row),)
            groups[key].add(math.log(row["measured_step_seconds"]))
    groups = [g for g in groups.values() if len(g) > 1]
    if not groups:
        return None
    squares = sum((len(g) - 1) * statistics.variance(g) for g in groups)
    freedom = sum(len(g) - 1 for g in groups)
    return {"deviation": math.sqrt(squares / freedom), "repeats": freedom, "of": ["row"]}


def repeated_layers(rows):
    """The same where no row was measured again, of layers: what a step takes more for
    one more microbatch, over layers that differ in depth alone. A layer cannot take less
    for twice the samples; where it was measured to, the difference is two errors."""
    steps = collections.defaultdict(dict)
    for row in rows:
        c = row["cells"]
        if "step_error" in row and c["pp"] == "1":
            count = int(c["global_batch"]) // int(c["dp"]) // int(c["microbatch_size"])
            key = (c["hidden"], c["tp"], int(c["microbatch_size"]), int(c["layers"]), c["dp"])
            steps[key][count] = row["measured_step_seconds"]
    slopes = {}
    for key, of in steps.items():
        if len(of) > 1:
            slopes[key[:4]] = (of[max(of)] - of[min(of)]) / (max(of) - min(of))
    layers = {}
    for hidden, tp, size, depth in slopes:
        depths = [k[3] for k in slopes if k[:3] == (hidden, tp, size)]
        if len(depths) == 2:
            difference = slopes[hidden, tp, size, max(depths)] - slopes[hidden, tp, size, min(depths)]
            layers[hidden, tp, size] = difference / (max(depths) - min(depths))
    less = [math.log(layers[key[0], key[1], 2 * key[2]] / one) for key, one in layers.items()
            if layers.get((key[0], key[1], 2 * key[2]), one) < one]
    deviation = math.sqrt(statistics.fmean(x * x for x in less) / 2)
    return {"deviation": deviation, "repeats": len(less), "of": ["hidden", "tp", "microbatch_size"]}


def ceiling(group, measured, repeat):
    """What the true order would get where measurements err: the measured times taken for
    true, and measured again with the errors that repeated ones show."""
    draw = random.Random(1)
    correlations, near = [], 0
    for _ in range(DRAWS):
        errors = {}
        again = []
        for i, row in enumerate(group):
            key = i if repeat["of"] == ["row"] else tuple(row["cells"][k] for k in repeat["of"])
            if key not in errors:
                errors[key] = math.exp(draw.gauss(0, repeat["deviation"]))
            again.append(measured[i] * errors[key])
        correlations.append(spearman(measured, again))
        first = min(range(len(group)), key=lambda i: measured[i])
        near += again[first] <= 1.05 * min(again)
    return {"rank_correlation": statistics.fmean(correlations), "within_5_percent": near / DRAWS}


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
        **planner_summary(found),
        **ceiling_summary(found),
    }


def planner_summary(found):
    planned = [s["planner_behind_best"] for s in found if "planner_behind_best" in s]
    if not planned:
        return {}
    return {"planned": len(planned), "planner_within_5_percent": sum(b <= 0.05 for b in planned),
            "planner_behind_best_median": statistics.median(planned),
            "planner_behind_best_mean": statistics.fmean(planned),
            "planner_behind_best_most": max(planned)}


def ceiling_summary(found):
    judged = [s for s in found if "ceiling" in s]
    if not judged:
        return {}
    rows = sum(s["rows"] for s in judged)
    return {"ceiling_rank_correlation": sum(s["ceiling"]["rank_correlation"] * s["rows"] for s in judged) / rows,
            "ceiling_within_5_percent": sum(s["ceiling"]["within_5_percent"] for s in judged)}


def report(table, rows):
    files = {}
    for name in dict.fromkeys(r["cells"]["file"] for r in rows):
        mine = [r for r in rows if r["cells"]["file"] == name]
        memory = [r["memory_error"] for r in mine if "memory_error" in r]
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
            "said_to_fit": sum(r.get("fits", False) for r in mine),
            "stacks": dict(collections.Counter(r["stack"] for r in mine if "stack" in r)),
        }
        if name in SWEPT:
            repeat = repeated_layers(mine) if name == "vtrain_a100_single" else repeated(mine)
            files[name]["repeat"] = repeat
            files[name]["sweeps_same_batch"] = sweeps(mine, True, repeat)
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


def predictions_of(program, table, *flags):
    command = [program, str(table), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr or f"{program} ended with {done.returncode}")
    return done.stdout


def with_cells(text, table):
    rows = json.loads(text)["rows"]
    with open(table, newline="") as file:
        cells = list(csv.DictReader(file))
    if len(cells) != len(rows):
        sys.exit(f"{table} has {len(cells)} rows, but {len(rows)} were predicted")
    for row, cell in zip(rows, cells):
        row["cells"] = cell
    return rows


def add_planned(program, table, rows):
    """The planner is asked for the rows of the sweeps alone: of the others it would
    search thousands of devices for nothing."""
    swept = [r for r in rows if r["cells"]["file"] in SWEPT]
    with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as part:
        writer = csv.DictWriter(part, list(swept[0]["cells"]))
        writer.writeheader()
        writer.writerows(r["cells"] for r in swept)
        part.flush()
        planned = json.loads(predictions_of(program, part.name, "--planned"))["rows"]
    for row, plan in zip(swept, planned):
        row["planned_step_seconds"] = plan["planned_step_seconds"]


def unfit(program):
    rows = json.loads(predictions_of(program, HERE / "out_of_memory.csv"))["rows"]
    fits = [r for r in rows if r.get("fits")]
    return {"rows": len(rows), "predicted_not_to_fit": len(rows) - len(fits),
            "predicted_to_fit": [{k: r[k] for k in ("row", "strategy", "memory_gib")} for r in fits]}


def percent(value, sign=""):
    return "" if value is None else f"{100 * value:{sign}.1f} %"


def print_planner_misses(result):
    """Of the sweeps in which the planner's first is not within 5 % of the best: how far."""
    for name, f in result["files"].items():
        behind = sorted(s["planner_behind_best"] for s in f.get("sweeps_same_batch", []) if "planner_behind_best" in s)
        if behind:
            beyond = ", ".join(f"{100 * b:.0f}" for b in behind if b > 0.05)
            print(f"{name}: the planner's first is behind the best by {percent(statistics.median(behind))} (median), "
                  f"{percent(statistics.fmean(behind))} (mean), {percent(behind[-1])} (most); beyond 5 %: {beyond or 'none'}")


def unseen(program, table):
    """Steps of models that no constant and no formula was chosen by."""
    rows = with_cells(predictions_of(program, table), table)
    models = dict.fromkeys(r["cells"]["model"] for r in rows)
    return {model: summary([r for r in rows if r["cells"]["model"] == model]) for model in models} | {"all": summary(rows)}


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
    print("\n| sweeps of | batch and sequence | sweeps | rows | rank correlation | least | predicted best behind the best: mean, most | within 5 % | planner\'s first within 5 % | ceiling: rank correlation, within 5 % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, f in result["files"].items():
        for key, batch in (("sweeps_same_batch", "same"), ("sweeps_any_batch", "any")):
            s = sweep_summary(f.get(key, []))
            if not s["sweeps"]:
                continue
            print(
                f"| {name} | {batch} | {s['sweeps']} | {s['rows']} | {s['rank_correlation']:.3f} | "
                f"{s['least_rank_correlation']:.3f} | {percent(s['behind_best_mean'])}, "
                f"{percent(s['behind_best_most'])} | {s['within_5_percent']} of {s['sweeps']} | "
                + (f"{s['planner_within_5_percent']} of {s['planned']}" if "planned" in s else "") + " | "
                + (f"{s['ceiling_rank_correlation']:.3f}, {s['ceiling_within_5_percent']:.1f}"
                   if "ceiling_rank_correlation" in s else "") + " |")
    print_planner_misses(result)
    for name, f in result["files"].items():
        if f.get("repeat"):
            r = f["repeat"]
            print(f"{name}: measured again, {r['repeats']} times: standard deviation {percent(r['deviation'])}")
    oom = result["out_of_memory"]
    print(f"ran out of memory: {oom['rows']} rows, {oom['predicted_not_to_fit']} of them predicted not to fit")
    for row in oom["predicted_to_fit"]:
        print(f"  row {row['row']} predicted to fit: {row['strategy']}, {row['memory_gib']:.1f} GiB")
    for model, s in result.get("unseen", {}).items():
        print(f"unseen, {model}: {s['rows']} rows, mean error {percent(s['mean'])}, "
              f"median {percent(s['median'])}, bias {percent(s['bias'], '+')}")
    for row in result["excluded"]:
        print(f"left out: row {row['row']} ({row['file']}, {row['model']}): {row['reason']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default=str(HERE / "step_times.csv"))
    parser.add_argument("--program", default=str(ROOT / "build" / "benchmarks" / "published_steps"))
    parser.add_argument("--predictions", help="a file with the output of published_steps --json, in place of running it")
    parser.add_argument("--unseen", help="a table of other models' steps, predicted as well")
    parser.add_argument("--json", help="write all figures there")
    arguments = parser.parse_args()
    table = arguments.table
    if arguments.predictions:
        rows = with_cells(Path(arguments.predictions).read_text(), table)
    else:
        rows = with_cells(predictions_of(arguments.program, table), table)
        if any(r["cells"]["file"] in SWEPT for r in rows):
            add_planned(arguments.program, table, rows)
    result = report(Path(table).name, rows)
    result["out_of_memory"] = unfit(arguments.program)
    if arguments.unseen:
        result["unseen"] = unseen(arguments.program, arguments.unseen)
    print_table(result)
    if arguments.json:
        for f in result["files"].values():
            for key in ("sweeps_same_batch", "sweeps_any_batch"):
                if key in f:
                    f[key.replace("sweeps", "sweep_summary")] = sweep_summary(f[key])
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
