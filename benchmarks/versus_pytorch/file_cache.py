"""The disk and its cache, for programs that time files."""
import os
from pathlib import Path


def files_of(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def folder_bytes(folder):
    return sum(path.stat().st_size for path in files_of(folder))


def synchronise(folder):
    """Waits until the file system of `folder` has written all that it was told."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    os.sync()


def drop_cached(folder):
    """Files below lie on the disk alone: the next reader waits for it."""
    for path in files_of(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
