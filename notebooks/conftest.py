"""A notebook that is tested neither reads nor writes the user's cache."""

from __future__ import annotations

import os

from kept import make_cache

make_cache()
os.environ.setdefault("OMP_NUM_THREADS", "1")
