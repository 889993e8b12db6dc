"""The tasks that an environment has by itself: files, task modules, and looking them up."""
