"""What is measured: gateways, their peers, containers, processes, clusters and catalogs."""
