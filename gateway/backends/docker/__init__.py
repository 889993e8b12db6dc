"""Run workers as containers of one Docker engine."""
