"""gRPC services: thin shells that turn messages into values and hand them to the core."""
