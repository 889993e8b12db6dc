"""The OpenAPI description of the gateway's HTTP routes: `document` builds it from the tables `routes` and `schemas`."""
