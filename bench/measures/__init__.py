"""The measures, each with its report."""
