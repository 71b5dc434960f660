"""What policies share: who takes part, the order of integer keys, places in the KV cache, throughput, models."""
