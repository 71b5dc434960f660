"""Policy ``qoserve``: QoServe (ASPLOS 2026; Niyama, arXiv 2503.22562), the paper's rules or its artifact's constants.

Sources: the paper, its Algorithm 1 above all, and the artifact, microsoft/sarathi-serve, branch niyama_asplos2026,
commit 72339db5. One decision:

1. **Decodes** always get their token.
2. **Hybrid priority** (paper), smaller first: ``arrival + TTFT + alpha * r`` for r missing prompt tokens; of a request
   that has only a TTLT SLO, ``arrival + TTLT + alpha * (r + d)`` with d the tokens that it still generates: mean + 2
   standard deviations of those of its class that have ended (`common.history`). alpha = 0 is EDF, a large one SRPF. The
   published alpha is in seconds per token, tuned for TTFT SLOs of seconds; ``alpha_of_service`` is the same in units of
   the time that r and d take at the recent throughput, so that one value does for all hardware.
3. **Relegation** (paper): a request whose deadline has passed, or will pass, is put behind all others for good
   (relegation is the primary sort key) and gets what the others leave. ``relegation=iteration``, the paper: if its
   deadline lies within this iteration; ``throughput``, the artifact and the default: if r takes longer than there is
   time, at the recent throughput. Where requests of priority above 0 are left, one of them is relegated in the stead of
   a more important one.
4. **Selective preemption** (paper; ``spare_started``): a started prompt may be displaced by one of higher priority only
   if it can spare this iteration; decodes never.
5. **Dynamic chunk** (Algorithm 1): the largest budget that is predicted to end within the least slack of the decodes,
   by TimeToBudget of our model (the paper: a random forest), at most ``max_tokens`` (2500, where throughput
   saturates).

``constants=artifact``: deadlines of TTLT requests are ``arrival + TTLT - n_out * 0.4 s`` (n_out known or 15); the next
token is due ``max(first token's delay, TTFT) + TBT * (tokens since + 1)`` after the arrival (0.4 s for TTLT), so a late
first token moves the later deadlines; the budget is the best of a grid, with 1.2 times the time of two linear models
(`artifact`), 128 tokens where there is no slack; relegation is by an exponential average of the prefill
throughput (0.995, from 8500 tokens/s) and spares who holds KV blocks; a started prompt has no privilege.
"""

from sidecar.policies.qoserve.policy import QoServePolicy as QoServePolicy
