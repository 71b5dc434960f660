"""Real engines: run as child processes, driven over HTTP, measured by what their adapter tells the sidecar."""
