"""What a decision costs on this machine: the measurements behind ``slidingserve bench``.

`transport` times round trips of the real client to a real sidecar process, `core` the decision core alone on fixed
states (`states`), `kernels` predictor calls, `codec` the messages and `engine` whole simulated iterations; `loads` are
the engines' requests, `run` strings it all together and `report` says it.
"""
