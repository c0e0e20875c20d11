"""Prints what examples/monitoring/track.py has sent: the steps and losses, as JSON.

  read_tracked.py wandb FOLDER      W&B's offline files, as WANDB_DIR
  read_tracked.py mlflow FOLDER     MLflow's files"""
import glob
import json
import os
import struct
import sys


def records_of(path):
    """A .wandb file is a log of LevelDB's: blocks of 32 KiB, in them a head of 7 bytes and a part
    of a record each."""
    data = open(path, "rb").read()
    assert data[:4] == b":W&B", data[:8]
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb(folder):
    from wandb.proto import wandb_internal_pb2
    points, parameters = [], {}
    for path in glob.glob(f"{folder}/wandb/offline-run-*/*.wandb"):
        for data in records_of(path):
            record = wandb_internal_pb2.Record.FromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                     for item in record.history.item}
            if "loss" in items:
                points.append([items["step"], items["loss"]])
            for item in record.run.config.update:
                parameters[item.key] = json.loads(item.value_json)
    return points, parameters["train"]["batch"]


def mlflow(folder):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient
    client = MlflowClient("file://" + folder)
    experiment = client.get_experiment_by_name("echelon")
    run, = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED", run.info.status
    points = client.get_metric_history(run.info.run_id, "loss")
    return [[one.step, one.value] for one in points], int(run.data.params["train.batch"])


points, batch = {"wandb": wandb, "mlflow": mlflow}[sys.argv[1]](sys.argv[2])
print(json.dumps({"points": points, "batch": batch}))
