"""Memory while a GGUF file is loaded: the weights once, and not a second time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gguf_files import write_gguf
from models import small_and_large

RUN = """
import sys
import torch
torch.set_num_threads(1)
from selfspec.models.layout import weight_bytes
from selfspec.models.loading import load_model
def peak():  # of this program alone: getrusage's begins with what the process was before
    return 1024 * int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1])
small, large, dtype = sys.argv[1:]
load_model(small, dtype=dtype)  # which imports all that loading needs
before = peak()
model, _ = load_model(large, dtype=dtype)
print(peak() - before, weight_bytes(model))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of a tiny model and of one of 40 million weights, a matrix of which has a fiftieth of them."""
    folder = tmp_path_factory.mktemp("gguf")
    for name, model in small_and_large(300):
        write_gguf(folder / f"{name}.gguf", model, kind="Q8_0")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts a program's own peak")
@pytest.mark.parametrize(("dtype", "copies"), [("file", "1"), ("float32", "1"), ("float32", "0"), ("bfloat16", "0")])
@pytest.mark.long("loads in processes of their own")
def test_loading_never_holds_the_weights_twice(files, dtype, copies, tmp_path, monkeypatch):
    """Neither when a file is first read, with its copy written to the cache or without, nor in parts of it."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("SELFSPEC_GGUF_COPIES", copies)
    monkeypatch.setenv("SELFSPEC_NATIVE", "0")  # nothing is compiled
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back, and not counted
    words = [str(files / "small.gguf"), str(files / "large.gguf"), dtype]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, weights = map(int, done.stdout.split())
    assert grown <= 1.4 * weights
