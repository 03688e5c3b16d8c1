"""The tests marked gpu, by file; in a rehearsal, those of the same files that need no GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from measuring import Part

part = Part("tests")
root = Path(__file__).resolve().parents[4]
FILES = ("tests/selfspec/models/test_kernels.py", "tests/selfspec/runtime/test_cuda_graphs.py")
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.xml"
    chosen = ["-k", "float8 or shapes or tie or hooks or rounding_up"] if part.toy else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen, *FILES]
    done = subprocess.run(command, cwd=root, timeout=max(part.left() - 3, 1))
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
    passed = failed = 0
    for case in cases:
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        passed += bad is None and case.find("skipped") is None
        if bad is not None:
            failed += 1
            part.line("failed test", test=case.get("name"), failure=str(bad.get("message"))[:600])
part.line("tests", passed=passed, failed=failed, pytest=done.returncode)
sys.exit(done.returncode)
