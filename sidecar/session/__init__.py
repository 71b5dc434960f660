"""One engine's session without I/O.

`machine` is the protocol's state machine, `mirror` the copy of the engine's queues, `checks` what a message may hold.
"""
