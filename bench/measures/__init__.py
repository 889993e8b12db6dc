"""The measurements, each with its report."""
