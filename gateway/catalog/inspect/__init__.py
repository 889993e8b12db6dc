"""Finds out what an image or a server is: its protocol, tools, tasks and limits.

Finding out what a server is that somebody else made: its protocol, its version, what it holds and what it takes.

For ``gateway env add`` and for servers given as ``--static NAME=URL``. It speaks HTTP on its own, not by the upstreams:
those know what a server is, and this asks servers of which nothing is known yet. Nothing here is on the request path.
"""
