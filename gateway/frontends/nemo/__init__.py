"""The frontend for NeMo Gym's agents and environment servers."""
