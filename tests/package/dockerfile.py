#!/usr/bin/env python3
"""Reads the Dockerfile, and builds it without Docker.

  dockerfile.py check           every instruction is known, every RUN is valid shell, and
                                COPY names the tarball that `make package` makes
  dockerfile.py build FOLDER    makes a Debian 12 in FOLDER with debootstrap and runs the
                                steps there (root, network, some minutes)
  dockerfile.py run FOLDER COMMAND …   runs a command there as the container would"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"FROM", "ARG", "COPY", "RUN", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions():
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    variables = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, rest = line.split(None, 1)
        rest = re.sub(r"\$\{(\w+)\}", lambda m: variables.get(m.group(1), m.group(0)), rest)
        if word == "ARG" and "=" in rest:
            name, value = rest.split("=", 1)
            variables[name] = value
        yield word, rest.strip()


def check():
    version = re.search(r"project\(Echelon VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    tarball = f"dist/echelon-{version}-linux-x86_64.tar.gz"
    words = []
    for word, rest in instructions():
        words.append(word)
        assert word in KNOWN, f"Dockerfile: unknown instruction {word}"
        if word == "COPY":
            assert rest.split()[0] == tarball, f"Dockerfile: COPY {rest}; make package makes {tarball}"
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(eval(rest), list), f"Dockerfile: {word} {rest} is not a list of words"
    assert words[0] == "FROM" and "ENTRYPOINT" in words, "Dockerfile: needs FROM and ENTRYPOINT"
    print(f"Dockerfile: {len(words)} instructions")


def environment(folder):
    values = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    # The way to the package registries, as this machine has it.
    values.update({k: v for k, v in os.environ.items() if k.lower().endswith("_proxy") or k.startswith("PIP_")})
    for word, rest in instructions():
        if word == "ENV":
            name, value = rest.split("=", 1)
            values[name] = value.replace("$PATH", values["PATH"])
    return values


def in_chroot(folder, command, **options):
    values = environment(folder)
    # A registry's certificate of this machine, out of reach of update-ca-certificates.
    if "PIP_CERT" in values:
        shutil.copy(values["PIP_CERT"], folder + "/etc/registry.pem")
        values["PIP_CERT"] = "/etc/registry.pem"
    for name in ("proc", "dev"):
        subprocess.run(["mount", "--rbind", "/" + name, f"{folder}/{name}"], check=True)
    try:
        return subprocess.run(["chroot", folder, *command], env=values, **options)
    finally:
        for name in ("dev", "proc"):
            subprocess.run(["mount", "--make-rslave", f"{folder}/{name}"], check=True)
            subprocess.run(["umount", "-R", f"{folder}/{name}"], check=True)


def build(folder):
    mirror = ""
    for source in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        found = re.search(r"https?://\S+/debian/?(?=\s|$)", source.read_text()) if source.is_file() else None
        mirror = mirror or (found.group(0) if found else "")
    if not Path(folder, "etc/debian_version").exists():
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", folder, *([mirror] if mirror else [])], check=True)
        Path(folder, "etc/apt/sources.list").unlink()
    for name in ("resolv.conf", "pip.conf", "apt/apt.conf.d", "apt/sources.list.d",
                 "apt/auth.conf.d"):
        source, target = Path("/etc") / name, Path(folder) / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for word, rest in instructions():
        print(f"{word} {rest}", flush=True)
        if word == "COPY":
            source, target = rest.split()
            shutil.copy(ROOT / source, folder + target)
        elif word == "RUN":
            in_chroot(folder, ["/bin/sh", "-c", rest], check=True)
        elif word == "WORKDIR":
            os.makedirs(folder + rest, exist_ok=True)


def main(words):
    if words == ["check"]:
        check()
    elif words[:1] == ["build"] and len(words) == 2:
        build(words[1])
    elif words[:1] == ["run"] and len(words) > 2:
        sys.exit(in_chroot(words[1], words[2:]).returncode)
    else:
        print(__doc__)
        sys.exit(2)


main(sys.argv[1:])
