"""Serve resources servers of NeMo Gym's package: ``server.py NAME:PORT …``. Run by the Python of `.venv-nemo`.

The package itself starts servers from a configuration of all servers of a training run. This program makes the same
application from the server's class alone, and changes nothing in it.
"""

import asyncio
import importlib
import sys
from typing import Any

import uvicorn
from fastapi.exceptions import RequestValidationError
from nemo_gym.base_resources_server import SimpleResourcesServer  # type: ignore[import-not-found]
from nemo_gym.config_types import BaseServerConfig  # type: ignore[import-not-found]
from nemo_gym.server_utils import (  # type: ignore[import-not-found]
    ServerClient,
    _validation_exception_handler,
)
from omegaconf import OmegaConf  # type: ignore[import-not-found]


def application(name: str) -> Any:
    """Return the application of the server *name*."""
    module = importlib.import_module(f"resources_servers.{name}.app")
    kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    kind: Any = next(one for one in kinds if issubclass(one, SimpleResourcesServer))
    place = BaseServerConfig(host="127.0.0.1", port=1)
    config = kind.model_fields["config"].annotation(host="127.0.0.1", port=1, entrypoint="app.py", name=name)
    client = ServerClient(head_server_config=place, global_config_dict=OmegaConf.create({}))
    server = kind(config=config, server_client=client)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    app.exception_handler(RequestValidationError)(_validation_exception_handler)
    return app


async def serve(ports: dict[str, int]) -> None:
    """Serve each server at its port, in one process: the package takes a quarter of a gigabyte."""
    configs = [uvicorn.Config(application(name), host="127.0.0.1", port=port) for name, port in ports.items()]
    sockets = [config.bind_socket() for config in configs]
    print("all are ready", flush=True)  # connections wait in the sockets
    serving = zip(map(uvicorn.Server, configs), sockets, strict=True)
    await asyncio.gather(*(server.serve(sockets=[socket]) for server, socket in serving))


if __name__ == "__main__":
    asyncio.run(serve({name: int(port) for name, _, port in (one.partition(":") for one in sys.argv[1:])}))
