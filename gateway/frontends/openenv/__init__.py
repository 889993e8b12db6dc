"""OpenEnv's protocol: WebSocket, HTTP and MCP."""
