"""Experiments: workloads, traces, scores; wires engine and decision core together."""
