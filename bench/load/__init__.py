"""Clients that put load on a gateway: HTTP/1.1, WebSockets, SSE, closed loops and whole episodes."""
