"""The generator of the math tasks: reasoning-gym's families, and a second way to each answer."""
