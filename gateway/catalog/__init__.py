"""The catalog of environments: reads their files, reloads changes, and inspects images and servers."""
