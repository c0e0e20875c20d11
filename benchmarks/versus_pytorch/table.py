#!/usr/bin/env python3
"""Prints a file that run.py --json wrote as a table for README.md."""
import json
import sys
from pathlib import Path


def cell(row, key, form):
    return form.format(**row[key]) if key in row else ""


def main():
    result = json.loads(Path(sys.argv[1]).read_text())
    print(
        "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}; "
        "PyTorch {pytorch}, torchvision {torchvision}; load average at the "
        "start {load_average_at_start}; ".format(**result["machine"])
        + f"{result['rounds']} rounds.\n"
    )
    print("| | unit | PyTorch | best | Echelon | ratio | ratio to best |")
    print("|---|---|--:|--:|--:|--:|--:|")
    plain, ratio = "{median:.4g}", "**{median:.2f}** ({min:.2f}–{max:.2f})"
    for row in result["rows"]:
        cells = [cell(row, s, plain) for s in ("default", "best", "echelon")]
        cells += [cell(row, f"ratio_{s}", ratio) for s in ("default", "best")]
        print(f"| {row['what']} | {row['unit']} | " + " | ".join(cells) + " |")
        if "cost_echelon" in row:
            cost = "{median:.1%} ({min:.1%}–{max:.1%})"
            cells = [
                cell(row, f"cost_{s}", cost)
                for s in ("default", "best", "echelon")
            ]
            print("| cost of being distributed | | " + " | ".join(cells) + " | | |")


if __name__ == "__main__":
    main()
