"""What federated methods are written with: server and client halves, cohorts, clients and executors."""
