"""A believable simulated engine in virtual time.

Discrete events, vLLM's rules for batches and KV blocks, measured iteration times.
"""
