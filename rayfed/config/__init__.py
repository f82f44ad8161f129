"""From YAML groups and overrides to one checked experiment."""
