"""Ray: workers, the driver's side of a run, signals, resources."""
