"""The engine gate: the only process of ours that holds a Docker socket (``gateway node``).

Whoever can talk to an engine owns its machine. The gateway faces trainers, so it talks to this gate instead, which
speaks the Engine API and passes on a closed list of requests: bodies of new containers are checked against the catalog
(`policy`) and written anew, and of all that is on the engine only what carries our label exists.

On the machines of a cluster it serves gateways elsewhere too, over TLS with certificates on both sides: the gate with
what a machine says of itself and its images (`cluster`), and the way to workers' sockets (`tunnel`).
"""
