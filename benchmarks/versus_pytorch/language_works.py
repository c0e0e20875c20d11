"""What the comparisons of language models share: the same work on each side,
figures of rounds, and the run from arguments to the file of figures."""
import argparse
import json
import sys
from pathlib import Path

from harness import ROOT, Sides, machine, spread


def compare_losses(what, losses, tolerance):
    """The largest relative difference to the first of `losses`, which are those
    of all steps by side; ends the program when one is above `tolerance`."""
    (first, expected), *others = losses.items()
    worst = 0.0
    for side, values in others:
        for step, (a, b) in enumerate(zip(expected, values, strict=True)):
            worst = max(worst, abs(a - b) / abs(a))
            if not worst <= tolerance:
                sys.exit(
                    f"{what}: not the same work: loss of step {step} is {a} in "
                    f"{first} and {b} in {side}"
                )
    return worst


def timings(seconds, tokens):
    """Of each round's seconds a step."""
    return {
        "ms": spread([1e3 * s for s in seconds]),
        "tokens_per_second": spread([tokens / s for s in seconds]),
    }


def ratios(above, below):
    return spread([a / b for a, b in zip(above, below, strict=True)])


def text_of(values, form):
    return (
        f"{values['median']:{form}} "
        f"({values['min']:{form}} to {values['max']:{form}})"
    )


def parser_of(description, works, steps):
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", choices=list(works), default=list(works)
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--json", type=Path)
    return parser


def parse(description, works, steps):
    return parser_of(description, works, steps).parse_args()


def run(options, ranks, rows, **facts):
    """Writes what rows(sides), a generator that prints as it goes, yields: after
    each row all so far."""
    sides = Sides(options.build.resolve(), ranks)
    result = {"machine": machine(), **facts, "rows": []}
    try:
        for row in rows(sides):
            result["rows"].append(row)
            if options.json:
                text = json.dumps(result, indent=1) + "\n"
                options.json.write_text(text)
    finally:
        sides.close()
