"""Run workers on many nodes, with one `docker` backend for each node's engine gate.

`nodes` is the directory of nodes, and `placement` chooses a node for each worker. `gate_sockets` exposes the nodes'
engines as local sockets, `dialing` connects the request path to workers, and `image_sync` copies images between nodes.
`backend` is the pool's interface.
"""
