"""Goodput: the highest rate of requests at which at most 1 % of them miss an SLO.

By policy, cap, workload and hardware.

`points` says what one run is and what is kept of it, `runner` makes it, `search` finds the rate, `caps` finds the best
cap by successive halving, `store` keeps every finished run, `sweep` spreads the searches over processes, `intervals`
says how sure a figure is, `summary` brings it all into one table.
"""
