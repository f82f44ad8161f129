"""What is scored, and the statistics over clients and domains."""
