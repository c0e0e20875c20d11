#!/usr/bin/env python3
"""moto's S3 with faults: a real server, which checks signatures and rights.

  s3_server.py PORT

Prints a line of JSON when it listens: the keys of one user who may do everything and of one
who may do nothing. The bucket "models" is there; GET /_test/fill?prefix=P&many=N puts N empty
objects into it. GET /_test/set?… begins to count requests anew and sets a fault; GET
/_test/log returns the requests since then, one a line.

  at=K       the request, from 1; without it there is no fault
  mode=      before   the connection ends, nothing is done
             after    all is done, then the connection ends
             busy     503 SlowDown
             skew     403 RequestTimeTooSkewed
             upload   a byte of the request's body changes on its way
             answer   a byte of the answer's body changes on its way
  many=N     so many requests from there on (default 1; 0: all)
  only=TEXT  counts and troubles only requests whose line of the log has it
  slow=S     every request waits so many seconds
"""
import json
import logging
import os
import socket
import sys
import threading
import time
import urllib.parse
from email.utils import formatdate
from io import BytesIO

os.environ.setdefault("S3_UPLOAD_PART_MIN_SIZE", "1024")
# Without it, moto asks Amazon's address for metadata.
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

try:
    from moto import settings
    from moto.iam.models import iam_backends
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server
except ImportError as missing:
    print(f"no moto: {missing}", flush=True)
    sys.exit(77)

ACCOUNT = "123456789012"
ERROR = "<?xml version=\"1.0\"?><Error><Code>{}</Code><Message>{}</Message></Error>"


def make_user(name, rights):
    iam = iam_backends[ACCOUNT]["aws"]
    iam.create_user("us-east-1", name)
    if rights:
        allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        iam.put_user_policy(name, "all", json.dumps({"Version": "2012-10-17", "Statement": [allow]}))
    key = iam.create_access_key(name)
    return {"access": key.access_key_id, "secret": key.secret_access_key}


class Faults:
    def __init__(self, app):
        self.app = app
        self.lock = threading.Lock()
        self.log = []
        self.fault = {}

    def control(self, environ, start):
        if environ["PATH_INFO"] == "/_test/set":
            with self.lock:
                self.log = []
                self.fault = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"]))
        if environ["PATH_INFO"] == "/_test/fill":
            wanted = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"]))
            for i in range(int(wanted["many"])):
                s3_backends[ACCOUNT]["aws"].put_object("models", f"{wanted['prefix']}{i:05}", b"")
        body = "".join(f"{line}\n" for line in self.log).encode()
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    def due(self, environ):
        with self.lock:
            query = environ.get("QUERY_STRING", "")
            self.log.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{'?' + query if query else ''}")
            fault = dict(self.fault)
            only = fault.get("only", "")
            number = sum(only in line for line in self.log)
            ours = only in self.log[-1]
        if "slow" in fault:
            time.sleep(float(fault["slow"]))
        first = int(fault.get("at", 0))
        many = int(fault.get("many", 1))
        if first and ours and number >= first and (many == 0 or number < first + many):
            return fault.get("mode", "before")
        return None

    @staticmethod
    def cut(environ):
        try:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        raise ConnectionAbortedError

    @staticmethod
    def refuse(start, status, code, message, headers=()):
        body = ERROR.format(code, message).encode()
        start(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml"), *headers])
        return [body]

    def __call__(self, environ, start):
        if environ["PATH_INFO"].startswith("/_test/"):
            return self.control(environ, start)
        # A request whose body is left on the connection would be read as the next one.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        mode = self.due(environ)
        if mode == "before":
            self.cut(environ)
        if mode == "busy":
            return self.refuse(start, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if mode == "skew":
            return self.refuse(
                start, "403 Forbidden", "RequestTimeTooSkewed",
                "The difference between the request time and the current time is too large.",
                [("Date", formatdate(time.time() - 7200, usegmt=True))])
        if mode == "upload" and body:
            body = body[:len(body) // 2] + bytes([body[len(body) // 2] ^ 1]) + body[len(body) // 2 + 1:]
        environ["wsgi.input"] = BytesIO(body)
        if mode == "after":
            list(self.app(environ, lambda *_: lambda _: None))
            self.cut(environ)
        if mode == "answer":
            answer = {}

            def keep(status, headers, exc_info=None):
                answer.update(status=status, headers=headers)
                return lambda _: None
            whole = b"".join(self.app(environ, keep))
            if whole:
                middle = len(whole) // 2
                whole = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:]
            start(answer["status"], answer["headers"])
            return [whole]
        return self.app(environ, start)


def end_with(parent):
    """A test program may end without its destructors."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main():
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    keys = {"all": make_user("all", True), "none": make_user("none", False)}
    s3_backends[ACCOUNT]["aws"].create_bucket("models", "us-east-1")
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    app = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True)
    print(json.dumps(keys), flush=True)
    sys.stderr = open(os.devnull, "w")  # what a cut connection leaves
    server.serve_forever()


main()
