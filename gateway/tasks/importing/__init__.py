"""Imports tasks from the files of public benchmarks, with a reader for each format.

A reader yields an `Entry` for each entry of its files. `gather` turns the entries into lines, and `write_lines` writes
the lines to a file. The readers only promise that the environment would open the tasks.
"""
