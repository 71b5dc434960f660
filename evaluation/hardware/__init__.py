"""Measured kernel tables of real GPUs: timers over them, batches drawn from what an engine can hold, profile fits.

The tables come from the public data folder (`tables`); nothing here is needed to run the simulated engine, which has
built-in profiles. pandas and scipy (extra ``fit``) are imported only in the functions that use them.
"""
