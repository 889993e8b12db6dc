"""The RFC's name for the module of the base class of custom tasks."""

from browser_tasks import CustomBrowserGymEnvironment

__all__ = ["CustomBrowserGymEnvironment"]
