"""The interfaces between the gateway's parts and their implementations."""
