"""Generates the Python stubs beside the .proto files: ``python protos/generate.py [--out FOLDER]``.

The stubs are checked in, so that users need no compiler and changes to them can be reviewed; CI generates them again
and compares. Generated with grpcio-tools 1.81, whose code loads on protobuf 6.33 and on 7.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> int:
    """Runs protoc over all protos and writes the stubs below ``out``; returns protoc's exit status."""
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    return int(protoc.main(["protoc", f"--proto_path={ROOT}", *(f"--{kind}_out={out}" for kind in kinds), *protos]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="where to write (default: beside the .proto files)")
    sys.exit(generate(parser.parse_args().out))
