"""Checks files against the JSON schema of Chrome traces as Echelon writes them.

  trace_schema.py FILE…

Beyond the schema: each event's thread and process have a name.
"""

import json
import pathlib
import sys

import jsonschema

schema = json.loads(
    (pathlib.Path(__file__).parent / "trace_schema.json").read_text())
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)

wrong = 0
for name in sys.argv[1:]:
    trace = json.loads(pathlib.Path(name).read_text())
    for error in list(validator.iter_errors(trace))[:5]:
        print(f"{name}: {error.json_path}: {error.message}")
        wrong += 1
    events = trace["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in events
               if e["name"] == "thread_name"}
    ranks = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in events:
        if event["ph"] == "X" and (
                (event["pid"], event["tid"]) not in threads
                or event["pid"] not in ranks):
            print(f"{name}: no name for the place of {event}")
            wrong += 1
sys.exit(1 if wrong else 0)
