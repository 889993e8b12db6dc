"""The worker pool: the control loop of the leading replica, and what it does to workers."""
