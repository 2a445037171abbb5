"""Protocol buffers, and the Python modules that scripts/make_protos.sh makes of them."""
