"""The scheduling contract, by version."""
