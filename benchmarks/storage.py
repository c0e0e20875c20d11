#!/usr/bin/env python3
"""What object storage costs: the client's speed, and a training step beside an upload.

  storage.py [--build FOLDER] [--mib N] [--rounds N] [--steps N] [--json FILE]

The server is a stand-in on loopback that keeps small objects, drops the bytes of large
ones, and answers as S3 does, so that the client is measured and not the server. The step
is that of an MLP whose checkpoints have about 100 MB; runs without checkpoints, with those
on the disk, and with those on the storage too alternate. On a machine with other work,
`nice -n -15` keeps that out."""
import argparse
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = """[model]
name = "mlp"
hidden = [1536, 1536, 1536, 1536]
[data]
name = "digits"
[optimizer]
name = "adamw"
[train]
batch = 256
"""


class StandIn:
    """Enough of S3 for one bucket."""

    def __init__(self):
        self.objects = {}  # key: (bytes or None, size, etag)
        self.parts = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        buffer, sink = b"", bytearray(1 << 20)
        zeros = bytes(1 << 20)
        while True:
            while b"\r\n\r\n" not in buffer:
                more = connection.recv(65536)
                if not more:
                    return
                buffer += more
            head, buffer = buffer.split(b"\r\n\r\n", 1)
            lines = head.decode().split("\r\n")
            method, target, _ = lines[0].split(" ")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:])}
            if "expect" in headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            size = int(headers.get("content-length", 0))
            body = None
            if size < 1 << 20:
                while len(buffer) < size:
                    buffer += connection.recv(65536)
                body, buffer = buffer[:size], buffer[size:]
            else:
                left = size - len(buffer)
                buffer = b""
                while left > 0:
                    left -= connection.recv_into(sink, min(left, len(sink)))
            status, extra, answer, length = self.answer(method, target, headers, body, size)
            extra["Content-Length"] = str(length)
            connection.sendall((f"HTTP/1.1 {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in extra.items())
                                + "\r\n").encode())
            if method == "HEAD":
                continue
            if answer is not None:
                connection.sendall(answer)
                continue
            while length > 0:
                length -= connection.send(zeros[:length])

    def answer(self, method, target, headers, body, size):
        path, _, query = target.partition("?")
        query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        key = path.split("/", 2)[2]
        text = lambda status, xml, **extra: (status, extra, xml.encode(), len(xml.encode()))
        if method == "POST" and "uploads" in query:
            self.parts[key] = 0
            return text(200, "<R><UploadId>1</UploadId></R>")
        if method == "POST":
            self.objects[key] = (None, self.parts.pop(key), '"parts-2"')
            return text(200, "<R></R>")
        if method == "PUT":
            checksum = headers.get("x-amz-checksum-crc32")
            extra = {"x-amz-checksum-crc32": checksum} if checksum else {}
            if "partNumber" in query:
                self.parts[key] += size
                return 200, {"ETag": '"part"', **extra}, b"", 0
            etag = f'"{hashlib.md5(body).hexdigest()}"' if body is not None else '"large"'
            self.objects[key] = (body, size, etag)
            return 200, {"ETag": etag, **extra}, b"", 0
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b"", 0
        if "list-type" in query:
            found = [f"<Contents><Key>{k}</Key><Size>{o[1]}</Size></Contents>"
                     for k, o in sorted(self.objects.items()) if k.startswith(query["prefix"])]
            return text(200, f"<R>{''.join(found)}</R>")
        if "uploads" in query:
            return text(200, "<R></R>")
        if key not in self.objects:
            return text(404, "<Error><Code>NoSuchKey</Code></Error>")
        content, size, etag = self.objects[key]
        if method == "HEAD":
            return 200, {"ETag": etag}, None, size
        if "range" in headers:
            first, last = map(int, re.findall(r"\d+", headers["range"]))
            return 206, {"ETag": etag}, None, last - first + 1
        return 200, {"ETag": etag}, content, size


def train(arguments, folder, environment, name, extra):
    run = folder / name
    subprocess.run([Path(arguments.build) / "bin/echelon", "train", folder / "mlp.toml", "--overwrite",
                    "--set", f"train.run={run}", "--set", f"train.steps={arguments.steps}",
                    "--set", "elastic.memory=off", *extra],
                   env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = [json.loads(line).get("step_seconds") for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean([s for s in seconds if s][3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    server = StandIn()
    environment = os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_ACCESS_KEY_ID": "a",
                                "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    results = {"machine": {"cores": len(os.sched_getaffinity(0)), "nice": os.nice(0),
                           "load_average_at_start": os.getloadavg()[0]},
               "mib": arguments.mib, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        out = subprocess.run([Path(arguments.build) / "benchmarks/object_store", "--folder", temp, "--url",
                              "s3://bucket/file", "--mib", str(arguments.mib), "--rounds", str(arguments.rounds)],
                             env=environment, check=True, capture_output=True, text=True).stdout
        results["client"] = json.loads(out)
        copy = results["client"]["copy"]["seconds"]
        for way in ("upload", "download"):
            one = results["client"][way]
            print(f"{way}: {arguments.mib / one['seconds']:.0f} MiB/s, {one['seconds'] / copy:.2f} of a plain copy's time, "
                  f"{one['processor_seconds'] / arguments.mib * 1024:.2f} processor seconds per GiB")
        (folder / "mlp.toml").write_text(MODEL)
        every = ["--set", f"checkpoint.every_steps={arguments.steps // 6}"]
        kinds = {"none": ["--set", "checkpoint.at_end=false"], "disk": every,
                 "storage": [*every, "--set", "checkpoint.remote=s3://bucket/run"]}
        steps = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds):
            for kind, extra in kinds.items():
                steps[kind].append(train(arguments, folder, environment, kind, extra))
        results["step_seconds"] = steps
        for kind in ("disk", "storage"):
            ratios = sorted(b / a for a, b in zip(steps["none"], steps[kind]))
            results[f"{kind}_over_none"] = ratios
            print(f"steps with checkpoints on {'the disk' if kind == 'disk' else 'disk and storage'}: "
                  f"{statistics.median(ratios):.3f} of those without ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    results["machine"]["load_average_at_end"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


main()
