#!/usr/bin/env python3
"""A mixture of experts on 2 ranks that share out the experts: Echelon against
all_to_all_single of torch.distributed, used as torchtitan does.

  large  8 experts of 1024 features, two for a token, hidden 512
  small  32 experts of 256 features, four for a token, hidden 512

2048 tokens a rank, AdamW, one thread a rank. Both sides read the same weights
and data; the losses of all steps must agree. Without communication each rank
trains all experts on its tokens by itself.

Ratios, rounds and memory are those of gpt.py.
"""
from types import SimpleNamespace

from gpt import Rounds, figures, programs_of, show
from harness import enter_environment
from language_works import parse, run

TOKENS = 2048  # of a rank
TOLERANCE = 1e-5
HIDDEN = 512


def work(title, **numbers):
    return SimpleNamespace(
        title=title, numbers={"hidden": HIDDEN, **numbers}, pytorch=(),
        echelon=(), alone=("--alone",), tokens=2 * TOKENS,
    )


WORKS = {
    "large": work("ep=2, 8 experts", inner=1024, experts=8, chosen=2),
    "small": work("ep=2, 32 small experts", inner=256, experts=32, chosen=4),
}


def write_start(folder, numbers):
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    hidden, inner = HIDDEN, numbers["inner"]

    def matrix(rows, columns):
        return torch.randn(rows, columns) / columns**0.5

    weights = {"gate.weight": matrix(numbers["experts"], hidden)}
    for e in range(numbers["experts"]):
        weights[f"experts.{e}.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"experts.{e}.up_proj.weight"] = matrix(inner, hidden)
        weights[f"experts.{e}.down_proj.weight"] = matrix(hidden, inner)
    save_file(weights, folder / "weights.safetensors")
    data = {name: torch.randn(4, 2 * TOKENS, hidden) for name in "xy"}
    save_file(data, folder / "data.safetensors")


def main():
    options = parse(__doc__, WORKS, steps=8)

    def rows(sides):
        for name in options.only:
            one = WORKS[name]
            write_start(sides.folder, one.numbers)
            arguments = [
                part for key, value in one.numbers.items()
                for part in (f"--{key}", value)
            ]
            rounds = Rounds(
                sides, ("torch_experts.py", "expert_step"), arguments, options,
                sides.folder / "weights.safetensors",
                sides.folder / "data.safetensors",
            )
            rounds.run(programs_of([one]), options.rounds)
            row = figures(name, one, rounds, TOLERANCE)
            show(row)
            yield row

    run(options, 2, rows, rounds=options.rounds)


if __name__ == "__main__":
    enter_environment()
    main()
