"""Every line of each file of metrics fits doc/metrics.schema.json.

  metrics_schema.py SCHEMA FILE..."""
import json
import sys

import jsonschema

schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
lines = 0
for path in sys.argv[2:]:
    for number, line in enumerate(open(path), 1):
        for error in validator.iter_errors(json.loads(line)):
            sys.exit(f"{path}:{number}: {error.message}\n{line}")
        lines += 1
if lines == 0:
    sys.exit("no line was checked")
