"""The operator's contract, by version."""
