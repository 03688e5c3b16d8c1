"""A notebook that is tested neither reads nor writes the user's cache."""

from __future__ import annotations

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="selfspec-")  # removed at the end
os.environ["SELFSPEC_CACHE"] = _folder.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
