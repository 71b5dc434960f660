"""The engine's side of SlidingServe: where decisions come from (`source`), the client of a sidecar and engines."""
