"""Fetches the Python part of vLLM releases: ``python tests/vllm/fetch_vllm_sources.py FOLDER VERSION...``.

Afterwards FOLDER/VERSION holds the package without its compiled libraries. Put before everything else on PYTHONPATH, in
an environment that has another release of vLLM, it is enough to run schedulers of that version; `test_version_matrix`
does. A version that is there already is not fetched again. One release is a download of about 320 MB, of which 60 stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEPT_SUFFIXES = (".py", ".json")


def fetch(folder: Path, version: str) -> Path:
    """Returns the folder that holds that version; fetches it with pip where it is missing.

    Raises:
        subprocess.CalledProcessError: pip found no such release for this platform, or no registry.
    """
    target = folder / version
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the last step is a rename: what is there under its name is complete.
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{version}-") as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", work, f"vllm=={version}"], check=True)
        wheel = next(Path(work).glob("vllm-*.whl"))
        unpacked = Path(work) / "unpacked"
        unpack(wheel, unpacked)
        unpacked.rename(target)
    return target


def unpack(wheel: Path, target: Path) -> None:
    """Unpacks what Python needs to import the package, and its metadata, from which vLLM reads its version."""
    with zipfile.ZipFile(wheel) as archive:
        kept = [
            name
            for name in archive.namelist()
            if name.endswith(KEPT_SUFFIXES) or name.split("/")[0].endswith(".dist-info")
        ]
        archive.extractall(target, kept)


def main(arguments: list[str] | None = None) -> None:
    """Fetches what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="+", metavar="version")
    given = parser.parse_args(arguments)
    for version in given.versions:
        print(fetch(given.folder, version))


if __name__ == "__main__":
    main()
