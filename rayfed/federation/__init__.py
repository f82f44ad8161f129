"""Building blocks of federated methods: server and client halves, cohorts, clients and executors."""
