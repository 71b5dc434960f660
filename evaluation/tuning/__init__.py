"""Answers which policy is best for a traffic, and how many requests per second can be promised with it.

`traffic` splits what was recorded into a part to choose on and a part to test on, `race` finds the best settings,
`promise` turns runs into a rate that holds in other windows of the same traffic, `tune` brings it together, `answer`
holds the result, `words` says it, `settings` writes it for the sidecar.
"""
