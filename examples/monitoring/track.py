#!/usr/bin/env python3
"""Sends a run's figures to Weights & Biases or to MLflow, while it trains or afterwards.

  track.py wandb RUN [--project NAME]
  track.py mlflow RUN [--project NAME]

It follows RUN/metrics.jsonl until the run ends, or Ctrl-C. Variables of theirs say where the
figures go: WANDB_MODE=offline keeps them in WANDB_DIR, and MLFLOW_TRACKING_URI names a server."""
import argparse
import json
import time
import tomllib
from pathlib import Path


def is_over(run):
    """Whether the launcher has said so, at its end."""
    try:
        status = json.loads((run / "status/rank-0.json").read_text())
    except (OSError, ValueError):
        return False
    return "exit_code" in status or status.get("lost", False)


def read_lines(path, known):
    """The whole lines that `known`, a list of their places and hashes, lacks."""
    with open(path, "rb") as file:
        def line_at(place):
            file.seek(place)
            return file.readline()

        # Training that goes back to an earlier state removes the last lines.
        while known and hash(line_at(known[-1][0])) != known[-1][1]:
            known.pop()
        place = file.tell() if known else 0
        while (line := line_at(place)).endswith(b"\n"):
            known.append((place, hash(line)))
            place += len(line)
            yield json.loads(line)


def figures_of(line):
    """The numbers in a line of metrics, by name."""
    for inner in ("evaluation", "layer_grad_norms"):
        line |= {f"{inner}/{name}": value for name, value in line.pop(inner, {}).items()}
    figures = {}
    for name, value in line.items():
        if value is None:
            value = float(line[name + "_is"])  # JSON has no NaN
        if isinstance(value, (int, float)) and name not in ("step", "simulated"):
            figures[name] = float(value)
    return figures


class Wandb:
    def __init__(self, run, project, config):
        import wandb
        self.run = wandb.init(project=project, name=run.name, config=config)
        # Steps of their own may not go back, and an evaluation comes after its step.
        self.run.define_metric("*", step_metric="step")

    def log(self, lines):
        for step, figures in lines:
            if figures:
                self.run.log({"step": step} | figures)

    def finish(self):
        self.run.finish()


class Mlflow:
    def __init__(self, run, project, config):
        import mlflow
        mlflow.set_experiment(project)
        self.mlflow, self.id = mlflow, mlflow.start_run(run_name=run.name).info.run_id
        mlflow.log_params({f"{table}.{key}": value for table, keys in config.items()
                           for key, value in keys.items()})

    def log(self, lines):
        from mlflow.entities import Metric
        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step)
                  for step, figures in lines for name, value in figures.items()]
        for i in range(0, len(points), 1000):  # the most that a server takes
            self.mlflow.MlflowClient().log_batch(self.id, metrics=points[i:i + 1000])

    def finish(self):
        self.mlflow.end_run()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("to", choices=["wandb", "mlflow"])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--project", default="echelon")
    given = parser.parse_args()
    run = given.run.resolve()
    metrics, known, over = run / "metrics.jsonl", [], False
    while not metrics.exists():
        time.sleep(1)  # it is to begin
    config = tomllib.loads((run / "config.toml").read_text())
    tracker = (Wandb if given.to == "wandb" else Mlflow)(run, given.project, config)
    try:
        while not over:
            over = is_over(run)
            tracker.log([(line["step"], figures_of(line)) for line in read_lines(metrics, known)])
            if not over:
                time.sleep(1)
    except KeyboardInterrupt:
        pass
    tracker.finish()


if __name__ == "__main__":
    main()
