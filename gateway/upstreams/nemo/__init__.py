"""The upstream for NeMo Gym's resources servers."""
