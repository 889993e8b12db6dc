"""The stores in Redis, which replicas share."""
