"""Finds out what an image or a server is: its protocol, tools, tasks and limits."""
