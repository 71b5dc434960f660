"""The paper's tables on our simulated hardware, each beside the published figures, with a verdict in words.

`paper` holds the published figures, `verdicts` says what makes a claim hold, `result` prints and writes any of the
tables, `choice` looks up what a goodput run in the same folder has found, `runs` makes runs in parallel. The tables
themselves: `goodput` (Figure 4), `overload` (5), `transient` (6), `ablation` (Table 4) and `overhead`.
"""
