#!/usr/bin/env python3
# first on Ray: 2 hosts of 8 ranks, layout dp=16. Made by `echelon deploy`.
# Ray keeps the hosts' devices for the job and starts a launcher on each; the
# launchers do the rest. The secret that they prove to each other is seen by
# whoever may talk to Ray, which has no authentication of its own.
import os
import secrets
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS = 2
DEVICES = {"CPU": 32, "GPU": 8, "memory": 34379287040}  # of each host
FOLDER = "/shared/first"  # the same on every host
COMMAND = ["echelon","train","first.toml","-n","8","--nnodes","2"]


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def launch(number, master, token):
    command = list(COMMAND)
    if HOSTS > 1:
        command += ["--node-rank", str(number), "--master-addr", master]
    environment = dict(os.environ, ECHELON_TOKEN=token)
    return subprocess.run(command, cwd=FOLDER, env=environment).returncode


def main():
    ray.init(address="auto")
    group = placement_group([DEVICES] * HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(number, **resources):
        place = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number)
        return {"scheduling_strategy": place, **resources}

    master = ray.get(address.options(**on(0, num_cpus=0)).remote())
    token = secrets.token_hex(32)
    started = [
        launch.options(**on(
            number, num_cpus=DEVICES["CPU"],
            num_gpus=DEVICES.get("GPU", 0))).remote(number, master, token)
        for number in range(HOSTS)]
    codes = ray.get(started)
    sys.exit(next((code for code in codes if code != 0), 0))


main()
