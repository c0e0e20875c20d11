"""Prints what TensorBoard reads from a folder of event files, as JSON: by tag, the
steps and values.

  read_events.py FOLDER"""
import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags}))
