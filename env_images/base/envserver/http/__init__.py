"""HTTP/1.1 as ORS needs it: connections, requests, routes and responses."""
