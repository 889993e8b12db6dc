"""Inspects a third-party image or server: finds its protocol, version, tools, tasks and limits.

``gateway env add`` and servers given as ``--static NAME=URL`` use it. It sends its own HTTP requests instead of using
the upstreams, because an upstream needs to know the server's protocol. Nothing here is on the request path.
"""
