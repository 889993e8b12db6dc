"""Nouns, errors, seams and pure decisions; imports the standard library only."""
