"""The trajectories of torch.optim, for optimizer_pytorch_test.

usage: reference.py cases.json values.f64 results.f64

cases.json: a list of {name, learning_rate, weight_decay, momentum, nesterov,
beta1, beta2, epsilon, clip_norm, schedule, warmup_steps, final_factor,
step_every, step_factor, steps, second_rate_factor}. values.f64: the initial
parameters and then, for each step, their gradients; a gradient whose first
element is NaN is absent. results.f64: for each case and step, the parameters,
the norm of the gradients before clipping, and the learning rate.
"""

import json
import math
import sys

import numpy
import torch
from torch.optim import lr_scheduler as schedulers

SHAPES = [(5, 7), (7,), (3, 2, 3, 3), (67,)]


def split(flat):
    parts, at = [], 0
    for shape in SHAPES:
        size = math.prod(shape)
        parts.append(flat[at : at + size].reshape(shape).clone())
        at += size
    return parts


def optimizer(case, groups):
    rate = case["learning_rate"]
    for group, factor in zip(groups, (1.0, case["second_rate_factor"])):
        group["lr"] = rate * factor
    if case["name"] == "sgd":
        return torch.optim.SGD(
            groups, momentum=case["momentum"], nesterov=case["nesterov"]
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[case["name"]]
    return kind(
        groups, betas=(case["beta1"], case["beta2"]), eps=case["epsilon"]
    )


def schedule(case, optim):
    warmup, left = case["warmup_steps"], case["steps"] - case["warmup_steps"]
    final = case["final_factor"]
    after = {
        "constant": lambda: schedulers.LambdaLR(optim, lambda step: 1.0),
        "linear": lambda: schedulers.LinearLR(optim, 1.0, final, left),
        "cosine": lambda: schedulers.CosineAnnealingLR(
            optim, left, final * case["learning_rate"]
        ),
        "step": lambda: schedulers.StepLR(
            optim, case["step_every"], case["step_factor"]
        ),
    }[case["schedule"]]
    if warmup == 0:
        return after()
    rise = schedulers.LinearLR(optim, 1 / (warmup + 1), 1.0, warmup)
    return schedulers.SequentialLR(optim, [rise, after()], [warmup])


def run(case, values):
    size = sum(math.prod(shape) for shape in SHAPES)
    parameters = [p.requires_grad_() for p in split(values[:size])]
    decayed = [p for p in parameters if p.dim() > 1]
    plain = [p for p in parameters if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": case["weight_decay"]},
        {"params": plain, "weight_decay": 0.0},
    ]
    optim = optimizer(case, groups)
    rates = schedule(case, optim)
    results = []
    for step in range(case["steps"]):
        at = size * (step + 1)
        for p, g in zip(parameters, split(values[at : at + size])):
            p.grad = None if g.flatten()[0].isnan() else g
        limit = case["clip_norm"] or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        results.append(optim.param_groups[0]["lr"])
        optim.step()
        rates.step()
        results.append(norm.item())
        results.extend(torch.cat([p.detach().flatten() for p in parameters]).tolist())
    return results


def main():
    cases = json.load(open(sys.argv[1]))
    values = torch.from_numpy(numpy.fromfile(sys.argv[2]))
    results = [run(case, values) for case in cases]
    numpy.concatenate(results).tofile(sys.argv[3])


main()
