"""Version 1 of the operator's contract: generated stubs."""
