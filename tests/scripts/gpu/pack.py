"""Pack the wheels that the CUDA image lacks, selfspec's own among them, into one folder for the driver.

    python tests/scripts/gpu/pack.py --out build/gpu                      # for the image (Python 3.12)
    python tests/scripts/gpu/pack.py --out build/gpu-311 --python 3.11    # for a rehearsal

Prints the size of each wheel and of everything that travels: the wheels and the repository's files. Exits with 1 when
that is more than `--limit` MiB.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NEEDED = ("pydantic", "optuna", "cmaes")
"""What selfspec imports to decode and to search, and the image lacks; their own requirements are resolved by pip."""
MIB = 2**20


def normalised(name: str) -> str:
    """Return a distribution's name as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(requirements: str) -> set[str]:
    """Return the normalised names in the text of a requirements file."""
    lines = (line.split("#")[0].strip() for line in requirements.splitlines())
    return {normalised(re.split(r"[\s=<>!~;\[]", line)[0]) for line in lines if line}


def lacking(report: dict[str, object], image: set[str]) -> list[str]:
    """Return `name==version` of what pip would install that the image does not have.

    `report` is what `pip install --report` writes.
    """
    installs = report["install"]
    assert isinstance(installs, list)
    found = [(normalised(item["metadata"]["name"]), item["metadata"]["version"]) for item in installs]
    return [f"{name}=={version}" for name, version in found if name not in image]


def pip(*arguments: str) -> None:
    """Run pip. Raises `CalledProcessError` when it fails."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def download(python: str, out: Path) -> None:
    """Download wheels of `NEEDED` and of what these need in turn for a Python version, except what the image has."""
    target = ["--python-version", python, "--only-binary=:all:", "-c", str(ROOT / "constraints.txt")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "-q", "--dry-run", "--report", str(report), "--target", folder, *target, *NEEDED)
        names = lacking(json.loads(report.read_text()), names_in((HERE / "image.txt").read_text()))
    pip("download", "-q", "--no-deps", "-d", str(out), *target, *names)


def build(out: Path) -> None:
    """Build selfspec's wheel from a copy of the repository, where no earlier build has left anything."""
    with tempfile.TemporaryDirectory() as folder:
        for file in repository_files():
            copy = Path(folder) / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        pip("wheel", "-q", "--no-deps", "-w", str(out), folder)


def repository_files() -> list[Path]:
    """Return the repository's files, those that are not committed yet included and ignored ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in sorted({*listed} - {""}) if (ROOT / name).is_file()]


def main() -> int:
    """Make the folder and print its size; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder; wheels in it from before are deleted")
    parser.add_argument("--python", default="3.12", help="the Python version of the machine (3.12)")
    parser.add_argument("--limit", type=float, default=64, help="how much may travel, in MiB (64)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for old in given.out.glob("*.whl"):
        old.unlink()
    download(given.python, given.out)
    build(given.out)
    wheels = sorted(given.out.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:6.2f} MiB  {wheel.name}")
    packed, repository = (sum(file.stat().st_size for file in files) for files in (wheels, repository_files()))
    total = (packed + repository) / MIB
    print(f"{packed / MIB:6.2f} MiB  in {len(wheels)} wheels\n{repository / MIB:6.2f} MiB  repository")
    print(f"{total:6.2f} MiB  travel, of {given.limit:g}")
    return 0 if total <= given.limit else 1


if __name__ == "__main__":
    sys.exit(main())
