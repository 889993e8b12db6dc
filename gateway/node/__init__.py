"""The engine gate (``gateway node``): the only process of the gateway that holds a Docker socket.

A process that can talk to an engine controls its machine. The gateway faces trainers, so it talks to this gate instead.
The gate speaks the Engine API and forwards a closed list of requests. It checks the bodies of new containers against
the catalog and rewrites them (`policy`), and shows only containers with the instance's label.

On the machines of a cluster it also serves gateways on other machines, over TLS with certificates on both sides. They
reach the gate, reports about the machine and its images (`cluster`), and workers' sockets (`tunnel`).
"""
