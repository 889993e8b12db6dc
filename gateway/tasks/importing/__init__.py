"""Public benchmarks' files as tasks: a reader for each format, and what is done with what they find.

A reader yields an `Entry` for each entry of its files; `gather` makes lines of them, `write_lines` a file. What an
environment does with a task is its own affair: the readers only promise tasks that it would open.
"""
