"""The sweep: checks before it, the search, Ray Tune, the choice at the end."""
