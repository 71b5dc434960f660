"""Policy ``slidingserve``: SlidingServe (arXiv 2606.05933), to the letter (``mode=paper``) or hardened (``robust``).

One decision, in the words of the paper:

1. `intake`: every decode gets its token; the prefilling and waiting requests are P, the prompts.
2. `priority`: MLPS brings P into its order.
3. `violation`: would a batch filled up to B make any first token late?
4. If so, `constructor` (BatchConstructor) picks by dynamic programming which prompts finish in this batch; if not,
   `chunker` (SlidingChunker) spreads the prompts' tokens over a sliding window of iterations.
5. `forwarder` (the batch forward simulator) turns a budget or a set into an allocation.

`decision` strings them together in one kernel, `policy` is what the session talks to.
"""

from sidecar.policies.slidingserve.policy import SlidingServePolicy as SlidingServePolicy
