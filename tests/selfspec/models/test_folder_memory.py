"""Memory while a folder of safetensors is loaded: the weights once, and not a second time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from layouts import needs_native
from models import small_and_large
from transformers import AutoTokenizer

from selfspec.builtin import model_folder

RUN = """
import sys, threading, time
import torch
torch.set_num_threads(1)
import selfspec
from selfspec.models.layout import weight_bytes
small, large, dtype = sys.argv[1:]
options = {"dtype": dtype, "profile": "none", "layout": "native"}
def own():  # without the pages of mapped files, which the system takes back when memory is short
    return 1024 * int(next(line for line in open("/proc/self/status") if "RssAnon" in line).split()[1])
selfspec.load(small, **options)  # which imports all that loading needs
before, seen, ended = own(), [], threading.Event()
def watch():
    while not ended.wait(0.001):
        seen.append(own())
watcher = threading.Thread(target=watch)
watcher.start()
llm = selfspec.load(large, **options)
seen.append(own())
ended.set()
watcher.join()
print(max(seen) - before, weight_bytes(llm.model), llm.held)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a tiny model and of one of 40 million weights, in both dtypes, the large one in several files."""
    made = tmp_path_factory.mktemp("folders")
    for name, model in small_and_large(4096):
        for dtype in ("float32", "bfloat16"):
            model.to(getattr(torch, dtype)).save_pretrained(made / f"{name}-{dtype}", max_shard_size="20MB")
            AutoTokenizer.from_pretrained(model_folder()).save_pretrained(made / f"{name}-{dtype}")
    return made


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts a program's own memory")
@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
@pytest.mark.long("loads in processes of their own")
def test_loading_never_holds_the_weights_twice(folders, checkpoint, dtype, monkeypatch):
    """Neither where weights are joined, nor where they are held in 16 bits or rounded."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is given back, and not counted
    words = [str(folders / f"{size}-{checkpoint}") for size in ("small", "large")]
    done = subprocess.run([sys.executable, "-c", RUN, *words, dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, weights, held = done.stdout.split()
    assert held == ("bfloat16" if (checkpoint, dtype) == ("bfloat16", "float32") else "None")
    assert int(grown) <= 1.3 * int(weights)
