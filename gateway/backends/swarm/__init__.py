"""Workers on many machines: each one's engine gate is spoken to as `docker` speaks to one.

`nodes` knows the machines, and `placement` decides which of them gets a worker. `gate_sockets` brings their engines to
local sockets, `dialing` their workers to the request path, and `image_sync` images from one machine to another.
`backend` is what the pool sees.
"""
