"""Modules with the names, arguments and results of AXLearn's, and what to write instead of others.

`differences.txt` has what differs on purpose, `modules.txt` the modules that Weft does not have.
"""
