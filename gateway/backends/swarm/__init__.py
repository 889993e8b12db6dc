"""Workers on many machines: each one's engine gate is spoken to as `docker` speaks to one, and which machine gets a
worker is decided by ``core/plan.place``.

What knows the machines is `nodes`; `gates` brings their engines to local sockets, `dialing` their workers to the
request path, `spreading` images from one to the other. `backend` is what the pool sees.
"""
