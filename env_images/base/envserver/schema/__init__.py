"""The shape of tools and tasks: JSON schemas from signatures, and validators in the words of pydantic."""
