"""What no policy can beat: exact optima of small instances, upper bounds for full workloads."""
