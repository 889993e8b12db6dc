"""The RFC's name for the module of the registry of custom tasks, and the package of mounted custom tasks.

``custom_tasks.my_task`` is /opt/openenv/custom_tasks/my_task.py, and is loaded only by an import of that name.
"""

from browser_tasks import get_custom_task, list_custom_tasks, register_custom_task

MOUNT = "/opt/openenv/custom_tasks"

__path__.append(MOUNT)
__all__ = ["get_custom_task", "list_custom_tasks", "register_custom_task"]
