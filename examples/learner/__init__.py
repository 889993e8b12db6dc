"""A small learner that trains through the gateway; `examples/curriculum.py` runs it."""
