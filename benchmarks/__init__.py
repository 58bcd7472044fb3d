"""How fast Weft is: one file per question, ratios instead of times.

`make bench` runs all of them and prints one table; `make bench ONLY=depth` runs one.
"""
