"""Reads a file of OTLP/JSON by OpenTelemetry's own classes, and prints its spans as JSON, with
the attributes of their resource.

  read_traces.py FILE"""
import base64
import json
import sys

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def as_protobuf_has_it(value):
    """OTLP/JSON has identifiers in hexadecimal, protobuf's JSON bytes in base64."""
    if isinstance(value, list):
        return [as_protobuf_has_it(one) for one in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {key: base64.b64encode(bytes.fromhex(one)).decode() if key in ids
            else as_protobuf_has_it(one) for key, one in value.items()}


def attributes_of(message):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in message.attributes}


spans = []
for line in open(sys.argv[1]):
    text = json.dumps(as_protobuf_has_it(json.loads(line)))
    request = json_format.Parse(text, ExportTraceServiceRequest())  # refuses unknown fields
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                assert len(span.trace_id) == 16 and len(span.span_id) == 8, span
                spans.append({
                    "name": span.name, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(), "begin": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano, "attributes": attributes_of(span),
                    "resource": attributes_of(resource.resource)})
print(json.dumps(spans))
