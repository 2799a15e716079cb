"""Private names of Equinox that published libraries use."""
