"""The worker pool: the leader's control loop, and the operations on workers that it runs."""
