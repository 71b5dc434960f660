"""The sidecar: a decision core without I/O (`queues`, `policies`, `guard`, `session`) and a shell around it."""
