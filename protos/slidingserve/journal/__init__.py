"""The format of journals, by version."""
