"""The id ``env-gateway-taskset`` for verifiers, which finds plugins as top-level modules."""

from env_gateway_client.verifiers import (
    GatewayConfig,
    GatewayData,
    GatewayEnvConfig,
    GatewayPlayEnv,
    GatewayTask,
    GatewayTaskset,
)

__all__ = ["GatewayConfig", "GatewayData", "GatewayEnvConfig", "GatewayPlayEnv", "GatewayTask", "GatewayTaskset"]
