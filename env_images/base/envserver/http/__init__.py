"""HTTP/1.1 for ORS: connections, requests, routes and responses."""
