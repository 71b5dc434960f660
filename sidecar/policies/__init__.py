"""Scheduling policies: one file each (SlidingServe: one folder), registered by name in `registry`."""
