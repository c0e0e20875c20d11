#!/usr/bin/env python3
"""Checks manifests against the published schemas of the engines, by other means than
echelon/deploy/schemas.cpp does.

  manifests.py check FILE …     names each field that is unknown or wrong
  manifests.py json FILE …      prints the documents of each file, a list in a line
  manifests.py schemas CRDS     makes the files of echelon/deploy/schemas anew

A definition of a custom resource has the whole schema of a pod in it. Only what is its
own is kept: no descriptions, and in place of each template of a pod or of a job the name
of Kubernetes' own definition. Those are taken from the package kubernetes-validate into
kubernetes.json. "check" asks that package itself for them, and jsonschema for the rest."""
import copy
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

SCHEMAS = Path(__file__).parents[2] / "echelon" / "deploy" / "schemas"
VERSION = "1.37.0"  # of Kubernetes
# Its objects that are written, in addition to the templates of jobs and pods.
CORE = ["io.k8s.api.batch.v1.Job", "io.k8s.api.core.v1.ConfigMap",
        "io.k8s.api.core.v1.PodTemplateSpec", "io.k8s.api.core.v1.Secret",
        "io.k8s.api.core.v1.Service", "io.k8s.api.policy.v1.PodDisruptionBudget"]
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
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"}
# Words that the server takes, where the published schemas only say "a string".
WORDS = {
    "completionMode": {"Indexed", "NonIndexed"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "operator": {"In", "NotIn"},
    "clusterIP": {"None"},
}
# Where kubernetes.json says so: a word has another meaning in other definitions.
DEFINITIONS_WITH_WORDS = {
    "JobSpec": ["completionMode"], "PodSpec": ["restartPolicy"],
    "PodFailurePolicyRule": ["action"], "PodFailurePolicyOnExitCodesRequirement": ["operator"]}


def is_pod(schema):
    return "containers" in schema.get("properties", {}).get("spec", {}).get("properties", {})


def is_job(schema):
    return "podFailurePolicy" in schema.get("properties", {})


def stripped(schema):
    """A schema without sentences, and without what Kubernetes itself defines."""
    if is_pod(schema):
        return {"$ref": "PodTemplateSpec"}
    if is_job(schema):
        return {"$ref": "JobSpec"}
    if "$ref" in schema:
        return {"$ref": short(schema["$ref"])}
    return defined(schema)


def defined(schema):
    if schema.get("x-kubernetes-int-or-string") or "oneOf" in schema:
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"type": "int-or-string", **pattern}
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if isinstance(kept.get("type"), list):
        (kept["type"],) = [one for one in kept["type"] if one != "null"]
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = stripped(kept[key])
    if "properties" in kept:
        kept["properties"] = {key: stripped(one) for key, one in kept["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    return kept


def short(name):
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]


def references(schema):
    """The full names of the definitions that a schema refers to."""
    if isinstance(schema, list):
        return [found for one in schema for found in references(one)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rsplit("/", 1)[-1]] if isinstance(schema.get("$ref"), str) else []
    return own + references(list(schema.values()))


def write(path, made):
    path.write_text(json.dumps(made, separators=(",", ":")) + "\n")


def make_kubernetes():
    """The objects of CORE, and every definition that they refer to."""
    published = kubernetes_validate.utils.schema_contents(
        f"kubernetes-json-schema/v{VERSION}-local-strict/_definitions.json", VERSION)["$defs"]
    definitions, taken, waiting = {}, {}, list(CORE)
    while waiting:
        name = waiting.pop()
        if taken.setdefault(short(name), name) != name:
            raise SystemExit(f"{name} and {taken[short(name)]} have one short name")
        if short(name) in definitions:
            continue
        schema = published[name]
        if name in CORE:
            schema.get("properties", {}).pop("status", None)
        made = definitions[short(name)] = defined(schema)
        for word in DEFINITIONS_WITH_WORDS.get(short(name), []):
            made["properties"][word]["enum"] = sorted(WORDS[word])
        waiting += references(schema)
    write(SCHEMAS / "kubernetes.json", {
        "source": {"repository": "kubernetes/kubernetes", "revision": f"v{VERSION}",
                   "path": "api/openapi-spec/swagger.json", "licence": "Apache-2.0"},
        "definitions": dict(sorted(definitions.items()))})


def make_schemas(crds):
    make_kubernetes()
    for project, name, version in TAKEN:
        (found,) = crds.glob(f"{project}-v*")
        source = dict(line.split(": ", 1) for line in (found / "SOURCE").read_text().splitlines())
        definition = yaml.safe_load((found / f"{name}.yaml").read_text())["spec"]
        (schema,) = [one["schema"]["openAPIV3Schema"] for one in definition["versions"]
                     if one["name"] == version]
        revision = source["revision"].split()
        schema["properties"].pop("status", None)
        schema["properties"]["metadata"] = {"$ref": "ObjectMeta"}
        write(SCHEMAS / f"{definition['names']['kind']}.json", {
            "source": {"repository": source["repository"], "revision": revision[0],
                       "commit": revision[1], "path": f"{source['paths'].rsplit('/', 1)[0]}/{name}.yaml",
                       "licence": source["licence"]},
            "apiVersion": f"{definition['group']}/{version}",
            "kind": definition["names"]["kind"],
            "scope": definition["scope"],
            "schema": stripped(schema)})


def plain(schema, marks, path=()):
    """The schema in words of JSON Schema; `marks` gets the places of pods and jobs, with *
    for each item."""
    if "$ref" in schema:
        marks.append((path, schema["$ref"]))
        return {}
    made = dict(schema)
    if made.get("type") == "int-or-string":
        made["type"] = ["integer", "string"]
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = plain(made[key], marks, (*path, "*"))
    if "properties" in made:
        made["properties"] = {
            name: plain(one, marks, (*path, name)) for name, one in made["properties"].items()}
    return made


def parts(value, path):
    """What `value` has at a path of plain()."""
    if not path:
        return [value]
    if isinstance(value, list):
        return [found for item in value for found in parts(item, path[1:])]
    if isinstance(value, dict) and path[0] in value:
        return parts(value[path[0]], path[1:])
    return []


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
    if kind == "ObjectMeta":
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": part}
    name = {"metadata": {"name": "part"}}
    if kind == "PodTemplateSpec":
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
    schema = plain(known["schema"], marks)
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        found.append(f"{'.'.join(map(str, error.path))}: {error.message[:200]}")
    for place, kind in marks:
        for part in parts(document, place):
            found += [f"{'.'.join(place)}: {problem}"
                      for problem in core_problems(as_object(kind, part))]
    return found


def documents_of(name):
    return [one for one in yaml.safe_load_all(Path(name).read_text()) if one]


def check(files):
    wrong = 0
    for name in files:
        for document in documents_of(name):
            title = f"{Path(name).name}: {document.get('kind')} {document.get('metadata', {}).get('name')}"
            found = problems(document)
            wrong += len(found)
            for problem in found:
                print(f"{title}: {problem}")
            if not found:
                print(f"{title}: fine")
    return 1 if wrong else 0


if sys.argv[1] == "schemas":
    make_schemas(Path(sys.argv[2]))
elif sys.argv[1] == "json":
    for file in sys.argv[2:]:
        print(json.dumps(documents_of(file)))
else:
    sys.exit(check(sys.argv[2:]))
