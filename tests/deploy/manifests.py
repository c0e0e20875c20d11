#!/usr/bin/env python3
"""Checks manifests against the published schemas of the engines.

  manifests.py check FILE …          names each field that is unknown or wrong
  manifests.py schemas CRDS FOLDER   makes the files of schemas/ anew

A definition of a custom resource has the whole schema of a pod in it. Only what is its
own is kept in schemas/: no descriptions, and in place of each template of a pod or of
a job a mark. There, and for the objects that Kubernetes itself has, the schemas of the
package kubernetes-validate are used."""
import copy
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

SCHEMAS = Path(__file__).parent / "schemas"
VERSION = "1.37.0"  # of Kubernetes
# What stays of each definition: the folder of the CRDs, its file, kind and version.
TAKEN = [
    ("jobset", "jobset.x-k8s.io_jobsets", "v1alpha2"),
    ("kueue", "kueue.x-k8s.io_clusterqueues", "v1beta2"),
    ("kueue", "kueue.x-k8s.io_cohorts", "v1beta2"),
    ("kueue", "kueue.x-k8s.io_localqueues", "v1beta2"),
    ("kueue", "kueue.x-k8s.io_resourceflavors", "v1beta2"),
    ("kai-scheduler", "scheduling.run.ai_queues", "v2"),
    ("trainer", "trainer.kubeflow.org_clustertrainingruntimes", "v1alpha1"),
    ("trainer", "trainer.kubeflow.org_trainjobs", "v1alpha1"),
    ("lws", "leaderworkerset.x-k8s.io_leaderworkersets", "v1"),
    ("prometheus-operator", "monitoring.coreos.com_podmonitors", "v1"),
]
KEPT = {"type", "properties", "required", "enum", "items", "additionalProperties", "pattern",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "anyOf", "oneOf",
        "nullable", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"}


def is_pod(schema):
    return "containers" in schema.get("properties", {}).get("spec", {}).get("properties", {})


def is_job(schema):
    return "podFailurePolicy" in schema.get("properties", {})


def stripped(schema):
    """A schema without sentences, and without what Kubernetes itself defines."""
    if is_pod(schema):
        return {"core": "pod"}
    if is_job(schema):
        return {"core": "job"}
    kept = {}
    for key, value in schema.items():
        if key not in KEPT:
            continue
        if key == "properties":
            value = {name: stripped(one) for name, one in value.items() if name != "status"}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            value = stripped(value)
        elif key in ("anyOf", "oneOf"):
            value = [stripped(one) for one in value]
        kept[key] = value
    return kept


def make_schemas(crds, folder):
    folder.mkdir(exist_ok=True)
    for project, name, version in TAKEN:
        (found,) = crds.glob(f"{project}-v*")
        source = dict(line.split(": ", 1) for line in (found / "SOURCE").read_text().splitlines())
        definition = yaml.safe_load((found / f"{name}.yaml").read_text())["spec"]
        (schema,) = [one["schema"]["openAPIV3Schema"] for one in definition["versions"]
                     if one["name"] == version]
        revision = source["revision"].split()
        made = {
            "source": {"repository": source["repository"], "revision": revision[0],
                       "commit": revision[1], "path": f"{source['paths'].rsplit('/', 1)[0]}/{name}.yaml",
                       "licence": source["licence"]},
            "apiVersion": f"{definition['group']}/{version}",
            "kind": definition["names"]["kind"],
            "scope": definition["scope"],
            "schema": stripped(schema)}
        path = folder / f"{made['kind']}.json"
        path.write_text(json.dumps(made, separators=(",", ":")) + "\n")


def strict(schema, marks, path=()):
    """The schema in which unknown fields are mistakes; `marks` gets the places of pods
    and jobs, with * for each item."""
    if "core" in schema:
        marks.append((path, schema["core"]))
        return {}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {key: value for key, value in schema.items() if not key.startswith("x-")}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = strict(made[key], marks, (*path, "*"))
    if "properties" in made:
        made["properties"] = {
            name: strict(one, marks, (*path, name)) for name, one in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


def parts(value, path):
    """What `value` has at a path of strict()."""
    if not path:
        return [value]
    if isinstance(value, list):
        return [found for item in value for found in parts(item, path[1:])]
    if isinstance(value, dict) and path[0] in value:
        return parts(value[path[0]], path[1:])
    return []


# Words that the server takes, where the published schemas only say "a string".
WORDS = {
    "completionMode": {"Indexed", "NonIndexed"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "operator": {"In", "NotIn"},
    "clusterIP": {"None"},
}


def wrong_words(value):
    if isinstance(value, list):
        return [problem for item in value for problem in wrong_words(item)]
    if not isinstance(value, dict):
        return []
    found = [f"{key}: {one} is none of {sorted(WORDS[key])}" for key, one in value.items()
             if key in WORDS and isinstance(one, str) and one not in WORDS[key]]
    return found + wrong_words(list(value.values()))


def core_problems(document):
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return wrong_words(document)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return ["no schema is known"]


def as_object(kind, part):
    """A part of a custom resource as an object that Kubernetes has."""
    name = {"metadata": {"name": "part"}}
    if kind == "pod":
        return {"apiVersion": "v1", "kind": "PodTemplate", **name, "template": part}
    part = copy.deepcopy(part)
    return {"apiVersion": "batch/v1", "kind": "Job", **name, "spec": part}


def problems(document):
    path = SCHEMAS / f"{document.get('kind')}.json"
    if not path.exists():
        return core_problems(document)
    known = json.loads(path.read_text())
    if known["apiVersion"] != document.get("apiVersion"):
        return [f"apiVersion is {document.get('apiVersion')}, not {known['apiVersion']}"]
    found = []
    if (known["scope"] == "Cluster") and "namespace" in document["metadata"]:
        found.append("metadata.namespace: it belongs to the whole cluster")
    marks = []
    schema = strict(known["schema"], marks)
    schema["properties"]["metadata"] = {"type": "object"}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        found.append(f"{'.'.join(map(str, error.path))}: {error.message[:200]}")
    for place, kind in marks:
        for part in parts(document, place):
            found += [f"{'.'.join(place)}: {problem}"
                      for problem in core_problems(as_object(kind, part))]
    return found




def check(files):
    wrong = 0
    for name in files:
        documents = [one for one in yaml.safe_load_all(Path(name).read_text()) if one]
        for document in documents:
            title = f"{Path(name).name}: {document.get('kind')} {document['metadata']['name']}"
            found = problems(document)
            wrong += len(found)
            for problem in found:
                print(f"{title}: {problem}")
            if not found:
                print(f"{title}: fine")
    return 1 if wrong else 0


if sys.argv[1] == "schemas":
    make_schemas(Path(sys.argv[2]), Path(sys.argv[3]))
else:
    sys.exit(check(sys.argv[2:]))
