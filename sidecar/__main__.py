"""``python -m sidecar`` is ``slidingserve``."""

from sidecar.cli import main

main()
