"""Version 1 of the journal format: generated stubs."""
