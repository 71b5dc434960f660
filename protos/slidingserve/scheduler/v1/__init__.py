"""Version 1 of the scheduling contract: generated stubs."""
