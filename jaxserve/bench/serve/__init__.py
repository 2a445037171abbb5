"""`jaxserve bench serve`: load for a running server, and what it answers."""
