"""JSON schemas and checks for tools and tasks, from signatures, with the error texts of pydantic."""
