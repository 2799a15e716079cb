"""What wraps, changes or describes a finished model."""
