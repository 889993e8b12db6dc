"""The subjects of the measurements: gateways, peers, containers, processes, clusters and catalogs."""
