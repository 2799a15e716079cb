"""What all layers stand on: checks, initial values, precision, sharding, the state."""
